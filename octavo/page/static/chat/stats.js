// How fast an answer was, and how many tokens it took.

import { thoughtOf } from "./rounds.js";

/**
 * Collects the numbers of one round of an answer: what the page's own clock says while it streams, and what
 * the server says at its end, which wins. Times of the page are milliseconds.
 */
export class Stopwatch {
  constructor(now) {
    this.sent = now;
    this.first = null; // the first chunk with text came
    this.last = null;
    this.chunks = 0; // about one for each token
    this.usage = null;
    this.timings = null;
    this.finish = null;
    this.stopReason = null; // a string or a token at which it was asked to stop
  }

  take(chunk, now) {
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    const choice = chunk.choices?.[0];
    this.finish = choice?.finish_reason ?? this.finish;
    this.stopReason = choice?.stop_reason ?? this.stopReason;
    if (choice?.delta?.content || thoughtOf(choice?.delta) || choice?.delta?.tool_calls?.length) {
      this.first ??= now;
      this.last = now;
      this.chunks += 1;
    }
  }

  /** `{ rate, ttft, prompt, cached, output, thought, isExact, finish, stopReason }`; null where unknown. */
  numbers() {
    const { usage, timings } = this;
    const span = this.chunks > 1 ? (this.last - this.first) / 1000 : 0;
    const output = usage?.completion_tokens ?? this.chunks;
    const measured = span > 0 ? (output - 1) / span : null;
    return {
      rate: positive(timings?.predicted_per_second) ?? measured,
      ttft: this.first === null ? null : (this.first - this.sent) / 1000,
      prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n ?? null,
      output,
      thought: usage?.completion_tokens_details?.reasoning_tokens ?? null,
      isExact: usage !== null,
      finish: this.finish,
      stopReason: this.stopReason,
    };
  }
}

/**
 * The numbers in words: `[{ text, title }]`, to be shown one after another. They are of the last of
 * `round` rounds.
 */
export function describe({ rate, ttft, prompt, cached, output, thought, isExact, round }) {
  const about = isExact ? "" : "about ";
  const parts = [];
  if (round > 1) {
    parts.push({ text: `round ${round}`, title: "The figures are of the last request of the answer" });
  }
  if (rate !== null) {
    parts.push({ text: `${speed(rate)} tokens/s`, title: "Speed after the first token" });
  }
  if (ttft !== null) {
    parts.push({ text: `first token ${seconds(ttft)}`, title: "From sending to the first text" });
  }
  if (output > 0 || isExact) {
    const thoughts = thought ? ` (${thought.toLocaleString("en")} thought)` : "";
    parts.push({ text: `${about}${count(output, "token")}${thoughts}`, title: "Tokens of the answer" });
  }
  if (prompt !== null) {
    const reused = cached ? ` (${cached.toLocaleString("en")} cached)` : "";
    parts.push({
      text: `prompt ${count(prompt, "token")}${reused}`,
      title: "Tokens of the conversation so far; cached ones were not computed again",
    });
  }
  return parts;
}

export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function speed(value) {
  return value.toFixed(value < 100 ? 1 : 0);
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function positive(value) {
  return typeof value === "number" && value > 0 && Number.isFinite(value) ? value : null;
}
