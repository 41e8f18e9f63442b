// What is saved and copied: the picture, the selection as JSON, commands that go on from here.

import { el } from "../dom.js";
import { draw } from "./canvas.js";
import { detailOf } from "./panel/details.js";
import { notesText } from "./panel/notes.js";
import { nodeJson } from "./panel/raw.js";
import { asSvg } from "./svg.js";
import { keyOf } from "./data/skeleton.js";

/** @import { Box, Graph } from "./types.js" */
/** @import { Shape } from "./scene.js" */

const SCALE = 2;
const MOST_PIXELS = 12_000;
const TENSORS = "dump_tensor_data";

/**
 * @param {string} name
 * @param {Blob | null} blob
 */
function save(name, blob) {
  if (!blob) return;
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

/**
 * @param {Shape[]} shapes
 * @param {Box} area
 * @param {Record<string, string>} palette
 */
export function saveSvg(shapes, area, palette) {
  save("graph.svg", new Blob([asSvg(shapes, area, { font: palette.font, background: palette.page })], { type: "image/svg+xml" }));
}

/**
 * With two pixels for each of the screen; fewer if the picture were too large.
 * @param {Shape[]} shapes
 * @param {Box} area
 * @param {Record<string, string>} palette
 */
export function savePng(shapes, area, palette) {
  const zoom = Math.min(SCALE, MOST_PIXELS / area.width, MOST_PIXELS / area.height);
  const [width, height] = [Math.ceil(area.width * zoom), Math.ceil(area.height * zoom)];
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d");
  if (!context) return;
  context.fillStyle = palette.page;
  context.fillRect(0, 0, width, height);
  draw(context, shapes, { x: area.x + area.width / 2, y: area.y + area.height / 2, zoom }, { width, height, font: palette.font });
  canvas.toBlob((blob) => save("graph.png", blob));
}

/**
 * @param {Graph} graph
 * @param {number} node
 */
export const saveJson = (graph, node) => save("node.json", new Blob([nodeJson(graph, node)], { type: "application/json" }));

/** @param {Graph} graph */
export const saveNotes = (graph) => save("graph_notes.json", new Blob([notesText(graph.notes)], { type: "application/json" }));

/**
 * The command that compares the tensors of a node element by element; "" if they were not saved.
 * @param {Graph} graph
 * @param {number} node
 */
export function diffCommand(graph, node) {
  const rows = (detailOf(graph, node)?.rows ?? []).filter((row) => row.file && row.golden_file);
  const worst = rows.find((row) => row.result === "error") ?? rows.find((row) => row.result === "warning") ?? rows[0];
  if (!worst) return "";
  return `trainermon tensor diff ${quoted(`${graph.dump}/${TENSORS}/${worst.file}`)} ${quoted(`${graph.golden_dump}/${TENSORS}/${worst.golden_file}`)}`;
}

/**
 * The configuration of a PrecisionDebugger that saves the tensors of this call, on this step and rank.
 * @param {Graph} graph
 * @param {number} node
 */
export function collectConfig(graph, node) {
  const chosen = { ...(graph.step === null ? {} : { step: [graph.step] }), ...(graph.rank === null ? {} : { rank: [graph.rank] }) };
  const name = keyOf(graph, node).replace(/\.(forward|backward|parameters_grad)(\.\d+)?$/, "");
  return JSON.stringify({ task: "tensor", dump_path: "tensors", level: "mix", ...chosen, tensor: { list: [name] } });
}

/** @param {string} text */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
