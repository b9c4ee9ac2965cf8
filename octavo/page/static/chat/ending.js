// Why an answer ended, in a plain sentence.

const REASONS = {
  left: "The page was left, which stopped it.",
  abort: "The server stopped it.",
};

/**
 * "" while an answer has not ended, and of one that failed: what went wrong is said by its error.
 * `limits` are those it was asked with, `{ answer, context }` in tokens; null where unknown.
 */
export function whyItEnded({ status, text, stats, limits }) {
  if (status === "stopped") return text ? "You stopped it." : "You stopped it before it began.";
  if (status === "left") return REASONS.left;
  if (status !== "done" || !stats) return "";
  const reason = reasonOf(stats, limits);
  return text.trim() === "" ? `The answer is empty. ${reason}` : reason;
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
