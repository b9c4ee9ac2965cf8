// JSON as it was written: keys in their order, twice where they are there twice, numbers with all
// their digits, none of which survive in an object of JavaScript.

const TOKEN = /"(?:[^"\\]|\\.)*"|[{}[\]]|[^\s{}[\]",:]+/g;

/**
 * The nodes of a JSON text, or null if it is none. A node is `{ kind, key, source, children }`:
 * `kind` is "object", "array" or "scalar", `key` its name in an object (null elsewhere), `source`
 * what was written of a scalar.
 */
export function readJson(text) {
  try {
    JSON.parse(text); // which says whether it is JSON; what follows relies on that
  } catch {
    return null;
  }
  const root = { kind: "array", key: null, children: [] };
  const open = [root];
  let key = null;
  for (const [source] of text.matchAll(TOKEN)) {
    const parent = open.at(-1);
    if (source === "}" || source === "]") {
      open.pop();
    } else if (parent.kind === "object" && key === null) {
      key = JSON.parse(source);
    } else {
      const node = { kind: kindOf(source), key, source, children: [] };
      key = null;
      parent.children.push(node);
      if (source === "{" || source === "[") open.push(node);
    }
  }
  return root.children[0];
}

export function isContainer({ kind }) {
  return kind === "object" || kind === "array";
}

function kindOf(source) {
  if (source === "{") return "object";
  return source === "[" ? "array" : "scalar";
}
