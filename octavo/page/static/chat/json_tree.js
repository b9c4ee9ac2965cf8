// JSON as a tree whose branches fold.

import { element } from "../common/dom.js";
import { isContainer, readJson } from "./json_nodes.js";

const OPEN_LEVELS = 3;
const AT_ONCE = 100; // children that are shown before one asks for more

/** The tree of a JSON object or array, or null if `text` is neither. */
export function treeOf(text) {
  const node = readJson(text);
  return node !== null && isContainer(node) ? branchList([node], 0) : null;
}

/** A box with the tree, and beside it the text as it was written, to be shown and copied. */
export function jsonBox(text, tree) {
  const pre = element("pre", { tabindex: 0, hidden: true }, element("code", {}, text));
  const turn = element("button", { class: "plain", type: "button", "aria-pressed": "false" }, "As text");
  turn.addEventListener("click", () => {
    tree.hidden = !tree.hidden;
    pre.hidden = !tree.hidden;
    turn.setAttribute("aria-pressed", String(tree.hidden));
  });
  const copy = element("button", { class: "copy-code", type: "button" }, "Copy");
  const head = element("div", { class: "code-head" }, element("span", {}, "JSON"), element("span", {}, turn, copy));
  return element("div", { class: "code-box" }, head, tree, pre);
}

function branchList(nodes, depth) {
  const list = element("ul", { class: depth === 0 ? "json-tree" : null });
  appendSome(list, nodes, depth);
  return list;
}

/** The next children, and a button for those after them. */
function appendSome(list, nodes, depth) {
  list.append(...nodes.slice(0, AT_ONCE).map((node) => nodeItem(node, depth)));
  const rest = nodes.slice(AT_ONCE);
  if (rest.length === 0) return;
  const more = element("button", { class: "plain", type: "button" }, `Show more (${rest.length.toLocaleString("en")})`);
  const item = element("li", {}, more);
  more.addEventListener("click", () => {
    item.remove();
    appendSome(list, rest, depth);
  });
  list.append(item);
}

function nodeItem(node, depth) {
  const key = node.key === null ? [] : [element("span", { class: "json-key" }, JSON.stringify(node.key)), ": "];
  if (node.children.length > 0) return element("li", {}, branch(node, key, depth));
  const text = isContainer(node) ? bracketsOf(node).join("") : node.source;
  return element("li", { class: "json-leaf" }, key, text);
}

function branch(node, key, depth) {
  const [begin, end] = bracketsOf(node);
  const summary = element("summary", {}, ...key, `${begin}…${end} `, element("span", { class: "json-size" }, sizeOf(node)));
  const details = element("details", { open: depth < OPEN_LEVELS }, summary);
  // What is folded is made when it is opened: JSON may be deeper and wider than a page can be.
  const fill = () => {
    if (details.open && details.childElementCount === 1) details.append(branchList(node.children, depth + 1));
  };
  fill();
  details.addEventListener("toggle", fill);
  return details;
}

function bracketsOf({ kind }) {
  return kind === "object" ? ["{", "}"] : ["[", "]"];
}

function sizeOf({ kind, children }) {
  const noun = kind === "object" ? "member" : "item";
  return `${children.length.toLocaleString("en")} ${noun}${children.length === 1 ? "" : "s"}`;
}
