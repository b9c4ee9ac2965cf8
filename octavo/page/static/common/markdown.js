// The Markdown that models write, in two steps: `parse` makes a tree of plain objects, `render`
// makes elements of it. Text only ever becomes text nodes, and there are links and images only for
// the caller says where they lead (`places`: octavo's own documents), so nothing a model writes can run,
// load or point anywhere.
//
// Blocks: paragraph, heading, code, list, quote, rule, table. Inside: code, strong, em, link, image.
// Formulas, between \\( and \\), \\[ and \\], $$ and $$, or $ and $, stay as they are written.
// All of it takes time linear in the length of the text, whatever the text.

const MAX_LINK = 400; // letters; a longer one stays text
const CODE_INDENT = 4; // spaces
const MAX_DEPTH = 8; // of lists and quotes inside each other; deeper ones stay text

const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_]) *(?:\1 *){2,}$/;
const TABLE_RULE = /^ {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])( {1,4}|$)/;
const FORMULA = /^ {0,3}(\\\[|\$\$)/; // one that has lines of its own
const FORMULA_END = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const LINK = /^!?\[([^[\]]+)\]\(([^()\s]+)\)/; // of an image, what it shows in words

/** The blocks of `source`. An unfinished one, as while streaming, is closed at the end. */
export function parse(source) {
  return parseBlocks(source.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = takeBlock(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function takeBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeCode(lines, at, fence[1], line.slice(fence[0].length));
  const formula = FORMULA.exec(line);
  if (formula) return takeFormula(lines, at, FORMULA_END[formula[1]], formula[0].length);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].trimEnd().replace(/(^| )#+$/, "");
    return [{ type: "heading", level: heading[1].length, inlines: parseInlines(text) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (beginsTable(lines, at)) return takeTable(lines, at);
  if (indentOf(line) >= CODE_INDENT) return takeIndentedCode(lines, at);
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return takeQuote(lines, at, depth);
    if (ITEM.test(line)) return takeList(lines, at, depth);
  }
  return takeParagraph(lines, at, depth);
}

function takeCode(lines, at, marker, info) {
  const text = [];
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at].trim();
    const isEnd = line.length >= marker.length && line === marker[0].repeat(line.length);
    if (isEnd) break;
    text.push(lines[at]);
  }
  const language = info.trim().split(/\s/)[0];
  return [{ type: "code", language, text: text.join("\n") }, at + 1];
}

/** A paragraph that goes on to the line in which its formula ends, whatever its lines begin with. */
function takeFormula(lines, at, end, indent) {
  let next = at;
  let from = indent; // behind what the formula begins with
  while (next < lines.length && !isBlank(lines[next]) && !lines[next].includes(end, from)) {
    next += 1;
    from = 0;
  }
  next = next < lines.length && !isBlank(lines[next]) ? next + 1 : next;
  const text = lines.slice(at, next).map((line) => line.trim());
  return [{ type: "paragraph", inlines: parseInlines(text.join("\n")) }, next];
}

/** Lines that are indented, and what is blank between them. */
function takeIndentedCode(lines, at) {
  let end = at;
  let next = at;
  while (next < lines.length && indentOf(lines[next]) >= CODE_INDENT) {
    end = next + 1;
    next = indexOfText(lines, end);
  }
  const text = lines.slice(at, end).map((line) => line.slice(CODE_INDENT));
  return [{ type: "code", language: "", text: text.join("\n") }, end];
}

/** A line of cells above a line of dashes, as many. */
function beginsTable(lines, at) {
  if (!lines[at].includes("|") || !TABLE_RULE.test(lines[at + 1] ?? "")) return false;
  return cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length;
}

function takeTable(lines, at) {
  const head = cellsOf(lines[at]).map(parseInlines);
  const isRight = cellsOf(lines[at + 1]).map((rule) => /^-+:$/.test(rule));
  const rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) {
    const cells = cellsOf(lines[at]).slice(0, head.length).map(parseInlines);
    rows.push([...cells, ...Array(head.length - cells.length).fill([])]);
  }
  return [{ type: "table", head, rows, isRight }, at];
}

/** What stands between bars; one after a backslash, or in code, is text. */
function cellsOf(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  const lastTick = row.lastIndexOf("`");
  const cells = [];
  let cell = "";
  let isCode = false;
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      cell += "|";
      at += 1;
      continue;
    }
    if (row[at] === "`") isCode = !isCode;
    if (row[at] === "|" && !(isCode && at < lastTick)) {
      cells.push(cell.trim());
      cell = "";
    } else {
      cell += row[at];
    }
  }
  return [...cells, cell.trim()];
}

