// Figures of a picture: what, how much, how sure, known how, and the formula with the numbers in.

import { element } from "../common/dom.js";
import { format, formatRange } from "../common/numbers.js";

// What stands behind a figure, in words.
const SOURCES = {
  measured: "measured",
  interpolated: "between measurements",
  published: "published",
  roofline: "roofline",
  extrapolated: "beyond measurements",
};

/** Show `[{ label, value, unit, low, high, source, formula }]`; a text as value is shown as it is. */
export function showFigures(container, figures) {
  container.replaceChildren(...figures.map(figureElement));
}

function figureElement({ label, value, unit = "", low, high, source, formula }) {
  const isRange = low !== undefined && high > low;
  const notes = [
    isRange ? formatRange(low, high, unit) : null,
    source ? (SOURCES[source] ?? source) : null,
  ].filter(Boolean);
  return element(
    "div",
    { class: "figure" },
    element("dt", {}, label),
    element("dd", { class: "figure-value" }, typeof value === "string" ? value : format(value, unit)),
    notes.length > 0 ? element("dd", { class: "figure-note" }, notes.join(" · ")) : null,
    formula ? element("dd", { class: "figure-formula" }, element("code", {}, formula)) : null,
  );
}
