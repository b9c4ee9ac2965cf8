// A pool of KV blocks by the rules of octavo's own (octavo/core/block_manager.py), small enough to be
// watched: reference counts, tables, copy-on-write, cached blocks, and their reuse.

export class Pool {
  constructor(numBlocks, blockSize) {
    this.blockSize = blockSize;
    this.blocks = Array.from({ length: numBlocks }, (_, id) => ({ id, tokens: [], refs: 0, isKnown: false, age: 0 }));
    this.tables = new Map(); // of each sequence: the ids of its blocks, in order
    this.clock = 0;
  }

  /** "used", "cached" (its tokens are known, and no request holds it) or "free". */
  stateOf({ refs, isKnown }) {
    if (refs > 0) return "used";
    return isKnown ? "cached" : "free";
  }

  tokensOf(name) {
    return this.tables.get(name).flatMap((id) => this.blocks[id].tokens);
  }

  /** A sequence begins: full blocks that hold its first tokens already are shared. How many were;
   * null where the pool has no room for the rest, and nothing has changed. */
  admit(name, prompt) {
    const shared = this.#match(prompt);
    const rest = prompt.slice(shared.length * this.blockSize);
    const idle = shared.filter((id) => this.blocks[id].refs === 0).length;
    if (Math.ceil(rest.length / this.blockSize) > this.numAvailable - idle) return null;
    for (const id of shared) this.blocks[id].refs += 1;
    this.tables.set(name, [...shared]);
    for (const token of rest) this.append(name, token);
    return shared.length;
  }

  /** Another sequence with the same tokens: all blocks are shared, the last, unfilled one too. */
  fork(name, other) {
    const table = this.tables.get(name);
    for (const id of table) this.blocks[id].refs += 1;
    this.tables.set(other, [...table]);
  }

  /** One token more. "in place", "new block", or "copied" where others share the last block; null
   * where the pool has no block left. */
  append(name, token) {
    const table = this.tables.get(name);
    let last = this.blocks[table.at(-1)];
    let how = "in place";
    if (last === undefined || last.tokens.length === this.blockSize) {
      if (this.numAvailable === 0) return null;
      last = this.#take([]);
      table.push(last.id);
      how = "new block";
    } else if (last.refs > 1) {
      if (this.numAvailable === 0) return null;
      last.refs -= 1;
      last = this.#take(last.tokens);
      table[table.length - 1] = last.id;
      how = "copied";
    }
    last.tokens = [...last.tokens, token];
    last.isKnown = last.tokens.length === this.blockSize;
    return how;
  }

  /** The sequence ends: full blocks stay cached until their memory is needed. */
  free(name) {
    for (const id of [...this.tables.get(name)].reverse()) {
      const block = this.blocks[id];
      block.refs -= 1;
      block.age = this.clock += 1;
      if (block.refs === 0 && !block.isKnown) block.tokens = [];
    }
    this.tables.delete(name);
  }

  get numAvailable() {
    return this.blocks.filter(({ refs }) => refs === 0).length;
  }

  /** Slots of used blocks, and how many of them hold a token. */
  get slots() {
    const used = this.blocks.filter(({ refs }) => refs > 0);
    return { all: used.length * this.blockSize, filled: used.reduce((sum, { tokens }) => sum + tokens.length, 0) };
  }

