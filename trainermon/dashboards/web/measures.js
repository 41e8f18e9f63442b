// The numbers of a step beside loss and gradient norm: which there may be, and the chart that shows one at a time.

import { el, select, setText } from "./dom.js";
import { LineChart } from "./lines.js";
import { formatCount, formatMeasured, formatSeconds } from "./scales.js";

/** @import { LineOptions } from "./lines.js" */
/** @import { Lines } from "./view.js" */
/** @typedef {{title: string, hint: string, log?: boolean, format?: (value: number | null) => string}} Measure */

/** @param {number | null} value */
const formatMemory = (value) => (value !== null && Number.isFinite(value) ? `${(value / 2 ** 30).toFixed(1)} GiB` : formatMeasured(value));

/** @param {number | null} value */
const formatClock = (value) => (value !== null && Number.isFinite(value) ? `${Math.round(value / 1e6)} MHz` : formatMeasured(value));

/**
 * In the order of the choice; the first one that a run has is shown first.
 * @type {Record<string, Measure>}
 */
const MEASURES = {
  rl_mean_abs: { title: "Rollout against trainer", hint: "mean difference of log-probabilities", log: true },
  rl_ratio: { title: "Importance ratio", hint: "trainer over rollout, mean; 1 if what was logged was sampled from" },
  rl_ess: { title: "Effective samples", hint: "share of the sampled tokens that count" },
  learning_rate: { title: "Learning rate", hint: "the largest of the parameter groups" },
  clip_ratio: { title: "Clip ratio", hint: "what clipping multiplied the gradients by" },
  loss_scale: { title: "Loss scale", hint: "what the loss was multiplied by", log: true, format: (value) => (value !== null && value >= 1000 && Number.isFinite(value) ? formatCount(value) : formatMeasured(value)) },
  skipped: { title: "Skipped steps", hint: "1 where the framework skipped the step" },
  tokens_per_second: { title: "Tokens per second", hint: "of all ranks of this node" },
  accelerator_utilization: { title: "Utilisation", hint: "share of time in which the accelerator computed, of the least busy rank" },
  accelerator_memory_bytes: { title: "Accelerator memory", hint: "in use on the fullest accelerator of this node", format: formatMemory },
  accelerator_power_watts: { title: "Power", hint: "watts of all accelerators of this node's ranks" },
  accelerator_temperature_celsius: { title: "Temperature", hint: "°C of the hottest accelerator" },
  accelerator_clock_hertz: { title: "Accelerator clock", hint: "of the slowest accelerator", format: formatClock },
  accelerator_throttled: { title: "Throttled", hint: "1 where heat or the power supply slows an accelerator down" },
  step_time: { title: "Step time", hint: "of the slowest rank", format: formatSeconds },
};

export const MEASURE_NAMES = Object.keys(MEASURES);

/**
 * The measures that `lines` has; every run has a step time, which is not worth a chart when it is alone.
 * @param {Lines} lines
 */
export function measuresOf({ series }) {
  const found = MEASURE_NAMES.filter((name) => series[name]);
  return found.length === 1 && found[0] === "step_time" ? [] : found;
}

export class MeasureChart extends LineChart {
  #numOffered = 0;

  /** @param {Pick<LineOptions, "parent" | "view" | "lines" | "alerts"> & {offered: string[]}} options */
  constructor({ offered, ...track }) {
    super({ ...track, name: offered[0], colour: "accent", log: false, title: "", hint: "", label: "A number of each step" });
    this.choice = el("span");
    this.controls.prepend(this.choice);
    this.offer(offered);
    this.#choose(offered[0]);
  }

  /**
   * Keeps the choice: what a run has had, it has.
   * @param {string[]} names
   */
  offer(names) {
    if (names.length === this.#numOffered) return;
    this.#numOffered = names.length;
    const options = names.map((name) => [name, MEASURES[name].title.toLowerCase()]);
    this.choice.replaceChildren(select("Number of the step", options, this.name, (name) => this.#choose(name)));
  }

  /** @param {string} name */
  #choose(name) {
    const { title, hint, log = false, format = formatMeasured } = MEASURES[name];
    this.name = name;
    this.format = format;
    setText(this.title, title);
    setText(this.hint, hint);
    this.setLog(log);
  }
}
