// The stages of a pipeline, each with its own layers. Twin of octavo/cost/pipeline.py and octavo/core/prompt_chunks.py.

import { boundOps, passSeconds } from "./steps.js";
import { numSeqs, passes } from "./work.js";

export class Stages {
  constructor({ stages: { kinds, order, send, chunks }, efficiency }) {
    const bound = kinds.map((kind) => ({
      ops: boundOps(kind),
      document: { efficiency, communication: kind.communication },
    }));
    this.stages = order.map((kind) => bound[kind]);
    Object.assign(this, { send, chunks, efficiency });
  }

  get count() {
    return this.stages.length;
  }

  /** Seconds of a step: of each stage, to send to the next one, and before and after them all. */
  times(chunks) {
    const [rows] = passes(chunks, 1);
    const inner = { ...rows, sampled: 0 }; // the last stage has the head
    const stages = this.stages.map((stage, index) => passSeconds(stage, index === this.count - 1 ? rows : inner));
    const { step_s: once, sequence_s: each } = this.efficiency;
    return {
      stages,
      send: this.send.seconds + rows.tokens * this.send.seconds_per_row,
      overhead: once + numSeqs(rows) * each,
    };
  }

  /** The tokens of each of equal chunks that are soonest through. */
  chunk(total) {
    const counts = new Set(this.chunks.sizes.map((size) => Math.max(1, Math.ceil(total / size))));
    const through = (count) => (count + this.count - 1) * this.#ofChunk(Math.ceil(total / count));
    const sorted = [...counts].sort((one, other) => one - other);
    const count = sorted.reduce((best, each) => (through(each) < through(best) ? each : best));
    return Math.max(1, Math.ceil(total / count));
  }

  #ofChunk(tokens) {
    const { sizes, seconds } = this.chunks;
    const found = sizes.findIndex((size) => size >= tokens);
    const after = found < 0 ? sizes.length - 1 : found;
    if (after === 0) return seconds[0];
    const rise = (seconds[after] - seconds[after - 1]) / (sizes[after] - sizes[after - 1]);
    return seconds[after - 1] + rise * (tokens - sizes[after - 1]);
  }
}

/** Seconds between two steps of the same requests, with as many under way as stages, or fewer. */
export function period({ stages, send, overhead }, numSteps = stages.length) {
  const throughAll = stages.reduce((sum, each) => sum + each, 0) + (stages.length - 1) * send + overhead;
  return Math.max(throughAll, Math.min(numSteps, stages.length) * Math.max(...stages, overhead));
}

export function scaled({ stages, send, overhead }, factor) {
  return { stages: stages.map((each) => factor * each), send: factor * send, overhead: factor * overhead };
}

/** Until the last of some steps is through. A stage computes one at a time, and no more are under way
 * than there are stages. */
export function secondsThrough(steps) {
  const count = steps[0].stages.length;
  const free = new Array(count).fill(0);
  const done = new Array(count).fill(0);
  for (const { stages, send, overhead } of steps) {
    let arrives = done.at(-count);
    stages.forEach((seconds, stage) => {
      free[stage] = Math.max(arrives, free[stage]) + seconds;
      arrives = free[stage] + send;
    });
    done.push(Math.max(done.at(-1), free.at(-1)) + overhead);
  }
  return done.at(-1);
}
