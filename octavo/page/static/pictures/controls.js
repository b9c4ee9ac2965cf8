// Sliders, choices and switches: native elements with names, and the same value again in words.
//
//   { id, label, kind: "range", min, max, step, unit, value }
//   { …, kind: "log-range", min, max, value }        // whole numbers from 1 on, three digits
//   { …, kind: "range", choices: [1, 2, 4, 8], value }   // a slider over given numbers
//   { …, kind: "choice", choices: [[value, "in words"]], value }
//   { …, kind: "toggle", value: false }
//   { …, kind: "step", min, max, value, most(values), beat }   // a slider with back, forward and
//                                                 // play, every `beat` milliseconds
//   { …, applies(values) }                        // whether it has a meaning beside what others say
//   { …, kind: "kept", value, keep(values), words(value) }   // a button that keeps what others say now,
//                                                 // as a text; `words` is null of a text that is none

import { element } from "../common/dom.js";
import { format } from "../common/numbers.js";

const PARTS = 400; // places of a slider whose values are powers
const BEAT = 1100; // milliseconds between two steps that play by themselves, if nothing else is said

let numControls = 0;

/** `{ element, show(value, values), close() }`; `onChange(value)` when it is moved. */
export function makeControl(control, onChange) {
  const id = `control-${(numControls += 1)}`;
  const made = { choice, toggle, step, kept }[control.kind] ?? slider;
  return made(control, id, onChange);
}

/** The value that a text of the address means, or null where it cannot be one. */
export function parseValue(control, text) {
  if (control.kind === "toggle") return { 1: true, 0: false }[text] ?? null;
  if (control.kind === "choice") return control.choices.find(([value]) => String(value) === text)?.[0] ?? null;
  if (control.kind === "kept") return control.words(text) === null ? null : text;
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) return null;
  return placesOf(control).near(value);
}

export function valueText(value) {
  return typeof value === "boolean" ? String(Number(value)) : String(value);
}

// -- kinds -------------------------------------------------------------------------------------

function slider(control, id, onChange) {
  const places = placesOf(control);
  const output = element("output", { for: id, class: "control-value" });
  const input = element("input", {
    id, type: "range", min: places.first, max: places.last, step: places.step,
    oninput: () => onChange(places.toValue(Number(input.value))),
  });
  return {
    element: labelled(control, id, output, input),
    show(value) {
      input.value = String(places.toPlace(value));
      output.textContent = format(value, control.unit);
      input.setAttribute("aria-valuetext", output.textContent);
      const share = (places.toPlace(value) - places.first) / (places.last - places.first || 1);
      input.style.setProperty("--share", `${100 * share}%`);
    },
    close() {},
  };
}

function choice(control, id, onChange) {
  const { choices } = control;
  const options = choices.map(([value, text], index) => element("option", { value: index }, text));
  const input = element("select", { id, onchange: () => onChange(choices[Number(input.value)][0]) }, options);
  return {
    element: labelled(control, id, null, input),
    show(value) {
      input.value = String(choices.findIndex(([each]) => each === value));
    },
    close() {},
  };
}

function toggle(control, id, onChange) {
  const input = element("input", { id, type: "checkbox", onchange: () => onChange(input.checked) });
  return {
    element: element("div", { class: "control is-toggle" }, input, element("label", { for: id }, control.label)),
    show(value) {
      input.checked = value;
    },
    close() {},
  };
}

function kept(control, id, onChange) {
  let latest = null;
  const output = element("output", { for: id, class: "hint" });
  const input = element("button", { id, type: "button", class: "bordered", onclick: () => onChange(control.keep(latest)) }, control.label);
  return {
    element: element("div", { class: "control is-kept" }, input, output),
    show(value, values) {
      latest = values;
      output.textContent = control.words(value);
      input.disabled = value === control.keep(values);
    },
    close() {},
  };
}

/** `most`: how far it goes now, where that depends on other controls. */
function step(control, id, onChange) {
  let [value, most, timer] = [control.value, control.max, null];
  const go = (next) => onChange(Math.min(most, Math.max(control.min, next)));
  const moved = slider(control, id, (next) => (stop(), go(next)));
  const button = (text, act) => element("button", { type: "button", class: "bordered", onclick: act }, text);
  const back = button("Back", () => (stop(), go(value - 1)));
  const forward = button("Next", () => (stop(), go(value + 1)));
  const play = button("Play", () => (timer === null ? start() : stop()));
  moved.element.append(element("div", { class: "step-buttons" }, back, forward, play));
  moved.element.classList.add("is-step");
  const [input, output] = [moved.element.querySelector("input"), moved.element.querySelector("output")];
  function start() {
    if (value >= most) go(control.min);
    timer = setInterval(() => (value >= most ? stop() : go(value + 1)), control.beat ?? BEAT);
    play.textContent = "Pause";
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  return {
    element: moved.element,
    show(next, values) {
      most = control.most?.(values) ?? control.max;
      value = Math.min(next, most);
      input.max = most;
      moved.show(value);
      input.style.setProperty("--share", `${(100 * (value - control.min)) / (most - control.min)}%`);
      output.textContent = `${value} of ${most}`;
      input.setAttribute("aria-valuetext", output.textContent);
      back.disabled = value <= control.min;
      forward.disabled = value >= most;
    },
    close: stop,
  };
}

function labelled({ label }, id, output, input) {
  const head = element("div", { class: "control-head" }, element("label", { for: id }, label), output);
  return element("div", { class: "control" }, head, input);
}

/** From values to the places of a slider, and back; `near` is the value that any number means. */
function placesOf({ kind, min, max, step = 1, choices }) {
  if (choices) {
    const toPlace = (value) => choices.reduce((best, each, index) =>
      Math.abs(each - value) < Math.abs(choices[best] - value) ? index : best, 0);
    const toValue = (place) => choices[place];
    return { first: 0, last: choices.length - 1, step: 1, toPlace, toValue, near: (value) => toValue(toPlace(value)) };
  }
  const bounded = (value) => Math.min(max, Math.max(min, value));
  if (kind === "log-range") {
    const span = Math.log(max / min);
    const toPlace = (value) => Math.round((PARTS * Math.log(bounded(value) / min)) / span);
    const toValue = (place) => bounded(rounded(min * Math.exp((span * place) / PARTS), min >= 1));
    const near = (value) => (min >= 1 ? Math.round(bounded(value)) : bounded(value));
    return { first: 0, last: PARTS, step: 1, toPlace, toValue, near };
  }
  const onStep = (value) => Number((min + Math.round((bounded(value) - min) / step) * step).toPrecision(12));
  return { first: min, last: max, step, toPlace: onStep, toValue: onStep, near: onStep };
}

function rounded(value, isWhole) {
  const short = Number(value.toPrecision(3));
  return isWhole ? Math.round(short) : short;
}
