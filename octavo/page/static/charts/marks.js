// Lines across a chart, with their labels.

import { shape } from "../common/dom.js";

const ROW = 15; // pixels of a label above the plot

/** Room above a plot for the labels of marks at an x, each in a row of its own. */
export function roomForMarks(marks) {
  return ROW * marks.filter(({ x }) => x !== undefined).length;
}

/** The marks `[{ x | y, label, isLimit, isLeft }]` of a plot `{ x, y, left, right, top, bottom }`. */
export function drawMarks(marks, place) {
  return marks.map((mark, index) => (mark.x === undefined ? across(mark, place) : down(mark, index, place)));
}

function down({ x: value, label, isLimit }, index, { x, left, right, top, bottom }) {
  const at = x.at(value);
  if (at < left - 1 || at > right + 1) return shape("g");
  const row = top - 5 - ROW * index;
  const isLate = at > (left + right) / 2;
  return marked(isLimit, { x1: at, x2: at, y1: row - 8, y2: bottom },
    { x: at + (isLate ? -5 : 5), y: row, "text-anchor": isLate ? "end" : "start" }, label);
}

function across({ y: value, label, isLimit, isLeft }, { y, left, right, top, bottom }) {
  const at = y.at(value);
  if (at < top - 1 || at > bottom + 1) return shape("g");
  return marked(isLimit, { x1: left, x2: right, y1: at, y2: at },
    { x: isLeft ? left + 6 : right - 2, y: at < top + 16 ? at + 14 : at - 5, "text-anchor": isLeft ? "start" : "end" }, label);
}

function marked(isLimit, line, text, label) {
  return shape("g", { class: isLimit ? "mark is-limit" : "mark" }, shape("line", line), shape("text", text, label));
}
