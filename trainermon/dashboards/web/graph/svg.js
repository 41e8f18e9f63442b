// The same list of shapes as an SVG document, to be saved or pasted into a report.

/** @import { Shape } from "./scene.js" */

/**
 * @param {Shape[]} shapes
 * @param {{x: number, y: number, width: number, height: number}} area
 * @param {{font: string, background: string}} look
 */
export function asSvg(shapes, { x, y, width, height }, { font, background }) {
  const size = `viewBox="${[x, y, width, height].map(Math.round).join(" ")}" width="${Math.round(width)}" height="${Math.round(height)}"`;
  const head = `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${escaped(font)}" font-size="12.5">`;
  return `${head}<rect x="${x}" y="${y}" width="100%" height="100%" fill="${background}"/>${shapes.map(element).join("")}</svg>`;
}

/** @param {Shape} shape */
function element(shape) {
  if (shape.kind === "text") {
    const weight = shape.isBold ? ' font-weight="600"' : "";
    const halo = shape.halo ? ` stroke="${shape.halo}" stroke-width="5" stroke-linejoin="round" paint-order="stroke"` : "";
    return `<text x="${shape.x}" y="${shape.y}" fill="${shape.fill}"${weight}${halo}>${escaped(shape.text)}</text>`;
  }
  if (shape.kind === "path") {
    const [x0, y0, x1, y1, x2, y2, x3, y3] = shape.points.map((number) => number.toFixed(1));
    const dash = shape.dashed ? ' stroke-dasharray="4 3"' : "";
    return `<path d="M${x0} ${y0}C${x1} ${y1} ${x2} ${y2} ${x3} ${y3}" fill="none" stroke="${shape.stroke}" stroke-width="${shape.thick}"${dash}/>`;
  }
  const line = shape.stroke ? ` stroke="${shape.stroke}" stroke-width="${shape.thick ?? 1}"${shape.dashed ? ' stroke-dasharray="4 3"' : ""}` : "";
  return `<rect x="${shape.x}" y="${shape.y}" width="${shape.width}" height="${shape.height}" rx="${shape.radius}" fill="${shape.fill}"${line}/>`;
}

/** @param {string} text */
const escaped = (text) =>
  text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter] ?? letter);
