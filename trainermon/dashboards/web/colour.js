// Colour maps, computed. A map is a path through OKLab (Ottosson, "A perceptual color space for image processing",
// 2020) with steady steps of lightness and hue, so equal differences of the value look about equally large everywhere.
// Bright is large in both themes, so that a picture in a report means the same whoever took it.

const STEPS = 256;

/** @param {number[]} lab */
function oklabToRgb([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

/** @param {number[]} rgb */
const displayable = (rgb) => rgb.every((part) => part > -1e-4 && part < 1.0001);

/** @param {number} part */
const gamma = (part) => (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055);

/**
 * The nearest colour of the same lightness and hue that a display can show.
 * @param {number} lightness
 * @param {number} chroma
 * @param {number} hueDegrees
 */
function fitted(lightness, chroma, hueDegrees) {
  const hue = (hueDegrees * Math.PI) / 180;
  /** @param {number} c */
  const lab = (c) => [lightness, c * Math.cos(hue), c * Math.sin(hue)];
  let [lo, hi] = [0, chroma];
  if (displayable(oklabToRgb(lab(hi)))) return lab(hi);
  for (let k = 0; k < 20; k++) {
    const middle = (lo + hi) / 2;
    if (displayable(oklabToRgb(lab(middle)))) lo = middle;
    else hi = middle;
  }
  return lab(lo);
}

/**
 * @param {number} a
 * @param {number} b
 * @param {number} t
 */
const mix = (a, b, t) => a + (b - a) * t;

/**
 * 256 packed pixels along `path(t)`.
 * @param {(t: number) => number[]} path
 */
const tabulate = (path) =>
  Uint32Array.from({ length: STEPS }, (_, k) =>
    pack(oklabToRgb(path(k / (STEPS - 1))).map((part) => 255 * gamma(Math.min(1, Math.max(0, part))))));

/**
 * A little-endian RGBA pixel, as ImageData wants it; every browser's platform is little-endian.
 * @param {number[]} rgb
 */
export const pack = ([red, green, blue]) =>
  ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;

/** @param {number} pixel */
export const css = (pixel) => `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;

/** @param {string} text */
export function parseHex(text) {
  const bits = parseInt(text.trim().slice(1), 16);
  return [(bits >> 16) & 255, (bits >> 8) & 255, bits & 255];
}

/** Low to high: deep violet to pale yellow. */
export const sequential = () => tabulate((t) => fitted(mix(0.23, 0.93, t), mix(0.13, 0.14, t), mix(300, 100, t ** 0.9)));

/**
 * Below, ordinary, above: blue, the surface, orange.
 * @param {boolean} dark
 */
export function diverging(dark) {
  const [middle, ends] = dark ? [0.27, 0.8] : [0.965, 0.5];
  return tabulate((t) => {
    const away = Math.abs(2 * t - 1);
    return fitted(mix(middle, ends, away), mix(0.004, 0.16, away), t < 0.5 ? 245 : 50);
  });
}
