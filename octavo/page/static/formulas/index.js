// The planner's formulas, as pictures use them: pure functions of JSON, without a document.

import { allGather, allReduce, allToAll, pointToPoint } from "./communication.js";
import { deployment } from "./deployment.js";
import { CannotBe } from "./errors.js";
import { sequenceBytes } from "./memory.js";
import { bill, listed, owned, perMillion, rented, USUAL_UTILIZATION } from "./money.js";
import * as queueing from "./queueing.js";
import * as speculation from "./speculation.js";
