// The pictures, in the order in which they are listed.

import { costs } from "./costs.js";
import { decisionTree } from "./decision_tree.js";
import { devices } from "./devices.js";
import { memoryWall } from "./memory_wall.js";
import { speculation } from "./speculation.js";

export const PICTURES = [memoryWall, speculation, devices, costs, decisionTree];
