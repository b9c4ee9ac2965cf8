// What all charts have: a title, a legend, a drawing that follows its width, figures that pointer
// and arrow keys read out, and the same figures as a table.
//
// A kind of chart is a function of what is to be shown and of a width in pixels:
//
//   kind(spec, width) -> {
//     height,                                  // of the drawing, in pixels
//     shapes: [SVG elements],
//     legend: [{ label, colour, mark }],       // mark: "line", "area", "dot" or "dashed"
//     stops: [{ x, y, dots, box, title, rows: [{ label, value, colour }] }],  // left to right
//     table: { head: [text], rows: [[text]] },
//   }
//
// `curves` and `lanes` are such functions; others can be written.

import { element, onceAFrame, shape } from "../common/dom.js";

let numCharts = 0;

export class Chart {
  #kind;
  #spec = null;
  #text = null; // the spec as it was shown last
  #width = 0; // of the stage: to ask for it lays out all that was drawn before
  #drawn = null;
  #stop = null; // the place in `stops` that is read out

  /** Appended to `container`; empty until `show`. */
  constructor(container, kind) {
    this.#kind = kind;
    numCharts += 1;
    const id = `chart-${numCharts}`;
    this.title = element("figcaption", { class: "chart-title", id });
    this.legend = element("ul", { class: "chart-legend" });
    this.svg = shape("svg", { class: "chart-svg", "aria-hidden": "true" });
    this.tip = element("div", { class: "chart-tip", hidden: true, "aria-hidden": "true" });
    this.spoken = element("p", { class: "unseen", role: "status" });
    this.stage = element(
      "div",
      {
        class: "chart-stage", tabindex: 0, role: "group", "aria-labelledby": id,
        "aria-description": "Arrow keys read the figures.",
        onpointermove: (event) => this.#point(event),
        onpointerdown: (event) => this.#point(event),
        onpointerleave: () => this.#read(null),
        onkeydown: (event) => this.#press(event),
        onblur: () => this.#read(null),
      },
      this.svg, this.tip,
    );
    this.table = element("table");
    this.details = element(
      "details",
      { class: "chart-table", ontoggle: () => this.#fillTable() },
      element("summary", {}, "The figures as a table"),
      element("div", { class: "chart-scroll", tabindex: 0, role: "group", "aria-labelledby": id }, this.table),
    );
    this.element = element("figure", { class: "chart" }, this.title, this.legend, this.stage, this.spoken, this.details);
    container.append(this.element);
    this.redraw = onceAFrame(() => this.#draw());
    this.observer = new ResizeObserver(([{ contentRect }]) => {
      const width = Math.floor(contentRect.width);
      if (width === this.#width) return; // its height is what was drawn
      this.#width = width;
      this.redraw();
    });
    this.observer.observe(this.stage);
  }

  /** Show something else, in the next frame; nothing is done where it is the same. */
  show(spec) {
    const text = JSON.stringify(spec);
    if (text === this.#text) return;
    this.#spec = spec;
    this.#text = text;
    this.redraw();
  }

  /** Leave the page. */
  close() {
    this.observer.disconnect();
    this.element.remove();
    this.#spec = null;
  }

  #draw() {
    const width = this.#width;
    if (this.#spec === null || width === 0) return;
    const drawn = this.#kind(this.#spec, width);
    this.#drawn = drawn;
    this.title.textContent = this.#spec.title;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${drawn.height}`);
    this.svg.style.height = `${drawn.height}px`;
    this.svg.replaceChildren(...drawn.shapes);
    this.legend.replaceChildren(...drawn.legend.map(legendItem));
    this.legend.hidden = drawn.legend.length < 2;
    this.#fillTable();
    if (this.#stop !== null) this.#read(Math.min(this.#stop, drawn.stops.length - 1));
  }

  #point(event) {
    if (this.#drawn === null || this.#drawn.stops.length === 0) return;
    const box = this.svg.getBoundingClientRect();
    this.#read(nearest(this.#drawn.stops, event.clientX - box.left, event.clientY - box.top));
  }

  #press(event) {
    const last = (this.#drawn?.stops.length ?? 0) - 1;
    if (last < 0 || event.target !== this.stage) return;
    const at = this.#stop;
    const stride = Math.max(1, Math.round(last / 10));
    const next = {
      ArrowRight: at === null ? 0 : at + 1, ArrowLeft: at === null ? last : at - 1,
      PageDown: (at ?? 0) + stride, PageUp: (at ?? last) - stride,
      Home: 0, End: last, Escape: null,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.#read(next === null ? null : Math.min(last, Math.max(0, next)), true);
  }

  /** Show what stands at a stop, and say it where it was asked for by a key. */
  #read(index, isSpoken = false) {
    const stop = index === null || index < 0 ? undefined : this.#drawn?.stops[index];
    this.svg.querySelector(".chart-focus")?.remove();
    this.#stop = stop === undefined ? null : index;
    this.tip.hidden = stop === undefined;
    if (stop === undefined) return;
    this.svg.append(focusOn(stop, this.#drawn));
    this.tip.replaceChildren(element("strong", {}, stop.title), ...stop.rows.map(tipRow));
    const room = this.stage.clientWidth - this.tip.offsetWidth;
    const right = stop.x + 14;
    this.tip.style.left = `${Math.max(0, right <= room ? right : Math.min(room, stop.x - 14 - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${Math.max(0, Math.min(stop.y - 20, this.#drawn.height - this.tip.offsetHeight))}px`;
    if (isSpoken) this.spoken.textContent = [stop.title, ...stop.rows.map(({ label, value }) => `${label} ${value}`)].join(", ");
  }

  #fillTable() {
    if (!this.details.open || this.#drawn === null) return; // not while it is hidden
    const { head, rows } = this.#drawn.table;
    this.table.replaceChildren(
      element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, rows.map(([first, ...rest]) =>
        element("tr", {}, element("th", { scope: "row" }, first), rest.map((text) => element("td", {}, text))),
      )),
    );
  }
}

function legendItem({ label, colour, mark }) {
  return element("li", {}, element("span", { class: `swatch ${mark} c${colour}` }), label);
}

function tipRow({ label, value, colour }) {
  return element("span", { class: "tip-row" }, element("span", { class: `swatch dot c${colour}` }), label, element("b", {}, value));
}

function nearest(stops, x, y) {
  const distance = (stop) => {
    const { box } = stop;
    if (box === undefined) return Math.abs(stop.x - x) + (stop.isPoint ? Math.abs(stop.y - y) : 0);
    const beside = Math.max(box.x - x, 0, x - box.x - box.width);
    return beside + 4 * Math.max(box.y - y, 0, y - box.y - box.height);
  };
  let best = 0;
  stops.forEach((stop, index) => {
    if (distance(stop) < distance(stops[best])) best = index;
  });
  return best;
}

function focusOn({ x, dots = [], box, isPoint }, { plot }) {
  if (box) return shape("g", { class: "chart-focus" }, shape("rect", { ...box, rx: 2 }));
  const line = isPoint ? null : shape("line", { x1: x, x2: x, y1: plot.top, y2: plot.bottom });
  return shape("g", { class: "chart-focus" }, line, dots.map((dot) =>
    shape("circle", { cx: x, cy: dot.y, r: 4.5, class: `c${dot.colour}` }),
  ));
}
