// What of the page is in its address, so that a link or a reload brings it back.

import { stated } from "../address.js";

/** @import { AddressState, AxisName } from "./types.js" */

/** @type {AxisName[]} */
const AXES = ["step", "time", "tokens"];

/** @returns {AddressState} */
export function readAddress() {
  const words = new URLSearchParams(location.hash.replace(/^#\/?\??/, ""));
  const axis = AXES.find((name) => name === words.get("axis")) ?? "step";
  const smoothing = Number(words.get("smoothing"));
  const [from, to] = [words.get("from"), words.get("to")].map((text) => (text === null ? NaN : Number(text)));
  return {
    runs: (words.get("runs") ?? "").split(",").filter(Boolean),
    axis,
    smoothing: smoothing > 0 && smoothing < 1 ? smoothing : 0,
    series: words.getAll("series"),
    log: words.getAll("log"),
    search: words.get("search") ?? "",
    state: words.get("state") ?? "all",
    tag: words.get("tag") ?? "",
    sort: words.get("sort") ?? "",
    span: Number.isFinite(from) && Number.isFinite(to) && from < to ? [from, to] : null,
  };
}

/**
 * The fragment for a state; what is as usual is left out.
 * @param {Partial<AddressState>} state
 */
export function fragment({ runs = [], axis = "step", smoothing = 0, series = [], log = [], search = "", state = "all", tag = "", sort = "", span = null }) {
  const words = new URLSearchParams();
  if (runs.length) words.set("runs", runs.join(","));
  if (axis !== "step") words.set("axis", axis);
  if (smoothing) words.set("smoothing", String(smoothing));
  for (const name of series) words.append("series", name);
  for (const name of log) words.append("log", name);
  if (search) words.set("search", search);
  if (state !== "all") words.set("state", state);
  if (tag) words.set("tag", tag);
  if (sort) words.set("sort", sort);
  const theme = stated("theme"); // theme.js follows it
  if (theme) words.set("theme", theme);
  if (span) for (const [name, value] of [["from", span[0]], ["to", span[1]]]) words.set(String(name), String(value));
  return `#?${words}`;
}

/**
 * Writes the state into the address without a new entry in the history.
 * @param {Partial<AddressState>} state
 */
export const writeAddress = (state) => history.replaceState(null, "", fragment(state));
