// Everything over two axes.
//
//   {
//     title, height: 260,
//     x: { label, unit, scale: "linear" | "log", min, max }, y: the same,
//     layers: [{ kind, label, colour: 1…8, points }],   // from the back to the front
//     marks: [{ x | y, label, isLimit }],               // lines across
//   }
//
// Kinds, and their points: "line", "dashed", "steps" and "points" [x, y]; "band" and "area" [x, low,
// high]; "histogram" [from, to, y]. A point may have a name as one more element.

import { shape } from "../common/dom.js";
import { format, formatRange } from "../common/numbers.js";
import { drawMarks, roomForMarks } from "./marks.js";
import { layAxis } from "./scales.js";

const HEIGHT = 260;
const TEXT = 6.4; // pixels of a letter, about
const MAX_TABLE_ROWS = 100;

const MARKS = { line: "line", steps: "line", dashed: "dashed", points: "dot", band: "band" };

export function curves(spec, width) {
  const height = spec.height ?? HEIGHT;
  const ends = spec.layers.map(endsOf);
  const marks = spec.marks ?? [];
  const xs = [...ends.flatMap(({ xs }) => xs), ...marks.flatMap(({ x }) => x ?? [])];
  const ys = [...ends.flatMap(({ ys }) => ys), ...marks.flatMap(({ y }) => y ?? [])];
  const bottom = height - 40;
  const top = 12 + roomForMarks(marks);
  const y = layAxis(spec.y, ys, bottom, top);
  const left = Math.ceil(Math.max(...y.ticks.map(({ text }) => text.length), 2) * TEXT) + 30;
  const x = layAxis(spec.x, xs, left, width - 12);
  const place = { x, y, left, right: width - 12, top, bottom };
  let stops = null; // of a chart that is drawn anew all the time, hardly ever asked for
  return {
    height,
    plot: place,
    shapes: [
      ...grid(place),
      clip(place, spec.layers.map((layer) => shape("g", { class: `layer ${layer.kind} c${layer.colour}` }, drawLayer(layer, place)))),
      ...drawMarks(marks, place),
      ...axes(place, height),
    ],
    legend: spec.layers.filter(({ label }) => label).map(({ label, colour, kind }) => ({ label, colour, mark: MARKS[kind] ?? "area" })),
    get stops() { return (stops ??= stopsOf(spec, place)); },
    get table() { return tableOf(spec); },
  };
}

/** Areas on top of each other: of `[{ label, colour, points: [[x, y]] }]` with the same x. */
export function stacked(parts) {
  const heights = parts[0].points.map(() => 0);
  return parts.map((part) => ({
    ...part,
    kind: "area",
    points: part.points.map(([x, y], index) => {
      const low = heights[index];
      heights[index] += y;
      return [x, low, heights[index]];
    }),
  }));
}

function endsOf({ kind, points }) {
  if (kind === "histogram") return { xs: points.flatMap(([from, to]) => [from, to]), ys: points.map(([, , y]) => y) };
  const isWide = kind === "band" || kind === "area";
  return { xs: points.map(([x]) => x), ys: points.flatMap(([, low, high]) => (isWide ? [low, high] : [low])) };
}

// -- shapes ------------------------------------------------------------------------------------

function drawLayer({ kind, points }, { x, y }) {
  if (points.length === 0) return [];
  const at = ([px, py]) => [x.at(px), y.at(py)];
  const base = y.at(y.min);
  switch (kind) {
    case "band":
    case "area": {
      const up = points.map(([px, low]) => at([px, low]));
      const down = points.map(([px, , high]) => at([px, high])).reverse();
      return [shape("path", { d: `${path([...up, ...down])}Z` })];
    }
    case "points":
      return points.map((point) => shape("circle", { cx: at(point)[0], cy: at(point)[1], r: 4 }));
    case "histogram":
      return points.map(([from, to, py]) => {
        const [left, right, above] = [x.at(from), x.at(to), y.at(py)];
        return shape("rect", { x: left + 0.5, y: above, width: Math.max(0.5, right - left - 1), height: Math.max(0, base - above) });
      });
    case "steps":
      return [shape("path", { d: path(stairs(points).map(at)) })];
    default:
      return [shape("path", { d: path(points.map(at)) })];
  }
}

function stairs(points) {
  return points.flatMap((point, index) => (index === 0 ? [point] : [[point[0], points[index - 1][1]], point]));
}

