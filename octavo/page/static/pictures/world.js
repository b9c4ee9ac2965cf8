// The models and devices that pictures know.

import { CannotBe, readConfig } from "../formulas/index.js";
import { askServer, isFolder, readJson } from "../common/places.js";

const USUAL_MODEL = "llama-3.1-8b";
const USUAL_DEVICE = "H100 SXM";

// The name, among models and devices, of what the server has that shows this page.
export const THIS_SERVER = "this";

/**
 * `{ tables, models, devices, usualModel, usualDevice, sample, settings, files }`: specs and devices
 * by name; some weights of a model, `{ source, columns, values }` in float32; how the engine of this
 * server is set, as knobs of a deployment, or null; `files` are those of `readFor`, by name.
 */
export async function loadWorld() {
  const [tables, sample, here] = await Promise.all([readJson("data.json"), readJson("pictures/sample.json"), askWhatIsServed()]);
  const world = makeWorld(tables, sample);
  if (here !== null) addThisServer(world, here);
  return world;
}

function makeWorld(tables, sample) {
  const byName = (all) => new Map(all.map((each) => [each.name, each]));
  return {
    tables,
    models: byName(tables.models),
    devices: byName(tables.devices),
    usualModel: USUAL_MODEL,
    usualDevice: USUAL_DEVICE,
    settings: null,
    sample: { ...sample, values: fromBfloat16(sample.bfloat16) },
    files: new Map(),
  };
}

/** Have the file that a picture `needs`, read once. */
export async function readFor({ needs: { file } }, { files }) {
  if (file && !files.has(file)) files.set(file, await readJson(file));
}

/** Null where there is no engine, or a key is needed that nobody has given yet. */
async function askWhatIsServed() {
  if (isFolder) return null;
  return askServer("octavo/deployment").catch(() => null);
}

function addThisServer(world, { model, hardware, settings }) {
  const { tables } = world;
  if (model !== null) {
    world.models.set(THIS_SERVER, model);
    world.settings = { maxModelLen: settings.max_model_len, maxNumSeqs: settings.max_num_seqs };
    if (settings.step_tokens > 0) world.settings.stepTokens = settings.step_tokens;
  }
  if (hardware === null) return;
  const [device] = hardware.devices;
  const [efficiencies, limits] = [tables.efficiencies.length, tables.limits.length];
  tables.efficiencies.push(...hardware.efficiencies); // which devices name by their places
  tables.limits.push(...hardware.limits);
  const engines = Object.entries(device.engines).map(([name, [efficiency, limit]]) => [name, [efficiency + efficiencies, limit + limits]]);
  world.devices.set(THIS_SERVER, { ...device, engines: Object.fromEntries(engines) });
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
