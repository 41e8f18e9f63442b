// The graphs of all ranks. Each is read when it is first looked at: its columns are pieces, which ranks may share.

/** @import { Column, Columns, Graph, GraphHeader, Judged, Member, Skeleton } from "../types.js" */
/** @typedef {(number: number) => Promise<ArrayBuffer>} ReadPiece */

/** @type {Record<Column["type"], (bytes: ArrayBuffer) => {length: number}>} */
const ARRAYS = {
  u8: (bytes) => new Uint8Array(bytes),
  i32: (bytes) => new Int32Array(bytes),
  f32: (bytes) => new Float32Array(bytes),
  json: (bytes) => new Uint8Array(bytes),
};

export class GraphStore {
  /**
   * @param {GraphHeader} header
   * @param {ReadPiece} readPiece
   */
  constructor(header, readPiece) {
    this.header = header;
    this.readPiece = readPiece;
    /** @type {Map<number, Promise<unknown>>} */
    this.columns = new Map();
    /** @type {Map<number, Promise<Skeleton>>} */
    this.skeletons = new Map();
    /** @type {Map<string, Uint8Array>} */
    this.worst = new Map();
    /** @type {Map<Member, Judged>} */
    this.judged = new Map();
    /** @type {Map<Member, Graph>} */
    this.graphs = new Map();
  }

  get members() {
    return this.header.members;
  }

  /**
   * Reads how the nodes of a rank are judged.
   * @param {Member} member
   * @returns {Promise<Judged>}
   */
  async judge(member) {
    const known = this.judged.get(member);
    if (known) return known;
    const [skeleton, columns] = await Promise.all([this.#skeleton(member.skeleton), this.#read(member.verdicts)]);
    const { golden, notes, keeps_notes, served } = this.header;
    const own = /** @type {Pick<Judged, "verdicts" | "nonfinite" | "meeting_nodes" | "meeting_numbers">} */ (columns);
    const worst = this.#worst(member, skeleton, own.verdicts);
    /** @type {Judged} */
    const judged = { ...member, ...skeleton, ...own, worst, member, golden, notes, keeps_notes, served };
    this.judged.set(member, judged);
    return judged;
  }

  /**
   * Reads all of a rank.
   * @param {Member} member
   * @returns {Promise<Graph>}
   */
  async load(member) {
    const known = this.graphs.get(member);
    if (known) return known;
    const [judged, columns, code] = await Promise.all([this.judge(member), this.#read(member.columns), this.#column("code", this.header.code)]);
    const graph = /** @type {Graph} */ ({ ...judged, ...columns, code });
    this.graphs.set(member, graph);
    return graph;
  }

  /**
   * The relative errors at the nodes of a rank.
   * @param {Member} member
   * @returns {Promise<Float32Array>}
   */
  async errors(member) {
    return /** @type {Float32Array} */ (await this.#column("errors", member.columns.errors));
  }

  /** @param {number} number */
  #skeleton(number) {
    let found = this.skeletons.get(number);
    if (!found) {
      const { count, columns } = this.header.skeletons[number];
      found = this.#read(columns).then((read) => completed(count, read));
      this.skeletons.set(number, found);
      found.catch(() => this.skeletons.delete(number));
    }
    return found;
  }

  /**
   * The worst verdict within each node; ranks that are built and judged alike share it.
   * @param {Member} member
   * @param {Skeleton} skeleton
   * @param {Uint8Array} verdicts
   */
  #worst(member, { parents }, verdicts) {
    const key = `${member.skeleton} ${member.verdicts.verdicts.piece}`;
    const known = this.worst.get(key);
    if (known) return known;
    const worst = verdicts.slice();
    for (let node = worst.length - 1; node > 0; node--) if (worst[node] > worst[parents[node]]) worst[parents[node]] = worst[node];
    this.worst.set(key, worst);
    return worst;
  }

  /**
   * @param {Columns} columns
   * @returns {Promise<Record<string, any>>}
   */
  async #read(columns) {
    return Object.fromEntries(await Promise.all(Object.entries(columns).map(async ([name, column]) => [name, await this.#column(name, column)])));
  }

  /**
   * @param {string} name
   * @param {Column} column
   */
  #column(name, column) {
    let found = this.columns.get(column.piece);
    if (!found) {
      found = this.readPiece(column.piece).then((bytes) => unpacked(name, column, bytes));
      this.columns.set(column.piece, found);
      found.catch(() => this.columns.delete(column.piece));
    }
    return found;
  }
}

/**
 * @param {string} name
 * @param {Column} column
 * @param {ArrayBuffer} bytes
 */
function unpacked(name, { type, count }, bytes) {
  const numbers = ARRAYS[type](bytes);
  if (numbers.length !== count) throw new Error(`of ${name} there are ${numbers.length} numbers where ${count} were expected: load the page again`);
  return type === "json" ? JSON.parse(new TextDecoder().decode(bytes)) : numbers;
}

/**
 * Adds what follows from the columns: parents from sizes, both ends of edges, and where keys end.
 * @param {number} count
 * @param {Record<string, any>} columns
 * @returns {Skeleton}
 */
function completed(count, { edge_gaps: gaps, edge_lengths: lengths, key_lengths: keyLengths, ...columns }) {
  const consumers = summed(gaps);
  const producers = consumers.map((consumer, edge) => consumer - lengths[edge]);
  const rest = /** @type {Omit<Skeleton, "count" | "parents" | "consumers" | "producers" | "key_ends">} */ (columns);
  return { ...rest, count, parents: parentsOf(rest.sizes), consumers, producers, key_ends: summed(keyLengths) };
}

/** @param {Int32Array} numbers */
function summed(numbers) {
  let sum = 0;
  return numbers.map((number) => (sum += number));
}

/** @param {Int32Array} sizes */
function parentsOf(sizes) {
  const parents = new Int32Array(sizes.length);
  let open = -1;
  for (let node = 0; node < sizes.length; node++) {
    while (open >= 0 && node >= open + sizes[open]) open = parents[open];
    parents[node] = open;
    open = node;
  }
  return parents;
}
