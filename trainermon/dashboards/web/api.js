// The only module that talks to the agent. Addresses are relative, so the page also works behind a path prefix
// (a notebook's proxy, an ingress).

/** @import { CurveLine, Grid, Histograms, Numeric, PickedRow } from "./types.js" */

/**
 * JSON has no NaN: the agent sends it, and the infinities, as text.
 * @param {Numeric} value
 */
export function number(value) {
  if (value === null || value === undefined) return null;
  return Number(value);
}

/**
 * A value of a step: null where nothing was recorded, infinity where something was not finite.
 * @param {Numeric} value
 */
export function measured(value) {
  const read = number(value);
  return read === null || Number.isFinite(read) ? read : Infinity;
}

/**
 * @param {string} path
 * @returns {Promise<unknown>}
 */
export async function getJson(path) {
  const reply = await fetch(path, { headers: { Accept: "application/json" }, cache: "no-store" });
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.json();
}

/** @param {Response} reply */
async function reason(reply) {
  const body = await reply.json().catch(() => null);
  return typeof body?.detail === "string" ? body.detail : `${reply.status} ${reply.statusText}`;
}

/**
 * Rows × columns of float32, raw: 400 000 cells are 1.6 MB and no parsing, where JSON took 8.4 MB and half a second.
 * NaN is a cell without data, +Infinity one that contains a non-finite element.
 * @param {string} path
 * @returns {Promise<Grid>}
 */
export async function getGrid(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(await reason(reply));
  const buffer = await reply.arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const start = (4 + size + 3) & ~3;
  const values = new Float32Array(buffer, start, header.rows.length * header.columns);
  return {
    rows: header.rows,
    firstStep: header.first_step,
    stride: Math.max(1, header.stride),
    columns: header.columns,
    values,
  };
}

/**
 * @param {PickedRow} picked
 * @param {boolean} byRank
 * @param {[number, number] | null} range
 */
const rowQuery = ({ kind, row }, byRank, range) => new URLSearchParams({ kind, row, ranks: byRank ? "each" : "merged", ...stepsQuery(range) });

/**
 * @param {[number, number] | null} range
 * @returns {Record<string, string>}
 */
const stepsQuery = (range) => (range ? { first: String(range[0]), last: String(range[1]) } : {});

/**
 * The numbers of the steps as they are stored, of every rank; the lines of the page are thinned, and merged over ranks.
 * @param {[number, number] | null} range
 */
export const stepsAddress = (range) => `api/steps.csv?${new URLSearchParams(stepsQuery(range))}`;

/** @param {string} path */
export async function getTable(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.blob();
}

/**
 * @param {PickedRow} picked
 * @param {{statistic: string, byRank: boolean, range: [number, number] | null, points: number}} choice
 */
export function curveAddress(picked, { statistic, byRank, range, points }) {
  const query = rowQuery(picked, byRank, range);
  query.set("statistic", statistic);
  query.set("points", String(points));
  return `api/row?${query}`;
}

/**
 * @param {PickedRow} picked
 * @param {boolean} byRank
 * @param {[number, number] | null} range
 */
export const tableAddress = (picked, byRank, range) => `api/row.csv?${rowQuery(picked, byRank, range)}`;

/**
 * The lines of a row: five columns of float64 each, step, lowest, highest, mean, how many elements were not finite.
 * @param {string} path
 * @returns {Promise<CurveLine[]>}
 */
export async function getCurve(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(await reason(reply));
  const buffer = await reply.arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  // Views of float64 must begin at a multiple of 8; the header takes care of that.
  let start = 4 + size;
  /** @param {number} length */
  const column = (length) => {
    const values = new Float64Array(buffer, start, length);
    start += 8 * length;
    return values;
  };
  return header.lines.map((/** @type {{rank: number | null, size: number}} */ { rank, size: length }) => ({
    rank, stride: header.stride, numLines: header.num_lines, name: "", colour: 0,
    steps: column(length), low: column(length), high: column(length), mean: column(length), nonfinite: column(length),
  }));
}

/**
 * @param {PickedRow} picked
 * @param {[number, number] | null} range
 * @param {number} points
 */
export function histogramAddress(picked, range, points) {
  const query = rowQuery(picked, false, range);
  query.set("points", String(points));
  return `api/histograms?${query}`;
}

/**
 * @param {PickedRow} picked
 * @param {[number, number] | null} range
 */
export const histogramTableAddress = (picked, range) => `api/histograms.csv?${rowQuery(picked, false, range)}`;

/**
 * The histograms of a row: first and last step of each, and the counts of its 128 bins, all float64.
 * @param {string} path
 * @returns {Promise<Histograms>}
 */
export async function getHistograms(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(await reason(reply));
  const buffer = await reply.arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const [begin, length, bins] = [4 + size, header.size, header.bounds.length];
  const counts = new Float64Array(buffer, begin + 16 * length, bins * length);
  const totals = Float64Array.from({ length }, (_, at) => counts.subarray(at * bins, (at + 1) * bins).reduce((sum, count) => sum + count, 0));
  // Exact zeros, and what is not finite, are no part of a distribution: next to most zeros, the rest would be one colour.
  const isRange = header.bounds.map((/** @type {(number | null)[]} */ [low, high]) => low !== high);
  let largest = 0;
  for (let k = 0; k < counts.length; k++) if (isRange[k % bins]) largest = Math.max(largest, counts[k] / totals[Math.floor(k / bins)] || 0);
  return {
    first: new Float64Array(buffer, begin, length), last: new Float64Array(buffer, begin + 8 * length, length), counts, totals, largest,
    low: header.bounds.map((/** @type {(number | null)[]} */ [low]) => low ?? -Infinity),
    high: header.bounds.map((/** @type {(number | null)[]} */ [, high]) => high ?? Infinity),
  };
}

/**
 * Server-sent events. `onState` hears "open" and "lost"; after a loss the browser retries by itself unless the server
 * answered with an error, in which case we do.
 * @template {Record<string, unknown>} Events
 * @param {{[Type in keyof Events]: (event: Events[Type]) => void}} handlers
 * @param {(state: "open" | "lost") => void} onState
 */
export function listen(handlers, onState) {
  const source = new EventSource("events");
  for (const [type, handle] of Object.entries(handlers)) {
    source.addEventListener(type, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("open", () => onState("open"));
  source.addEventListener("error", () => {
    onState("lost");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(handlers, onState), 3000);
  });
}

/**
 * The page's own address of a diagnosis, or null. Built from parts: a foreign address never becomes a link.
 * @param {string | null | undefined} address
 */
export function diagnosisHash(address) {
  const match = /(?:^|\/)diagnosis\/([^/?#]+)\/(\d+)\/(\d+)$/.exec(address ?? "");
  return match && `#/diagnosis/${match[1]}/${match[2]}/${match[3]}`;
}

/**
 * Whether nothing more will come of a run: it is over, however it ended.
 * @param {{state: string} | null} run
 */
export const hasEnded = (run) => ["finished", "stopped", "interrupted", "killed", "failed", "crashed"].includes(run?.state ?? "");

/**
 * Address of the graph with the dump of this id, attempt and step.
 * @param {{id: string, attempt: number | string, step: number | string}} dump
 */
export const graphAddress = ({ id, attempt, step }) => `graph/${encodeURIComponent(id)}/${attempt}/${step}/?of=step${step}`;
