// Grafana's heat map is in no npm package: this one draws the same cells and colours after the same options.
import { formattedValueToString, getValueFormat } from '@grafana/data';
import * as chromatic from 'd3-scale-chromatic';
import { useEffect, useRef } from 'react';

import { from, to } from './queries.js';

const TWO_SIDED = new Set(['RdBu', 'RdYlBu', 'Spectral']);
const KEPT_IN_DARK = new Set(['Turbo', 'Viridis', 'Magma']);

const colourOf = (scheme) => {
  const interpolate = chromatic[`interpolate${scheme}`];
  const turned = TWO_SIDED.has(scheme) || !KEPT_IN_DARK.has(scheme);
  return (share) => interpolate(turned ? 1 - share : share);
};

const nameOf = (frame) => frame.fields[1].config.displayNameFromDS;

// Counts up to a bound become counts between bounds, smallest bound first.
function apart(frames) {
  const sorted = [...frames].sort((a, b) => bound(nameOf(a)) - bound(nameOf(b)));
  return sorted.map((frame, place) => {
    if (!place) return frame;
    const below = new Map(sorted[place - 1].fields[0].values.map((time, i) => [time, sorted[place - 1].fields[1].values[i]]));
    const values = frame.fields[1].values.map((value, i) => value - (below.get(frame.fields[0].values[i]) ?? 0));
    return { ...frame, fields: [frame.fields[0], { ...frame.fields[1], values }] };
  });
}

const bound = (name) => (name === '+Inf' ? Infinity : parseFloat(name));

export function Heat({ panel, frames, width, height }) {
  const canvas = useRef(null);
  const { options } = panel;
  useEffect(() => draw(canvas.current, panel, frames, width, height), [width, height]);
  return <canvas ref={canvas} width={2 * width} height={2 * height} style={{ width, height }} aria-label={options.color.scheme} />;
}

function draw(canvas, panel, all, width, height) {
  const { options } = panel;
  const buckets = panel.targets[0].format === 'heatmap';
  const frames = buckets ? apart(all) : all;
  const pen = canvas.getContext('2d');
  pen.scale(2, 2);
  pen.font = '12px Inter, Helvetica, Arial, sans-serif';
  pen.textBaseline = 'middle';
  const texts = frames.map((frame) => (buckets ? text(options.yAxis.unit, bound(nameOf(frame))) : nameOf(frame)));
  const left = Math.min(width / 3, Math.max(...texts.map((t) => pen.measureText(t).width)) + 14);
  const above = 6;
  const bottom = height - 52;
  const rows = frames.length;
  const high = (bottom - above) / rows;
  const hidden = options.filterValues?.le ?? 1e-9;
  const known = frames.flatMap((frame) => frame.fields[1].values.filter((v) => v !== null && Number.isFinite(v) && v > hidden));
  const low = options.color.min ?? Math.min(...known);
  const most = options.color.max ?? Math.max(...known);
  const colour = colourOf(options.color.scheme);
  const x = (time) => left + ((time / 1000 - from) / (to - from)) * (width - left);
  const top = (row) => above + (options.yAxis.reverse ? row : rows - 1 - row) * high;
  const gap = high > 4 ? options.cellGap : 0;
  frames.forEach((frame, row) => {
    const times = frame.fields[0].values;
    const wide = ((width - left) * (frame.fields[0].config.interval / 1000)) / (to - from);
    frame.fields[1].values.forEach((value, i) => {
      if (value === null || !Number.isFinite(value) || value <= hidden) return;
      pen.fillStyle = colour(Math.max(0, Math.min(1, (value - low) / (most - low || 1))));
      pen.fillRect(x(times[i]) - wide, top(row) + gap / 2, wide + (gap ? -gap / 2 : 0.5), high - gap + (gap ? 0 : 0.5));
    });
  });
  pen.fillStyle = '#ccccdc';
  pen.textAlign = 'right';
  const every = Math.ceil(15 / high);
  texts.forEach((t, row) => row % every || pen.fillText(t, left - 8, top(row) + high / 2));
  timeAxis(pen, x, bottom);
  if (known.length) colourBar(pen, colour, text(options.cellValues.unit, low, options.cellValues.decimals), text(options.cellValues.unit, most, options.cellValues.decimals), left, bottom);
}

const text = (unit, value, decimals) =>
  value === Infinity ? '+Inf' : formattedValueToString(getValueFormat(unit)(value, decimals));

function timeAxis(pen, x, bottom) {
  const every = [60, 300, 600, 900, 1800].find((s) => (to - from) / s <= 8) ?? 3600;
  pen.textAlign = 'center';
  for (let time = Math.ceil(from / every) * every; time <= to; time += every) {
    pen.fillText(new Date(time * 1000).toISOString().slice(11, 16), x(time * 1000), bottom + 12);
  }
}

function colourBar(pen, colour, low, high, left, bottom) {
  for (let place = 0; place < 200; place += 1) {
    pen.fillStyle = colour(place / 199);
    pen.fillRect(left + 60 + place, bottom + 30, 1.5, 10);
  }
  pen.fillStyle = '#ccccdc';
  pen.textAlign = 'right';
  pen.fillText(low, left + 52, bottom + 36);
  pen.textAlign = 'left';
  pen.fillText(high, left + 268, bottom + 36);
}
