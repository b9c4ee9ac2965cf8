// One question and its answer, as the page shows them.

import { element } from "../common/dom.js";
import { whyItEnded } from "./ending.js";
import { RoundView } from "./round_view.js";
import { textOf } from "./rounds.js";
import { describe } from "./stats.js";
import { TokenView } from "./tokens.js";

/**
 * The elements of a turn `{ user, answer }`. `answer` is null or `{ rounds, status, error, stats,
 * limits, log }`: rounds as in rounds.js, the stats of the last, and a status of "waiting",
 * "streaming", "done", "stopped", "left" or "failed".
 *
 * `actions` is what the page can do: `copy(text, button)`, `regenerate()`, `remove()`,
 * `edit(text)`.
 */
export class TurnView {
  #actions;
  #timer = null;
  #rounds = []; // their views
  #shown = null; // the answer that these are of

  constructor(turn, actions) {
    this.turn = turn;
    this.#actions = actions;

    this.bubble = element("div", { class: "bubble" }, turn.user);
    this.editButton = button("Edit", () => this.#beginEdit());
    const userLabel = { class: "user", "aria-label": "You" };
    this.user = element("article", userLabel, this.bubble, row(this.editButton));

    this.rounds = element("div", { class: "rounds" });
    this.note = element("p", { class: "note" });
    this.error = element("div", { class: "error-box", role: "alert" });
    this.tokens = new TokenView();
    this.stats = element("p", { class: "stats" });
    this.copyButton = button("Copy", () => actions.copy(textOf(this.turn.answer), this.copyButton));
    this.againButton = button("Regenerate", () => actions.regenerate());
    this.removeButton = button("Delete", () => actions.remove());
    this.buttons = row(this.copyButton, this.againButton, this.removeButton);
    this.answer = element("article", { class: "answer", "aria-label": "Answer" });
    this.answer.append(this.rounds, this.note, this.error, this.tokens.element, this.stats, this.buttons);

    this.element = element("section", { class: "turn" }, this.user, this.answer);
    this.setPlace({ isLast: true, isBusy: false });
  }

  /** Which buttons make sense: only the last turn can be taken back, and not while one runs. */
  setPlace({ isLast, isBusy }) {
    this.editButton.disabled = isBusy;
    this.againButton.hidden = !isLast || Boolean(this.turn.answer?.error); // it has its own
    this.removeButton.hidden = !isLast;
    this.buttons.hidden = isLast && isBusy;
    this.update();
  }

  /** Show the answer as it is now. */
  update() {
    const { answer } = this.turn;
    this.answer.hidden = answer === null;
    if (answer === null) return;
    const isRunning = answer.status === "waiting" || answer.status === "streaming";
    this.answer.classList.toggle("is-running", isRunning);
    this.answer.setAttribute("aria-busy", String(isRunning));
    this.#showRounds(answer, isRunning);
    this.note.textContent = whyItEnded(answer);
    this.note.hidden = this.note.textContent === "";
    this.copyButton.hidden = textOf(answer) === "";
    this.tokens.show(answer.log ?? null);
    this.#showStats(answer.stats);
    this.#showError(answer.error);
  }

  /** Let go of the timer; the elements are about to leave the page. */
  close() {
    clearInterval(this.#timer);
  }

  #showRounds(answer, isRunning) {
    if (answer !== this.#shown) {
      this.#shown = answer;
      this.#rounds = [];
      this.rounds.replaceChildren();
    }
    const last = answer.rounds.length - 1;
    answer.rounds.forEach((round, index) => {
      if (this.#rounds[index] === undefined) {
        this.#rounds[index] = new RoundView(index + 1);
        this.rounds.append(this.#rounds[index].element);
      }
      this.#rounds[index].update(round, isRunning && index === last);
    });
  }

  #showStats(stats) {
    this.stats.replaceChildren();
    for (const { text, title } of stats ? describe(stats) : []) {
      this.stats.append(element("span", { title }, text));
    }
    this.stats.hidden = this.stats.childElementCount === 0;
  }

  #showError(error) {
    if (this.shownError === error) return; // role="alert" is read out whenever it changes
    this.shownError = error;
    clearInterval(this.#timer);
    this.error.replaceChildren();
    this.error.hidden = error === null;
    if (error === null) return;
    fillError(this.error, error, "Try again", () => this.#actions.regenerate());
    const wait = this.error.querySelector(".wait");
    const tick = () => {
      const left = Math.ceil((error.retryAt - Date.now()) / 1000);
      wait.textContent = left > 0 ? `Try again in ${duration(left)}.` : "You can try again now.";
      if (left <= 0) clearInterval(this.#timer);
    };
    if (error.retryAt !== null) {
      this.#timer = setInterval(tick, 1000);
      tick();
    }
  }

  #beginEdit() {
    const rows = Math.min(10, this.turn.user.split("\n").length + 1);
    const input = element("textarea", { rows, "aria-label": "Edit your message" });
    input.value = this.turn.user;
    const form = element("form", { class: "edit" });
    const end = () => {
      form.remove();
      this.user.classList.remove("is-edited");
    };
    const cancel = button("Cancel", () => {
      end();
      this.editButton.focus();
    });
    const send = element("button", { class: "strong", type: "submit" }, "Send");
    form.append(input, row(cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (input.value.trim() === "") return;
      end();
      this.#actions.edit(input.value);
    });
    input.addEventListener("keydown", (event) => {
      if (isSend(event)) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel.click();
      }
    });
    this.user.classList.add("is-edited");
    this.user.append(form);
    input.focus();
  }
}

/** Whether a key press means to send: Enter, but not the one that ends an input method's word. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

/** Make `box` say what went wrong, with a button that does `action`. */
export function fillError(box, error, label, action) {
  const title = element("p", { class: "error-title" }, error.title);
  box.replaceChildren(title, element("p", {}, error.message));
  if (error.retryAt !== null) {
    // Off, as a countdown is not read out each second.
    box.append(element("p", { class: "wait", "aria-live": "off" }));
  }
  const again = element("button", { class: "bordered", type: "button", onclick: action }, label);
  const foot = element("div", { class: "error-foot" }, again);
  if (error.requestId) {
    foot.append(element("span", { class: "request-id" }, `Request ${error.requestId}`));
  }
  box.append(foot);
}

function duration(seconds) {
  if (seconds < 120) return `${seconds} s`;
  return seconds < 7200 ? `${Math.ceil(seconds / 60)} min` : `${Math.ceil(seconds / 3600)} h`;
}

function button(label, action) {
  return element("button", { class: "plain", type: "button", onclick: action }, label);
}

function row(...buttons) {
  return element("div", { class: "actions" }, ...buttons);
}
