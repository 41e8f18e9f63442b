// Shows a generated dashboard with Grafana's own panel library, outside Grafana.
import {
  ThemeContext, applyFieldOverrides, booleanOverrideProcessor, createFieldConfigRegistry, createTheme, dateTime,
  displayNameOverrideProcessor, getFieldDisplayValues, identityOverrideProcessor, numberOverrideProcessor,
  standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry, thresholdsOverrideProcessor,
  transformDataFrame, unitOverrideProcessor, valueMappingsOverrideProcessor,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, Table, TimeSeries } from '@grafana/ui';
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';

import { Heat } from './heat.jsx';
import { framesOf, from, interpolate, to } from './queries.js';

const WIDTH = 1600;
const ROW = 38;
const theme = createTheme({ colors: { mode: 'dark' } });
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now-1h', to: 'now' } };
const NO_DEFAULTS = {
  timeseries: { color: { mode: 'palette-classic' }, custom: { drawStyle: 'line', lineWidth: 1, fillOpacity: 0, showPoints: 'auto', pointSize: 5 } },
};

const property = (id, process) => ({
  id, path: id, name: id, editor: () => null, override: () => null, process, shouldApply: () => true, settings: {},
});
standardFieldConfigEditorRegistry.setInit(() => [
  property('unit', unitOverrideProcessor), property('min', numberOverrideProcessor), property('max', numberOverrideProcessor),
  property('decimals', numberOverrideProcessor), property('displayName', displayNameOverrideProcessor),
  property('color', identityOverrideProcessor), property('noValue', identityOverrideProcessor),
  property('mappings', valueMappingsOverrideProcessor), property('thresholds', thresholdsOverrideProcessor),
  property('links', identityOverrideProcessor), property('fieldMinMax', booleanOverrideProcessor),
]);
const CUSTOM = [
  'drawStyle', 'lineWidth', 'fillOpacity', 'lineInterpolation', 'showPoints', 'pointSize', 'spanNulls', 'stacking', 'gradientMode',
  'axisPlacement', 'axisLabel', 'scaleDistribution', 'hideFrom', 'thresholdsStyle', 'barAlignment', 'barWidthFactor', 'fillBelowTo', 'insertNulls',
  'axisSoftMin', 'axisSoftMax', 'axisCenteredZero', 'lineStyle', 'cellOptions', 'align', 'width', 'filterable',
];
const registry = createFieldConfigRegistry(
  { useCustomConfig: (builder) => CUSTOM.forEach((name) => builder.addCustomEditor(property(name, identityOverrideProcessor))) },
  'panel',
);
standardTransformersRegistry.setInit(() =>
  [...new Map(Object.values(standardTransformers).map((t) => [t.id, t])).values()].map((t) => ({ id: t.id, name: t.name, transformation: t, editor: () => null })),
);

const transformed = (panel, frames) =>
  panel.transformations?.length
    ? new Promise((done, fail) => transformDataFrame(panel.transformations, frames, { interpolate }).subscribe({ next: done, error: fail }))
    : frames;

function fieldConfigOf(panel) {
  const basis = NO_DEFAULTS[panel.type] ?? { color: { mode: 'thresholds' } };
  const { defaults, overrides } = panel.fieldConfig;
  const thresholds = { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };
  const made = { thresholds, ...basis, ...defaults, custom: { ...basis.custom, ...defaults.custom } };
  made.thresholds.steps = made.thresholds.steps.map((s) => ({ ...s, value: s.value ?? -Infinity }));
  for (const o of overrides) for (const p of o.properties) if (p.id === 'thresholds') p.value.steps[0].value ??= -Infinity;
  return { defaults: made, overrides };
}

