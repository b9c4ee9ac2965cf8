// The replicas of an engine: a ring for each, of which one is shown. One engine alone has one ring.

import { element } from "../common/dom.js";
import { format } from "../common/numbers.js";
import { Ring } from "./ring.js";

export class Replicas {
  list = []; // as the server describes them; empty for one engine
  #rings = new Map([[null, new Ring()]]);
  #shown = null;

  /** The ring of the replica that is shown. */
  get ring() {
    return this.#rings.get(this.#shown);
  }

  get shown() {
    return this.#shown;
  }

  show(number) {
    if (this.#rings.has(number)) this.#shown = number;
  }

  /** Take in one event: of the replica that it names, or of all. */
  take(event) {
    this.list = event.replicas ?? this.list;
    if (event.replica === undefined) for (const ring of this.#rings.values()) ring.take(event);
    else if (event.engine === "removed") this.#remove(event.replica);
    else this.#ringOf(event.replica).take(event);
  }

  note(text, state) {
    for (const ring of this.#rings.values()) ring.note(text, state);
  }

  close(now) {
    for (const ring of this.#rings.values()) ring.close(now);
  }

  #ringOf(number) {
    if (!this.#rings.has(number)) this.#rings.set(number, new Ring());
    if (this.#rings.delete(null)) this.#shown = number; // there is more than one engine
    return this.#rings.get(number);
  }

  #remove(number) {
    if (this.#rings.size > 1) this.#rings.delete(number);
    this.list = this.list.filter(({ replica }) => replica !== number);
    if (!this.#rings.has(this.#shown)) [this.#shown] = this.#rings.keys();
    this.ring.note(`replica ${number} was removed`);
  }
}

const HEAD = ["replica", "state", "requests", "running · waiting", "KV blocks used", "restarts"];

/** A row for each replica; its number is a button that calls `choose(number)`. */
export function showReplicas(table, { list, shown }, choose) {
  const rows = list.map((one) => [
    one.state, format(one.requests), `${one.num_running} · ${one.num_waiting}`, format(one.kv_usage, "%"), format(one.num_restarts),
  ]);
  table.replaceChildren(
    element("thead", {}, element("tr", {}, HEAD.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, rows.map((row, index) => element("tr", {}, element("th", { scope: "row" }, button(list[index].replica, shown, choose)), row.map((text) => element("td", {}, text))))),
  );
}

function button(number, shown, choose) {
  const pressed = String(number === shown);
  return element("button", { type: "button", class: "bordered", "aria-pressed": pressed, "aria-label": `Show replica ${number}`, onclick: () => choose(number) }, String(number));
}
