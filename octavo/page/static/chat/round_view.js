// One round of an answer, as the page shows it: the thought, what was said, and the calls.

import { element } from "../common/dom.js";
import { renderInto } from "../common/markdown.js";
import { jsonBox, treeOf } from "./json_tree.js";
import { MOST_ROUNDS } from "./rounds.js";
import { seconds } from "./stats.js";

export class RoundView {
  #thought = new ThoughtView();
  #prose = new Prose();
  #json = element("div", { class: "json-answer" });
  #made = null;
  #calls = [];
  #callList = element("ul", { class: "calls", "aria-label": "Tool calls" });
  #warnings = element("p", { class: "note" });

  /** `number` counts the rounds of an answer from 1. */
  constructor(number) {
    const title = `Round ${number} of at most ${MOST_ROUNDS}`;
    const head = number > 1 ? element("p", { class: "round-title" }, title) : null;
    this.element = element(
      "div", { class: "round" },
      head, this.#thought.element, this.#prose.element, this.#json, this.#callList, this.#warnings,
    );
  }

  /** `isRunning`: the model is still writing it. */
  update(round, isRunning) {
    const isThinking = isRunning && round.text === "" && round.calls.length === 0;
    this.#thought.update(round, isThinking && round.thought !== "");
    this.#showText(round, isRunning);
    round.calls.forEach((call, index) => {
      this.#calls[index] ??= this.#newCall();
      this.#calls[index].update(call, isRunning);
    });
    this.#callList.hidden = round.calls.length === 0;
    this.#warnings.textContent = round.warnings.join(" ");
    this.#warnings.hidden = round.warnings.length === 0;
  }

  #showText({ text, isJson, thought, calls }, isRunning) {
    const box = isRunning ? null : this.#boxOf(text);
    const isJsonShown = box !== null || (isJson && text !== "");
    this.#prose.show(isJsonShown ? "" : text);
    // An empty one shows where the text will be.
    this.#prose.element.hidden = isJsonShown || (text.trim() === "" && (calls.length > 0 || thought !== ""));
    this.#json.hidden = !isJsonShown;
    if (box === null && isJsonShown) this.#showJsonText(text);
    else if (box !== null && this.#json.firstChild !== box) this.#json.replaceChildren(box);
  }

  /** The box with the tree of a text; the same one as long as the text is the same. */
  #boxOf(text) {
    if (this.#made?.text !== text) {
      const tree = /^\s*[{[]/.test(text) ? treeOf(text) : null;
      this.#made = { text, box: tree && jsonBox(text, tree) };
    }
    return this.#made.box;
  }

  #showJsonText(text) {
    if (this.#json.firstChild?.className !== "json-text") this.#json.replaceChildren(plainText());
    this.#json.firstChild.textContent = text;
  }

  #newCall() {
    const view = new CallView();
    this.#callList.append(view.element);
    return view;
  }
}

/** Text of a model. A text that is shown already costs nothing. */
class Prose {
  element = element("div", { class: "prose" });
  #text = "";

  show(text) {
    if (text === this.#text) return;
    this.#text = text;
    renderInto(this.element, text);
  }
}

/** The thought before an answer: open while it grows, folded afterwards. */
class ThoughtView {
  #label = element("summary");
  #prose = new Prose();
  #isThinking = false;

  constructor() {
    this.element = element("details", { class: "thought", hidden: true }, this.#label, this.#prose.element);
  }

  update({ thought, thoughtMs }, isThinking) {
    this.element.hidden = thought === "";
    if (thought === "") return;
    this.#prose.show(thought);
    const time = thoughtMs >= 1 ? ` for ${seconds(thoughtMs / 1000)}` : "";
    this.#label.textContent = isThinking ? `Thinking${time}…` : `Thought${time}`;
    if (isThinking !== this.#isThinking) this.element.open = isThinking; // what the reader does in between stays
    this.#isThinking = isThinking;
    this.element.classList.toggle("is-thinking", isThinking);
  }
}

/** A call of a tool: its name, arguments and result in one line, and in full when it is opened. */
class CallView {
  #name = element("code", { class: "call-name" });
  #arguments = element("span", { class: "call-arguments" });
  #state = element("span", { class: "call-state" });
  #body = element("div", { class: "call-body" });
  #shown = null;

  constructor() {
    const summary = element("summary", {}, this.#name, " ", this.#arguments, " ", this.#state);
    this.element = element("li", {}, element("details", { class: "call" }, summary, this.#body));
  }

  update(call, isRunning) {
    const key = JSON.stringify([call, isRunning]);
    if (key === this.#shown) return;
    this.#shown = key;
    this.#name.textContent = call.name;
    this.#arguments.textContent = call.arguments;
    this.#state.textContent = stateOf(call, isRunning);
    this.#state.classList.toggle("is-bad", call.failed);
    this.#body.replaceChildren(
      element("p", { class: "call-label" }, "Arguments"), treeOrText(call.arguments),
    );
    if (call.result !== null) {
      this.#body.append(element("p", { class: "call-label" }, "Result"), treeOrText(call.result));
    }
  }
}

function stateOf({ result }, isRunning) {
  if (result !== null) return `→ ${result}`;
  return isRunning ? "…" : "not run";
}

function treeOrText(text) {
  return treeOf(text) ?? plainText(text);
}

function plainText(text = "") {
  return element("pre", { class: "json-text" }, text);
}
