// Blocks of several ranks in time: nothing overlaps, and what is not computed is waited for.

import assert from "node:assert/strict";
import { test } from "node:test";

import { loadSteps, rankRows, sharesOf } from "./static/pictures/layout_lanes.js";

const PIPELINE = {
  kind: "pipeline", ranks: 2, seconds: 4,
  steps: [[0, 3, 5, 0, [[0, 1], [1, 3]]], [1, 4, 0, 2, [[1, 2], [3, 4]]]],
};
const EXPERTS = {
  kind: "experts", ranks: 2, seconds: 10,
  steps: [[0, 10, 4, 0, [1, 6, [6, 3]]]],
};

test("stages wait where they have no step", () => {
  const [first, second] = rankRows(PIPELINE, 0, 4);
  assert.deepEqual(first.blocks.map(({ from, to, label }) => [from, to, label]), [
    [0, 1, "step with prompts"], [1, 2, "step of answers alone"],
  ]);
  assert.deepEqual(second.blocks.map(({ from, to, label }) => [from, to, label]), [
    [0, 1, "waits (bubble)"], [1, 3, "step with prompts"], [3, 4, "step of answers alone"],
  ]);
  assert.equal(sharesOf(PIPELINE).idle, 1 - 5 / 8);
});

test("only what lies between two moments is there", () => {
  const [first] = rankRows(PIPELINE, 0.5, 1.5);
  assert.deepEqual(first.blocks.map(({ from, to }) => [from, to]), [[0.5, 1], [1, 1.5]]);
});

test("ranks wait for the one whose experts are used most", () => {
  const [busiest, other] = rankRows(EXPERTS, 0, 10);
  assert.deepEqual(busiest.blocks.map(({ from, to }) => [from, to]), [[0, 9], [9, 10]]);
  assert.deepEqual(other.blocks.map(({ from, to, label }) => [from, to, label]), [
    [0, 6, "step with prompts"], [6, 9, "waits for the busiest rank"], [9, 10, "exchanges results"],
  ]);
  const { idle, exchange, busiest: most } = sharesOf(EXPERTS);
  assert.equal(exchange, 0.1);
  assert.equal(most, 12 / 9);
  assert.ok(Math.abs(idle - 0.15) < 1e-12);
  assert.deepEqual(loadSteps(EXPERTS, 0, 10)[0], [[0, 12 / 9], [10, 12 / 9]]);
});