function path(places) {
  return places.map(([x, y], index) => `${index === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

let numClips = 0;

/** Nothing of a layer outside the axes. */
function clip({ left, right, top, bottom }, groups) {
  const id = `clip-${(numClips += 1)}`;
  const frame = shape("rect", { x: left, y: top - 5, width: Math.max(0, right - left + 5), height: bottom - top + 6 });
  return shape("g", { "clip-path": `url(#${id})` }, shape("clipPath", { id }, frame), groups);
}

function grid({ x, y, left, right, top, bottom }) {
  const across = y.ticks.map((tick) => shape("line", { class: "grid", x1: left, x2: right, y1: tick.at, y2: tick.at }));
  const down = x.ticks.map((tick) => shape("line", { class: "grid", x1: tick.at, x2: tick.at, y1: top, y2: bottom }));
  return [...across, ...down];
}

function axes({ x, y, left, right, top, bottom }, height) {
  const text = (attributes, words) => shape("text", attributes, words);
  return [
    shape("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` }),
    ...y.ticks.map((tick) => text({ x: left - 6, y: tick.at + 4, "text-anchor": "end" }, tick.text)),
    ...x.ticks.map((tick) => text({ x: tick.at, y: bottom + 16, "text-anchor": tick.at > right - 14 ? "end" : "middle" }, tick.text)),
    text({ class: "axis-title", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title),
    text({ class: "axis-title", x: 11, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(top + bottom) / 2})` }, y.title),
  ];
}

// -- figures -----------------------------------------------------------------------------------

/** Where the pointer can rest: each x that any layer has, or each point of a cloud. */
function stopsOf(spec, { x, y }) {
  const isCloud = spec.layers.every(({ kind }) => kind === "points");
  const stops = new Map();
  spec.layers.forEach((layer, depth) => {
    layer.points.forEach((point, index) => {
      const key = isCloud ? `${depth}:${index}` : point[0];
      if (!stops.has(key)) stops.set(key, { x: x.at(middle(layer, point)), y: Infinity, title: titleOf(spec, layer, point), rows: [], dots: [], isPoint: isCloud });
      const stop = stops.get(key);
      const height = y.at(topOf(layer, point));
      stop.y = Math.min(stop.y, height);
      stop.rows.push({ label: layer.label, value: valueOf(spec, layer, point), colour: layer.colour });
      if (layer.kind !== "band") stop.dots.push({ y: height, colour: layer.colour });
    });
  });
  return [...stops.values()].sort((a, b) => a.x - b.x);
}

function middle({ kind }, [from, to]) {
  return kind === "histogram" ? (from + to) / 2 : from;
}

function topOf({ kind }, point) {
  return kind === "line" || kind === "dashed" || kind === "steps" || kind === "points" ? point[1] : point[2];
}

function titleOf(spec, { kind }, point) {
  const name = point[kind === "line" || kind === "dashed" || kind === "steps" || kind === "points" ? 2 : 3];
  if (name !== undefined) return name;
  return kind === "histogram" ? formatRange(point[0], point[1], spec.x.unit) : `${format(point[0], spec.x.unit)}`;
}

function valueOf(spec, { kind }, point) {
  if (kind === "band") return formatRange(point[1], point[2], spec.y.unit);
  if (kind === "area") return format(point[2] - point[1], spec.y.unit);
  const value = format(kind === "histogram" ? point[2] : point[1], spec.y.unit);
  return value;
}

function tableOf(spec) {
  const isCloud = spec.layers.every(({ kind }) => kind === "points");
  if (isCloud) {
    const rows = spec.layers.flatMap((layer) => layer.points.map((point) => [point[2] ?? layer.label, format(point[0], spec.x.unit), format(point[1], spec.y.unit)]));
    return { head: ["", spec.x.label, spec.y.label], rows: thinned(rows) };
  }
  const rows = new Map();
  spec.layers.forEach((layer, column) => {
    for (const point of layer.points) {
      if (!rows.has(point[0])) rows.set(point[0], [titleOf(spec, layer, point), ...spec.layers.map(() => "")]);
      rows.get(point[0])[column + 1] = valueOf(spec, layer, point);
    }
  });
  const sorted = [...rows].sort(([a], [b]) => a - b).map(([, row]) => row);
  return { head: [spec.x.label, ...spec.layers.map(({ label }) => label)], rows: thinned(sorted) };
}

/** Evenly fewer, where there are more than can be read. */
function thinned(rows) {
  const stride = Math.ceil(rows.length / MAX_TABLE_ROWS);
  return rows.filter((_, index) => index % stride === 0 || index === rows.length - 1);
}
