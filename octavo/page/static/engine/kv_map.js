// Who holds which KV block: a cell for each, by colour; the pointer names its request.

import { element, onceAFrame } from "../common/dom.js";

const HOLDERS = { "-1": "free", "-2": "cached", "-3": "shared by several", "-4": "of a request that has just ended" };
const CELL = 9;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c8"]; // of requests, in turn

export class KvMap {
  #pool = null;
  #cells = [];
  #columns = 1;
  #pointed = null;

  constructor(container) {
    this.canvas = element("canvas", {
      role: "img", "aria-label": "Map of the KV blocks",
      onpointermove: (event) => this.#point(event),
      onpointerleave: () => this.#name(null),
    });
    this.says = element("p", { class: "hint" });
    this.list = element("ul", { class: "holders" });
    container.append(this.canvas, this.says, this.list);
    this.redraw = onceAFrame(() => this.#draw());
    new ResizeObserver(this.redraw).observe(container);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }

  show(pool) {
    if (pool === this.#pool) return;
    this.#pool = pool;
    this.#cells = pool === null ? [] : cellsOf(pool.runs);
    this.redraw();
  }

  #draw() {
    const width = this.canvas.parentElement.clientWidth;
    this.#columns = Math.max(1, Math.floor(width / CELL));
    const height = Math.ceil(this.#cells.length / this.#columns) * CELL;
    const scale = devicePixelRatio;
    [this.canvas.width, this.canvas.height] = [width * scale, height * scale];
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(this.canvas);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    this.#cells.forEach((holder, index) => {
      context.globalAlpha = this.#pointed === null || holder === this.#pointed ? 1 : 0.3;
      context.fillStyle = style.getPropertyValue(colourOf(holder));
      context.fillRect((index % this.#columns) * CELL, Math.floor(index / this.#columns) * CELL, CELL - 1, CELL - 1);
    });
    this.#count();
  }

  #count() {
    const counts = new Map();
    for (const holder of this.#cells) counts.set(holder, (counts.get(holder) ?? 0) + 1);
    const order = [...counts].sort(([a], [b]) => (a < 0 && b < 0 ? b - a : b - a)).slice(0, 12);
    this.list.replaceChildren(...order.map(([holder, count]) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = `var(${colourOf(holder)})`;
      return element("li", {}, swatch, `${this.#nameOf(holder)}: ${this.#pool.every > 1 ? "about " : ""}${(count * this.#pool.every).toLocaleString("en")}`);
    }));
    const every = this.#pool?.every ?? 1;
    this.says.textContent = this.#pointed !== null ? this.#nameOf(this.#pointed)
      : every > 1 ? `One of every ${every} blocks is shown; small requests may lie between.` : "Point at a block to see the request that holds it.";
  }

  #point(event) {
    const column = Math.floor(event.offsetX / CELL);
    const index = Math.floor(event.offsetY / CELL) * this.#columns + column;
    this.#name(column < this.#columns ? (this.#cells[index] ?? null) : null);
  }

  #name(holder) {
    if (holder === this.#pointed) return;
    this.#pointed = holder;
    this.redraw();
  }

  #nameOf(holder) {
    return HOLDERS[holder] ?? this.#pool.requests[holder] ?? "";
  }
}

/** Runs `[holder, count, holder, count, …]`, one cell after another. */
export function cellsOf(runs) {
  const cells = [];
  for (let at = 0; at < runs.length; at += 2) {
    for (let count = 0; count < runs[at + 1]; count += 1) cells.push(runs[at]);
  }
  return cells;
}

function colourOf(holder) {
  if (holder >= 0) return COLOURS[holder % COLOURS.length];
  return { "-1": "--line", "-2": "--edge", "-3": "--ink", "-4": "--faded" }[holder];
}
