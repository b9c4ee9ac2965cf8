// The models and devices that pictures know.

import { CannotBe, readConfig } from "../formulas/index.js";
import { askServer, isFolder, readJson } from "../common/places.js";

const USUAL_MODEL = "llama-3.1-8b";
const USUAL_DEVICE = "H100 SXM";

/**
 * `{ tables, models, devices, usualModel, usualDevice, sample }`: specs and devices by name, and some
 * weights of a model, `{ source, columns, values }` in float32.
 */
export async function loadWorld() {
  const [tables, sample] = await Promise.all([readJson("data.json"), readJson("pictures/sample.json")]);
  const byName = (all) => new Map(all.map((each) => [each.name, each]));
  return {
    tables,
    models: byName(tables.models),
    devices: byName(tables.devices),
    usualModel: USUAL_MODEL,
    usualDevice: USUAL_DEVICE,
    sample: { ...sample, values: fromBfloat16(sample.bfloat16) },
  };
}

/** Little-endian in base64: the upper halves of float32. */
function fromBfloat16(text) {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const words = Uint32Array.from({ length: bytes.length / 2 }, (_, index) => (bytes[2 * index] << 16) | (bytes[2 * index + 1] << 24));
  return new Float32Array(words.buffer);
}

/**
 * The model whose config.json a file is, among those of the world from now on. Families that are not
 * known here are asked of the server. Throws an Error that says what is wrong with the file.
 */
export async function addModel(world, file) {
  const config = parsed(await file.text());
  const name = `${config._name_or_path?.split("/").at(-1) || config.model_type || "my model"} (config.json)`;
  const spec = await specOf(config, name, world.tables);
  world.models.set(name, { ...spec, name, file: "config.json" });
  return { name };
}

function parsed(text) {
  try {
    const config = JSON.parse(text);
    if (config !== null && typeof config === "object" && !Array.isArray(config)) return config;
  } catch {
    // said below
  }
  throw new Error("This is no config.json: it is not a JSON object.");
}

async function specOf(config, name, tables) {
  try {
    return readConfig(config, name, tables);
  } catch (error) {
    if (!(error instanceof CannotBe) || isFolder) throw error;
    return askServer("octavo/spec", { config, name });
  }
}
