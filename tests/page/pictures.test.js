// What pictures compute by themselves: tiles of softmax, a pool of blocks; numbers in words.

import assert from "node:assert/strict";
import { test } from "node:test";
import { layAxis } from "./static/charts/scales.js";
import { stacked } from "./static/charts/curves.js";
import { compact, digits, format, formatRange } from "./static/common/numbers.js";
import { pack, unpack } from "./static/common/packing.js";
import { parseValue, valueText } from "./static/pictures/controls.js";
import { finish, plainAttention, scoresOf, tileByTile } from "./static/pictures/online_softmax.js";
import { NUM_EVENTS, Pool, poolAfter } from "./static/pictures/paging.js";
import { roundOneRow, TYPES } from "./static/pictures/rounding.js";

/** The same numbers each time: a generator of Lehmer's. */
function random(seed) {
  let state = seed;
  return () => (state = (state * 48271) % 2147483647) / 2147483647;
}

test("tiles come to what plain softmax comes to, however large the scores", () => {
  const next = random(7);
  const matrix = (rows, columns, size) => Array.from({ length: rows }, () => Array.from({ length: columns }, () => size * (next() - 0.5)));
  for (const size of [1, 30, 3000]) {
    for (const isCausal of [false, true]) {
      const [queries, keys, values] = [matrix(5, 3, size), matrix(9, 3, 2), matrix(9, 2, 4)];
      const scores = scoresOf(queries, keys, isCausal);
      const plain = plainAttention(scores, values);
      for (const tile of [1, 2, 4, 9, 16]) {
        const states = tileByTile(scores, values, tile);
        assert.equal(states.length, Math.ceil(9 / tile) + 1);
        states.at(-1).forEach((row, index) => finish(row).forEach((each, column) => {
          assert.ok(Math.abs(each - plain[index][column]) < 1e-12, `${each} ${plain[index][column]}`);
        }));
      }
    }
  }
});

test("a query sees itself and what is before it, and nothing gathers where nothing is seen", () => {
  const scores = scoresOf([[1], [1]], [[1], [2], [3]], true);
  assert.deepEqual(scores, [[1, 2, -Infinity], [1, 2, 3]]);
  const [none] = tileByTile([[-Infinity, 1]], [[5], [7]], 1)[1];
  assert.deepEqual(none, { max: -Infinity, sum: 0, output: [0] });
  assert.deepEqual(finish(none), [0]);
  assert.deepEqual(finish(tileByTile([[-Infinity, 1]], [[5], [7]], 1)[2][0]), [7]);
});

/** What is true of a pool at any time. */
function checkPool(pool, written) {
  const refs = pool.blocks.map(() => 0);
  for (const [name, table] of pool.tables) {
    table.forEach((id) => (refs[id] += 1));
    assert.deepEqual(pool.tokensOf(name), written.get(name));
    const inner = table.slice(0, -1);
    assert.ok(inner.every((id) => pool.blocks[id].tokens.length === pool.blockSize));
  }
  assert.deepEqual(pool.blocks.map((block) => block.refs), refs);
}

test("a pool keeps every sequence as it was written, whoever shares with whom", () => {
  for (let seed = 1; seed <= 40; seed += 1) {
    const next = random(seed);
    const pick = (most) => Math.floor(next() * most);
    const pool = new Pool(3 + pick(10), 1 + pick(4));
    const written = new Map();
    for (let turn = 0; turn < 80; turn += 1) {
      const names = [...pool.tables.keys()];
      const name = names[pick(names.length)];
      const act = pick(10);
      if (act < 2) {
        const prompt = Array.from({ length: 1 + pick(9) }, () => "ab"[pick(2)]);
        if (pool.admit(`s${turn}`, prompt) !== null) written.set(`s${turn}`, prompt);
      } else if (act < 3 && name) {
        pool.fork(name, `s${turn}`);
        written.set(`s${turn}`, written.get(name));
      } else if (act < 4 && name) {
        pool.free(name);
        written.delete(name);
      } else if (name && pool.append(name, `${turn}`) !== null) {
        written.set(name, [...written.get(name), `${turn}`]);
      }
      pool.publish();
      checkPool(pool, written);
    }
  }
});

test("what is told of the pool happens: a copy where blocks are shared, and a prefix that is found", () => {
  for (const size of [2, 4, 8]) {
    const said = Array.from({ length: NUM_EVENTS + 1 }, (_, events) => poolAfter(events, 48 / size, size).said);
    assert.ok(said[8].length > 0);
    assert.ok(said.every((text) => !/undefined|null|has no room/.test(text)), said.join("\n"));
  }
  assert.match(poolAfter(3, 9, 4).said, /copied first/);
  assert.match(poolAfter(9, 9, 4).said, /2 blocks shared/);
});

