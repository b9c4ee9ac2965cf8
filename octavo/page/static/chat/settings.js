// What the reader has chosen, and the conversation of this tab.

import { CONSTRAINT_FIELDS, constraintOf, problemWithConstraint } from "./constraints.js";
import { messagesOf } from "./rounds.js";
import { NUM_ALTERNATIVES } from "./tokens.js";
import { definitions } from "./tools.js";

const SETTINGS = "octavo.settings"; // localStorage: outlives the browser
const CONVERSATION = "octavo.conversation"; // sessionStorage: outlives a reload, not the tab
const KEY = "octavo.key";

/** The number fields: bounds, and whether only whole numbers will do. */
export const NUMBERS = {
  temperature: { min: 0, max: 100 },
  top_p: { min: 0, above: true, max: 1 },
  max_tokens: { min: 1, max: 1e9, isWhole: true },
  seed: { min: 0, max: Number.MAX_SAFE_INTEGER, isWhole: true },
};

/** Where neither the reader nor the model's authors say how to sample; as in the terminal. */
const FALLBACK = { temperature: 0.7, top_p: 0.95 };

export const DEFAULTS = { model: "", system: "", stop: "", tokens: "", tools: "", format: "" };
for (const name of [...Object.keys(NUMBERS), ...CONSTRAINT_FIELDS]) DEFAULTS[name] = "";

/** Why `text` cannot be the setting `name`, in words; "" if it can. Empty is the default. */
export function problemWith(name, text) {
  if (CONSTRAINT_FIELDS.includes(name)) return problemWithConstraint(name, text);
  const bounds = NUMBERS[name];
  if (bounds === undefined || text.trim() === "") return "";
  const value = Number(text);
  if (!Number.isFinite(value)) return "This is not a number.";
  if (bounds.isWhole && !Number.isInteger(value)) return "This must be a whole number.";
  if (bounds.above && value <= bounds.min) return `This must be above ${bounds.min}.`;
  if (value < bounds.min) return `This must be at least ${bounds.min}.`;
  if (value > bounds.max) return `This must be at most ${bounds.max}.`;
  return "";
}

/** What an empty setting means, as far as that is a number; `model` is what the API says of it. */
export function defaultsOf(model) {
  return { ...FALLBACK, ...model?.sampling_defaults };
}

/** The request fields that the settings ask for; what is not in it is up to the server. */
export function toRequest(settings, model) {
  const request = constraintOf(settings);
  for (const [name, value] of Object.entries(FALLBACK)) {
    if (model?.sampling_defaults?.[name] === undefined) request[name] = value;
  }
  for (const name of Object.keys(NUMBERS)) {
    const text = settings[name].trim();
    if (text !== "" && problemWith(name, text) === "") request[name] = Number(text);
  }
  const stop = settings.stop
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]));
  if (stop.length > 0) request.stop = stop;
  if (settings.tokens) Object.assign(request, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (settings.tools) request.tools = definitions();
  return request;
}

/**
 * The messages to send for the last of `turns`, with the rounds that its answer has by now. Turns
 * that were never answered are left out: many chat templates insist that user and assistant
 * alternate.
 */
export function toMessages(system, turns) {
  const messages = [];
  if (system.trim() !== "") messages.push({ role: "system", content: system });
  turns.forEach((turn, index) => {
    const isLast = index === turns.length - 1;
    const rounds = turn.answer?.rounds ?? [];
    if (!isLast && (rounds.at(-1)?.text ?? "") === "") return;
    messages.push({ role: "user", content: turn.user }, ...messagesOf(rounds));
  });
  return messages;
}

export function loadSettings() {
  const stored = read(localStorageOrNull(), SETTINGS);
  const settings = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    if (typeof stored?.[name] === "string") settings[name] = stored[name];
  }
  return settings;
}

export function saveSettings(settings) {
  write(localStorageOrNull(), SETTINGS, settings);
}

export function loadConversation() {
  const stored = read(sessionStorageOrNull(), CONVERSATION);
  if (!Array.isArray(stored)) return [];
  const isAnswer = (answer) => answer === null || Array.isArray(answer?.rounds);
  return stored.filter((turn) => typeof turn?.user === "string" && isAnswer(turn.answer));
}

export function saveConversation(turns) {
  write(sessionStorageOrNull(), CONVERSATION, turns);
}

export function loadKey() {
  return read(sessionStorageOrNull(), KEY) ?? "";
}

export function saveKey(key) {
  write(sessionStorageOrNull(), KEY, key);
}

// Storage may be switched off, full, or hold what another version wrote: the page works without.

function localStorageOrNull() {
  try {
    return globalThis.localStorage ?? null;
  } catch {
    return null;
  }
}

function sessionStorageOrNull() {
  try {
    return globalThis.sessionStorage ?? null;
  } catch {
    return null;
  }
}

function read(storage, name) {
  try {
    return JSON.parse(storage?.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    storage?.setItem(name, JSON.stringify(value));
  } catch {
    // It is gone with the page, then.
  }
}
