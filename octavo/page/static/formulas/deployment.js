// A model on devices, by the document that the planner has of it (docs/planning.md): one of the
// page's own, where nothing was measured.

import { maxConcurrency } from "./memory.js";
import { bill } from "./money.js";
import { Service } from "./service.js";
import { Stages, period } from "./stages.js";
import { boundOps, stepCost, stepTotal } from "./steps.js";

export class Deployment {
  /** So many `replicas` of what a document of one replica describes. */
  constructor(document, replicas = 1) {
    const { model, memory, precision, rank, deployment, service, money, link } = document;
    this.document = document;
    this.replicas = replicas;
    Object.assign(this, { model, memory, precision, link, limits: deployment, parallel: rank.parallel });
    this.numDevices = money.num_devices * replicas;
    /** The number of groups that requests are spread over: replicas, copies, pipeline stages. */
    this.numGroups = service.num_groups * replicas;
    this.targetStepSeconds = service.target_step_seconds;
    this.ops = boundOps(document);
    this.stages = document.stages ? new Stages(document) : null;
  }

  /** The same with so many replicas. */
  times(replicas) {
    return replicas === this.replicas ? this : new Deployment(this.document, replicas);
  }

  /** Requests of so many tokens whose KV cache fits, in all replicas and copies. */
  maxConcurrency(length) {
    return maxConcurrency(this.memory, length) * this.parallel.dp * this.replicas;
  }

  /** Whether a request of so many tokens can be answered at all. */
  holds(length) {
    return length <= this.limits.max_model_len && maxConcurrency(this.memory, length) >= 1;
  }

  /** What a step takes: `total`, `compute`, `communication`, `overhead` as predictions (see
   * predictions.js); `ops`, `transfers` and `bound`. Chunks: see work.js. */
  step(chunks, numSteps = 1) {
    return stepCost(this, chunks, numSteps);
  }

  /** The total of that alone, which is sooner found. */
  stepTotal(chunks) {
    return stepTotal(this, chunks);
  }

  /** The same; in a pipeline, until the same requests may be in the next one. */
  stepSeconds(chunks) {
    const total = this.stepTotal(chunks);
    if (!this.stages) return total;
    const factor = period(this.stages.times(chunks)) / total.value;
    const { value, low, high, source } = total;
    return { value: factor * value, low: factor * low, high: factor * high, source };
  }

  /** What becomes of `{ inputLen, outputLen, rate }`; see service.js. */
  service(traffic) {
    return new Service(this, traffic);
  }

  /** A bill (money.js) for `{ requestsPerSecond, inputLen, outputLen, ... }`; null without a price. */
  money(answers) {
    const { fixed_usd_per_hour: fixed, running_usd_per_hour: running, watts } = this.document.money;
    return fixed && bill({ fixed, running }, { numDevices: this.numDevices, watts, ...answers });
  }
}
