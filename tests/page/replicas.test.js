// Which ring an event of several replicas goes to, and which one is shown.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Replicas } from "./static/engine/replicas.js";

const ready = (replica) => ({ replica, engine: "ready", detail: "", about: { replica } });
const stateOf = (replicas) => {
  replicas.close(1);
  return replicas.ring.frames.at(-1).state;
};

test("one engine has one ring and no list", () => {
  const replicas = new Replicas();
  replicas.take({ engine: "ready", detail: "" });
  assert.deepEqual([stateOf(replicas), replicas.shown, replicas.list], ["ready", null, []]);
});

test("an event goes to the replica that it names, or to all", () => {
  const replicas = new Replicas();
  replicas.take(ready(0));
  replicas.take(ready(1));
  assert.equal(replicas.shown, 0);
  replicas.take({ replica: 1, engine: "restarting", detail: "it died" });
  replicas.take({ rejected: { work: 2 }, replicas: [{ replica: 0 }, { replica: 1 }] });
  assert.equal(stateOf(replicas), "ready");
  assert.deepEqual(replicas.ring.frames.at(-1).notes, ["2 refused: work"]);
  replicas.show(1);
  assert.deepEqual([stateOf(replicas), replicas.ring.about.replica], ["restarting", 1]);
  replicas.show(7);
  assert.deepEqual([replicas.shown, replicas.list.length], [1, 2]);
});

test("a replica that is removed is no longer shown", () => {
  const replicas = new Replicas();
  for (const number of [0, 1, 2]) replicas.take(ready(number));
  replicas.take({ replicas: [{ replica: 0 }, { replica: 1 }, { replica: 2 }] });
  replicas.take({ replica: 0, engine: "removed", detail: "" });
  assert.deepEqual([replicas.shown, replicas.list.length], [1, 2]);
  replicas.close(1);
  assert.deepEqual(replicas.ring.frames[0].notes, ["replica 0 was removed"]);
});
