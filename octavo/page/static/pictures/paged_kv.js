// Blocks and tables instead of one long stretch for each request.

import { lanes, sideBySide } from "../charts/lanes.js";
import { element } from "../common/dom.js";
import { NUM_EVENTS, poolAfter } from "./paging.js";

const NUM_BLOCKS = { 2: 16, 4: 9, 8: 6 }; // by their size: nearly as many slots
const RESERVED = 32; // tokens that an answer may have at most, if room for all is kept from the start

export const pagedKv = {
  id: "paged-kv",
  title: "Paged KV cache",
  sentences: [
    "The length of an answer is not known in advance, so memory reserved for the longest one is mostly waste; blocks of a few tokens are allocated when they are needed, and a block table says where they lie.",
    "Block tables only point, so requests with the same prefix share its blocks, and a shared block is copied when one of them writes into it (copy on write).",
    "The only waste is the unfilled part of each request’s last block, and a full block that no request holds stays cached until its memory is needed: the prefix cache.",
  ],
  readMore: "inference#paged-kv-cache",
  needs: {},
  controls: [
    { id: "step", label: "What has happened", kind: "step", min: 0, max: NUM_EVENTS, value: 4 },
    { id: "size", label: "Tokens in a block", kind: "range", choices: [2, 4, 8], value: 4 },
  ],

  figures(context) {
    const { pool } = stateOf(context);
    const { all, filled } = pool.slots;
    const lengths = [...pool.tables.keys()].map((name) => pool.tokensOf(name).length);
    const written = lengths.reduce((sum, length) => sum + length, 0);
    const running = lengths.length;
    return [
      { label: "Blocks used", value: `${pool.blocks.filter(({ refs }) => refs > 0).length} of ${pool.blocks.length}` },
      { label: "Slots used, but empty", value: all > 0 ? 1 - filled / all : 0, unit: "%", formula: `${all - filled} of ${all} slots` },
      { label: "Without sharing, blocks would hold", value: written, unit: "tokens", formula: `they hold ${filled}` },
      { label: `With ${RESERVED} slots kept for each`, value: running > 0 ? 1 - written / (running * RESERVED) : 0, unit: "%", source: "empty",
        formula: `${running * RESERVED - written} of ${running * RESERVED} slots` },
    ];
  },

  draw(canvas, context) {
    const state = stateOf(context);
    const said = canvas.place("happening", "p");
    if (said.textContent !== state.said) said.textContent = state.said;
    said.setAttribute("role", "status");
    showPool(canvas.place("pool", "ol"), state);
    showTables(canvas.place("tables", "dl"), state);
    drawShares(canvas, state);
  },
};

function stateOf({ values: { step, size } }) {
  return poolAfter(step, NUM_BLOCKS[size], size);
}

function showPool(place, { pool, written }) {
  place.setAttribute("aria-label", "Blocks of the pool");
  place.replaceChildren(...pool.blocks.map((block) => {
    const state = pool.stateOf(block);
    const slots = Array.from({ length: pool.blockSize }, (_, index) =>
      element("span", { class: "slot" }, block.tokens[index] ?? " "));
    const holders = [...pool.tables].filter(([, table]) => table.includes(block.id)).map(([name]) => name);
    const holder = state === "used" ? holders.join(", ") : state === "cached" ? "cached" : "free";
    const head = element("span", { class: "block-head" }, element("b", {}, String(block.id)), element("span", {}, holder));
    return element("li", { class: `kv-block is-${state}${written.includes(block.id) ? " is-new" : ""}${holders.length > 1 ? " is-shared" : ""}` }, head, ...slots);
  }));
}

function showTables(place, { pool }) {
  if (pool.tables.size === 0) {
    place.replaceChildren(element("dt", {}, "Tables"), element("dd", {}, "no request runs"));
    return;
  }
  place.replaceChildren(...[...pool.tables].flatMap(([name, table]) => [
    element("dt", {}, `Table of ${name}`),
    element("dd", {}, `${table.join(" → ")}  `, element("span", { class: "hint" }, pool.tokensOf(name).join(" "))),
  ]));
}

function drawShares(canvas, { pool }) {
  const counts = { used: 0, cached: 0, free: 0 };
  for (const block of pool.blocks) counts[pool.stateOf(block)] += 1;
  const { all, filled } = pool.slots;
  canvas.chart("shares", lanes, {
    title: "Where the pool’s slots are",
    x: { label: "slots", min: 0, max: pool.blocks.length * pool.blockSize },
    rows: [{
      label: "pool",
      blocks: sideBySide([
        { size: filled, label: "hold a token", colour: 1 },
        { size: all - filled, label: "used, but empty", colour: 2 },
        { size: counts.cached * pool.blockSize, label: "cached", colour: 6 },
        { size: counts.free * pool.blockSize, label: "free", colour: 7, isFaint: true },
      ]).filter(({ from, to }) => to > from),
    }],
  });
}
