// Attention without its matrix: tiles, and a softmax that is put right as it goes.

import { curves } from "../charts/curves.js";
import { element } from "../common/dom.js";
import { digits } from "../common/numbers.js";
import { finish, plainAttention, scoresOf, tileByTile } from "./online_softmax.js";

// Small numbers of no meaning: 4 queries, 8 keys, heads of 2.
const QUERIES = [[1.2, -0.4], [0.3, 1.1], [-0.9, 0.8], [1.6, 0.5]];
const KEYS = [[0.5, 0.2], [-0.3, 1.4], [1.1, -0.6], [0.2, 0.9], [-1.2, 0.4], [1.7, 0.3], [0.4, -1.1], [0.8, 1.3]];
const VALUES = [[1, 0], [0, 1], [2, -1], [-1, 2], [0.5, 0.5], [3, 1], [-2, 0], [1, -1]];
const HEAD = 128;

export const flashTiles = {
  id: "flash-tiles",
  title: "FlashAttention, tile by tile",
  sentences: [
    "Attention weighs values by the softmax of scores, and a softmax seems to need all scores of a row; yet a running maximum and sum are enough, if both are corrected whenever a larger score comes.",
    "So keys and values can come in tiles that fit into fast memory, each is read once for a block of queries, and no score is ever written to the large memory.",
    "The result is the same as of plain softmax, but for rounding; the operations are the same as well, and what is saved is memory and reading.",
  ],
  readMore: "inference#flashattention",
  needs: {},
  controls: [
    { id: "step", label: "Tiles taken", kind: "step", min: 0, max: 8, value: 1, most: ({ tile }) => KEYS.length / tile },
    { id: "tile", label: "Keys in a tile", kind: "range", choices: [1, 2, 4, 8], value: 2 },
    { id: "scale", label: "Queries, larger by", kind: "range", min: 0.5, max: 8, step: 0.5, value: 1, unit: "×" },
    { id: "causal", label: "Causal mask: no later tokens", kind: "toggle", value: false },
    { id: "length", label: "Tokens of the figures below", kind: "log-range", min: 128, max: 1048576, value: 131072, unit: "tokens" },
  ],

  figures(context) {
    const { length } = context.values;
    const state = stateOf(context);
    const worst = largestDifference(state.plain, state.rows.map(finish));
    return [
      { label: "Tiles taken", value: `${state.taken} of ${state.numTiles}` },
      { label: "Largest difference from plain softmax", value: worst < 5e-13 ? "none to 12 digits" : worst.toFixed(3),
        formula: state.taken === state.numTiles ? "all keys have been seen" : "some keys have not been seen" },
      { label: `Scores of ${digits(length)} tokens, kept whole`, value: scoreBytes(length), unit: "iB", source: "of each head and layer",
        formula: `${digits(length)}² × 2 B` },
      { label: "Kept in tiles", value: keptBytes(length), unit: "iB", source: "of each head and layer",
        formula: `${digits(length)} × (max + sum) × 4 B` },
    ];
  },

  draw(canvas, context) {
    const state = stateOf(context);
    showMatrix(canvas.place("matrix"), state);
    showRows(canvas.place("matrix-rows"), state);
    drawMemory(canvas, context);
  },
};

function stateOf({ values }) {
  const queries = QUERIES.map((query) => query.map((each) => values.scale * each));
  const scores = scoresOf(queries, KEYS, values.causal);
  const states = tileByTile(scores, VALUES, values.tile);
  const taken = Math.min(values.step, states.length - 1);
  return { scores, taken, numTiles: states.length - 1, tile: values.tile, rows: states[taken], before: states[Math.max(0, taken - 1)], plain: plainAttention(scores, VALUES) };
}

function largestDifference(one, other) {
  return Math.max(...one.flatMap((row, index) => row.map((each, column) => Math.abs(each - other[index][column]))));
}

/** The scores: of tiles that were taken, of the one taken last, of those to come. */
function showMatrix(place, { scores, taken, tile }) {
  const kindOf = (column) => {
    const index = Math.floor(column / tile) + 1;
    if (index === taken) return "is-now";
    return index < taken ? "is-done" : "is-ahead";
  };
  const head = KEYS.map((_, column) => element("th", { scope: "col" }, `k${column + 1}`));
  const body = scores.map((row, index) => element("tr", {}, element("th", { scope: "row" }, `q${index + 1}`),
    row.map((score, column) => element("td", { class: kindOf(column) }, kindOf(column) === "is-ahead" ? "·" : show(score)))));
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("td"), head)), element("tbody", {}, body));
  place.replaceChildren(...scrolling("Scores: those of the last tile are filled; earlier ones are forgotten, later ones are not computed yet", table));
}

/** What is kept of each query, and what it comes to. */
function showRows(place, { rows, before, plain, taken }) {
  const body = rows.map((row, index) => {
    const shrink = taken > 0 ? Math.exp(before[index].max - row.max) : 1;
    const now = finish(row);
    const isSame = now.every((each, column) => Math.abs(each - plain[index][column]) < 5e-13);
    return element("tr", {}, element("th", { scope: "row" }, `q${index + 1}`),
      element("td", {}, show(row.max)), element("td", {}, Number.isNaN(shrink) ? "–" : show(shrink)), element("td", {}, show(row.sum)),
      element("td", {}, row.output.map(show).join("  ")), element("td", { class: isSame ? "is-same" : "" }, now.map(show).join("  ")),
      element("td", {}, plain[index].map(show).join("  ")));
  });
  const names = ["largest score", "rescaled by", "sum", "output so far", "divided by the sum", "plain softmax"];
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("td"), names.map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, body));
  place.replaceChildren(...scrolling("What is kept of each query, and what it comes to", table));
}

function scrolling(title, table) {
  return [
    element("h3", { class: "chart-title" }, title),
    element("div", { class: "number-table", tabindex: 0, role: "group", "aria-label": title }, table),
  ];
}

function show(value) {
  if (value === -Infinity) return "−∞";
  return value.toFixed(3).replace("-", "−");
}

/** What has to be kept between the products, of one head. */
function drawMemory(canvas, { values }) {
  const lengths = [];
  for (let length = 128; length <= 1048576; length *= 2) lengths.push(length);
  canvas.chart("kept", curves, {
    title: `What is kept of one head of ${HEAD}, in 16 bits`,
    x: { label: "tokens", scale: "log", min: 128, max: 1048576 },
    y: { label: "memory", unit: "iB", scale: "log" },
    layers: [
      { kind: "line", label: "all scores", colour: 2, points: lengths.map((length) => [length, scoreBytes(length)]) },
      { kind: "line", label: "largest scores and sums, in tiles", colour: 1, points: lengths.map((length) => [length, keptBytes(length)]) },
      { kind: "dashed", label: "queries, keys, values and outputs, either way", colour: 7, points: lengths.map((length) => [length, 4 * length * HEAD * 2]) },
    ],
    marks: [{ x: values.length, label: `${digits(values.length)} tokens` }],
    height: 230,
  });
}

const scoreBytes = (length) => 2 * length ** 2;
const keptBytes = (length) => 2 * 4 * length;
