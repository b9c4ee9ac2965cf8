// The pictures, in the order in which they are listed.

import { attentionKinds } from "./attention_kinds.js";
import { batching } from "./batching.js";
import { costs } from "./costs.js";
import { decisionTree } from "./decision_tree.js";
import { devices } from "./devices.js";
import { flashTiles } from "./flash_tiles.js";
import { kvGrowth } from "./kv_growth.js";
import { memoryWall } from "./memory_wall.js";
import { pagedKv } from "./paged_kv.js";
import { parallelism } from "./parallelism.js";
import { quantization } from "./quantization.js";
import { serving } from "./serving.js";
import { speculation } from "./speculation.js";

export const PICTURES = [
  memoryWall,
  kvGrowth,
  attentionKinds,
  flashTiles,
  pagedKv,
  batching,
  serving,
  speculation,
  quantization,
  devices,
  parallelism,
  costs,
  decisionTree,
];
