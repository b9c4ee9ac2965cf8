import assert from "node:assert/strict";
import { test } from "node:test";
import { parse, parseInlines, render, renderInto } from "./static/common/markdown.js";

/** What `parse` found, as terse text. */
function show(source) {
  return parse(source).map(showBlock).join(" ");
}

function showBlock(block) {
  switch (block.type) {
    case "code":
      return `code(${block.language}|${block.text})`;
    case "list":
      return `${block.isOrdered ? `ol${block.start}` : "ul"}(${block.items
        .map((blocks) => blocks.map(showBlock).join(" "))
        .join("; ")})`;
    case "quote":
      return `quote(${block.blocks.map(showBlock).join(" ")})`;
    case "heading":
      return `h${block.level}(${showInlines(block.inlines)})`;
    case "rule":
      return "rule";
    case "table":
      return `table(${[block.head, ...block.rows].map((row) => row.map(showInlines).join("|")).join("; ")})`;
    default:
      return `p(${showInlines(block.inlines)})`;
  }
}

function showInlines(nodes) {
  return nodes
    .map((node) =>
      typeof node === "string"
        ? node
        : node.type === "code"
          ? `<c>${node.text}</c>`
          : node.type === "link"
            ? `[${showInlines(node.inlines)}](${node.target})`
            : `<${node.type}>${showInlines(node.inlines)}</${node.type}>`,
    )
    .join("");
}

const inline = (text) => showInlines(parseInlines(text));

/** Just enough of a document to render into. */
class Node {
  constructor(name, text = null) {
    this.name = name;
    this.text = text;
    this.children = [];
  }

  append(...nodes) {
    for (const node of nodes) {
      const child = typeof node === "string" ? new Node("#text", node) : node;
      child.parent = this;
      this.children.push(child);
    }
  }

  replaceWith(node) {
    node.parent = this.parent;
    this.parent.children[this.parent.children.indexOf(this)] = node;
  }

  remove() {
    this.parent.children = this.parent.children.filter((child) => child !== this);
  }

  get lastElementChild() {
    return this.children.at(-1);
  }

  get all() {
    return [this, ...this.children.flatMap((child) => child.all)];
  }

  get textContent() {
    return this.text ?? this.children.map((child) => child.textContent).join("");
  }
}
const fakeDocument = {
  createElement: (name) => new Node(name),
  createTextNode: (text) => new Node("#text", text),
};

const BLOCKS = [
  ["", ""],
  ["  \n\n ", ""],
  ["one\ntwo\n\nthree", "p(one\ntwo) p(three)"],
  ["a\r\nb\r\rc", "p(a\nb) p(c)"],
  ["# One\n### Three ###\ntext", "h1(One) h3(Three) p(text)"],
  ["#nothing", "p(#nothing)"],
  ["---\n* * *\n___", "rule rule rule"],
  ["```js\nlet a = 1;\n\n  b\n```\nafter", "code(js|let a = 1;\n\n  b) p(after)"],
  ["```\nopen\n", "code(|open\n)"],
  ["```", "code(|)"],
  ["~~~\n```\n~~~", "code(|```)"],
  ["````\n```\n````", "code(|```)"],
  ["```inline``` text", "p(<c>inline</c> text)"],
  ["text\n```py\nx\n```", "p(text) code(py|x)"],
  ["- a\n- b", "ul(p(a); p(b))"],
  ["  - a\n  - b", "ul(p(a); p(b))"],
  ["* a\n\n* b\n\ntext", "ul(p(a); p(b)) p(text)"],
  ["3. c\n4. d", "ol3(p(c); p(d))"],
  ["1) a\n2. b", "ol1(p(a)) ol2(p(b))"],
  ["- a\n  more\nlazy\n- b", "ul(p(a\nmore\nlazy); p(b))"],
  ["- a\n  - b\n    - c\n- d", "ul(p(a) ul(p(b) ul(p(c))); p(d))"],
  ["1. a\n  - b\n2. c", "ol1(p(a) ul(p(b)); p(c))"],
  ["1. a\n\n   b\n\n   ```\n   code\n     more\n   ```\n2. c", "ol1(p(a) p(b) code(|code\n  more); p(c))"],
  ["-", "ul()"],
  ["- a\n\n\n", "ul(p(a))"],
  ["-no\n1.no", "p(-no\n1.no)"],
  ["**bold** start", "p(<strong>bold</strong> start)"],
  ["a\n    b\n\n    c\n      d\n\n    e\n\nf", "p(a\nb) code(|c\n  d\n\ne) p(f)"],
  ["- a\n\n      b\n\n  c", "ul(p(a) code(|b) p(c))"],
  ["> quoted\n> - a\nafter", "quote(p(quoted) ul(p(a))) p(after)"],
  ["a\n- b\n---\nc", "p(a) ul(p(b)) rule p(c)"],
  ["| a | *b* |\n|---|--:|\n| 1 | 2 |\n| 3 |\n\nc", "table(a|<em>b</em>; 1|2; 3|) p(c)"],
  ["a | b\n- | -\n`x|y` | \\|", "table(a|b; <c>x|y</c>||)"],
  ["| a | b |\n|---|", "p(| a | b |\n|---|)"],
];
for (const [source, expected] of BLOCKS) {
  test(`blocks of ${JSON.stringify(source)}`, () => assert.equal(show(source), expected));
}

