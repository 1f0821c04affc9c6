"use strict";
const RIGHT = 10, BOTTOM = 32, SHADES = 32;
const byId = id => document.getElementById(id);
const say = (id, text) => { byId(id).textContent = text ?? "–"; };
const show = (id, shown) => byId(id).toggleAttribute("hidden", !shown);
const short = (number, digits = 3) => Number(number.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 20 });
const many = number => number.toLocaleString("en");
const bytes = n => n < 1e3 ? `${many(n)} B` : n < 999.5e3 ? `${short(n / 1e3)} kB` : n < 999.5e6 ? `${short(n / 1e6)} MB` : `${short(n / 1e9)} GB`;
const percent = fraction => fraction === 0 ? "0 %" : `${short(100 * fraction)} %`;
const span = s => s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} d`;
const clock = time => new Date(1000 * time).toLocaleTimeString("en-GB");
const date = time => new Date(1000 * time).toLocaleString("sv-SE");
const plural = (n, what) => `${many(n)} ${what}${n === 1 ? "" : "s"}`;
let data = null, drawn = "", charts = [], byTime = false, left = 104; // pixels for labels at the left

function add(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}
function element(parent, name, text, kind) {
  const node = parent.appendChild(document.createElement(name));
  if (text !== undefined && text !== null) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}
// Columns of all charts: one for each version, and a few for each gap where versions are missing, so that it can be seen.
function columns(versions) {
  const found = [], wide = Math.ceil(versions.length / 100);
  let before = 0;
  for (const row of versions) {
    if (row.version > before + 1) found.push(...Array(wide).fill({ gap: [before + 1, row.version - 1] }));
    found.push({ row });
    before = row.version;
  }
  return found;
}

// Places of columns: evenly spaced, or by time of encoding. A column reaches halfway to its neighbours.
function start(id, height, cols) {
  const svg = byId(id), width = svg.clientWidth, inner = width - left - RIGHT, step = inner / cols.length;
  let latest = 0;
  const times = cols.map(col => latest = Math.max(latest, col.row?.created_s ?? 0)), from = times[0], lasted = latest - from;
  const mids = times.map((time, i) => left + inner * (!byTime ? (i + 0.5) / cols.length : lasted ? (time - from) / lasted : 0.5));
  const edges = [left, ...mids.slice(1).map((mid, i) => (mid + mids[i]) / 2), width - RIGHT];
  svg.replaceChildren();
  svg.style.height = `${height}px`;
  return { svg, width, height, inner, step, base: height - BOTTOM, mids, edges, cols, from, lasted };
}
function versionLabels({ cols, step, mids }) {
  const nice = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find(n => n * step >= 44) ?? 100000;
  return cols.flatMap(({ row }, i) => row && (cols.length <= 8 || row.version % nice === 0) ? [[mids[i], `${row.version}`]] : []);
}
function timeLabels({ inner, from, lasted, mids }) {
  const offset = 60 * new Date(1000 * from).getTimezoneOffset(), most = inner / 64;
  const unit = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200].find(s => lasted / s <= most) ?? 86400 * Math.ceil(lasted / 86400 / most);
  const labels = [];
  for (let time = Math.ceil((from - offset) / unit) * unit + offset; time <= from + lasted; time += unit)
    labels.push([left + inner * (lasted ? (time - from) / lasted : 0.5), (time - offset) % 86400 ? clock(time).slice(0, unit < 60 ? 8 : 5) : date(time).slice(5, 10)]);
  return labels.length ? labels : [[mids[0], clock(from)]];
}
function drawAxis(chart) {
  const { svg, cols, base, edges, mids } = chart, isFull = row => row.kind !== "delta" || row.anchor_bytes !== null;
  const marked = cols.filter(({ row }) => row && isFull(row)).length * 12 < chart.inner; // more would hide the rest
  add(svg, "line", { class: "axis", x1: left, x2: chart.width - RIGHT, y1: base, y2: base });
  cols.forEach(({ gap, row }, i) => {
    if (gap) add(svg, "rect", { class: "gap", x: edges[i], y: 6, width: Math.max(edges[i + 1] - edges[i], 1), height: base - 6 });
    else if (marked && isFull(row)) add(svg, "line", { class: `mark ${row.kind === "delta" ? "anchor" : row.kind}`, x1: mids[i], x2: mids[i], y1: 6, y2: base });
  });
  let taken = -1e9;
  for (const [x, text] of byTime ? timeLabels(chart) : versionLabels(chart)) {
    const half = 3.5 * text.length, at = Math.max(left - 6 + half, Math.min(x, chart.width - half));
    if (at - half < taken + 8) continue;
    taken = at + half;
    add(svg, "line", { class: "axis", x1: x, x2: x, y1: base, y2: base + 4 });
    add(svg, "text", { x: at, y: base + 15, "text-anchor": "middle" }, text);
  }
  add(svg, "text", { x: left + chart.inner / 2, y: base + 29, "text-anchor": "middle" }, byTime ? "encoded at" : "version");
}
function tick(chart, y, text) {
  add(chart.svg, "line", { class: "grid", x1: left, x2: chart.width - RIGHT, y1: y, y2: y });
  add(chart.svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, text);
}
const steps = high => { const power = 10 ** Math.floor(Math.log10(high)); return power * [1, 2, 5, 10].find(f => f * power >= high * 0.999); };

function drawSizes(cols, compactions) {
  const chart = start("sizes", 210, cols), { svg, base } = chart;
  const rows = cols.flatMap(col => col.row ?? []);
  const all = [...rows.flatMap(r => [r.delta_bytes, r.anchor_bytes]), ...compactions.map(f => f.payload_bytes)].filter(n => n > 0);
  const low = (all.length ? Math.min(...all) : 1e3) / 1.8, high = Math.max(...all, low * 10) * 1.8;
  const y = n => n > 0 ? base - (base - 10) * Math.log(n / low) / Math.log(high / low) : base;
  const wide = high / low > 50;
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const n of wide ? [power] : [power, 2 * power, 5 * power]) if (n >= low && n <= high) tick(chart, y(n), bytes(n));
  drawAxis(chart);
  const at = new Map(cols.map((col, i) => [col.row?.version, i]));
  const x = version => at.has(version) ? chart.mids[at.get(version)] : left;
  for (const compaction of compactions) {
    if (!at.has(compaction.version)) continue;
    const line = add(svg, "line", { class: "compaction", x1: x(compaction.base_version) + 2, x2: x(compaction.version) - 2, y1: y(compaction.payload_bytes), y2: y(compaction.payload_bytes) });
    add(line, "title", {}, `compaction ${compaction.base_version}-${compaction.version}: ${bytes(compaction.payload_bytes)}`);
  }
  const radius = Math.max(1, Math.min(3.2, chart.step * 0.42));
  cols.forEach(({ row }, i) => {
    if (row && row.delta_bytes !== null) add(svg, "circle", { class: "delta", cx: chart.mids[i], cy: y(row.delta_bytes), r: radius });
    if (row && (row.anchor_bytes !== null || row.kind === "reference"))
      add(svg, "rect", { class: "anchor", x: chart.mids[i] - 3.5, y: y(row.anchor_bytes ?? 0) - 3.5, width: 7, height: 7 });
  });
  charts.push(chart);
}

// Lines over versions: each has the name of a colour, and a function from a row to a number or null.
function drawLines(id, cols, lines, least, format) {
  const chart = start(id, 130, cols), { svg, base } = chart, numbers = lines.flatMap(([, of]) => cols.flatMap(({ row }) => (row && of(row)) ?? []));
  const high = steps(Math.max(...numbers, 0) || least), y = n => base - (base - 10) * n / high;
  for (const part of [0, 0.5, 1]) tick(chart, y(part * high), format(part * high));
  drawAxis(chart);
  for (const [colour, of] of lines) {
    let path = "", pen = "M";
    cols.forEach(({ row }, i) => {
      const found = row ? of(row) : null;
      if (found === null) { pen = "M"; return; }
      path += `${pen}${chart.mids[i].toFixed(1)} ${y(found).toFixed(1)}`;
      pen = "L";
      add(svg, "circle", { style: `fill: var(--${colour})`, cx: chart.mids[i], cy: y(found), r: Math.max(1, Math.min(2.2, chart.step * 0.3)) });
    });
    add(svg, "path", { class: "path", style: `stroke: var(--${colour})`, d: path });
  }
  charts.push(chart);
}
const drawFractions = (cols, total) => drawLines("fractions", cols, [["delta", row => row.changed === null ? null : row.changed / Math.max(total, 1)]], 0.01, percent);
function drawAges(cols) {
  const known = cols.some(col => col.row?.token_lag);
  show("tokens", known);
  if (known) drawLines("ages", cols, ["delta", "compaction", "anchor"].map((colour, i) => [colour, row => row.token_lag?.[i] ?? null]).reverse(), 1, n => short(n));
}

// Starts at the first version whose layers are known.
function drawHeat(all, found) {
  const first = all.findIndex(col => found.heat[col.row?.version]), cols = all.slice(0, Math.max(first, 0)).some(col => col.row?.changed) ? all.slice(first) : all;
  const values = Object.values(found.heat).flat().filter(n => n > 0), shown = values.length > 0 && found.layers.length > 0;
  show("scale", shown); show("heat", shown); show("noheat", !shown);
  say("heatnote", "% of its elements" + (cols === all ? "" : `; the newest ${plural(cols.length, "version")}`) + (found.heat_unread ? `; reading headers, ${many(found.heat_unread)} left` : ""));
  if (!shown) { say("noheat", found.heat_unread ? "Reading the headers of the deltas …" : "No version with a delta yet."); return; }
  values.sort((a, b) => a - b); // so that a few tiny layers do not take all the shades
  const cold = values[Math.floor(0.01 * values.length)], hot = values[Math.floor(0.99 * values.length)];
  say("cold", `≤ ${percent(cold)}`); say("hot", `≥ ${percent(hot)}`);
  const size = Math.max(5, Math.min(18, Math.floor(380 / found.layers.length))), top = 4;
  const chart = start("heat", top + size * found.layers.length + BOTTOM, cols), { svg, base, edges, mids, step } = chart;
  const hatch = add(add(svg, "defs", {}), "pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  add(hatch, "line", { class: "axis", x1: 0, x2: 0, y1: 0, y2: 5, "stroke-width": 2 });
  drawAxis(chart);
  const every = Math.ceil(12 / size), letters = Math.floor(left / 7), paths = Array(SHADES).fill("");
  found.layers.forEach((name, row) => {
    if (row % every) return;
    const label = /(?:[^.]+\.)?(?:\d+|[^.]+)$/.exec(name)[0].replace(/^.*\.(?=\D)/, "");
    add(svg, "text", { x: left - 8, y: top + (row + 0.5) * size + 4, "text-anchor": "end" }, label.length > letters ? `…${label.slice(1 - letters)}` : label);
  });
  show("unread", cols.some(col => col.row && !found.heat[col.row.version]));
  const tall = size - (size > 8 ? 0.5 : 0);
  cols.forEach((col, i) => {
    if (!col.row) return;
    const from = Math.max(edges[i], mids[i] - 2 * step), space = Math.min(edges[i + 1], mids[i] + 2 * step) - from; // a pause stays empty
    const width = (space - (space > 6 ? 0.5 : 0)).toFixed(2), x = from.toFixed(2);
    const fractions = found.heat[col.row.version];
    if (!fractions) { add(svg, "rect", { class: "unread", x, y: top, width, height: base - top }); return; }
    add(svg, "rect", { x, y: top, width, height: base - top, fill: "var(--card)" });
    fractions.forEach((fraction, row) => {
      if (fraction <= 0) return;
      const level = hot > cold ? Math.log(Math.min(Math.max(fraction, cold), hot) / cold) / Math.log(hot / cold) : 1;
      paths[Math.round(level * (SHADES - 1))] += `M${x} ${top + row * size}h${width}v${tall}h-${width}z`;
    });
  });
  paths.forEach((d, shade) => {
    if (d) add(svg, "path", { class: "cells", d, fill: `color-mix(in oklab, var(--hot) ${(100 * shade / (SHADES - 1)).toFixed(1)}%, var(--cold))` });
  });
  charts.push({ ...chart, layer: y => y >= top && y < base ? Math.floor((y - top) / size) : null });
}

