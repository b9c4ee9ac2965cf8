// Elements made of text and attributes, never of markup.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with attributes and children. An attribute that is null, undefined or false is left
 * out, true is an empty one, and a function listens: `{ onclick: () => … }`.
 */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same of an SVG. */
export function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Set the attributes of an element that is there, by the same rules. */
export function setAttributes(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === null || value === undefined || value === false) made.removeAttribute(name);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
}

function fill(made, attributes, children) {
  setAttributes(made, attributes);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Calls `draw` in the next frame, once, however often it is asked to before. */
export function onceAFrame(draw) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  };
}