const INLINES = [
  ["**a** and *b* and `c`", "<strong>a</strong> and <em>b</em> and <c>c</c>"],
  ["__a__ _b_", "<strong>a</strong> <em>b</em>"],
  ["***a***", "<strong><em>a</em></strong>"],
  ["**a *b* c**", "<strong>a <em>b</em> c</strong>"],
  ["*a **b***", "<em>a <strong>b</strong></em>"],
  ["**open", "**open"],
  ["*open `code` **more", "*open <c>code</c> **more"],
  ["2 * 3 * 4", "2 * 3 * 4"],
  ["snake_case_name", "snake_case_name"],
  ["**a *b** c*", "<strong>a *b</strong> c*"],
  ["`a **b**`", "<c>a **b**</c>"],
  ["``a ` b``", "<c>a ` b</c>"],
  ["`` ` ``", "<c>`</c>"],
  ["`open **b**", "`open <strong>b</strong>"],
  ["\\*a\\* \\`b\\` c\\d", "*a* `b` c\\d"],
  ["a \\", "a \\"],
  ["*****", "*****"],
  ["**", "**"],
  ["日本**語**です", "日本<strong>語</strong>です"],
  ["[text](https://example.org)", "[text](https://example.org)"],
];
for (const [source, expected] of INLINES) {
  test(`inside ${JSON.stringify(source)}`, () => assert.equal(inline(source), expected));
}

const ATTACKS = [
  "<script>alert(1)</script>",
  "<img src=x onerror=alert(1)>",
  "[click](javascript:alert(1))",
  "![x](https://example.org/?secret)",
  "<https://example.org>",
  '```"><script>alert(1)</script>\n<b>\n```',
  "# <svg onload=alert(1)>",
  "- <iframe src=javascript:alert(1)>\n  > **<a href=x>**",
  "`<b>` &lt;b&gt;",
];
const ELEMENTS = "table thead tbody tr th td h3 h4 h5 h6 p ul ol li blockquote hr strong em code div span button pre #text";

test("whatever is written becomes text in a few harmless elements", () => {
  for (const attack of ATTACKS) {
    for (const block of parse(attack)) {
      for (const node of render(block, fakeDocument).all) {
        assert.ok(ELEMENTS.split(" ").includes(node.name), node.name);
        // Nothing of what was written reaches a property.
        const { name, text, parent, children, ...properties } = node;
        const allowed = ["button", "copy-code", "code-head", "code-box", 0, 1];
        assert.ok(Object.values(properties).every((value) => allowed.includes(value)));
      }
    }
  }
});

test("nothing of the text is lost", () => {
  const text = (source) =>
    parse(source).map((block) => render(block, fakeDocument).textContent).join("");
  assert.equal(text(ATTACKS[0]), ATTACKS[0]);
  assert.equal(text(ATTACKS[3]), ATTACKS[3]);
  assert.equal(text(ATTACKS[8]), "<b> &lt;b&gt;");
});

test("rendering piece by piece ends as rendering at once, and keeps finished blocks", () => {
  const source = BLOCKS.map(([text]) => text).join("\n\n");
  const tree = (node) => [node.name, node.text, node.children.map(tree)];
  const whole = new Node("div");
  renderInto(whole, source, { document: fakeDocument });
  const grown = new Node("div");
  let first;
  for (let end = 0; end <= source.length; end += 1) {
    renderInto(grown, source.slice(0, end), { document: fakeDocument });
    if (end === 20) first = grown.children[0];
  }
  assert.deepEqual(tree(grown), tree(whole));
  assert.equal(grown.children[0], first);
  renderInto(grown, "", { document: fakeDocument });
  assert.equal(grown.children.length, 0);
});

/** Microseconds, however many others have the processor's cores. */
function processorTime(work) {
  const before = process.cpuUsage();
  work();
  const { user, system } = process.cpuUsage(before);
  return user + system;
}

/** Some milliseconds; work that grows with the square of these texts takes thousands of times as long. */
function plainLoop() {
  const seen = new Map();
  for (let index = 0; index < 100_000; index += 1) seen.set(index % 7, `${index}`);
}

