// What can be taken away from the page: charts as one picture, the numbers of the steps as a table.

import { getTable } from "../api.js";
import { el } from "../dom.js";
import { theme } from "../theme.js";

/** @import { Track } from "../track.js" */

const MARGIN = 16;
const TITLE = 26;

/**
 * @param {Blob} blob
 * @param {string} name
 */
function save(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/**
 * A run's name as a file's.
 * @param {string} text
 */
export const fileName = (text) => text.replace(/[^\w.-]+/g, "_").slice(0, 100) || "run";

/**
 * Fetches a table and saves it; unlike a link, it can say why there is none.
 * @param {string} address
 * @param {string} name
 */
export const saveTable = async (address, name) => save(await getTable(address), name);

/**
 * The charts, one below the other with their titles, as they are on the page.
 * @param {Track[]} tracks
 * @param {string} heading
 * @param {string} name
 */
export function savePicture(tracks, heading, name) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(...tracks.map(({ plot }) => plot.clientWidth)) + 2 * MARGIN;
  const height = tracks.reduce((sum, track) => sum + track.height + TITLE, 2 * MARGIN + TITLE);
  const canvas = el("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const context = canvas.getContext("2d");
  if (!context) return;
  context.scale(ratio, ratio);
  context.fillStyle = theme.panel;
  context.fillRect(0, 0, width, height);
  context.textBaseline = "middle";
  context.fillStyle = theme.ink;
  context.font = `600 15px ${theme.font}`;
  context.fillText(heading, MARGIN, MARGIN + TITLE / 2);
  let y = MARGIN + TITLE;
  for (const track of tracks) {
    context.font = `600 13px ${theme.font}`;
    context.fillStyle = theme.ink;
    const title = track.title.textContent ?? "";
    context.fillText(title, MARGIN, y + TITLE / 2);
    const after = MARGIN + context.measureText(title).width + 12;
    context.font = `12px ${theme.font}`;
    context.fillStyle = theme.muted;
    context.fillText(track.hint.textContent ?? "", after, y + TITLE / 2);
    context.drawImage(track.base, MARGIN, y + TITLE, track.plot.clientWidth, track.height);
    y += track.height + TITLE;
  }
  canvas.toBlob((blob) => blob && save(blob, name));
}
