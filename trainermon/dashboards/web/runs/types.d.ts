// What `trainermon serve` answers beside a run's own page. Read by tsc alone.

import type { Numeric } from "../types.js";

export interface RunEntry {
  key: string;
  name: string;
  path: string;
  state: "running" | "silent" | "finished" | "stopped" | "interrupted" | "killed" | "failed" | "crashed" | "empty";
  problem: string;
  started_s: number | null;
  last_time_s: number | null;
  attempt: number;
  world_size: number;
  nodes: string[];
  step: number | null;
  loss: Numeric;
  alerts_firing: number;
  alerts: number;
  worst: string | null;
  tags: string[];
  framework: string;
  page: string | null;
}

export interface RunsAnswer {
  runs: RunEntry[];
  folders: string[];
  version: string;
}

export type AxisName = "step" | "time" | "tokens";

export interface RunCurves {
  key: string;
  error?: string;
  steps: number[];
  x: number[];
  series: Record<string, Numeric[]>;
}

export interface CurvesAnswer {
  axis: AxisName;
  runs: RunCurves[];
}

export interface OfferedSeries {
  kind: string;
  label: string;
  statistics: Record<string, string>;
}

export interface DifferencePoint {
  step: number;
  one: Numeric;
  other: Numeric;
  relative: number;
}

export interface DifferenceAnswer {
  name: string;
  num_steps: number;
  first_step: number | null;
  any: DifferencePoint | null;
  beyond_rounding: DifferencePoint | null;
  sentence: string;
  command: string;
}

/** One run's line in a chart; `place` decides its colour, its dashes and its number. */
export interface OverlayLine {
  place: number;
  name: string;
  steps: number[];
  x: number[];
  values: (number | null)[];
}

/** What of the page is in its address. */
export interface AddressState {
  runs: string[];
  axis: AxisName;
  smoothing: number;
  series: string[];
  log: string[];
  search: string;
  state: string;
  tag: string;
  sort: string;
  span: [number, number] | null;
}
