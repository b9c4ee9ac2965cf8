// What a picture draws on: charts and elements by name, made when they are first asked for and kept
// while the picture is there, so that drawing again only changes what they show.

import { Chart } from "../charts/chart.js";
import { element } from "../common/dom.js";

export class Canvas {
  #charts = new Map();
  #places = new Map();

  constructor(root) {
    this.root = root;
  }

  /** Show `spec` in the chart of this name; `kind` is `curves`, `lanes` or a function like them. */
  chart(name, kind, spec) {
    if (!this.#charts.has(name)) this.#charts.set(name, new Chart(this.root, kind));
    this.#charts.get(name).show(spec);
  }

  /** The element of this name, `<div class=name>`; what is in it is up to the picture. */
  place(name, tag = "div") {
    if (!this.#places.has(name)) {
      const made = element(tag, { class: name });
      this.#places.set(name, made);
      this.root.append(made);
    }
    return this.#places.get(name);
  }

  close() {
    for (const chart of this.#charts.values()) chart.close();
    this.root.replaceChildren();
  }
}
