// The page: what it knows, and what happens when something is typed, clicked or answered.

import { ApiError, listModels, streamChat } from "./api.js";
import { copy } from "../common/clipboard.js";
import { onceAFrame } from "../common/dom.js";
import { showNavigation } from "../common/navigation.js";
import { CONSTRAINTS, constraintNote } from "./constraints.js";
import { whyItEnded } from "./ending.js";
import { Follower } from "./follower.js";
import { fillChoice, isAway, showInBar } from "./models.js";
import { MOST_ROUNDS, RoundWriter, emptyRound, isEmpty, openCalls, textOf } from "./rounds.js";
import * as store from "./settings.js";
import { Stopwatch } from "./stats.js";
import { emptyLog, takeChunk } from "./tokens.js";
import { TOOL_NAMES, runTool } from "./tools.js";
import { TurnView, fillError, isSend } from "./turn.js";

const at = (id) => document.getElementById(id);

const state = {
  turns: store.loadConversation(), // { user, answer }, see turn.js
  settings: store.loadSettings(),
  models: [],
  key: store.loadKey(),
  running: null, // { turn, controller } while an answer streams
};
for (const { answer } of state.turns) {
  // Leaving the page in the middle of an answer has stopped it.
  if (answer && ["waiting", "streaming"].includes(answer.status)) answer.status = "left";
}
let views = [];
const follower = new Follower(at("scroller"), at("to-end"));

// -- the conversation --------------------------------------------------------------------------

function showConversation() {
  for (const view of views) view.close();
  views = state.turns.map((turn) => new TurnView(turn, actionsOn(turn)));
  at("log").replaceChildren(...views.map((view) => view.element));
  showPlaces();
  showSurroundings();
  follower.follow();
}

function actionsOn(turn) {
  return {
    copy,
    regenerate: () => answerAgain(turn),
    remove: () => remove(turn),
    edit: (text) => edit(turn, text),
  };
}

function showPlaces() {
  const isBusy = state.running !== null;
  views.forEach((view, index) => view.setPlace({ isLast: index === views.length - 1, isBusy }));
}

/** Everything around the conversation that depends on it. */
function showSurroundings() {
  const isBusy = state.running !== null;
  const isEmpty = state.turns.length === 0;
  at("welcome").hidden = !isEmpty;
  at("new").disabled = isEmpty;
  const hadFocus = document.activeElement === at("stop");
  at("stop").hidden = !isBusy;
  at("send").hidden = isBusy;
  if (hadFocus && !isBusy) at("message").focus();
  at("send").disabled = at("message").value.trim() === "";
  const system = state.settings.system.trim();
  at("system-note").hidden = system === "";
  at("system-note").textContent = `System prompt: ${system}`;
  const tools = state.settings.tools ? `Tools: ${TOOL_NAMES.join(", ")}` : "";
  const form = [constraintNote(state.settings), tools].filter((text) => text !== "").join(" · ");
  at("form-note").hidden = form === "";
  at("form-note").textContent = form;
  showContext();
}

function showContext() {
  const stats = state.turns.at(-1)?.answer?.stats;
  const length = modelFacts()?.max_model_len;
  const used = stats?.isExact && stats.prompt !== null ? stats.prompt + stats.output : null;
  at("context").textContent =
    used === null || !(length > 0)
      ? ""
      : `${used.toLocaleString("en")} of ${length.toLocaleString("en")} tokens of context`;
}

function setTurns(turns) {
  state.turns = turns;
  store.saveConversation(turns);
  showConversation();
}

function send(text) {
  if (state.running !== null || text.trim() === "") return;
  hideToast();
  const turn = { user: withoutMargins(text), answer: null };
  setTurns([...state.turns, turn]);
  answer(turn);
}

/** Empty lines around a message go; the indentation of its first line stays. */
function withoutMargins(text) {
  return text.trimEnd().replace(/^\s*\n/, "");
}

function edit(turn, text) {
  if (state.running !== null) return;
  const edited = { user: withoutMargins(text), answer: null };
  const before = state.turns;
  const kept = before.slice(0, before.indexOf(turn));
  setTurns([...kept, edited]);
  if (before.length > kept.length + 1) offerUndo("Later turns were removed.", before);
  answer(edited);
}

function remove(turn) {
  if (state.running !== null) return;
  const before = state.turns;
  setTurns(before.filter((other) => other !== turn));
  offerUndo("The last turn was deleted.", before);
  at("message").focus();
}

function startAnew() {
  stop();
  const before = state.turns;
  setTurns([]);
  if (before.length > 0) offerUndo("New conversation.", before);
  at("message").focus();
}

// -- an answer ---------------------------------------------------------------------------------

