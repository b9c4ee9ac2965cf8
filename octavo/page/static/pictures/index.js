// The pictures, in the order in which they are listed.

import { memoryWall } from "./memory_wall.js";

export const PICTURES = [memoryWall];
