// The models and devices that pictures know, by name.

import { pack, unpack } from "../common/packing.js";
import { askServer, isFolder, readJson } from "../common/places.js";
import { Recording } from "./recording.js";
import { listTensors } from "./tensors.js";

const USUAL_MODEL = "llama-3.1-8b";
const USUAL_DEVICE = "H100 SXM";

// The name, among models and devices, of what the server has that shows this page.
export const THIS_SERVER = "this";

/**
 * `{ models, devices, kvTypes, recording, usualModel, usualDevice, sample, settings, tensors, files }`: models
 * and devices by name; of a folder, what is recorded of them, else null; some weights of a model,
 * `{ source, columns, values }` in float32; how the engine of this server is set, as limits that
 * it is asked about, or null; `tensors` are names of those that it has, and `files` what was read
 * for pictures, by name.
 */
export async function loadWorld() {
  const [data, sample, here] = await Promise.all([readJson("data.json"), readJson("pictures/sample.json"), askWhatIsServed()]);
  const recording = isFolder ? new Recording(await readJson("deployments.json")) : null;
  const { model, hardware } = recording?.choices ?? { model: data.models, hardware: data.devices };
  const byName = (all) => new Map(all.map((name) => [name, { name }]));
  const world = {
    models: byName(model),
    devices: byName(hardware),
    kvTypes: data.kv_types,
    recording,
    usualModel: USUAL_MODEL,
    usualDevice: USUAL_DEVICE,
    settings: null,
    tensors: [],
    sample: { ...sample, values: fromBfloat16(sample.bfloat16) },
    files: new Map(),
  };
  if (here !== null) addThisServer(world, here);
  return world;
}

/** Have what a picture `needs`, read once. */
export async function readFor({ needs: { file, tensors } }, world) {
  const { files } = world;
  if (file && !files.has(file)) files.set(file, await readJson(file));
  if (tensors && world.tensors.length === 0) world.tensors = await listTensors();
}

/** Null where there is no engine, or a key is needed that has not been given yet. */
async function askWhatIsServed() {
  if (isFolder) return null;
  return askServer("octavo/deployment").catch(() => null);
}

function addThisServer(world, { model, hardware, settings }) {
  if (model !== null) {
    world.models.set(THIS_SERVER, { name: model.name });
    world.settings = { max_model_len: settings.max_model_len, max_num_seqs: settings.max_num_seqs };
    if (settings.step_tokens > 0) world.settings.max_num_batched_tokens = settings.step_tokens;
  }
  if (hardware !== null) world.devices.set(THIS_SERVER, { name: hardware.devices[0].name });
}

/** Little-endian in base64: the upper halves of float32. */
function fromBfloat16(text) {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const words = Uint32Array.from({ length: bytes.length / 2 }, (_, index) => (bytes[2 * index] << 16) | (bytes[2 * index + 1] << 24));
  return new Float32Array(words.buffer);
}

/**
 * The model whose config.json a text is, among those of the world from now on. It has the `config`,
 * and `packed` as an address has it, null where it is too large. Throws an Error that says what is
 * wrong with the text.
 */
export async function addModel(world, text) {
  return addConfig(world, await parsed(() => JSON.parse(text), "This is no config.json"));
}

/** The same of what an address has. */
export async function addPackedModel(world, packed) {
  return addConfig(world, await parsed(() => unpack(packed), "The model in this address cannot be read"));
}

async function parsed(read, otherwise) {
  const config = await Promise.resolve().then(read).catch(() => null);
  if (config !== null && typeof config === "object" && !Array.isArray(config)) return config;
  throw new Error(`${otherwise}: it is not a JSON object.`);
}

async function addConfig(world, config) {
  if (isFolder) throw new Error("A model of your own is computed by a server: run octavo serve, and open its pictures.");
  const [said] = [config._name_or_path, config.model_type, "my model"].filter((each) => typeof each === "string" && each);
  const name = `${said.split("/").at(-1)} (config.json)`;
  await askServer("octavo/spec", { body: { config, name } }); // says what is wrong with it
  const model = { name, file: "config.json", config, packed: await pack(config) };
  world.models.set(name, model);
  return model;
}
