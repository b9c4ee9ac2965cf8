// Requests that come at random: where the load settles, and how long answers take there. Twin of octavo/planner/steady_state.py.

import { maxConcurrency } from "./memory.js";
import { worst } from "./predictions.js";
import { period, scaled, secondsThrough } from "./stages.js";
import { delaysQuantile, md1WaitQuantile, mmkWaitQuantile, normalQuantile } from "./quantiles.js";
import { balance, md1Wait, mmkWait } from "./queueing.js";

const MIN_CHUNK = 16; // tokens of a prompt that a step has room for in any case
const LEAST_SPAN = 4; // steps with prompts may take so many times as long as those without
const MOST_TOKENS = 2 ** 24; // of a prompt: more than any has
const ENDS = ["value", "low", "high"];

/** What becomes of `{ inputLen, outputLen, rate }`: tokens, and requests a second. */
export class Service {
  #groups;
  #loads = new Map(); // by end of the predictions, as they are asked for

  constructor(deployment, { inputLen, outputLen, rate }) {
    const fitting = maxConcurrency(deployment.memory, inputLen + outputLen);
    const { max_num_seqs: numSeqs, max_num_batched_tokens: stepTokens } = deployment.limits;
    const most = Math.floor(Math.min(numSeqs, fitting) / deployment.parallel.pp);
    this.table = tableOf(deployment, inputLen, outputLen);
    this.slots = Math.max(1, most);
    this.steps = [this.table, inputLen, outputLen, stepTokens, deployment.targetStepSeconds, deployment.stages];
    this.rate = rate / deployment.numGroups;
    this.#groups = deployment.numGroups;
  }

  /** Whether the queue stays finite, by the middle of the predictions. */
  get isStable() {
    return this.#load("value").isStable;
  }

  /** Answers under way at once; seconds to the first token, between tokens, to the last: as
   * predictions, Infinity at an end where a queue grows without end. */
  get streams() {
    return this.#between((load) => load.streams * this.#groups);
  }

  get ttft() {
    return this.#between((load) => load.ttft());
  }

  get tpot() {
    return this.#between((load) => load.tpot());
  }

  get e2e() {
    return this.#between((load) => load.e2e());
  }

  /** The middle of two of these, which is found sooner than its ends: `{ streams, tpot }`. */
  get middle() {
    const load = this.#load("value");
    if (!load.isStable) return { streams: Infinity, tpot: Infinity };
    return { streams: load.streams * this.#groups, tpot: load.tpot() };
  }

  /** What a share of the requests do not exceed; `metric` is "ttft", "tpot" or "e2e". */
  within(metric, share) {
    return this.#between((load) => load[metric](share));
  }

  /** Of the time, what goes into prompts. */
  get prefillShare() {
    return this.#load("value").prefillShare;
  }

  #load(end) {
    if (!this.#loads.has(end)) {
      const load = new Load(new Steps(...this.steps, end), this.rate, this.slots);
      this.#loads.set(end, load);
    }
    return this.#loads.get(end);
  }

  #between(figure) {
    const ends = ENDS.map((end) => this.#load(end))
      .map((load) => (load.isStable ? figure(load) : Infinity));
    const source = worst(this.table.sources);
    return { value: ends[0], low: Math.min(...ends), high: Math.max(...ends), source };
  }
}

const TABLES = new WeakMap(); // of deployments, by lengths: one for all rates

/** Seconds of steps with some streams, half way to their ends, and equal pieces of prompts. */
function tableOf(deployment, inputLen, outputLen) {
  const name = `${inputLen} ${outputLen}`;
  if (!TABLES.has(deployment)) TABLES.set(deployment, new Map());
  const tables = TABLES.get(deployment);
  if (!tables.has(name)) {
    const stream = [inputLen + Math.floor(outputLen / 2) - 1, 1];
    tables.set(name, new StepTable(deployment, stream));
  }
  return tables.get(name);
}

class StepTable {
  #known = new Map(); // keys are numbers: tens of thousands are looked up for one figure

  constructor(deployment, stream) {
    this.deployment = deployment;
    this.stream = stream;
    this.predictions = [];
  }

  get sources() {
    return this.predictions.map((each) => each.source);
  }

  /** Of a step with `count` pieces `[start, tokens, samples]` of prompts beside the streams. */
  cost(streams, piece, count) {
    const beside = this.#beside(piece, count);
    if (!beside.has(streams)) {
      const [start, tokens] = this.stream;
      const pieces = piece ? [[...piece, 0, count]] : [];
      const total = this.deployment.stepSeconds([[start, tokens, 1, 0, streams], ...pieces]);
      this.predictions.push(total);
      beside.set(streams, total);
    }
    return beside.get(streams);
  }