function takeQuote(lines, at, depth) {
  const inner = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at += 1) {
    inner.push(lines[at].replace(QUOTE, ""));
  }
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, at];
}

function takeList(lines, at, depth) {
  const [, , marker, start] = ITEM.exec(lines[at]);
  const kind = marker.at(-1); // a list ends where the kind of marker changes
  const items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[2].at(-1) !== kind || RULE.test(lines[at])) break;
    const [inner, next] = takeItem(lines, at, item[0].length, item[1].length);
    items.push(parseBlocks(inner, depth + 1));
    at = next;
  }
  const isOrdered = start !== undefined;
  return [{ type: "list", isOrdered, start: isOrdered ? Number(start) : 1, items }, at];
}

/** The lines of the item at `at`, without their indentation; its marker stands at `margin`. */
function takeItem(lines, at, indent, margin) {
  // Models indent what belongs to an item by 2, 3 or 4, whatever the marker's width.
  const isInside = (line) => indentOf(line) >= margin + 2;
  const inner = [lines[at].slice(indent)];
  at += 1;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      const next = indexOfText(lines, at);
      if (next === lines.length) return [inner, next];
      if (!isInside(lines[next])) return [inner, ITEM.test(lines[next]) ? next : at];
      for (; at < next; at += 1) inner.push("");
    } else if (isInside(lines[at])) {
      inner.push(lines[at].slice(Math.min(indent, indentOf(lines[at]))));
      at += 1;
    } else if (beginsBlock(lines[at])) {
      break;
    } else {
      inner.push(lines[at]); // the item's paragraph goes on
      at += 1;
    }
  }
  return [inner, at];
}

function takeParagraph(lines, at, depth) {
  const first = at;
  do at += 1;
  while (at < lines.length && !isBlank(lines[at]) && !(depth < MAX_DEPTH && beginsBlock(lines[at])));
  const text = lines.slice(first, at).map((line) => line.trim());
  return [{ type: "paragraph", inlines: parseInlines(text.join("\n")) }, at];
}