function View({ panel, width, height }) {
  const [state, setState] = useState({});
  useEffect(() => {
    const load = async () => {
      const frames = await framesOf(panel);
      const shown = await transformed(panel, frames);
      const fieldConfig = fieldConfigOf(panel);
      return applyFieldOverrides({
        data: shown, fieldConfig, fieldConfigRegistry: registry, theme, timeZone: 'utc', replaceVariables: interpolate,
      });
    };
    load().then((frames) => setState({ frames }), (error) => setState({ error: String(error) }));
  }, []);
  if (state.error) return <div className="panel-error" style={{ color: 'red' }}>{state.error}</div>;
  if (!state.frames) return null;
  const mark = (kind) => <i className={`panel-${kind}`} data-title={panel.title} hidden />;
  if (!state.frames.length) {
    const style = { color: '#8e8e9a', height, display: 'flex', alignItems: 'center', justifyContent: 'center', textAlign: 'center' };
    return <div style={style}>{mark('empty')}{panel.fieldConfig.defaults.noValue}</div>;
  }
  return <>{mark('done')}{drawn(panel, state.frames, width, height)}</>;
}

function drawn(panel, frames, width, height) {
  const { options } = panel;
  if (panel.type === 'heatmap') return <Heat panel={panel} frames={frames} width={width} height={height} />;
  if (panel.type === 'table') return <Table data={frames[0]} width={width} height={height} ariaLabel={panel.title} />;
  if (panel.type === 'timeseries') {
    return <TimeSeries frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc" legend={options.legend} options={options} />;
  }
  const values = getFieldDisplayValues({
    fieldConfig: fieldConfigOf(panel), reduceOptions: options.reduceOptions, replaceVariables: interpolate, theme, data: frames,
    sparkline: options.graphMode === 'area', timeZone: 'utc',
  });
  if (panel.type === 'stat') {
    return values.map((v, i) => (
      <BigValue key={i} theme={theme} width={width / values.length} height={height} value={v.display} sparkline={v.sparkline}
        colorMode={options.colorMode} graphMode={options.graphMode} justifyMode={options.justifyMode} textMode={options.textMode} />
    ));
  }
  return values.map((v, i) => (
    <div key={i} style={{ paddingBottom: 6 }}>
      <BarGauge theme={theme} width={width} height={height / values.length - 6} value={v.display} field={v.field}
        display={v.view?.getFieldDisplayProcessor(v.colIndex)} orientation="horizontal" displayMode={options.displayMode}
        namePlacement={options.namePlacement} valueDisplayMode={options.valueMode} showUnfilled={options.showUnfilled} text={options.text}
        alignmentFactors={{ title: 'h.10.attn.weight.bias', text: '9999×' }} />
    </div>
  ));
}

function Dashboard({ body }) {
  const cell = WIDTH / 24;
  const end = Math.max(...body.panels.map((p) => p.gridPos.y + p.gridPos.h)) * ROW;
  const box = { border: '1px solid #34353c', borderRadius: 2, padding: '5px 10px', marginRight: 8, background: '#111217' };
  const names = { datasource: body.tags[1] === 'influxdb' ? 'InfluxDB' : 'Prometheus', run: interpolate('$run'), module: interpolate('$module') };
  return (
    <div style={{ width: WIDTH, margin: 8, color: '#ccccdc', font: '14px Inter, Helvetica, Arial, sans-serif' }}>
      <div style={{ fontSize: 18, margin: '6px 4px 12px' }}>{body.title}</div>
      <div style={{ margin: '0 4px 10px' }}>
        {body.templating.list.map((v) => (
          <span key={v.name} style={box}><b style={{ fontWeight: 500, color: '#9fa7b3' }}>{v.label}</b>&ensp;{names[v.name] ?? 'All'} ▾</span>
        ))}
      </div>
      <div style={{ position: 'relative', height: end }}>
        {body.panels.map((panel) => {
          const { x, y, w, h } = panel.gridPos;
          const style = { position: 'absolute', left: x * cell, top: y * ROW };
          if (panel.type === 'row') return <div key={panel.id} style={{ ...style, padding: '10px 4px', fontSize: 16 }}>▾&ensp;{interpolate(panel.title)}</div>;
          return (
            <div key={panel.id} style={style}>
              <PanelChrome title={panel.title} description={panel.description} width={w * cell - 8} height={h * ROW - 8}>
                {(width, height) => <View panel={panel} width={width} height={height} />}
              </PanelChrome>
            </div>
          );
        })}
      </div>
    </div>
  );
}

const name = new URLSearchParams(location.search).get('dashboard');
const body = await (await fetch(`/dashboards/${name}`)).json();
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}><GlobalStyles /><Dashboard body={body} /></ThemeContext.Provider>,
);
