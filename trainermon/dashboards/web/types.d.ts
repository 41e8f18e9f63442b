// What the agent and the controller answer, and what several modules of the page hand one another. Read by tsc alone.

/** JSON has no NaN: the agent sends it, and the infinities, as text. */
export type Numeric = number | string | null | undefined;

/** What `el` takes as a child; a list stands for its members. */
export type Child = Node | string | null | undefined;
export type Content = Child | Child[];
export type Props = Record<string, string | number | boolean | null | undefined | ((event: Event) => void)>;

/** The key of a choice and what the reader sees. */
export type Option = string[];

export type Tone = "good" | "calm" | "warn" | "bad";
export type Severity = "info" | "warning" | "critical" | "fatal";

export interface Rank {
  rank: number;
  alive: boolean;
  phase: string;
  step: number;
  lag_s?: number;
  place?: Record<string, number> | null;
}

export interface Series {
  kind: string;
  name?: string;
  slot?: string;
  call?: number;
  micro_step?: number | null;
  stage?: string;
}

export interface Finding {
  series: Series;
  value: Numeric;
  baseline: Numeric;
}

export interface Alert {
  id: string;
  rule: string;
  kind: string;
  severity: Severity;
  state: "pending" | "firing" | "resolved";
  message?: string;
  rank: number;
  attempt: number;
  first_step: number;
  step: number;
  value: Numeric;
  baseline: Numeric;
  statistic: string | null;
  num_series: number;
  findings?: Finding[];
  diagnosis?: string | null;
  report?: string | null;
  runbook?: string;
  acknowledged?: { by: string; time_s: number; note: string } | null;
  silenced?: { by: string; until_s: number; series: string; note: string } | null;
}

/** What a rule found at one step, on however many ranks. */
export interface AlertGroup extends Alert {
  members: Alert[];
}

export interface Dump {
  id: string;
  attempt: number;
  step: number;
  status: string;
  ranks?: number[];
  path?: string;
  diagnosis?: string | null;
}

export interface HeatMapOffer {
  kind: string;
  statistics: string[];
}

/** The figures of the newest step. */
export interface StepFigures {
  step?: number | null;
  loss?: Numeric;
  grad_norm?: Numeric;
  step_time_s?: Numeric;
  tokens_per_second?: Numeric;
}

export interface StepEvent extends StepFigures {
  step: number;
  [measure: string]: Numeric;
}

export interface Run extends StepFigures {
  run_id: string;
  state: string;
  attempt: number;
  host: string;
  output: string;
  version?: string;
  started_s?: number;
  world_size: number;
  ranks: Rank[];
  rules?: number;
  /** How many of them look at the loss alone, and see none as none is recorded. */
  rules_without_loss?: number;
  model?: { parameters: number; is_whole: boolean } | null;
  bytes_per_step?: number;
  skipped_records?: number;
  lag_s: Numeric;
  problem?: string | null;
  takes_orders?: boolean;
  diagnosis_pages?: boolean;
  heatmaps: HeatMapOffer[];
  rank_quantities?: string[];
  /** Answered from files by `trainermon serve`, and what of them cannot be read. */
  stored?: boolean;
  left_out?: string | null;
}

export interface Columns {
  steps: number[];
  series: Record<string, Numeric[]>;
}

/** One number per step; null where nothing was recorded, an infinity where something was not finite. */
export type Column = (number | null)[];

/** Rows × columns, row by row. NaN: no data; +Infinity: contains a non-finite element. */
export interface Grid {
  rows: string[];
  firstStep: number;
  stride: number;
  columns: number;
  values: Float32Array;
}

/** A row of a heat map that the reader has picked. */
export interface PickedRow {
  kind: string;
  row: string;
}

/** A row over the steps, of one rank or of all; `stride` steps share a point, `steps` has the first of them. */
export interface CurveLine {
  rank: number | null;
  name: string;
  colour: number;
  stride: number;
  numLines: number;
  steps: Float64Array;
  low: Float64Array;
  high: Float64Array;
  mean: Float64Array;
  nonfinite: Float64Array;
}

/**
 * The histograms of a row: `first` and `last` step of each, `counts` of its bins, step by step, their sum (`totals`), the
 * largest share that any bin has but those of zero and of what is not finite (0: none), and the bounds of the bins in ascending order.
 */
export interface Histograms {
  first: Float64Array;
  last: Float64Array;
  counts: Float64Array;
  totals: Float64Array;
  largest: number;
  low: number[];
  high: number[];
}

export type Mode = "log" | "linear" | "change" | "peers";

export interface Encoded {
  codes: Int16Array;
  diverging: boolean;
  scale: "ratio" | "linear" | "log";
  lo: number;
  hi: number;
}

