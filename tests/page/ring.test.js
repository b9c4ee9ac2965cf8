// The last five minutes of an engine: what is kept, and whose time a step was.

import assert from "node:assert/strict";
import { test } from "node:test";
import { FRAME_SECONDS, MOST_FRAMES, Ring } from "./static/engine/ring.js";

/** An event of steps of one token and a tenth of a second, and what else came with them. */
function event(ids, further = {}) {
  const column = (value) => ids.map(value);
  const steps = {
    step_id: ids, num_tokens: column(() => 1), num_prompt_tokens: column(() => 0),
    seconds: column(() => 0.1), step_seconds: column((id) => 0.1 * (id + 1)),
  };
  return { missed: 0, steps, last: { step_id: ids.at(-1) }, ...further };
}

const look = (step_id, rows) => ({ step_id, rows, preempted: [] });
const ended = (id) => ({ id, reason: "stop" });

/** The device's time of requests that end after these events, to the microsecond. */
function secondsOf(events, ...ids) {
  const ring = new Ring();
  for (const each of [...events, { ended: ids.map(ended) }]) ring.take(each);
  ring.close(1);
  return ring.frames[0].ended.map(({ device_seconds: seconds }) => seconds && Math.round(1e6 * seconds) / 1e6);
}

test("a step's time is shared by its tokens, guesses among them", () => {
  const rows = [["a#0", 0, 30, 1, 0, 0], ["b#0", 9, 1, 1, 0, 0], ["b#1", 9, 1, 3, 8, 2]];
  assert.deepEqual(secondsOf([event([0], { looks: [look(0, rows)] })], "a", "b", "c"), [0.075, 0.025, null]);
});

test("time is of the step in whose rows a request is, also where several came at once", () => {
  const looks = [look(1, [["a#0", 0, 8, 1, 0, 0]]), look(2, [["b#0", 0, 1, 1, 0, 0]]), look(4, [["b#0", 1, 1, 1, 0, 0]])];
  // That of step 3, whose rows were not shown, goes to those of the next.
  assert.deepEqual(secondsOf([event([1, 2, 3, 4], { looks })], "a", "b"), [0.1, 0.3]);
});

test("an engine that restarts begins anew, and what it had is gone", () => {
  const ring = new Ring();
  ring.take(event([7], { looks: [look(7, [["a#0", 0, 1, 1, 0, 0]])], pool: { runs: [0, 1] } }));
  ring.take({ engine: "restarting", detail: "it was killed" });
  ring.close(1);
  const [{ state, last, pool, looks, numSteps, notes }] = ring.frames;
  assert.deepEqual([state, last, pool, looks, numSteps], ["restarting", null, null, [], 1]);
  assert.deepEqual(notes, []); // it is the first that is heard of it
  ring.take({ engine: "ready", detail: "" });
  ring.take(event([0]));
  ring.close(2);
  assert.equal(ring.frames[1].last.step_id, 0);
  assert.deepEqual(ring.frames[1].notes, ["engine ready"]);
});

test("who never ends is forgotten, and not who comes", () => {
  const rows = (id) => [look(id, [[`r${id}#0`, 0, 1, 1, 0, 0]])];
  const events = Array.from({ length: 5000 }, (_, id) => event([id], { looks: rows(id) }));
  assert.deepEqual(secondsOf(events, "r0", "r4999"), [null, 0.1]);
});

test("what is kept is bounded", () => {
  const ring = new Ring();
  for (let at = 0; at < 3 * MOST_FRAMES; at += 1) {
    const ids = Array.from({ length: 50 }, (_, index) => 50 * at + index);
    ring.take(event(ids, { looks: ids.map((id) => look(id, Array(20).fill([`r${id}`, 0, 1, 1, 0, 0]))) }));
    ring.close(at * FRAME_SECONDS);
  }
  const { steps, looks, numSteps } = ring.frames.at(-1);
  assert.deepEqual([ring.frames.length, steps.length, looks.length, looks[0].rows.length], [MOST_FRAMES, 32, 32, 16]);
  assert.equal(numSteps, 50);
});
