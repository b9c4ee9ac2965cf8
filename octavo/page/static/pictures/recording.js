// Deployments of a folder, as octavo/page/recorded_deployments.py records them: `parts` are what their
// documents have in common, each told once, and a document has the places of its own.

export class Recording {
  #documents = new Map();

  constructor({ choices, fields, parts, deployments }) {
    Object.assign(this, { choices, fields, parts, deployments });
  }

  /** `{ document }` or `{ error }`; null of what is not recorded. */
  of(name) {
    const row = this.deployments[name];
    if (row === undefined) return null;
    if (typeof row === "string") return { error: row };
    if (!this.#documents.has(name)) this.#documents.set(name, this.#unpacked(row));
    return { document: this.#documents.get(name) };
  }

  #unpacked(row) {
    const all = (places) => places.map((place) => this.parts[place]);
    const found = Object.fromEntries(this.fields.map((name, index) => [name, this.parts[row[index]]]));
    const { memory, stages } = found;
    const computed = ({ rank, ops, communication, ...others }) => ({
      ...others,
      ops: all(ops),
      communication: all(communication),
      rank: { ...rank, matrices: all(rank.matrices), attention: all(rank.attention) },
    });
    return {
      ...computed(found),
      memory: { ...memory, attention: all(memory.attention) },
      stages: stages && { ...stages, kinds: stages.kinds.map(computed) },
    };
  }
}