export interface Cell {
  row: number;
  column: number;
}

/** Neighbouring rows, `to` exclusive. */
export interface Block {
  text: string;
  index: number | null;
  from: number;
  to: number;
}

/** The plot area of a chart in CSS pixels; `outer` is the width of the whole chart. */
export interface Box {
  left: number;
  top: number;
  width: number;
  height: number;
  right: number;
  outer: number;
}

export interface Axis {
  at: (value: number) => number;
  ticks: (count: number) => number[];
}

/** The sentence on top of the page. */
export interface Assessment {
  tone: Tone;
  headline: string;
  details: string[];
  alert?: Alert;
}

export interface TensorFacts {
  slot: string;
  dtype?: string;
  shape?: number[];
  count: number;
  nans: number;
  infs: number;
  min?: Numeric;
  max?: Numeric;
}

export interface ChainLink {
  module: string;
  class_name?: string;
  direction: string;
  call?: number;
  tensor: TensorFacts;
  omitted?: number;
}

export interface RankFinding {
  rank: number;
  role: string;
  replay: string;
  replay_reason?: string;
  unreduced?: number | null;
  reduced?: number | null;
}

export interface BadParameter {
  name: string;
  count: number;
  nans: number;
  infs: number;
}

/** The answer of `trainermon diagnose`; described in analysis/diagnosis/README.md. */
export interface Report {
  run_id: string;
  step: number | null;
  attempt: number;
  verdict: string;
  headline: string;
  reason: string;
  rank: number | null;
  module: string | null;
  class_name?: string;
  call?: number;
  phase: string;
  micro_step?: number | null;
  tensor?: TensorFacts | null;
  source?: string | null;
  dump?: string | null;
  classification?: { cause: string; operation?: string; reason?: string; collect?: string; source?: string } | null;
  reproducibility?: string | null;
  reproducibility_reason?: string;
  chain: ChainLink[];
  ranks: RankFinding[];
  parameters: BadParameter[];
  api?: string;
  symptom?: string;
  reference?: string;
  levels?: { level: string; answer: string; reason: string; source: string }[];
  contrasts?: { rank: number | null; place: string; value: Record<string, Numeric>; usual: Record<string, Numeric>; relative?: Numeric; expected?: Numeric }[];
  collect?: { reason: string; debugger?: unknown; monitor?: unknown } | null;
  setting_differences?: string[];
  consequences?: string[];
  candidates?: string[];
  evidence?: string[];
}

/** An alert as the controller has it. */
export type JobAlert = Pick<Alert, "rule" | "severity" | "rank" | "step" | "message">;

/** An agent that has never answered has an address alone. */
export interface Agent {
  url: string;
  up: boolean;
  problem: string;
  age_s?: number;
  run_id?: string;
  attempt?: number;
  host?: string;
  world_size?: number;
  /** The last that its ranks have finished. */
  step?: number | null;
  steps_per_s?: number | null;
  ranks?: Rank[];
  /** Those that fire and are not silenced. */
  alerts?: JobAlert[];
  silenced?: JobAlert[];
}

/** Ranks are text, as of 10,000 of them; `coverage` has, by status, which. */
export interface Escalation {
  id: string;
  run: string;
  ranks: string | null;
  task: string;
  num_steps: number;
  first_step: number | null;
  accepted_s: number;
  reason: string;
  outcome: string | null;
  coverage: Record<string, string>;
  detail: string;
}

export interface Standstill {
  text: string;
  culprits: number[];
}

export interface Divergence {
  text: string;
  ranks: number[];
}

export interface Job {
  version: string;
  ready: boolean;
  runs: string[];
  agents: Agent[];
  standstills?: Record<string, Standstill>;
  divergences?: Record<string, Divergence[]>;
  broken_laws?: Record<string, Divergence[]>;
  escalations: Escalation[];
}

export interface JobRank extends Rank {
  node?: string;
  url: string;
  up: boolean;
  alerts: JobAlert[];
  behind: number;
}

export interface JobNode extends Agent {
  name: string;
  alerts: JobAlert[];
  ranks: JobRank[];
}

/** One run of the job, with what is wrong with each of its nodes and ranks. */
export interface JobState {
  run?: string;
  attempt: number;
  nodes: JobNode[];
  ranks: JobRank[];
  living: number;
  /** Whether no rank lives any more. */
  isOver: boolean;
  step: number | null;
  pace: number;
  world: number;
  alerts: JobAlert[];
  silenced: JobAlert[];
  standstill: Standstill | null;
  divergences: Divergence[];
  brokenLaws: Divergence[];
}
