import assert from "node:assert/strict";
import { test } from "node:test";
import { constraintNote, constraintOf } from "./static/chat/constraints.js";
import { DEFAULTS, problemWith, toRequest } from "./static/chat/settings.js";

const SAID = { sampling_defaults: { temperature: 0.6, top_p: 0.8 } };
const asked = (settings) => toRequest({ ...DEFAULTS, ...settings }, SAID);

test("each kind becomes its field of a request", () => {
  const schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}';
  const ofSchema = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(schema) } };
  const texts = { json_schema: schema, choice: "yes\n\nno, never\n", regex: "a+ ", grammar: 'root ::= "a"' };
  assert.deepEqual(asked(texts), {}, "what is not chosen is not sent");
  assert.deepEqual(asked({ ...texts, format: "json" }), { response_format: ofSchema });
  assert.deepEqual(asked({ ...texts, format: "choice" }), { structured_outputs: { choice: ["yes", "no, never"] } });
  assert.deepEqual(asked({ ...texts, format: "regex" }), { structured_outputs: { regex: "a+ " } });
  assert.deepEqual(asked({ ...texts, format: "grammar" }), { structured_outputs: { grammar: 'root ::= "a"' } });
});

test("without a text, JSON is any object, and the others ask for nothing, and say so", () => {
  assert.deepEqual(asked({ format: "json" }), { response_format: { type: "json_object" } });
  for (const format of ["choice", "regex", "grammar", "of another version"]) assert.deepEqual(asked({ format }), {});
  assert.match(constraintNote({ ...DEFAULTS, format: "regex" }), /not written yet/);
  assert.equal(constraintNote({ ...DEFAULTS, format: "json" }), "Answers: JSON");
  assert.equal(constraintNote({ ...DEFAULTS, format: "json", json_schema: "{}" }), "Answers: JSON of a schema");
  assert.equal(constraintNote(DEFAULTS), "");
  assert.deepEqual(constraintOf(DEFAULTS), {});
});

test("a schema is a JSON object", () => {
  assert.equal(problemWith("json_schema", ""), "");
  assert.equal(problemWith("json_schema", '{"type": "object"}'), "");
  assert.match(problemWith("json_schema", '{"type": '), /This is not JSON: /);
  for (const text of ["[]", "3", "null", '"a"', "true"]) assert.match(problemWith("json_schema", text), /an object/);
});
