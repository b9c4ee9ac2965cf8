// Requests within limits, and the knee.

import assert from "node:assert/strict";
import { test } from "node:test";
import { distribution, goodput, knee, quantile } from "./static/pictures/in_time.js";

const LIMITS = { ttft: 1, tpot: 0.1 };
const run = (rate, late) => ({ rate, requests: Array.from({ length: 10 }, (_, index) => [index < late ? 2 : 0.5, 0.05]) });

test("both limits count, and a limit is still in time", () => {
  const requests = [[1, 0.1], [1, 0.11], [1.01, 0.1], [0.5, null]];
  assert.deepEqual(goodput({ rate: 8, requests }, LIMITS), { good: 2, share: 0.5, rate: 4 });
});

test("a distribution reaches all who have a value", () => {
  assert.deepEqual(distribution([3, 1, null, 2, 1]), [[1, 0.25], [1, 0.5], [2, 0.75], [3, 1]]);
  assert.equal(quantile([1, 2, 3, 4], 0.5), 2);
  assert.equal(quantile([1, 2, 3, 4], 0.95), 4);
  assert.equal(quantile([null], 0.5), null);
});

test("the knee is before the first rate at which too many are late", () => {
  assert.equal(knee([run(1, 0), run(2, 1), run(4, 2), run(8, 0)], LIMITS).rate, 2);
  assert.equal(knee([run(1, 5), run(2, 0)], LIMITS), undefined);
  assert.equal(knee([run(1, 0), run(2, 1)], LIMITS).rate, 2);
});
