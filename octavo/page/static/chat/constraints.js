// What form an answer must have: the settings that say so, and the request fields they become.

/** By the value of the setting `format`: the setting with its text, and what it is called. */
export const CONSTRAINTS = {
  json: { field: "json_schema", name: "JSON" },
  choice: { field: "choice", name: "one of the choices" },
  regex: { field: "regex", name: "text that matches the regular expression" },
  grammar: { field: "grammar", name: "text of the grammar" },
};

export const CONSTRAINT_FIELDS = Object.values(CONSTRAINTS).map(({ field }) => field);

/** Why `text` cannot be the setting `name`, in words; "" if it can. Empty text always can. */
export function problemWithConstraint(name, text) {
  if (name !== "json_schema" || text.trim() === "") return "";
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
  const isObject = typeof schema === "object" && schema !== null && !Array.isArray(schema);
  return isObject ? "" : "A JSON schema is an object, in braces.";
}

/** The request fields; none while the text that they need is empty. */
export function constraintOf(settings) {
  const { field } = CONSTRAINTS[settings.format] ?? {};
  const text = settings[field] ?? "";
  const isEmpty = text.trim() === "";
  if (field === "json_schema") return { response_format: isEmpty ? { type: "json_object" } : ofSchema(text) };
  if (field === undefined || isEmpty) return {};
  const value = field === "choice" ? text.split("\n").filter((line) => line.trim() !== "") : text;
  return { structured_outputs: { [field]: value } };
}

/** The constraint that is in force, as a sentence; "" without one. */
export function constraintNote(settings) {
  const constraint = CONSTRAINTS[settings.format];
  if (constraint === undefined) return "";
  const hasText = settings[constraint.field].trim() !== "";
  if (settings.format === "json") return hasText ? "Answers: JSON of a schema" : "Answers: JSON";
  return hasText ? `Answers: ${constraint.name}` : "Answers: free, as their form is not written yet";
}

function ofSchema(text) {
  return { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(text) } };
}
