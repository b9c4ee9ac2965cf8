// A kind of chart: values on a line, and the levels below it that they are rounded to.
//
//   { title, label, levels: [numbers that rise], points: [{ value, rounded, code }] }

import { shape } from "../common/dom.js";
import { layAxis } from "../charts/scales.js";

const [VALUES_AT, LEVELS_AT, BOTTOM] = [20, 96, 118];
const NARROW = 5; // pixels between levels, below which their lines are thin

export function numberLine(spec, width) {
  const { levels, points } = spec;
  const [left, right] = [14, width - 14];
  const ends = points.flatMap(({ value, rounded }) => [value, rounded]);
  const bounds = [Math.min(...ends, levels[0]), Math.max(...ends, levels.at(-1))];
  const x = layAxis({ label: spec.label, min: bounds[0], max: bounds[1] }, [], left, right);
  const pitch = (right - left) / levels.length;
  return {
    height: BOTTOM + 40,
    plot: { x, left, right, top: VALUES_AT, bottom: LEVELS_AT },
    shapes: [
      shape("path", { class: "axis", d: `M${left} ${BOTTOM}H${right}` }),
      ...x.ticks.map((tick) => shape("text", { x: tick.at, y: BOTTOM + 16, "text-anchor": "middle" }, tick.text)),
      shape("text", { class: "axis-title", x: (left + right) / 2, y: BOTTOM + 34, "text-anchor": "middle" }, x.title),
      ...levels.map((level) => shape("line", { class: pitch < NARROW ? "level is-thin" : "level", x1: x.at(level), x2: x.at(level), y1: LEVELS_AT, y2: BOTTOM })),
      ...points.map(({ value, rounded }) => shape("line", { class: "rounds", x1: x.at(value), y1: VALUES_AT, x2: x.at(rounded), y2: LEVELS_AT })),
      ...points.map(({ value }) => shape("circle", { class: "weight c1", cx: x.at(value), cy: VALUES_AT, r: 4 })),
    ],
    legend: [{ label: "weights", colour: 1, mark: "dot" }, { label: "levels that the type has here", colour: 2, mark: "line" }],
    stops: points.map((point) => stopOf(point, x)).sort((a, b) => a.x - b.x),
    table: { head: ["", "weight", "becomes", "code", "error"], rows: points.map((point, index) => [`${index + 1}`, ...wordsOf(point)]) },
  };
}

function stopOf(point, x) {
  const [value, rounded, code, error] = wordsOf(point);
  return {
    x: x.at(point.value), y: VALUES_AT, title: `weight ${value}`, dots: [{ y: VALUES_AT, colour: 1 }],
    rows: [{ label: "becomes", value: rounded, colour: 2 }, { label: "code", value: code, colour: 2 }, { label: "error", value: error, colour: 1 }],
  };
}

function wordsOf({ value, rounded, code }) {
  return [signed(value), signed(rounded), String(code), signed(rounded - value)];
}

function signed(value) {
  return value.toPrecision(3).replace("-", "−");
}
