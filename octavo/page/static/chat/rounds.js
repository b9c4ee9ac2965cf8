// The rounds of an answer: what the model said to one request, and what the tools it called said.

import { readArguments } from "./tools.js";

/** So often is the model asked for one answer, at most: each round of calls needs one more. */
export const MOST_ROUNDS = 8;

/**
 * A round in which nothing has been said. Its calls are `{ id, name, arguments, result, failed }`:
 * `arguments` is the text of a JSON object, `result` is null until the tool has run.
 * `isJson`: the answer was asked to be JSON. Kept with the answer, so only what JSON can hold.
 */
export function emptyRound(isJson = false) {
  return { thought: "", thoughtMs: 0, text: "", calls: [], warnings: [], isJson };
}

/** Writes what a stream says into a round. Times are milliseconds. */
export class RoundWriter {
  #round;
  #thoughtAt = null; // until when the thought's time is counted; null while there is none

  constructor(round) {
    this.#round = round;
  }

  take(chunk, now) {
    const choice = chunk.choices?.[0];
    const thought = thoughtOf(choice?.delta);
    const text = choice?.delta?.content ?? "";
    const calls = choice?.delta?.tool_calls ?? [];
    const isPastThought = text !== "" || calls.length > 0 || choice?.finish_reason;
    if (this.#thoughtAt !== null) this.#round.thoughtMs += now - this.#thoughtAt;
    if (isPastThought) this.#thoughtAt = null;
    else if (thought !== "" || this.#thoughtAt !== null) this.#thoughtAt = now;
    this.#round.thought += thought;
    this.#round.text += text;
    calls.forEach((piece) => this.#takeCall(piece));
    this.#round.warnings.push(...(choice?.warnings ?? []));
  }

  #takeCall({ index, id, function: { name, arguments: text } = {} }) {
    const { calls } = this.#round;
    calls[index] ??= { id: id ?? `call_${index}`, name: "", arguments: "", result: null, failed: false };
    calls[index].name += name ?? "";
    calls[index].arguments += text ?? "";
  }
}

/** The thought in a delta, which servers have by either of two names, and octavo by both. */
export function thoughtOf(delta) {
  return delta?.reasoning_content ?? delta?.reasoning ?? "";
}

export function isEmpty({ thought, text, calls }) {
  return thought === "" && text === "" && calls.length === 0;
}

/** What an answer says to the reader, without thoughts and calls. */
export function textOf({ rounds }) {
  return rounds.map(({ text }) => text).filter((text) => text.trim() !== "").join("\n\n");
}

/** The calls that wait for a tool, once the model is done: not those that it was cut in. */
export function openCalls({ calls }, finish) {
  const isWhole = finish === "tool_calls" || finish === "stop";
  return isWhole ? calls.filter(({ result }) => result === null) : [];
}

/** The messages that rounds were. A call without a result is not among them, as templates insist. */
export function messagesOf(rounds) {
  return rounds.flatMap(({ thought, text, calls }) => {
    const answered = calls.filter(({ result }) => result !== null);
    const message = { role: "assistant", content: text };
    if (thought !== "") message.reasoning_content = thought; // templates know which they want
    if (answered.length > 0) message.tool_calls = answered.map(callMessage);
    return [message, ...answered.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
  });
}

/** Servers want an object: where the model wrote none, its tool's error has what it wrote. */
function callMessage({ id, name, arguments: text }) {
  const isObject = text !== "" && readArguments(text) !== null;
  return { id, type: "function", function: { name, arguments: isObject ? text : "{}" } };
}