test("numbers in words", () => {
  const cases = [
    [[1234, ""], "1,234"], [[0, "B"], "0 B"], [[1.5e9, "B"], "1.5 GB"], [[2 ** 30, "iB"], "1 GiB"],
    [[999.7e6, "B"], "1 GB"], [[0.00123, "s"], "1.23 ms"], [[0.5, "%"], "50%"], [[3.35e12, "B/s"], "3.35 TB/s"],
    [[0.087, "$"], "$0.087"], [[2.5, "×"], "2.5×"], [[null, "s"], "–"], [[NaN, "s"], "–"], [[Infinity, ""], "∞"],
    [[0.00002, ""], "2.0 × 10⁻⁵"], [[12345678, "tokens"], "12.3M tokens"], [[-1500, "B"], "−1.5 kB"],
  ];
  for (const [[value, unit], text] of cases) assert.equal(format(value, unit), text);
  assert.equal(formatRange(0.001, 0.002, "s"), "1–2 ms");
  assert.equal(formatRange(5, 5, "tokens"), "5 tokens");
  assert.equal(digits(99.95), "100");
  assert.deepEqual([-0.0466, -1500, -Infinity].map(digits), ["−0.0466", "−1,500", "−∞"]);
  assert.deepEqual([format(1, "requests"), format(2, "requests"), format(1, "tokens/s")], ["1 request", "2 requests", "1 tokens/s"]);
  assert.deepEqual([1, 1500, 2e6, 3e9, -2.5].map(compact), ["1", "1.5k", "2M", "3B", "−2.5"]);
});

test("ticks are round, inside of the axis and not too many", () => {
  for (const [min, max] of [[0, 1], [0, 7.3], [3, 1000], [0, 1e-4], [0, 123456]]) {
    const axis = layAxis({ label: "x", min, max }, [], 0, 600);
    assert.ok(axis.ticks.length >= 2 && axis.ticks.length <= 10, `${min} ${max} ${axis.ticks.length}`);
    assert.ok(axis.ticks.every(({ at }) => at >= -0.01 && at <= 600.01));
  }
  const log = layAxis({ label: "x", scale: "log", min: 1, max: 1e6 }, [], 0, 600);
  assert.deepEqual(log.ticks.map(({ text }) => text), ["1", "10", "100", "1k", "10k", "100k", "1M"]);
  const memory = layAxis({ label: "x", scale: "log", unit: "iB" }, [2 ** 20, 2 ** 40], 0, 400);
  assert.deepEqual(memory.ticks.map(({ text }) => text), ["1 MiB", "32 MiB", "1 GiB", "32 GiB", "1 TiB"]);
  const few = layAxis({ label: "requests", min: 0, max: 3, isWhole: true }, [], 0, 900);
  assert.deepEqual(few.ticks.map(({ text }) => text), ["0", "1", "2", "3"]);
  assert.equal(layAxis({ label: "y" }, [], 0, 100).ticks.length > 0, true); // nothing to show
});

test("areas stand on each other", () => {
  const [, upper] = stacked([{ label: "a", points: [[0, 1], [1, 2]] }, { label: "b", points: [[0, 3], [1, 4]] }]);
  assert.deepEqual(upper.points, [[0, 1, 4], [1, 2, 6]]);
});

test("what an address says is a value of the control, or nothing", () => {
  const log = { kind: "log-range", min: 1, max: 4096, value: 8 };
  const given = [["131072", 4096], ["17", 17], ["0", 1], ["x", null], ["", null], ["1e99", 4096], ["Infinity", null]];
  for (const [text, value] of given) assert.equal(parseValue(log, text), value);
  assert.equal(parseValue({ kind: "range", choices: [1, 2, 4] }, "3.5"), 4);
  assert.equal(parseValue({ kind: "range", min: 0, max: 1, step: 0.05 }, "0.61"), 0.6);
  assert.equal(parseValue({ kind: "choice", choices: [["a", "A"]] }, "b"), null);
  const toggle = { kind: "toggle" };
  for (const value of [true, false]) assert.equal(parseValue(toggle, valueText(value)), value);
  assert.equal(parseValue(toggle, "maybe"), null);
});

test("one row that has changed is rounded as if all were rounded anew", () => {
  const next = random(11);
  const values = Float32Array.from({ length: 3 * 256 }, () => next() + next() + next() - 1.5);
  for (const [name, type] of Object.entries(TYPES)) {
    const before = type.round(values, 256);
    for (const at of [3, 300, 767]) {
      const changed = values.slice();
      changed[at] *= 17;
      const row = Math.floor(at / 256);
      assert.deepEqual(roundOneRow(type, before, changed, 256, row), type.round(changed, 256), name);
    }
    assert.deepEqual(before, type.round(values, 256), name); // it is as it was
  }
});

test("an address has a config as it was, or none where it is too large", async () => {
  const next = random(5);
  const config = { model_type: "llama", hidden_size: 4096, name: "ü–✓", rope_scaling: { factor: 8.5, kinds: [null, true] } };
  const packed = await pack(config);
  assert.match(packed, /^[\w-]+$/);
  assert.deepEqual(await unpack(packed), config);
  assert.equal(await pack({ noise: Array.from({ length: 2000 }, next) }), null);
  for (const text of ["", "!", packed.slice(9), "A".repeat(5000)]) await assert.rejects(unpack(text), Error, text.slice(0, 9));
});
