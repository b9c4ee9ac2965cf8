// Why an answer ended, in a plain sentence.

import { MOST_ROUNDS, isEmpty, textOf } from "./rounds.js";

const REASONS = {
  left: "The page was left, which stopped it.",
  abort: "The server stopped it.",
};

/**
 * "" while an answer has not ended, and of one that failed: what went wrong is said by its error.
 * `limits` are those it was asked with, `{ answer, context }` in tokens; null where unknown.
 */
export function whyItEnded(answer) {
  const { status, rounds, stats, limits } = answer;
  if (status === "stopped") return rounds.every(isEmpty) ? "You stopped it before it began." : "You stopped it.";
  if (status === "left") return REASONS.left;
  if (status !== "done" || !stats) return "";
  if (stats.finish === "tool_calls") return afterCalls(rounds.at(-1));
  const reason = reasonOf(stats, limits);
  return textOf(answer) === "" ? `The answer is empty. ${reason}` : reason;
}

/** Why the model was not asked again after a round of calls. */
function afterCalls({ calls }) {
  const hasRun = calls.every(({ result }) => result !== null);
  return hasRun ? `It was stopped after ${MOST_ROUNDS} rounds of tool calls.` : "It called tools, but they are switched off.";
}

function reasonOf({ finish, stopReason, prompt, output }, limits) {
  if (finish === "stop") return stoppedAt(stopReason);
  if (finish === "length") return limitOf(prompt + output, output, limits ?? {});
  return REASONS[finish] ?? (finish === null ? "" : `It ended by ${finish}.`);
}

function stoppedAt(reason) {
  if (typeof reason === "string") return `It came to ${JSON.stringify(reason)}, at which it was asked to stop.`;
  if (typeof reason === "number") return `It drew the token ${reason}, at which it was asked to stop.`;
  return "The model ended the answer by itself.";
}

/** `used`: tokens of the prompt and the answer. */
function limitOf(used, output, { answer, context }) {
  const tokens = (number) => `${number.toLocaleString("en")} tokens`;
  if (answer && output >= answer) return `It was cut at Max tokens: ${tokens(answer)}.`;
  if (context && used >= context) return `It was cut at the end of the context: ${tokens(context)}.`;
  return "It was cut at the server's limit: there was no room for more.";
}
