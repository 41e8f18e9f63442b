// What the modules of the graph's page hand one another. Read by tsc alone.

export interface Column {
  type: "u8" | "i32" | "f32" | "json";
  /** How many numbers; bytes of JSON. */
  count: number;
  /** Equal numbers are equal columns. */
  piece: number;
}

export type Columns = Record<string, Column>;

export interface GraphFinding {
  node: number;
  message: string;
}

/** One argument, parameter or result of a call on both sides; numbers that are not finite are text. */
export interface DetailRow {
  place: string;
  kind: string;
  ours: (number | string | null)[] | null;
  golden: (number | string | null)[] | null;
  error: number | string | null;
  result: string;
  message: string;
  /** What the row was put together from, as `2 parts, tp`. */
  merged?: string;
  /** How many elements are not finite, as `3 NaN, 1 Inf`. */
  nonfinite?: string;
  golden_nonfinite?: string;
  file?: string;
  golden_file?: string;
}

/** Number of the first line that was kept around a frame, that of the frame, and the lines. */
export type KeptCode = [number, number, string[]];

export interface NodeDetail {
  rows: DetailRow[];
  stack: string[];
}

/** Texts by the key of a call or the path of a group, and modules that were matched by hand. */
export interface GraphNotes {
  notes: Record<string, string>;
  matches: { target: string[]; golden: string[] }[];
}

/** What the page's header says of the graph of one rank and step. */
export interface Member {
  label: string;
  dump: string;
  golden_dump: string;
  step: number | null;
  rank: number | null;
  axes: string;
  /** How far ranks were put together: `each`, `tp` or `model`. */
  level: string;
  /** What a reader should know of how it was compared. */
  remarks: string[];
  dtype_names: string[];
  overlays: string[];
  sentence: string;
  findings: GraphFinding[];
  worst_verdict: number;
  /** The largest relative error; null: none is known. */
  worst_error: number | string | null;
  /** The worst verdict of each of equal stretches of the step, a digit each. */
  strip: string;
  /** Number of the first node, counted through all ranks. */
  first_detail: number;
  /** Which of the skeletons it has. */
  skeleton: number;
  verdicts: Columns;
  columns: Columns;
}

export interface GraphHeader {
  version: number;
  golden: string;
  /** Place of the rank that is shown first. */
  first: number;
  served: boolean;
  notes: GraphNotes;
  /** Whether the server keeps them. */
  keeps_notes: boolean;
  code: Column;
  skeletons: { count: number; columns: Columns }[];
  members: Member[];
}

/** What ranks that are built alike have in common. */
export interface Skeleton {
  count: number;
  texts: string[];
  sizes: Int32Array;
  parents: Int32Array;
  structures: Int32Array;
  names: Int32Array;
  classes: Int32Array;
  kinds: Uint8Array;
  directions: Uint8Array;
  sides: Uint8Array;
  /** The edges, in order of their consumers. */
  producers: Int32Array;
  consumers: Int32Array;
  exact: Uint8Array;
  /** The keys of the nodes' calls as UTF-8 one after the other, and where each ends; a group has none. */
  keys: Uint8Array;
  key_ends: Int32Array;
}

/** A graph of which it is known how its nodes are judged. */
export interface Judged extends Omit<Member, "verdicts">, Skeleton {
  member: Member;
  golden: string;
  notes: GraphNotes;
  keeps_notes: boolean;
  served: boolean;
  verdicts: Uint8Array;
  /** The worst verdict of each node and all that is within it. */
  worst: Uint8Array;
  nonfinite: Uint8Array;
  /** The nodes of collectives, and the number of the meeting of each, which ranks that take part have in common. */
  meeting_nodes: Int32Array;
  meeting_numbers: Int32Array;
}

/** The graph of one rank and step, as it is shown. */
export interface Graph extends Judged {
  details: Record<string, NodeDetail>;
  /** Lines of code, as `/a/model.py:118`. */
  line_texts: string[];
  code: Record<string, KeptCode>;
  /** Number of the line that made the call of each node; -1: not known. */
  lines: Int32Array;
  errors: Float32Array;
  norms: Float32Array;
  growths: Float32Array;
  overlay_values: Float32Array;
  /** 0 none, 1 medium, 2 high, 3 critical. */
  overflow: Uint8Array;
  num_bytes: Float32Array;
  dtypes: Uint8Array;
}

/** Neighbours that are shown as one: the nodes of each repetition. */
export interface Fold {
  members: number[][];
}

export interface Opened {
  isOpen: (node: number) => boolean;
  isApart: (node: number) => boolean;
  isHidden?: (node: number) => boolean;
}

export interface Box {
  node: number;
  nodes: number[];
  label: string;
  x: number;
  y: number;
  width: number;
  height: number;
  children: Box[];
  isOpen: boolean;
  isGroup: boolean;
}

export interface Wire {
  from: Box;
  to: Box;
  count: number;
  isExact: boolean;
  /** How many wires it stands for, where so many lead into a box that they are drawn as one. */
  bundled?: number;
}

/** What is seen of the plane: the point in the middle and how many pixels a unit has. */
export interface Camera {
  x: number;
  y: number;
  zoom: number;
}

/** Ranks that are judged alike everywhere: the first of them, and all as places in the list of ranks. */
export interface RankGroup {
  member: Member;
  places: number[];
}

/** A step of those that are shown: the place of its worst rank, how bad it is, and its largest relative error. */
export interface StepSummary {
  step: number | null;
  place: number;
  worst: number;
  error: number;
}

/** What the fills of boxes stand for; `text` is empty where they stand for nothing. */
export interface Colouring {
  fillOf: (box: Box, sizes: Int32Array) => string;
  legend: { text: string; colour: string }[];
  text: string;
}

/** How the boxes are drawn. */
export interface Look {
  selected: number;
  palette: Record<string, string>;
  hits: Set<number>;
  /** Nodes that are selected beside it. */
  others: Set<number>;
  hasNote: (node: number) => boolean;
  near: Map<Box | Wire, number>;
  fillOf: (box: Box) => string;
  cellsOf: (box: Box) => number[];
}

/** A part of the step, from 0 to 1. */
export type Range = readonly [number, number];