/** Ask for the answer of `turn`, which is the last one, and show it as it comes. */
async function answer(turn) {
  if (state.running !== null) return;
  const controller = new AbortController();
  const run = { turn, controller };
  state.running = run;
  turn.answer = { rounds: [], status: "waiting", error: null, stats: null, limits: null };
  showPlaces();
  showSurroundings();
  follower.follow(true);
  at("status").textContent = "The model is answering.";
  try {
    await converse(turn, controller.signal);
    turn.answer.status = "done";
  } catch (error) {
    fail(turn, error, controller.signal);
  }
  if (state.running === run) state.running = null;
  store.saveConversation(state.turns);
  showPlaces();
  showSurroundings();
  follower.follow();
  announce(turn.answer);
  refreshModels();
}

/** Ask the model, run the tools that it calls, and ask again with their results, until it is done. */
async function converse(turn, signal) {
  const { answer } = turn;
  answer.log = state.settings.tokens ? emptyLog() : null;
  while (answer.rounds.length < MOST_ROUNDS) {
    await stream(answer, signal);
    const calls = state.settings.tools ? openCalls(answer.rounds.at(-1), answer.stats?.finish) : [];
    if (calls.length === 0) return;
    for (const call of calls) Object.assign(call, runTool(call));
    at("status").textContent = `Tools were called: ${calls.map(({ name }) => name).join(", ")}.`;
  }
}

/** One round of an answer. */
async function stream(answer, signal) {
  const watch = new Stopwatch(performance.now());
  const round = emptyRound(state.settings.format === "json");
  if (!isModelKnown()) await loadModels(signal);
  if (isAway(modelFacts())) {
    at("status").textContent = `${chosenModel()} is loaded first.`;
    setTimeout(refreshModels, 300);
  }
  const request = {
    model: chosenModel(),
    messages: store.toMessages(state.settings.system, state.turns),
    ...store.toRequest(state.settings, modelFacts()),
  };
  answer.limits = { answer: request.max_tokens ?? null, context: modelFacts()?.max_model_len ?? null };
  answer.rounds.push(round);
  showSoon();
  const writer = new RoundWriter(round);
  let last = performance.now();
  for await (const chunk of streamChat(request, { key: state.key, signal })) {
    const now = performance.now();
    watch.take(chunk, now);
    if (answer.log !== null) {
      takeChunk(answer.log, chunk, now - last);
      if (chunk.choices?.[0]?.logprobs) last = now;
    }
    writer.take(chunk, now);
    answer.stats = { ...watch.numbers(), round: answer.rounds.length };
    if (!isEmpty(round)) answer.status = "streaming";
    showSoon();
  }
}

function fail(turn, error, signal) {
  const { answer } = turn;
  if (signal.aborted) {
    answer.status = signal.reason === "left" ? "left" : "stopped";
    return;
  }
  if (!(error instanceof ApiError)) console.error(error);
  answer.status = "failed";
  answer.error = toPlain(error);
  if (error.status === 401) askForKey(() => answerAgain(turn));
}

function answerAgain(turn) {
  if (state.turns.at(-1) === turn) answer(turn);
}

/** What is kept of an error: it must survive a reload, too. */
function toPlain(error) {
  const { title, message, retryAt, requestId } =
    error instanceof ApiError ? error : new ApiError(-1, "The page met an unexpected error.");
  return { title, message, retryAt, requestId };
}

function stop() {
  state.running?.controller.abort();
  state.running = null;
}

/** For screen readers: the answer as a whole, not piece by piece. */
function announce(answer) {
  const how = answer.status === "failed" ? "The answer failed:" : "Answer:";
  at("status").textContent = `${how} ${textOf(answer)} ${whyItEnded(answer)}`;
  setTimeout(() => (at("status").textContent = ""), 2000);
}

/** Show the running answer once a frame, however many chunks a frame brings. */
const showSoon = onceAFrame(() => {
  views.at(-1)?.update();
  follower.follow();
});

// -- models and keys ---------------------------------------------------------------------------

async function loadModels(signal) {
  state.models = await listModels(state.key, signal);
  if (state.models.length === 0) throw new ApiError(503, "No model is being served.");
  fillChoice(at("model"), state.models, chosenModel());
  showModel();
}

function showModel() {
  const bar = { name: at("model-name"), choice: at("bar-model") };
  showInBar(bar, state.models, chosenModel());
  showContext();
}

/** What the models are by now, where they come and go; nothing is lost if that is not known. */
function refreshModels() {
  if (state.models.some(({ status }) => status !== undefined)) loadModels().catch(() => {});
}

/** The model of the settings if it is served, else the first. */
function chosenModel() {
  const names = state.models.map((model) => model.id);
  return names.includes(state.settings.model) ? state.settings.model : (names[0] ?? "");
}

/** Facts of the model are null until the engine is up, which may be later than the page. */
function isModelKnown() {
  return modelFacts() !== undefined && modelFacts().max_model_len !== null;
}

