import assert from "node:assert/strict";
import { test } from "node:test";
import { readJson } from "./static/chat/json_nodes.js";

/** The text of a node again, without white space. */
function write({ kind, key, source, children }) {
  const name = key === null ? "" : `${JSON.stringify(key)}:`;
  if (kind === "object") return `${name}{${children.map(write).join(",")}}`;
  if (kind === "array") return `${name}[${children.map(write).join(",")}]`;
  return name + source;
}

test("what was written is kept, even what objects of JavaScript cannot hold", () => {
  const texts = [
    '{"b":1,"2":2,"1":3,"b":4}', '{"__proto__":{"a":1}}', "[12345678901234567890,1.0,-0,1e400,1E+2]",
    '["a\\"b","\\\\",",","{}[]:","\\u00e9","\\\\\\"",""]', "[true,false,null]", '{"":{},"a":[]}', "[[],[[]],{}]", '"text"', "7", "null",
  ];
  for (const text of texts) assert.equal(write(readJson(text)), text);
  assert.equal(write(readJson(' {\n "a" : [ 1 , 2 ]\t}\n')), '{"a":[1,2]}');
});

test("kinds", () => {
  const kinds = readJson('[{}, [], "", 1, -1, true, null]').children.map(({ kind }) => kind);
  assert.deepEqual(kinds, ["object", "array", ...Array(5).fill("scalar")]);
});

test("what is no JSON has no nodes", () => {
  for (const text of ["", "{", "[1,]", "{'a': 1}", "[1] and more", "{a: 1}", "[NaN]"]) assert.equal(readJson(text), null);
});

test("depth is no matter", () => {
  let node = readJson("[".repeat(5000) + "]".repeat(5000));
  for (let depth = 1; depth < 5000; depth += 1) [node] = node.children;
  assert.deepEqual(node.children, []);
});
