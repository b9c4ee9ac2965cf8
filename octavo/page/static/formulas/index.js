// The planner's documents evaluated, as pictures use them: pure functions of JSON, without a page.
// What each computes, octavo.planner computes the same: tests/page/test_formulas.py asks both.

export { decisions } from "./decisions.js";
export { Deployment } from "./deployment.js";
export { isUniform, sequenceBytes } from "./memory.js";
export { bill, perMillion } from "./money.js";
export { delaysQuantile, md1WaitQuantile, mmkWaitQuantile, normalQuantile } from "./quantiles.js";
export { erlangC, md1Wait, mmkWait } from "./queueing.js";
export { acceptance, batchedSpeedup, expectedTokens, speedup } from "./speculation.js";