  /** How stages share a step with a piece of a prompt. */
  times(streams, piece) {
    const [start, tokens] = this.stream;
    const pieces = piece ? [[...piece, 0, 1]] : [];
    return this.deployment.stages.times([[start, tokens, 1, 0, streams], ...pieces]);
  }

  #beside(piece, count) {
    const key = piece === null ? -1 : (piece[0] * MOST_TOKENS + piece[1]) * 2 + piece[2];
    const alike = this.#inner(this.#known, count);
    return this.#inner(alike, key);
  }

  #inner(maps, key) {
    if (!maps.has(key)) maps.set(key, new Map());
    return maps.get(key);
  }
}

/** By one end of the predictions. Numbers of streams need not be whole: between two, the cost is a
 * straight line. */
class Steps {
  #beside = {}; // what was found of the number of streams that was asked for last: each is, many times

  constructor(table, inputLen, outputLen, budget, target, pipeline, end) {
    const stages = pipeline ? pipeline.count : 1;
    Object.assign(this, { table, inputLen, budget, target, pipeline, stages, end, gaps: outputLen - 1 });
  }

  /** Without prompts; of one stream at the least. Where streams are too few for all stages, they do
   * not wait for each other. */
  decode(streams) {
    return this.#of(streams).decode ??= this.#decode(streams);
  }

  #decode(streams) {
    const seconds = this.#line(Math.max(1, streams));
    if (!this.pipeline || streams >= 1) return seconds;
    const times = this.table.times(1, null);
    return (seconds * period(times, Math.max(1, streams * this.stages))) / period(times);
  }

  /** Of all the steps that one prompt takes beside some streams. */
  prompt(streams) {
    return this.#of(streams).prompt ??= this.#promptSteps(streams).reduce((sum, each) => sum + each, 0);
  }

  /** Until they are done: in a pipeline, several are under way at once. */
  firstToken(streams) {
    return this.#of(streams).firstToken ??= this.#firstToken(streams);
  }

  #firstToken(streams) {
    const steps = this.#promptSteps(streams);
    if (!this.pipeline) return steps.reduce((sum, each) => sum + each, 0);
    const pieces = this.#pieces(this.room(streams));
    return secondsThrough(steps.map((seconds, number) => {
      const times = this.table.times(Math.floor(streams + 0.5), pieces[number]);
      return scaled(times, seconds / period(times));
    }));
  }

  numChunks(streams) {
    return this.#promptSteps(streams).length;
  }

  #promptSteps(streams) {
    return this.#of(streams).promptSteps ??= this.#pieces(this.room(streams))
      .map((piece) => this.#line(streams, piece));
  }

  /** Of `size` tokens, or of as many as bring a prompt through a pipeline soonest. */
  #pieces(size) {
    const most = Math.min(size, this.pipeline ? this.pipeline.chunk(this.inputLen) : size);
    const pieces = [];
    for (let start = 0; start < this.inputLen; start += most) {
      const left = this.inputLen - start;
      pieces.push([start, Math.min(most, left), Number(most >= left)]);
    }
    return pieces;
  }

  /** Of one step with as many whole prompts as there is room for. */
  full(streams) {
    const count = Math.floor(this.room(streams) / this.inputLen);
    return this.#line(streams, [0, this.inputLen, 1], count);
  }

  /** Tokens of a step that are left for prompts: fewer where streams would wait beyond the target. */
  room(streams) {
    return this.#of(streams).room ??= this.#roomBeside(streams);
  }

  #roomBeside(streams) {
    const room = Math.max(1, this.budget - Math.ceil(streams));
    if (!this.target || streams < 1) return room;
    const [decode, tokens] = [this.decode(streams), Math.min(room, this.inputLen)];
    const each = (this.#line(streams, [0, tokens, 1]) - decode) / tokens;
    const seconds = Math.max(this.target, LEAST_SPAN * decode) - decode;
    return Math.min(room, Math.max(MIN_CHUNK, Math.trunc(seconds / each)));
  }

  #of(streams) {
    if (this.#beside.streams !== streams) this.#beside = { streams };
    return this.#beside;
  }

  #line(streams, chunk = null, count = 1) {
    const below = Math.floor(streams);
    const low = this.table.cost(below, chunk, count)[this.end];
    if (below === streams) return low;
    const high = this.table.cost(below + 1, chunk, count)[this.end];
    return low + (high - low) * (streams - below);
  }
}

