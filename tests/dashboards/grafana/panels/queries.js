// Asks Prometheus and InfluxDB as Grafana's data sources do, and returns their answers as Grafana's data frames.
import { FieldType, renderLegendFormat, toDataFrame } from '@grafana/data';

const page = new URLSearchParams(location.search);
export const to = Number(page.get('to'));
export const from = Number(page.get('from'));
const picked = JSON.parse(page.get('picked'));
const step = Math.max(15, Math.ceil((to - from) / 240));

const variables = {
  ...Object.fromEntries(Object.entries(picked).map(([name, v]) => [name, Array.isArray(v) ? `(${v.join('|')})` : v])),
  __rate_interval: `${Math.max(60, 4 * step)}s`,
  __interval: `${step}s`,
  __range: `${to - from}s`,
  timeFilter: `time >= ${from * 1000}ms and time <= ${to * 1000}ms`,
};

export const interpolate = (text) =>
  text.replace(/\$\{([a-zA-Z_]\w*)(?::\w+)?\}|\$([a-zA-Z_]\w*)/g, (whole, a, b) => variables[a || b] ?? whole);

const number = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : parseFloat(text));

async function answer(url, parameters) {
  const response = await fetch(`${url}?${new URLSearchParams(parameters)}`);
  const body = await response.json();
  const error = body.error || body.results?.[0]?.error;
  if (error) throw new Error(error);
  return body;
}

async function fromPrometheus(target) {
  const query = interpolate(target.expr);
  const { data } = target.instant
    ? await answer('/prometheus/api/v1/query', { query, time: to })
    : await answer('/prometheus/api/v1/query_range', { query, start: from, end: to, step });
  const series = data.result.map((found) => ({ labels: found.metric, rows: found.values || [found.value] }));
  if (target.format === 'table') return series.length ? [tableOf(target.refId, series)] : [];
  return series.map(({ labels, rows }) => {
    const { __name__, ...rest } = labels;
    const name = target.legendFormat === '__auto' ? __name__ || 'Value' : renderLegendFormat(target.legendFormat, labels);
    return frameOf(target.refId, name, rest, rows.map((row) => row[0] * 1000), rows.map((row) => number(row[1])));
  });
}

function tableOf(refId, series) {
  const names = [...new Set(series.flatMap(({ labels }) => Object.keys(labels)))].sort();
  const column = (name) => ({ name, type: FieldType.string, values: series.map(({ labels }) => labels[name] ?? '') });
  const values = series.map(({ rows }) => number(rows[0][1]));
  const times = series.map(({ rows }) => rows[0][0] * 1000);
  return toDataFrame({
    refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: times },
      ...names.map(column),
      { name: `Value #${refId}`, type: FieldType.number, values },
    ],
  });
}

async function fromInfluxDB(target) {
  const parameters = { db: 'trainermon', epoch: 'ms', q: interpolate(target.query.replace(/\$tag_/g, '$$tag_')) };
  const body = await answer('/influxdb/query', parameters);
  const series = body.results[0].series ?? [];
  if (target.resultFormat === 'table') return series.length ? [influxTable(target.refId, series)] : [];
  return series.map(({ tags = {}, values }) => {
    const name = (target.alias || 'Value').replace(/\$tag_(\w+)/g, (_, tag) => tags[tag]);
    return frameOf(target.refId, name, tags, values.map((row) => row[0]), values.map((row) => row[1]));
  });
}

function influxTable(refId, series) {
  const tags = Object.keys(series[0].tags ?? {});
  const rows = series.flatMap(({ tags: own, values }) => values.map((row) => [...tags.map((tag) => own[tag]), ...row]));
  const names = [...tags, 'Time', ...series[0].columns.slice(1)];
  const type = (place) => (place < tags.length ? FieldType.string : place > tags.length ? FieldType.number : FieldType.time);
  return toDataFrame({
    refId,
    fields: names.map((name, place) => ({ name, type: type(place), values: rows.map((row) => row[place]) })),
  });
}

const frameOf = (refId, name, labels, times, values) =>
  toDataFrame({
    refId,
    name,
    fields: [
      { name: 'Time', type: FieldType.time, values: times, config: { interval: step * 1000 } },
      { name: 'Value', type: FieldType.number, labels, config: { displayNameFromDS: name }, values },
    ],
  });

export async function framesOf(panel) {
  const ask = panel.datasource.type === 'influxdb' ? fromInfluxDB : fromPrometheus;
  const frames = (await Promise.all(panel.targets.map(ask))).flat();
  if (panel.targets.length === 1 && frames.length === 1) {
    for (const field of frames[0].fields) if (field.name.startsWith('Value #')) field.name = 'Value';
  }
  return frames;
}