  /** Blocks that begin as the prompt does; its last token is always computed, as its logits are. */
  #match(prompt) {
    const found = [];
    const most = Math.floor((prompt.length - 1) / this.blockSize);
    for (let depth = 0; depth < most; depth += 1) {
      const id = this.#known(prompt.slice(0, (depth + 1) * this.blockSize));
      if (id === undefined) break;
      found.push(id);
    }
    return found;
  }

  /** A block is known by its own tokens and all before them, as keys and values depend on those. */
  #known(tokens) {
    const wanted = tokens.join(" ");
    return this.blocks.find((block) => block.isKnown && block.path === wanted)?.id;
  }

  /** Note what full blocks stand for; called once a sequence has changed. */
  publish() {
    for (const table of this.tables.values()) {
      table.forEach((id, index) => {
        const before = table.slice(0, index).flatMap((other) => this.blocks[other].tokens);
        this.blocks[id].path = [...before, ...this.blocks[id].tokens].join(" ");
      });
    }
  }

  /** A free block, else the least recently used cached one. */
  #take(tokens) {
    const idle = this.blocks.filter(({ refs }) => refs === 0);
    const block = idle.find(({ isKnown }) => !isKnown) ?? idle.reduce((one, other) => (other.age < one.age ? other : one));
    Object.assign(block, { refs: 1, tokens: [...tokens], isKnown: false, path: undefined });
    return block;
  }
}

const words = (text) => text.split(" ");
const TALE = "once a fox met a crow with cheese";

// What happens, one after another: what is done to the pool, and what is to be said of it.
const EVENTS = [
  [(pool) => pool.admit("A", words(`${TALE} and said`)), (shared, pool) => `A asks with 10 tokens: ${count(pool.tables.get("A").length)}, anywhere in the pool.`],
  [(pool) => pool.fork("A", "A′"), () => "A wants two answers: A′ shares every block of the prompt, the unfilled one too. Nothing is copied yet."],
  [(pool) => pool.append("A", "how"), (how) => appended("A", how)],
  [(pool) => pool.append("A′", "what"), (how) => appended("A′", how)],
  [(pool) => pool.append("A", "fine"), (how) => appended("A", how)],
  [(pool) => pool.append("A′", "lovely"), (how) => appended("A′", how)],
  [(pool) => pool.append("A", "feathers"), (how) => appended("A", how)],
  [(pool) => pool.append("A′", "song"), (how) => appended("A′", how)],
  [(pool) => pool.admit("B", words(`${TALE} but the crow flew`)), (shared) => `B asks, and its prompt begins as A’s does: ${count(shared)} shared, and not computed again.`],
  [(pool) => pool.append("B", "away"), (how) => appended("B", how)],
  [(pool) => pool.free("A"), () => "A has its answer. Blocks that only A held are released: full ones stay cached, others are free."],
  [(pool) => pool.free("A′"), () => "A′ has ended too. B still holds what it shares."],
  [(pool) => pool.admit("C", words("tell me a story of a king and a queen who had no cheese at all")), (shared) =>
    shared === null ? "C asks with 16 tokens, and the pool has no room: C waits." : "C asks for something else: free blocks are taken first, then cached ones, least recently used first."],
  [(pool) => pool.free("B"), () => "B has ended. A request that begins with the same tokens finds its blocks in the cache."],
];

export const NUM_EVENTS = EVENTS.length;

/** The pool after so many events, which blocks the last of them wrote, and what it was. */
export function poolAfter(numEvents, numBlocks, blockSize) {
  const pool = new Pool(numBlocks, blockSize);
  let said = "The pool is empty: blocks of the same size, all free.";
  let before = pool.blocks.map(() => "");
  for (const [act, say] of EVENTS.slice(0, numEvents)) {
    before = pool.blocks.map(({ tokens }) => tokens.join(" "));
    const result = act(pool);
    pool.publish();
    said = say(result, pool);
  }
  const written = pool.blocks.filter(({ id, tokens, refs }) => refs > 0 && tokens.join(" ") !== before[id]).map(({ id }) => id);
  return { pool, said, written };
}

function appended(name, how) {
  return {
    "in place": `${name} writes a token into its last block, which is its own.`,
    "new block": `${name} writes a token: its last block is full, so it takes another one.`,
    copied: `${name} writes a token into a block that is shared: it is copied first, and only it.`,
  }[how] ?? `${name} has no room for its token and waits.`;
}

function count(blocks) {
  return blocks === 1 ? "1 block" : `${blocks} blocks`;
}