/** The deviation of a sum from its mean, of parts that have nothing to do with each other. */
function joint(one, other) {
  const size = Math.hypot(one, other);
  return one + other < 0 ? -size : size;
}

/** How it is at some rate. */
class Load {
  constructor(steps, rate, slots) {
    Object.assign(this, { steps, rate, slots });
    const settled = balance((others) => rate * steps.gaps * this.#tpotBeside(others), slots);
    this.streams = settled ?? Infinity;
    this.isStable = settled !== null && Number.isFinite(this.#tpotBeside(settled))
      && rate * this.#delay < 1;
  }

  /** Of the time, what steps take longer for the prompts in them. */
  get prefillShare() {
    return this.isStable ? Math.min(1, this.rate * this.#delay) : 1;
  }

  /** Means; with a share, what so many of the requests do not exceed. */
  ttft(share = null) {
    const { steps, steps: { stages }, streams } = this;
    const own = steps.firstToken(streams);
    const stay = steps.gaps * this.#tpotBeside(streams);
    // All stages have one queue.
    const service = (steps.numChunks(streams) > 1 ? steps.prompt(streams) : this.#packed(streams)) / stages;
    const [step, rate, slots] = [this.#stepUnderWay / stages, this.rate * stages, this.slots * stages];
    if (share === null) return own + step / 2 + md1Wait(rate, service) + mmkWait(rate, stay, slots);
    return own + step * share + md1WaitQuantile(rate, service, share) + mmkWaitQuantile(rate, stay, slots, share);
  }

  tpot(share = null) {
    const { steps: { gaps }, steps, streams, rate } = this;
    if (!gaps) return 0;
    const mean = this.#tpotBeside(streams);
    if (share === null) return mean;
    const met = rate * (gaps * mean + steps.firstToken(streams));
    const further = rate * this.#delay;
    const byPrompts = (this.#delay * (delaysQuantile(met * (1 - further), further, share) - met)) / gaps;
    return mean + joint(byPrompts, normalQuantile(share) * this.#decodeSpread);
  }

  e2e(share = null) {
    const { gaps } = this.steps;
    const mean = this.ttft() + gaps * this.tpot();
    if (share === null) return mean;
    return mean + joint(this.ttft(share) - this.ttft(), gaps * (this.tpot(share) - this.tpot()));
  }

  /** Mean time between two tokens of a stream, as prompts come in between. */
  #tpotBeside(others) {
    const { steps, rate } = this;
    const streams = Math.min(others + 1, this.slots);
    const [decode, prompt] = [steps.decode(streams), steps.prompt(streams)];
    if (rate * prompt < 1) {
      const extra = prompt - steps.numChunks(streams) * decode;
      // Prompts that came while its own was computed are computed while it decodes.
      const before = (rate * extra * steps.firstToken(streams)) / Math.max(1, steps.gaps);
      return (decode + before) / (1 - rate * extra);
    }
    // Every step has prompts: as many as come while it lasts, if there is room for them.
    const each = this.#packed(streams);
    const together = rate * each < 1 ? (rate * (prompt - each)) / (1 - rate * each) : Infinity;
    return together > steps.room(streams) / steps.inputLen ? Infinity : together / rate;
  }

  /** Seconds of one more prompt in a step that has one. */
  #packed(streams) {
    const { steps } = this;
    const count = Math.floor(steps.room(streams) / steps.inputLen);
    if (count < 2) return steps.prompt(streams);
    return (steps.full(streams) - steps.prompt(streams)) / (count - 1);
  }

  /** Seconds by which a prompt delays the streams beside it. */
  get #delay() {
    const { steps, streams, rate } = this;
    const prompt = steps.prompt(streams);
    const isShared = rate * prompt >= 1;
    const extra = prompt - steps.numChunks(streams) * steps.decode(streams);
    return isShared ? this.#packed(streams) : Math.max(0, extra);
  }

  /** Standard deviation of the time of a step, for the number of streams in it. */
  get #decodeSpread() {
    const { steps, streams, slots } = this;
    const more = Math.min(streams + Math.sqrt(streams), slots);
    return steps.decode(more) - steps.decode(Math.min(streams, more));
  }

  /** Mean seconds of the step that a request comes into. */
  get #stepUnderWay() {
    const { steps, streams, rate } = this;
    const [decode, prompt] = [steps.decode(streams), steps.prompt(streams)];
    const busy = Math.min(1, rate * prompt);
    const withPrompt = steps.numChunks(streams) === 1 ? prompt : 0;
    return busy * withPrompt + (1 - busy) * (1 - Math.exp(-streams)) * decode;
  }
}
