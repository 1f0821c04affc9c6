const POLL_MS = 2000, LATE_S = 20, ROWS = 200;
const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6", "#14b8a6", "#ef4444", "#84cc16"];

function table(id, heads, rows) {
  const target = byId(id);
  target.replaceChildren();
  const line = (parent, cells, cell) => {
    const row = element(parent, "tr");
    cells.forEach((value, i) => {
      const node = element(row, cell, typeof value === "function" ? undefined : value, heads[i][1]);
      if (typeof value === "function") value(node);
      node.dataset.head = heads[i][0]; // shown beside the value in a narrow window
    });
  };
  line(element(target, "thead"), heads.map(head => head[0]), "th");
  const body = element(target, "tbody");
  rows.forEach(row => {
    line(body, row, "td");
    if (row.error) { // in a row of its own: it is long, and rare
      const below = element(element(body, "tr", undefined, "below"), "td", row.error, "error");
      below.colSpan = heads.length;
    }
  });
}

function drawLags(lags, colour) {
  show("nolags", !lags.length); show("lagplot", lags.length);
  const svg = byId("lagplot"), height = 130, base = height - 20;
  svg.replaceChildren();
  if (!lags.length) return;
  svg.style.height = `${height}px`;
  const chart = { svg, width: svg.clientWidth }, from = lags[0].time_s, to = lags.at(-1).time_s, high = steps(Math.max(...lags.map(l => l.lag_s), 0.001));
  const x = time => left + (chart.width - left - RIGHT) * (to > from ? (time - from) / (to - from) : 0.5), y = lag => base - (base - 10) * lag / high;
  for (const part of [0, 0.5, 1]) tick(chart, y(part * high), `${short(part * high)} s`);
  add(svg, "text", { x: left, y: height - 4 }, clock(from));
  add(svg, "text", { x: (left + chart.width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" }, "served at");
  add(svg, "text", { x: chart.width - RIGHT, y: height - 4, "text-anchor": "end" }, clock(to));
  for (const lag of lags) {
    const dot = add(svg, "circle", { cx: x(lag.time_s), cy: y(lag.lag_s), r: 2.5, fill: colour(lag.replica_id) });
    add(dot, "title", {}, `${lag.replica_id}, version ${lag.version}: ${span(lag.lag_s)}`);
  }
}

const link = (parent, version) => { if (version === null) parent.append("–"); else element(parent, "a", many(version)).href = `#v${version}`; };

function showReplicas(found) {
  const rows = found.replicas, most = Math.max(...rows.map(r => r.behind ?? 0), 1);
  const places = new Map(rows.map((row, i) => [row.replica_id, i])), colour = id => COLOURS[(places.get(id) ?? 0) % COLOURS.length];
  show("noreplicas", !rows.length); show("replicas", rows.length); show("lags", rows.length);
  table("replicas", [["replica", ""], ["state", ""], ["version", "n"], ["behind", "n"], ["", "bars"], ["lag", "n"], ["last heartbeat", "n"]], rows.map(row => Object.assign([
    cell => { element(cell, "span", undefined, "swatch").style.background = colour(row.replica_id); cell.append(row.replica_id); },
    cell => { const heard = row.live || row.state === "stopped"; cell.textContent = (heard ? row.state : `silent (${row.state})`) + (row.pin === null ? "" : `, pinned to ${row.pin}`); cell.dataset.state = heard ? row.state : "silent"; },
    cell => { link(cell, row.version); if (row.strange) cell.append(" (another)"); if (row.sha256) cell.title = row.sha256; },
    row.behind === null ? "–" : many(row.behind),
    cell => { if (row.behind) element(cell, "span", undefined, "bar").style.width = `${6 * row.behind / most}rem`; },
    row.lag_s === null ? "–" : span(row.lag_s), `${span(row.age_s)} ago`], { error: row.error })));
  drawLags(found.lags, colour);
}

function showVersions(found) {
  const rows = [...found.versions.map(row => ({ ...row, order: row.version })), ...found.compactions.map(compaction => ({ ...compaction, kind: "compaction", order: compaction.version + 0.5 }))];
  rows.sort((a, b) => b.order - a.order);
  say("listed", rows.length > ROWS ? `the newest ${ROWS} of ${many(rows.length)}` : `${plural(found.versions.length, "version")}, ${plural(found.compactions.length, "compaction")}`);
  const size = n => n === null || n === undefined ? "" : bytes(n);
  table("versions", [["version", "n"], ["digest", "more"], ["kind", ""], ["step", "n"], ["encoded", "more"], ["changed", "n"], ["delta", "n"], ["bits per changed", "n more"], ["anchor", "n"]], rows.slice(0, ROWS).map(row => {
    const payload = row.kind === "compaction" ? row.payload_bytes : row.delta_bytes;
    return [row.kind === "compaction" ? `${row.base_version}–${row.version}` : cell => link(cell, row.version), (row.sha256 ?? "").slice(0, 12), row.kind, row.step ?? "", date(row.created_s),
      row.changed === null ? "" : percent(row.changed / Math.max(found.element_count, 1)), size(payload), row.changed && payload ? (8 * payload / row.changed).toFixed(2) : "", size(row.anchor_bytes)];
  }));
}

function showTiles(found) {
  const last = found.versions.at(-1), delta = found.versions.findLast(row => row.delta_bytes !== null);
  say("head", many(found.newest_version));
  byId("head").title = found.head_sha256 ?? "";
  byId("head").href = `#v${found.newest_version}`;
  say("step", last && last.step !== null ? `step ${many(last.step)}` : "");
  if (last) say("age", `${span(found.time_s - last.created_s)} ago`);
  const paced = found.versions.slice(-21);
  say("pace", paced.length > 2 ? `one every ${span((paced.at(-1).created_s - paced[0].created_s) / (paced.at(-1).version - paced[0].version))}` : "");
  if (delta) {
    say("payload", bytes(delta.delta_bytes));
    say("smaller", delta.delta_bytes ? `1/${many(Math.max(1, Math.round(found.full_bytes / delta.delta_bytes)))} of ${bytes(found.full_bytes)}` : "no change");
    say("changed", percent(delta.changed / Math.max(found.element_count, 1)));
    say("bits", delta.changed ? `${(8 * delta.delta_bytes / delta.changed).toFixed(2)} bits each` : "");
  }
  const live = found.replicas.filter(row => row.live && row.pin === null), there = live.filter(row => row.behind === 0 && !row.strange && row.state !== "failed" && row.state !== "stale");
  const pinned = found.replicas.filter(row => row.live && row.pin !== null).length;
  say("fleet", found.replicas.length ? live.length ? `${there.length} of ${live.length}` : "none live" : "none");
  const silent = found.replicas.filter(row => !row.live && row.state !== "stopped").length, failed = live.filter(row => row.state === "failed").length, stale = live.filter(row => row.state === "stale").length;
  say("lagging", [failed && `${failed} failed`, stale && `${stale} stale`, silent && `${silent} silent`, pinned && `${pinned} pinned`].filter(Boolean).join(", "));
  say("stored", bytes(found.stored_bytes));
  say("objects", `${plural(found.versions.length + found.unread, "version")}, ${plural(found.compactions.length, "compaction")}`);
}

// Show the version that `#v42` in the address names.
function showVersion() {
  const number = Number(/^#v(\d+)$/.exec(location.hash)?.[1] ?? NaN), box = byId("version");
  if (!data || isNaN(number)) { box.close(); return; }
  const at = data.versions.findIndex(row => row.version === number), row = data.versions[at];
  say("vname", `Version ${many(number)}`);
  for (const [id, other] of [["older", data.versions[row ? at - 1 : -1]], ["newer", data.versions[row ? at + 1 : -1]]]) {
    show(id, other);
    if (other) byId(id).href = `#v${other.version}`;
  }
  const facts = row ? [
    ["encoded", date(row.created_s)], ["step", row.step === null ? null : many(row.step)], ["digest", row.sha256],
    ["delta", row.delta_bytes === null ? null : `${bytes(row.delta_bytes)}, ${row.codec}, from version ${many(row.base_version)}`],
    ["changed", row.changed === null ? null : `${many(row.changed)} elements, ${percent(row.changed / Math.max(data.element_count, 1))} of all`],
    ["anchor", row.kind === "reference" ? "the weights that training began with" : row.anchor_bytes === null ? null : bytes(row.anchor_bytes)],
    ["publishes together", row.coalesced > 1 ? many(row.coalesced) : null],
    ["compactions", data.compactions.filter(compaction => compaction.version === number).map(compaction => `from version ${many(compaction.base_version)}, ${bytes(compaction.payload_bytes)}`).join("; ")],
  ] : [["", "Forgotten, not published yet, or older than what was read."]];
  byId("vfacts").replaceChildren();
  for (const [name, fact] of facts.filter(fact => fact[1])) { element(byId("vfacts"), "dt", name); element(byId("vfacts"), "dd", fact); }
  const serving = data.replicas.filter(replica => replica.version === number && !replica.strange);
  say("vserved", serving.map(replica => `${replica.replica_id} (${replica.live || replica.state === "stopped" ? replica.state : "silent"})`).join(", ") || "No replica.");
  const heat = data.heat[number], most = Math.max(...heat ?? [], 1e-9);
  say("vunknown", heat ? "" : row && row.changed === null ? "Full weights, without a delta." : "Not known: its headers were not read.");
  byId("vlayers").replaceChildren();
  (heat ?? []).forEach((fraction, i) => {
    const line = element(byId("vlayers"), "li");
    element(line, "span", data.layers[i]); element(line, "span", percent(fraction), "n");
    element(line, "i").style.width = `${100 * fraction / most}%`;
  });
  if (!box.open) box.showModal();
}

function draw() {
  const found = data;
  show("main", found && found.newest_version !== null);
  show("waiting", !found || found.newest_version === null);
  if (!found || found.newest_version === null) { say("waiting", found ? "Waiting for the first version." : "Reading the channel …"); return; }
  showTiles(found);
  showReplicas(found);
  showVersion();
  show("problems", found.problems.length); say("problems", found.problems.slice(-5).join("\n"));
  const key = [innerWidth, found.newest_version, found.versions.length, found.forgotten, found.compactions.length, found.heat_unread, Object.keys(found.heat).length, byTime].join();
  if (key === drawn) return;
  drawn = key; charts = [];
  const cols = columns(found.versions).filter(col => !byTime || col.row);
  left = innerWidth < 600 ? 72 : 104;
  show("gaps", cols.some(col => col.gap)); say("gone", found.unread ? "forgotten or not read" : "forgotten"); show("tip", false);
  drawSizes(cols, found.compactions); drawFractions(cols, found.element_count); drawAges(cols); drawHeat(cols, found); showVersions(found);
}

function receive(found) {
  data = found;
  if (found) {
    document.title = `${found.newest_version ?? "–"} · ${found.url} · deltasync`;
    say("channel", found.url);
    say("where", found.run_id ? `run ${found.run_id.slice(0, 12)}, since ${date(found.created_s)}; ${plural(found.tensor_count, "tensor")}, ${many(found.element_count)} elements` : "");
    complain(found.error);
  }
  draw();
}
const complain = error => { show("error", error); say("error", error); };

function pointed(event) {
  const chart = charts.find(c => c.svg.contains(event.target)), box = chart?.svg.getBoundingClientRect(), x = event.clientX - box?.left;
  return [chart, chart?.cols.find((_, i) => chart.edges[i] <= x && x < chart.edges[i + 1]), box];
}
addEventListener("click", event => {
  const [, col] = pointed(event);
  if (col?.row) location.hash = `v${col.row.version}`;
});
addEventListener("mousemove", event => {
  const [chart, col, box] = pointed(event);
  document.querySelectorAll(".cross").forEach(node => node.remove());
  show("tip", col);
  if (!col) return;
  for (const c of charts) {
    const x = c.mids[c.cols.indexOf(col)];
    if (x !== undefined) add(c.svg, "line", { class: "cross", x1: x, x2: x, y1: 4, y2: c.base });
  }
  const row = col.row, lines = [];
  if (!row) lines.push(col.gap[0] === col.gap[1] ? `version ${col.gap[0]}` : `versions ${col.gap[0]} to ${col.gap[1]}`, "forgotten, or older than what was read");
  else {
    lines.push(`version ${row.version}${row.step !== null ? `, step ${row.step}` : ""}, ${clock(row.created_s)}`);
    if (row.delta_bytes !== null) lines.push(`delta ${bytes(row.delta_bytes)}, ${percent(row.changed / Math.max(data.element_count, 1))} changed`);
    if (row.anchor_bytes !== null) lines.push(`anchor ${bytes(row.anchor_bytes)}`);
    if (row.kind === "reference") lines.push("the weights that training began with");
    if (row.token_lag) lines.push(`trained tokens ${row.token_lag.map(n => short(n)).join(" / ")} versions old (mean / p95 / max)`);
    if (row.coalesced > 1) lines.push(`${row.coalesced} publishes together`);
    data.compactions.filter(compaction => compaction.version === row.version).forEach(compaction => lines.push(`compaction from ${compaction.base_version}: ${bytes(compaction.payload_bytes)}`));
    const layer = chart.layer?.(event.clientY - box.top), heat = data.heat[row.version];
    if (layer !== undefined && layer !== null) lines.push(`${data.layers[layer]}: ${heat ? percent(heat[layer]) : "not known"}`);
  }
  const tip = byId("tip");
  tip.textContent = lines.join("\n");
  tip.style.left = `${Math.max(4, Math.min(event.pageX + 14, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.pageY + 16}px`;
});
addEventListener("resize", draw);
addEventListener("hashchange", showVersion);
byId("version").addEventListener("close", () => history.replaceState(null, "", "#"));
byId("axis").addEventListener("change", event => { byTime = event.target.value === "time"; draw(); });

async function poll() {
  try {
    const reply = await fetch("data.json", { cache: "no-store" });
    if (!reply.ok) throw new Error(`it answers ${reply.status}`);
    receive(await reply.json());
    const age = data ? Date.now() / 1000 - data.time_s : 0;
    say("when", data ? (age > LATE_S ? `last look ${span(age)} ago` : `live, ${clock(data.time_s)}`) : "");
    byId("when").classList.toggle("late", age > LATE_S);
  } catch (error) {
    complain(`This page is not up to date, because deltasync dashboard is out of reach: ${error.message}`);
  }
  setTimeout(poll, POLL_MS);
}
const embedded = JSON.parse(byId("data").textContent);
if (embedded) { receive(embedded); say("when", `as of ${date(embedded.time_s)}`); } else { draw(); poll(); }