function modelFacts() {
  return state.models.find(({ id }) => id === chosenModel());
}

async function begin() {
  at("notice").hidden = true;
  try {
    await loadModels();
  } catch (error) {
    if (error.status === 401) {
      askForKey(begin);
      return;
    }
    fillError(at("notice"), { ...toPlain(error), retryAt: null }, "Try again", begin);
    at("notice").hidden = false;
  }
}

let afterKey = () => {};

function askForKey(then) {
  afterKey = then;
  at("key-text").textContent = state.key
    ? "The server did not accept this API key."
    : "This server asks for an API key.";
  at("key").value = "";
  if (!at("key-dialog").open) at("key-dialog").showModal();
}

function setKey(key) {
  state.key = key;
  store.saveKey(key);
  at("key-row").hidden = key === "";
}

// -- the message being written -----------------------------------------------------------------

const message = at("message");

function fitMessage() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
  at("send").disabled = message.value.trim() === "";
}

message.addEventListener("input", fitMessage);
message.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value;
  if (state.running !== null || text.trim() === "") return;
  message.value = "";
  fitMessage();
  if (matchMedia("(pointer: coarse)").matches) message.blur(); // makes room for the answer
  send(text);
});
at("stop").addEventListener("click", stopAndShow);
at("new").addEventListener("click", () => at("new-dialog").showModal());
at("new-form").addEventListener("submit", (event) => {
  event.preventDefault();
  at("new-dialog").close();
  startAnew();
});
at("examples").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") send(event.target.textContent);
});
at("log").addEventListener("click", (event) => {
  if (!event.target.classList.contains("copy-code")) return;
  copy(event.target.closest(".code-box").querySelector("pre").textContent, event.target);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopAndShow();
});

function stopAndShow() {
  state.running?.controller.abort(); // what follows is up to answer()
}

// -- undoing -----------------------------------------------------------------------------------

let toastTimer = null;

function offerUndo(text, turns) {
  const toast = at("toast");
  toast.querySelector("span").textContent = text;
  toast.querySelector("button").onclick = () => {
    stop();
    hideToast();
    setTurns(turns);
    at("message").focus();
  };
  toast.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hideToast, 8000);
}

function hideToast() {
  at("toast").hidden = true;
}

// -- settings ----------------------------------------------------------------------------------

const form = at("settings-form");

function showSettings() {
  for (const name of Object.keys(store.DEFAULTS)) {
    const input = form.elements[name];
    input.value = name === "model" ? chosenModel() : state.settings[name];
    showProblem(input);
  }
  showConstraintField();
  const { temperature, top_p } = store.defaultsOf(modelFacts());
  at("temperature").placeholder = temperature;
  at("top_p").placeholder = top_p;
  at("key-row").hidden = state.key === "";
}

/** Only the constraint that is chosen has a field for its text. */
function showConstraintField() {
  for (const [format, { field }] of Object.entries(CONSTRAINTS)) {
    form.elements[field].closest(".field").hidden = format !== state.settings.format;
  }
}

function showProblem(input) {
  const problem = store.problemWith(input.name, input.value);
  const place = at(`${input.name}-problem`);
  if (place === null) return problem;
  place.textContent = problem;
  input.setAttribute("aria-invalid", String(problem !== ""));
  return problem;
}

form.addEventListener("input", ({ target }) => {
  if (showProblem(target) !== "") return; // what was valid last stays in use
  state.settings[target.name] = target.value;
  store.saveSettings(state.settings);
  showModel();
  showConstraintField();
  showSurroundings();
});
form.addEventListener("submit", (event) => event.preventDefault());
at("bar-model").addEventListener("change", ({ target }) => {
  state.settings.model = target.value;
  store.saveSettings(state.settings);
  showSurroundings();
});
at("open-settings").addEventListener("click", () => {
  showSettings();
  at("settings").showModal();
});
at("system-note").addEventListener("click", () => {
  at("open-settings").click();
  at("system").focus();
});
at("form-note").addEventListener("click", () => {
  at("open-settings").click();
  at(constraintNote(state.settings) === "" ? "tools" : "format").focus();
});
at("reset").addEventListener("click", () => {
  state.settings = { ...store.DEFAULTS };
  store.saveSettings(state.settings);
  showSettings();
  showSurroundings();
});
at("forget-key").addEventListener("click", () => {
  setKey("");
  at("settings").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  if (key === "") return;
  setKey(key);
  at("key-dialog").close();
  afterKey();
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  // A click beside a dialog closes it.
  dialog.addEventListener("pointerdown", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

// Leaving the page stops the answer; otherwise it would end as a lost connection.
addEventListener("pagehide", () => {
  state.running?.controller.abort("left");
  store.saveConversation(state.turns);
});
showNavigation("chat");
setKey(state.key);
showConversation();
begin();
