// The tokens of an answer: how likely each was, what else it might have been, when it came; what
// was cached and guessed.

import { element } from "../common/dom.js";
import { format } from "../common/numbers.js";

export const NUM_ALTERNATIVES = 5;
const MOST = 2000; // tokens of an answer that are kept

/** What the stream says of tokens: kept with the answer, so only what JSON can hold. */
export function emptyLog() {
  return { tokens: [], missed: 0, cached: null, prompt: null, drafted: 0, accepted: 0 };
}

/** Take in a chunk that came `gap` milliseconds after the one before it. */
export function takeChunk(log, chunk, gap) {
  const choice = chunk.choices?.[0];
  const entries = choice?.logprobs?.content ?? [];
  entries.forEach(({ token, logprob, top_logprobs: top }, index) => {
    if (log.tokens.length >= MOST) log.missed += 1;
    else log.tokens.push({
      token, logprob, top: top.map((each) => [each.token, each.logprob]),
      ms: gap / entries.length, isTogether: index > 0,
    });
  });
  log.prompt = chunk.usage?.prompt_tokens ?? log.prompt;
  log.cached = chunk.usage?.prompt_tokens_details?.cached_tokens ?? log.cached;
  log.drafted = chunk.timings?.draft_n ?? log.drafted;
  log.accepted = chunk.timings?.draft_n_accepted ?? log.accepted;
}

/** What is known of the prompt and of guesses: a sentence each. */
export function sentences(log) {
  const said = [];
  if (log.cached !== null && log.prompt !== null) said.push(cachedOf(log));
  if (log.drafted > 0) said.push(`${format(log.drafted)} tokens were guessed ahead, ${format(log.accepted)} of them accepted (${format(log.accepted / log.drafted, "%")}).`);
  if (log.missed > 0) said.push(`${format(log.missed)} more tokens are not shown.`);
  return said;
}

function cachedOf({ cached, prompt }) {
  if (cached === 0) return `None of the prompt's ${format(prompt)} tokens were cached.`;
  return `${format(cached)} of the prompt's ${format(prompt)} tokens were cached, and not computed again.`;
}

/** The elements that show a log as it grows. */
export class TokenView {
  #log = null;
  #at = null;

  constructor() {
    this.list = element("div", {
      class: "token-list", tabindex: 0, role: "group", "aria-label": "Tokens of the answer",
      "aria-description": "Arrow keys go from token to token.",
      onpointerover: (event) => this.#read(indexOf(event.target)),
      onclick: (event) => this.#read(indexOf(event.target)),
      onkeydown: (event) => this.#press(event),
    });
    this.reading = element("p", { class: "token-reading", role: "status" });
    this.alternatives = element("ol", { class: "token-top" });
    this.said = element("p", { class: "stats" });
    this.element = element("section", { class: "tokens", hidden: true }, this.list, this.reading, this.alternatives, this.said);
  }

  /** Show a log; null hides it. */
  show(log) {
    this.element.hidden = !log || log.tokens.length === 0;
    if (this.element.hidden) return;
    if (log !== this.#log) {
      this.list.replaceChildren();
      [this.#log, this.#at] = [log, null];
      this.reading.textContent = "Point at a token, or go there with the arrow keys: the fainter its shade, the surer the model was.";
      this.alternatives.replaceChildren();
    }
    log.tokens.slice(this.list.childElementCount).forEach((each) => this.list.append(tokenOf(each)));
    this.said.replaceChildren(...sentences(log).map((text) => element("span", {}, text)));
  }

  #press(event) {
    const last = this.list.childElementCount - 1;
    const at = this.#at ?? -1;
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.#read(Math.min(last, Math.max(0, next)));
  }

  #read(index) {
    if (index === null) return;
    this.list.children[this.#at]?.classList.remove("is-read");
    this.#at = index;
    this.list.children[index].classList.add("is-read");
    const { token, logprob, top, ms, isTogether } = this.#log.tokens[index];
    const when = isTogether ? "came together with the one before" : `came after ${format(ms / 1000, "s")}`;
    this.reading.textContent = `${visible(token)}: ${format(Math.exp(logprob), "%")}, ${when}.`;
    this.alternatives.replaceChildren(...top.map(([other, value]) => alternative(other, value, other === token)));
  }
}

function tokenOf({ token, logprob }) {
  const shade = Math.min(4, Math.floor(-logprob / 0.7)); // 0: likelier than one half
  const text = token.includes("\n") ? `↵${token}` : token;
  return element("span", { class: `token s${shade}` }, text);
}

function alternative(token, logprob, isChosen) {
  const bar = element("i", { class: "token-bar" });
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  return element("li", { class: isChosen ? "is-chosen" : null }, element("span", {}, visible(token)), element("span", {}, format(Math.exp(logprob), "%")), bar);
}

function visible(token) {
  return JSON.stringify(token);
}

function indexOf(target) {
  return target.classList.contains("token") ? [...target.parentElement.children].indexOf(target) : null;
}
