// A model on devices, as an engine runs it there. From what `octavo.page.data` tells, or a server.

import { CannotBe } from "./errors.js";
import { memoryOf, settle } from "./memory.js";
import { countParameters } from "./models.js";
import { bill, listed } from "./money.js";
import { precisionOf } from "./precision.js";
import { attentionOps, kvBytesPerToken, Layout, weightsBytes } from "./rank.js";
import { Service } from "./service.js";
import { pricedOps, stepCost, stepTotal } from "./steps.js";

/**
 * @param knobs `{ spec, device, precision, kv, engine, tp, pp, ep, dp, replicas, maxModelLen,
 *   maxNumSeqs, stepTokens, blockSize, utilization, reserveBytes }`: `spec` and `device` as of
 *   `tables`; `precision` is null for what the model's authors published, `kv` "auto" for what the
 *   engine takes. What is left out is 1, or the engine's default.
 * @param tables what `page_data` has: `types`, `engines`, `efficiencies`, `limits`.
 * @throws CannotBe where the model cannot be laid out so; its message says why.
 */
export function deployment(knobs, tables) {
  return new Deployment(knobs, tables);
}

class Deployment {
  constructor(knobs, tables) {
    const { spec, device, precision = null, kv = "auto", engine = "octavo" } = knobs;
    const { tp = 1, pp = 1, ep = 1, dp = 1, replicas = 1 } = knobs;
    const profile = tables.engines[engine];
    const [efficiency, limits] = device.engines[engine];
    const kind = device.kind === "gpu" ? profile.gpu : profile.other;
    const kvName = kind.kv_types[kv] ?? (kv === "auto" ? "bfloat16" : kv);
    this.knobs = knobs;
    this.tables = tables;
    this.spec = spec;
    this.device = device;
    this.replicas = replicas;
    this.parallel = { tp, pp, ep, dp };
    this.precision = precisionOf(spec, precision, kvName, tables.types);
    this.engine = kind;
    this.targetStepSeconds = profile.target_step_seconds;
    this.efficiency = tables.efficiencies[efficiency];
    this.limits = settle(knobs, tables.limits[limits], spec);
    this.layout = new Layout(spec, this.precision, this.parallel);
    this.link = linkOf(device, this.parallel);
  }

  /** The same with other knobs. */
  with(changes) {
    return new Deployment({ ...this.knobs, ...changes }, this.tables);
  }

  get numDevices() {
    const { tp, pp, dp } = this.parallel;
    return tp * pp * dp * this.replicas;
  }

  /** How many lots requests are dealt out to: replicas, copies, stages of a pipeline. */
  get numGroups() {
    return this.parallel.pp * this.parallel.dp * this.replicas;
  }

  /** `{ bytes, parameters, active }` of the whole model. */
  get weights() {
    return this.#once("weights", () => ({
      bytes: weightsBytes(this.spec, this.precision), ...countParameters(this.spec),
    }));
  }

  /** Of one token in all layers, on one device of a group of one. */
  get kvBytesPerToken() {
    return this.#once("kv", () => {
      const parallel = { tp: 1, pp: 1, ep: 1, dp: 1 };
      const whole = { ...this.layout, parallel };
      return kvBytesPerToken(attentionOps(whole, { first: 0, last: this.layout.order.length }));
    });
  }

  /** Of the device that has least left: `lines`, `poolBytes`, `numBlocks`... */
  get memory() {
    return this.#once("memory", () =>
      memoryOf(this.layout, this.device, this.engine, this.limits));
  }

  /** Requests of so many tokens whose keys and values fit, in all replicas and copies. */
  maxConcurrency(length) {
    return this.memory.maxConcurrency(length) * this.parallel.dp * this.replicas;
  }

  /** Whether a request of so many tokens can be answered at all. */
  holds(length) {
    return length <= this.limits.maxModelLen && this.memory.maxConcurrency(length) >= 1;
  }

  /** What the rank that has most to do computes, and each of its operations with its price. */
  get rank() {
    return this.#once("rank", () => this.layout.busiest);
  }

  get ops() {
    return this.#once("ops", () => pricedOps(this.rank, this.device, this.efficiency));
  }

  /** What a step takes: `total`, `compute`, `communication`, `overhead` as `{ seconds, low, high,
   * source }`; `ops`, `transfers` and `bound`. Chunks: see work.js. */
  step(chunks, numSteps = 1) {
    const cost = this.stepCost(chunks, numSteps);
    const seconds = ({ value, ...rest }) => ({ seconds: value, ...rest });
    const [total, compute] = [seconds(cost.total), seconds(cost.compute)];
    const [communication, overhead] = [seconds(cost.communication), seconds(cost.overhead)];
    return { ...cost, total, compute, communication, overhead };
  }

  /** The same with predictions as predictions.js has them. */
  stepCost(chunks, numSteps = 1) {
    return stepCost(this.ops, this.rank, this.efficiency, this.link, chunks, numSteps);
  }

  /** The total of that alone, which is sooner found. */
  stepTotal(chunks) {
    return stepTotal(this.ops, this.rank, this.efficiency, this.link, chunks);
  }

  /** What becomes of `{ inputLen, outputLen, rate }`; see service.js. */
  service(traffic) {
    return new Service(this, traffic);
  }

  /** A bill (money.js) for `{ requestsPerSecond, inputLen, outputLen, ... }`; null without a price. */
  money(answers, price = listed(this.device)) {
    const { numDevices, device: { watts } } = this;
    return price && bill(price, { numDevices, watts, ...answers });
  }

  #known = new Map();

  #once(name, make) {
    if (!this.#known.has(name)) this.#known.set(name, make());
    return this.#known.get(name);
  }
}

/** Null where nobody has anything to say to another. */
function linkOf(device, { tp, pp, ep }) {
  if (tp === 1 && pp === 1 && ep === 1) return null;
  if (!device.link) throw new CannotBe(`${device.name} has no link to another device`);
  return device.link;
}
