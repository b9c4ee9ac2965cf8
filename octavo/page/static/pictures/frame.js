// What all pictures share: controls, figures with their formulas, the command that asks the same of
// `octavo plan`, three sentences, and the state in the address.
//
// How a picture is made
//
// A picture is a module that exports one object, and has a line in index.js:
//
//   export const memoryWall = {
//     id: "memory-wall",                       // in the address: pictures#memory-wall
//     title: "The memory wall",
//     sentences: ["…", "…", "…"],              // three: what one sees, why, what follows
//     readMore: "inference#the-memory-wall",   // a document, and a heading of it
//     needs: { model: true, hardware: true },  // brings the pickers of picker.js; { file: "x.json" }
//                                              // is there as world.files.get("x.json"); { tensors: true }
//                                              // brings a picker of the served model's weights
//     controls: [{ id: "batch", label: "Batch", kind: "log-range", min: 1, max: 1024, value: 8,
//                  unit: "requests" }],        // kinds: controls.js
//     layouts(values) { return [{ tp: 2 }]; },  // that it compares with its own; may be left out
//     figures(context) { return [{ label, value, unit, low, high, source, formula }]; },  // or null: as before
//     command(context) { return planCommand(context, { concurrency: context.values.batch }); },
//     draw(canvas, context) { canvas.chart("steps", curves, { … }); },
//   };
//
// `context` is that of picker.js. `values` has what each control says, by id. Controls named tp, pp, ep,
// dp and replicas change the deployment by themselves. Where a model cannot be laid out so, the frame
// says why, and neither `figures` nor `draw` is called; what was drawn stays while the server computes
// another deployment. `figures` and `command` are pure functions;
// `command` may be left out. A value's unit is one of common/numbers.js, or any word; bytes are "B"
// (powers of 1000) or, for what memory holds, "iB" (powers of 1024). `formula` is text with the
// numbers put in: "2 × 8.03e9 × 8 / 989 TFLOP/s = 130 µs".
//
// `draw` is called once a frame at most, whenever anything has changed: it says what is to be seen
// now, and canvas.js and charts/ keep what is there already. Nothing else may be kept between calls,
// so that an address always shows the same. A server is asked by answers.js, which
// has it drawn again when the answer has come. Charts follow the width by themselves; elements of
// `canvas.place(name)` are the picture's own, in SVG or HTML, with classes in pictures.css.

import { copy } from "../common/clipboard.js";
import { element, onceAFrame } from "../common/dom.js";
import { documentAddress } from "../common/places.js";
import { writeState } from "../common/url_state.js";
import { Canvas } from "./canvas.js";
import { makeControl, parseValue, valueText } from "./controls.js";
import { showFigures } from "./figures.js";
import { contextOf, declaredControls, ownModel } from "./picker.js";
import { addModel } from "./world.js";

export class Frame {
  /** Shows `picture` in `container`, with what `given` (URLSearchParams) says; `problem`: with a
   * model of one's own that it says. */
  constructor(container, picture, world, given, problem = "") {
    this.container = container;
    this.picture = picture;
    this.world = world;
    this.redraw = onceAFrame(() => this.#draw());
    this.#open(given);
    this.ownProblem.textContent = problem;
  }

  close() {
    for (const control of this.controls) control.close();
    this.canvas.close();
    this.isClosed = true;
  }

  #open(given) {
    const { picture, world } = this;
    this.declared = declaredControls(picture, world);
    this.values = Object.fromEntries(this.declared.map((control) => [control.id, startOf(control, given)]));
    this.controls = this.declared.map((control) =>
      makeControl(control, (value) => this.#change(control.id, value)));
    this.container.replaceChildren(...this.#build());
    this.canvas = new Canvas(this.drawing);
    this.redraw();
  }

  /** A model of one's own, from its config.json, is chosen at once. */
  async #addModel(file) {
    this.ownProblem.textContent = "";
    try {
      const { name, packed } = await addModel(this.world, await file.text());
      if (this.isClosed) return;
      this.close();
      this.isClosed = false;
      this.#open(new URLSearchParams([...this.#changed(), ["model", name]]));
      this.#writeState();
      if (packed === null) this.ownProblem.textContent = "It is too large for an address: a link to this page, or a reload, will not have it.";
    } catch (error) {
      this.ownProblem.textContent = error.message;
    }
  }

  #build() {
    const { picture } = this;
    this.drawing = element("div", { class: "drawing" });
    this.problem = element("p", { class: "error-box", role: "status", hidden: true });
    this.figures = element("dl", { class: "figures" });
    this.commandText = element("code");
    this.command = element(
      "div",
      { class: "command", hidden: true },
      this.commandText,
      element("button", { type: "button", class: "bordered", onclick: (event) => copy(this.commandText.textContent, event.target) }, "Copy"),
    );
    const about = element("div", { class: "about" }, picture.sentences.map((text) => element("p", {}, text)));
    const more = element("p", { class: "read-more" }, element("a", { href: documentAddress(picture.readMore) }, "Read more"));
    this.ownProblem = element("p", { class: "problem", role: "status" });
    const own = picture.needs?.model ? [ownModel((file) => this.#addModel(file), this.ownProblem)] : [];
    const controls = element("form", { class: "controls", "aria-label": "Settings of the picture", onsubmit: (event) => event.preventDefault() },
      this.controls.map((control) => control.element), own);
    return [
      element("h2", {}, picture.title), about, more, controls,
      this.problem, this.drawing, this.figures, this.command,
    ];
  }

  #change(id, value) {
    this.values[id] = value;
    this.redraw();
    this.#writeState();
  }

  #writeState() {
    const own = this.world.models.get(this.values.model)?.packed;
    writeState(this.picture.id, own ? [...this.#changed(), ["own", own]] : this.#changed());
  }

  /** What is not as usual, for the address. */
  #changed() {
    const changed = this.declared.filter(({ id, value }) => this.values[id] !== value);
    return changed.map(({ id }) => [id, valueText(this.values[id])]);
  }

  #draw() {
    if (this.isClosed) return;
    this.declared.forEach((control, index) => {
      this.controls[index].show(this.values[control.id], this.values);
      this.controls[index].element.hidden = control.applies?.(this.values) === false;
    });
    const context = contextOf(this.picture, this.values, this.world, this.redraw);
    this.container.setAttribute("aria-busy", String(context.isWaiting));
    if (context.isWaiting) return;
    this.problem.hidden = context.cannot === null;
    this.drawing.hidden = this.figures.hidden = context.cannot !== null;
    this.#showCommand(context);
    if (context.cannot !== null) {
      this.problem.replaceChildren(...inCode(context.cannot));
      return;
    }
    const figures = this.picture.figures(context);
    if (figures !== null) showFigures(this.figures, figures);
    this.picture.draw(this.canvas, context);
  }

  #showCommand(context) {
    const text = context.cannot === null ? (this.picture.command?.(context) ?? null) : null;
    this.command.hidden = text === null;
    const words = (text ?? "").split(" ").flatMap((word, index) => [...(index > 0 ? [" "] : []), element("span", { class: "word" }, word)]);
    this.commandText.replaceChildren(...words);
  }
}

/** A text with commands between backticks, in elements. */
function inCode(text) {
  return text.split("`").map((part, index) => (index % 2 === 0 ? part : element("code", {}, part)));
}

function startOf(control, given) {
  const text = given.get(control.id);
  return (text === null ? null : parseValue(control, text)) ?? control.value;
}
