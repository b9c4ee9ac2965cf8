// Blocks in rows along one axis: parts of a whole side by side, or what happens when.
//
//   {
//     title,
//     x: { label, unit, min, max },
//     rows: [{ label, note, blocks: [{ from, to, label, colour: 1…8, text, isFaint }] }],
//     marks: [{ x, label, isLimit }],
//     kinds: [{ label, colour }],   // of blocks, where the legend has others than those that are there
//     isTime: false,        // whether the figures are from when to when, not how much
//   }
//
// `text` is written into a block where there is room.

import { shape } from "../common/dom.js";
import { format, formatRange } from "../common/numbers.js";
import { drawMarks, roomForMarks } from "./marks.js";
import { layAxis } from "./scales.js";

const TEXT = 7.1;
const BAR = 24;

export function lanes(spec, width) {
  const names = spec.rows.map(({ label }) => label);
  const longest = Math.max(...names.map((name) => name.length)) * TEXT + 16;
  const isNarrow = longest > width * 0.3; // names stand above their rows
  const left = isNarrow ? 4 : longest;
  const pitch = BAR + (isNarrow ? 26 : 10);
  const marks = spec.marks ?? [];
  const top = 6 + roomForMarks(marks);
  const bottom = top + pitch * spec.rows.length;
  const edge = width - 12;
  const right = Math.min(edge, ...spec.rows.map((row) => endOfAxis(row, spec.x, left, edge, isNarrow)));
  const ends = [...spec.rows.flatMap(({ blocks }) => blocks.flatMap(({ from, to }) => [from, to])), ...marks.map(({ x }) => x)];
  const x = layAxis(spec.x, ends, left, right);
  const place = { x, left, right, edge, top, bottom };
  const rowTop = (index) => top + pitch * index + (isNarrow ? 20 : 4);
  return {
    height: bottom + 40,
    plot: place,
    shapes: [
      ...x.ticks.map((tick) => shape("line", { class: "grid", x1: tick.at, x2: tick.at, y1: top, y2: bottom })),
      ...spec.rows.flatMap((row, index) => drawRow(row, rowTop(index), place, isNarrow)),
      shape("path", { class: "axis", d: `M${left} ${bottom}H${right}` }),
      ...x.ticks.map((tick) => shape("text", { x: tick.at, y: bottom + 16, "text-anchor": anchor(tick.at, place) }, tick.text)),
      shape("text", { class: "axis-title", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, x.title),
      ...drawMarks(marks, place),
    ],
    legend: legendOf(spec),
    stops: spec.rows.flatMap((row, index) => row.blocks.map((block) => stopOf(spec, row, block, rowTop(index), x))),
    table: tableOf(spec),
  };
}

/** Where an axis ends at the most, so that the note of a row fits between its blocks and the edge. */
function endOfAxis(row, { max }, left, edge, isNarrow) {
  if (isNarrow || !row.note || !max) return edge;
  const share = Math.max(0, ...row.blocks.map(({ to }) => to)) / max;
  return share > 0 ? left + (edge - roomOf(row) - left) / share : edge;
}

const roomOf = ({ note }) => note.length * TEXT + 10;

/** Blocks one after another: of `[{ size, label, colour }]`. */
export function sideBySide(parts) {
  let end = 0;
  return parts.map(({ size, ...part }) => ({ ...part, from: end, to: (end += size) }));
}

function anchor(at, { left, right }) {
  if (at > right - 14) return "end";
  return at < left + 4 ? "start" : "middle";
}

function drawRow(row, top, { x, left, edge }, isNarrow) {
  const name = isNarrow
    ? shape("text", { class: "row-name", x: left, y: top - 5 }, row.note ? `${row.label} · ${row.note}` : row.label)
    : shape("text", { class: "row-name", x: left - 10, y: top + BAR / 2 + 4, "text-anchor": "end" }, row.label);
  const blocks = row.blocks.map((block) => {
    const [from, to] = [x.at(block.from), x.at(block.to)];
    const width = Math.max(1, to - from - (to - from > 4 ? 1 : 0));
    const box = shape("rect", { class: `block c${block.colour}${block.isFaint ? " faint" : ""}`, x: from, y: top, width, height: BAR, rx: Math.min(3, width / 4) });
    const hasRoom = block.text && block.text.length * TEXT + 6 < width;
    const text = hasRoom ? shape("text", { class: "block-text", x: from + width / 2, y: top + BAR / 2 + 4, "text-anchor": "middle" }, block.text) : null;
    return shape("g", {}, box, ...(text ? [text] : []));
  });
  const end = Math.max(left, ...row.blocks.map(({ to }) => x.at(to)));
  const fits = !isNarrow && row.note && end + roomOf(row) <= edge;
  const note = fits ? [shape("text", { class: "row-note", x: end + 6, y: top + BAR / 2 + 4 }, row.note)] : [];
  return [name, ...blocks, ...note];
}

function legendOf({ rows, kinds = [] }) {
  const seen = new Map(kinds.map((kind) => [kind.colour, { ...kind, mark: "area" }]));
  for (const { blocks } of rows) {
    for (const { label, colour, isFaint } of blocks) {
      if (!seen.has(colour)) seen.set(colour, { label, colour, mark: isFaint ? "band" : "area" });
    }
  }
  return [...seen.values()];
}

function stopOf(spec, row, block, top, x) {
  const [from, to] = [x.at(block.from), x.at(block.to)];
  return {
    x: (from + to) / 2, y: top, box: { x: from, y: top, width: Math.max(2, to - from), height: BAR },
    title: row.label, rows: [{ label: block.label, value: valueOf(spec, block), colour: block.colour }],
  };
}

function valueOf({ x, isTime }, { from, to }) {
  return isTime ? formatRange(from, to, x.unit) : format(to - from, x.unit);
}

function tableOf(spec) {
  const rows = spec.rows.flatMap((row) => row.blocks.map((block) => [row.label, block.label, valueOf(spec, block)]));
  return { head: ["", "Part", spec.x.label], rows };
}