test("hostile text takes linear time", () => {
  const n = 30_000;
  const texts = [
    "*".repeat(n), "* ".repeat(n), "*a ".repeat(n), "**a ".repeat(n), "_a*b__c**".repeat(n / 8),
    "`".repeat(n), "`a``b```c````d".repeat(n / 10),
    Array.from({ length: 300 }, (_, i) => "`".repeat(i + 1)).join(" "),
    "> ".repeat(n), "- ".repeat(n), "1. ".repeat(n), "-\n".repeat(n), ">\n".repeat(n), "\n".repeat(n),
    "```" + " ".repeat(n) + "`", "`".repeat(n) + " `a", "# " + "# ".repeat(n), "#".repeat(n) + " a",
    "- - - ".repeat(n) + "x", "-" + " ".repeat(n) + "x", "- a\n\n".repeat(n), "  - a\n".repeat(n),
    "    a\n\n".repeat(n), "    a\n" + "\n".repeat(n), "[".repeat(n), "[a](".repeat(n), "!".repeat(n), "![".repeat(n), "![a](".repeat(n), `|${"`|".repeat(n)}\n|${"-|".repeat(2 * n)}`, "|-".repeat(n) + "\n" + "|-".repeat(n),
    "\\(".repeat(n), "\\[\n".repeat(n), "$".repeat(n), "$a ".repeat(n), "$$a".repeat(n), "\\(a\\]$".repeat(n), "$$\n".repeat(n),
    "\\".repeat(n), "\\``".repeat(n), " ".repeat(n) + "x", ("- " + "  ".repeat(3)).repeat(n / 8),
  ];
  const most = 100 * Math.min(...[1, 2, 3].map(() => processorTime(plainLoop)));
  for (const text of texts) {
    const took = processorTime(() => parse(text));
    assert.ok(took < most, `${JSON.stringify(text.slice(0, 20))}… took ${took} µs, and ${most} would be much`);
  }
});

test("formulas stay as they are written", () => {
  for (const formula of [
    String.raw`\(a^2 + b_1 * c_1 * d\)`, String.raw`\[\frac{a}{b} \\ \{x\} *y* _z_\]`, String.raw`$$\alpha\_1 *b* c$$`,
    String.raw`$x_1*y*z_2$`, String.raw`\(f(x) = \`y\`\)`, String.raw`$a\$b$`.replace(String.raw`\$`, "\\,"),
  ]) {
    assert.equal(inline(`so ${formula}, *thus*`), `so ${formula}, <em>thus</em>`);
  }
  const lines = ["\\[", "a = b", "- c", "# d", "> e", "\\]"].join("\n");
  assert.equal(show(`Then\n${lines}\n- item`), `p(Then) p(${lines}) ul(p(item))`);
  assert.equal(show(`$$\na\n+ b\n$$`), "p($$\na\n+ b\n$$)");
});

test("a formula that has not ended yet keeps what it begins with", () => {
  assert.equal(inline("so \\(a^2 + b"), "so \\(a^2 + b");
  assert.equal(inline("so \\[a and $$b"), "so \\[a and $$b");
});

test("money and other escapes are no formulas", () => {
  assert.equal(inline("$5 and *$6*, $7/$8"), "$5 and <em>$6</em>, $7/$8");
  assert.equal(inline("\\*not\\* \\_so\\_ \\# \\`"), "*not* _so_ # `");
});

test("links and images are for whoever says where they lead", () => {
  const source = "see [the *wall*](inference.md#wall), [x](javascript:1), ![a wall](wall.webp) ![b](http://b) hey!";
  const [block] = parse(source);
  const places = {
    below: 1,
    link: (target) => (target.startsWith("inference") ? "docs/inference#wall" : null),
    image: (target) => (target === "wall.webp" ? { src: "docs/wall.webp", width: 7, height: 5 } : null),
  };
  const paragraph = render(block, fakeDocument, places);
  const links = paragraph.all.filter(({ name }) => name === "a");
  assert.deepEqual(links.map(({ href, textContent }) => [href, textContent]), [["docs/inference#wall", "the wall"]]);
  const images = paragraph.all.filter(({ name }) => name === "img");
  assert.deepEqual(images.map(({ src, alt, width, height }) => [src, alt, width, height]), [["docs/wall.webp", "a wall", 7, 5]]);
  const words = render(block, fakeDocument, { ...places, link: () => "" });
  assert.ok(words.textContent.startsWith("see the wall, x") && words.all.every(({ name }) => name !== "a"));
  assert.match(paragraph.textContent, /\[x\]\(javascript:1\), {2}!\[b\]\(http:\/\/b\) hey!$/);
  const chat = render(block, fakeDocument);
  assert.equal(chat.textContent, source.replace("*wall*", "wall"));
  assert.ok(chat.all.every(({ name }) => name !== "a" && name !== "img"));
});
