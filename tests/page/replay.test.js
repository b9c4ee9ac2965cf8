// A recorded run as blocks in time: nothing is lost, and nobody sits on another's slot.

import assert from "node:assert/strict";
import { test } from "node:test";
import { throughput } from "./static/engine/charts.js";
import { batchSizes, outcome, requestRows, slotRows, until } from "./static/pictures/replay.js";

// Two slots; three requests, of which the last waits for one.
const FOUND = { slots: 2, requests: [[0, 8, 3], [0, 8, 1], [0.5, 8, 2]] };
const RUN = {
  seconds: 4,
  ttft: [1, 1, 2.5],
  steps: [
    [0, 1, [[0, 8], [1, 8]], [], 1, [], 0.2],
    [1, 2, [[2, 4]], [0], 0, [], 0.2],
    [2, 3, [[2, 4]], [0], 0, [], 0.2],
    [3, 4, [], [2], 0, [], 0.1],
  ],
};

const plain = (blocks) => blocks.map(({ from, to, label }) => [from, to, label]);

test("a request waits, has its prompt computed and is answered", () => {
  assert.deepEqual(requestRows(FOUND, RUN).map(plain), [
    [[0, 1, "prompt"], [1, 3, "answer"]],
    [[0, 1, "prompt"]],
    [[0.5, 1, "waits"], [1, 3, "prompt"], [3, 4, "answer"]],
  ]);
});

test("a slot has one request after the other, and is empty between them", () => {
  const rows = slotRows(FOUND, RUN);
  assert.deepEqual(rows.map((blocks) => blocks.map(({ number }) => number)), [[0, 0, null], [1, 2, 2]]);
  for (const blocks of rows) {
    assert.equal(blocks[0].from, 0);
    assert.equal(blocks.at(-1).to, 4);
    blocks.slice(1).forEach(({ from }, index) => assert.equal(from, blocks[index].to));
  }
});

test("one who was preempted waits again", () => {
  const steps = [[0, 1, [[0, 8]], [], 0, [], 0], [1, 2, [[1, 8]], [], 1, [0], 0], [2, 3, [[0, 9]], [], 0, [], 0]];
  const [first] = requestRows({ requests: [[0, 8, 2], [1, 8, 1]] }, { steps });
  assert.deepEqual(plain(first), [[0, 1, "prompt"], [1, 2, "waits"], [2, 3, "prompt"]]);
});

test("what it comes to", () => {
  const found = outcome(FOUND, RUN);
  assert.deepEqual(found, { seconds: 4, ttft: 1.5, slowest: 2.5, used: 7, wasted: 0, all: 8 });
  assert.deepEqual(batchSizes(RUN), [[0, 2], [1, 2], [2, 2], [3, 1], [4, 0]]);
});

test("later than a moment nothing is shown", () => {
  const blocks = [{ from: 0, to: 2 }, { from: 2, to: 3 }];
  assert.deepEqual(until(blocks, 1), [{ from: 0, to: 1 }]);
  assert.deepEqual(until(blocks, 2), [{ from: 0, to: 2 }]);
  assert.deepEqual(until(blocks, 9), blocks);
});

test("prompts and answers have the colours that they have on the dashboard", () => {
  const kinds = Object.fromEntries(requestRows(FOUND, RUN).flat().map(({ label, colour }) => [label, colour]));
  const [prompts, answers] = throughput([], 0).layers;
  assert.deepEqual([kinds.prompt, kinds.answer], [prompts.colour, answers.colour]);
});