function beginsBlock(line) {
  return [FENCE, FORMULA, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function isBlank(line) {
  return line.trim() === "";
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function indexOfText(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

// -- inside a block ----------------------------------------------------------------------------

/** Strings, and `{ type: "code", text }`, `{ type: "strong" | "em", inlines }`, `{ type: "link",
 * target, inlines }`, `{ type: "image", target, text }`. */
export function parseInlines(text) {
  // What is open: the text itself, and above it at most one each of ** __ * _.
  const open = [{ marker: "", nodes: [] }];
  const codeEnds = new BacktickRuns(text);
  const formulaEnds = new FormulaEnds(text);
  const add = (node) => append(open.at(-1).nodes, node);
  let at = 0;
  let link = null;
  while (at < text.length) {
    const char = text[at];
    const formulaEnd = char === "\\" || char === "$" ? formulaEnds.after(at) : at;
    if (formulaEnd > at) {
      add(text.slice(at, formulaEnd));
      at = formulaEnd;
    } else if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      add(text[at + 1]);
      at += 2;
    } else if (char === "`") {
      const length = runLength(text, at);
      const end = codeEnds.after(at + length, length);
      if (end < 0) add(text.slice(at, at + length));
      else add({ type: "code", text: codeText(text.slice(at + length, end)) });
      at = end < 0 ? at + length : end + length;
    } else if ((char === "[" || char === "!") && (link = LINK.exec(text.slice(at, at + MAX_LINK))) !== null) {
      const [whole, words, target] = link;
      add(char === "!" ? { type: "image", target, text: words } : { type: "link", target, inlines: parseInlines(words) });
      at += whole.length;
    } else if (char === "*" || char === "_") {
      at = takeRun(text, at, open, add);
    } else {
      const end = nextSpecial(text, at + 1);
      add(text.slice(at, end));
      at = end;
    }
  }
  while (open.length > 1) abandon(open);
  return open[0].nodes;
}

/** Open or close emphasis with the run of * or _ at `at`; returns where it ends. */
function takeRun(text, at, open, add) {
  const char = text[at];
  const end = at + runLength(text, at);
  const before = text[at - 1] ?? " ";
  const after = text[end] ?? " ";
  const isWordBefore = char === "_" && /[\p{L}\p{N}]/u.test(before);
  const isWordAfter = char === "_" && /[\p{L}\p{N}]/u.test(after);
  const canClose = /\S/.test(before) && !isWordAfter;
  const canOpen = /\S/.test(after) && !isWordBefore;
  if (end - at > 3) {
    add(text.slice(at, end)); // a line of asterisks is no emphasis
    return end;
  }
  while (at < end) {
    const top = open.at(-1).marker;
    let marker = char.repeat(Math.min(2, end - at));
    if (end - at === 3 && top === char) marker = top;
    const depth = open.findIndex((frame) => frame.marker === marker);
    if (depth > 0 && canClose) {
      while (open.length - 1 > depth) abandon(open);
      const { nodes } = open.pop();
      append(open.at(-1).nodes, { type: marker.length === 2 ? "strong" : "em", inlines: nodes });
    } else if (depth < 0 && canOpen) {
      open.push({ marker, nodes: [] });
    } else {
      append(open.at(-1).nodes, marker);
    }
    at += marker.length;
  }
  return end;
}

/** The innermost emphasis was never closed: its marker is text. */
function abandon(open) {
  const { marker, nodes } = open.pop();
  const into = open.at(-1).nodes;
  append(into, marker);
  for (const node of nodes) append(into, node);
}

function append(nodes, node) {
  if (typeof node === "string" && typeof nodes.at(-1) === "string") {
    nodes[nodes.length - 1] += node;
  } else if (node !== "") {
    nodes.push(node);
  }
}

/** Where runs of backticks end code; knows which lengths do not come again. */
class BacktickRuns {
  constructor(text) {
    this.text = text;
    this.absent = new Set();
  }

  after(at, length) {
    if (this.absent.has(length)) return -1;
    while ((at = this.text.indexOf("`", at)) >= 0) {
      const found = runLength(this.text, at);
      if (found === length) return at;
      at += found;
    }
    this.absent.add(length);
    return -1;
  }
}

/** Where formulas end; knows which ends do not come again. */
class FormulaEnds {
  constructor(text) {
    this.text = text;
    this.absent = new Set();
  }

  /** The end of the formula that begins at `at`; `at` itself if none does. One whose end has not come
   * yet, as while streaming, is only its beginning, which stays as it is. */
  after(at) {
    const begin = this.text.slice(at, at + 2);
    if (begin in FORMULA_END) {
      const end = this.#indexOf(FORMULA_END[begin], at + 2);
      return end < 0 ? at + 2 : end + 2;
    }
    return begin[0] === "$" ? this.#afterDollar(at) : at;
  }

  /** As Pandoc has it: no space inside next to either $, and no digit behind the second, so that sums
   * of money are none. */
  #afterDollar(at) {
    const end = this.#indexOf("$", at + 1);
    const isFormula = end > at + 1 && /\S/.test(this.text[at + 1]) && /[^\s\\]/.test(this.text[end - 1])
      && !/\d/.test(this.text[end + 1] ?? "");
    return isFormula ? end + 1 : at;
  }

  #indexOf(mark, from) {
    if (this.absent.has(mark)) return -1;
    const found = this.text.indexOf(mark, from);
    if (found < 0) this.absent.add(mark);
    return found;
  }
}

function codeText(text) {
  const flat = text.replace(/\n/g, " ");
  return /^ .*[^ ].* $/.test(flat) ? flat.slice(1, -1) : flat;
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function nextSpecial(text, at) {
  while (at < text.length && !"\\`*_![$".includes(text[at])) at += 1;
  return at;
}

// -- elements ----------------------------------------------------------------------------------

/** Show `source` in `container`, and leave the elements of blocks that are as before alone. */
export function renderInto(container, source, { document = globalThis.document, places } = {}) {
  const blocks = parse(source);
  const keys = blocks.map((block) => JSON.stringify(block));
  const shown = container.markdownKeys ?? [];
  blocks.forEach((block, index) => {
    if (shown[index] === keys[index]) return;
    const element = render(block, document, places);
    const old = container.children[index];
    if (old === undefined) container.append(element);
    else old.replaceWith(element);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
  container.markdownKeys = keys;
}

// The chat's: an answer is below its question.
const ALONE = { link: () => null, image: () => null, below: 2 };

/**
 * The element of one block. `places.link(target)` is an address, and `places.image(target)` an
 * `{ src, width, height }`; null for what is to stay text, and "" for a link of which its words do. A heading of the first level is one of
 * the next after `places.below`.
 */
export function render(block, document, places = ALONE) {
  const make = (name, ...children) => {
    const element = document.createElement(name);
    element.append(...children);
    return element;
  };
  const inlines = (nodes) => nodes.flatMap(inline);
  const inline = (node) => {
    if (typeof node === "string") return document.createTextNode(node);
    if (node.type === "code") return make("code", node.text);
    if (node.type === "link") return linked(node, places.link(node.target));
    if (node.type === "image") return pictured(node, places.image(node.target));
    return make(node.type, ...inlines(node.inlines));
  };
  const linked = (node, address) => {
    const text = inlines(node.inlines);
    if (address === null) return ["[", ...text, `](${node.target})`];
    if (address === "") return text;
    const link = make("a", ...text);
    link.href = address;
    return link;
  };
  const pictured = (node, image) =>
    image === null
      ? `![${node.text}](${node.target})`
      : Object.assign(make("img"), { alt: node.text, loading: "lazy", ...image });
  const blockElement = (block) => {
    switch (block.type) {
      case "code":
        return codeElement(block, make);
      case "heading":
        return make(`h${Math.min(6, block.level + places.below)}`, ...inlines(block.inlines));
      case "list": {
        const items = block.items.map((blocks) => make("li", ...blocks.map(blockElement)));
        const list = make(block.isOrdered ? "ol" : "ul", ...items);
        if (block.isOrdered) list.start = block.start;
        return list;
      }
      case "table":
        return tableElement(block, make, inlines);
      case "quote":
        return make("blockquote", ...block.blocks.map(blockElement));
      case "rule":
        return make("hr");
      default:
        return make("p", ...inlines(block.inlines));
    }
  };
  return blockElement(block);
}

function tableElement({ head, rows, isRight }, make, inlines) {
  const cell = (name) => (nodes, column) => {
    const made = make(name, ...inlines(nodes));
    if (isRight[column]) made.className = "is-right";
    return made;
  };
  const row = (name, cells) => make("tr", ...cells.map(cell(name)));
  const body = rows.map((cells) => row("td", cells));
  const box = make("div", make("table", make("thead", row("th", head)), make("tbody", ...body)));
  box.className = "table-box";
  box.tabIndex = 0; // to be scrolled with the keyboard
  return box;
}

function codeElement(block, make) {
  const button = make("button", "Copy");
  button.type = "button";
  button.className = "copy-code";
  const head = make("div", make("span", block.language), button);
  head.className = "code-head";
  const pre = make("pre", make("code", block.text));
  pre.tabIndex = 0; // to be scrolled with the keyboard
  const box = make("div", head, pre);
  box.className = "code-box";
  return box;
}
