// The models and devices that pictures know.

import { readJson } from "../common/places.js";

const USUAL_MODEL = "llama-3.1-8b";
const USUAL_DEVICE = "H100 SXM";

/** `{ tables, models, devices, usualModel, usualDevice }`: specs and devices by name. */
export async function loadWorld() {
  const tables = await readJson("data.json");
  const byName = (all) => new Map(all.map((each) => [each.name, each]));
  return {
    tables,
    models: byName(tables.models),
    devices: byName(tables.devices),
    usualModel: USUAL_MODEL,
    usualDevice: USUAL_DEVICE,
  };
}
