// The tools that a model may call here. They run in this page, and reach nothing outside of it.

import { KNOWN_NAMES, calculate, numberText } from "./arithmetic.js";

const TOOLS = [
  {
    name: "current_time",
    description: "The current date and time, in the user's time zone or in another.",
    properties: {
      timezone: { type: "string", description: "a name of the IANA database, such as Asia/Tokyo" },
    },
    required: [],
    run: ({ timezone }, now) => JSON.stringify(timeIn(timezone, now)),
  },
  {
    name: "calculator",
    description: "Computes the value of an arithmetic expression.",
    properties: {
      expression: { type: "string", description: `numbers, + - * / % ^, parentheses, ${KNOWN_NAMES}` },
    },
    required: ["expression"],
    run: ({ expression }) => numberText(calculate(expression)),
  },
];

export const TOOL_NAMES = TOOLS.map(({ name }) => name);

/** The tools as a request lists them. */
export function definitions() {
  return TOOLS.map(({ name, description, properties, required }) => {
    const parameters = { type: "object", properties, required, additionalProperties: false };
    return { type: "function", function: { name, description, parameters } };
  });
}

/** Run a call `{ name, arguments }`: `{ result, failed }`, whose result is text for the model. */
export function runTool(call, now = new Date()) {
  try {
    const tool = TOOLS.find(({ name }) => name === call.name);
    if (tool === undefined) {
      throw new Error(`There is no tool ${JSON.stringify(call.name)}. There are ${TOOL_NAMES.join(", ")}.`);
    }
    return { result: tool.run(argumentsOf(tool, call.arguments), now), failed: false };
  } catch (error) {
    return { result: `Error: ${error.message}`, failed: true };
  }
}

/** The object that the arguments of a call are; null if they are something else. */
export function readArguments(text) {
  try {
    const value = JSON.parse(text || "{}");
    return typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** The arguments, checked. All parameters of these tools are text. */
function argumentsOf(tool, text) {
  const given = readArguments(text);
  if (given === null) throw new Error(`The arguments are not a JSON object: ${text}`);
  for (const [name, value] of Object.entries(given)) {
    if (!Object.hasOwn(tool.properties, name)) {
      throw new Error(`${tool.name} has no parameter ${JSON.stringify(name)}. It has ${Object.keys(tool.properties).join(", ")}.`);
    }
    if (typeof value !== "string") throw new Error(`${name} must be a string.`);
  }
  const missing = tool.required.find((name) => !Object.hasOwn(given, name));
  if (missing !== undefined) throw new Error(`${missing} is missing.`);
  return given;
}

function timeIn(timeZone, now) {
  let format;
  try {
    format = new Intl.DateTimeFormat("en-GB", {
      timeZone, weekday: "long", year: "numeric", month: "long", day: "numeric",
      hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "longOffset",
    });
  } catch {
    throw new Error(`There is no time zone ${JSON.stringify(timeZone)}. Names are such as Europe/Berlin.`);
  }
  const part = Object.fromEntries(format.formatToParts(now).map(({ type, value }) => [type, value]));
  return {
    date: `${part.weekday}, ${part.day} ${part.month} ${part.year}`,
    time: `${part.hour}:${part.minute}:${part.second}`,
    timezone: format.resolvedOptions().timeZone,
    utc_offset: part.timeZoneName.replace("GMT", "") || "+00:00",
  };
}
