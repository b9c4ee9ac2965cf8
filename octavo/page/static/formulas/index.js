// The planner's formulas, as pictures use them: pure functions of JSON, without a document. What
// each computes, octavo.planner computes the same: tests/page/test_formulas.py asks both.

export { allGather, allReduce, allToAll, pointToPoint } from "./communication.js";
export { decisions } from "./decisions.js";
export { deployment } from "./deployment.js";
export { CannotBe } from "./errors.js";
export { sequenceBytes } from "./memory.js";
export { bill, listed, owned, perMillion, rented, USUAL_UTILIZATION } from "./money.js";
export { delaysQuantile, md1WaitQuantile, mmkWaitQuantile, normalQuantile } from "./quantiles.js";
export { balance, erlangC, md1Wait, mmkWait } from "./queueing.js";
export {
  acceptance, batchedSpeedup, bestLength, expectedTokens, speedup,
} from "./speculation.js";
export { readConfig } from "./read_config.js";
export { expertsHit, loadFactor } from "./work.js";
