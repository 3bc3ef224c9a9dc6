// The sections of the page, with a function for each. They are drawn from the rows that /v1/events sends.
"use strict";

const HOSTS_SHOWN = 8; // for a model, without a search
const NODES_SHOWN = 60; // in the picture of transfers
const CELLS_SHOWN = 1000;

function drawTiles(shown, jobs, totals) {
  const holdings = shown.flatMap((row) => row.holdings);
  const filling = holdings.filter((h) => h.state === "filling");
  const running = jobs.filter((job) => !["done", "failed"].includes(job.phase));
  const tiles = [
    ["Members", shown.length],
    ["Hosts", new Set(shown.map((row) => row.host)).size],
    ["Models", new Set(holdings.map((h) => h.model)).size],
    ["Filling", filling.length],
    ["Rate", rate(filling.reduce((sum, h) => sum + h.gb_per_s, 0))],
    ["In memory", bytes(holdings.reduce((sum, h) => sum + h.nbytes * h.share, 0))],
  ];
  if (totals) tiles.push(["Reads saved", bytes(totals.saved_bytes)]);
  if (jobs.length) tiles.push(["Conversions", running.length]);
  $("tiles").replaceChildren(...tiles.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

// -- Problems, with the side to blame and the next step.

function problemsOf(row) {
  const problems = [];
  if (row.silent) problems.push(["late", "has sent no heartbeat for some seconds", ""]);
  if (row.complaints) problems.push(["late", `${plural(row.complaints, "complaint")} from other members`, "`penstock why` names them"]);
  if (row.drain) problems.push(["note", `is draining${row.drain.reason ? `: ${row.drain.reason}` : ""}`, `by ${row.drain.by}`]);
  else for (const h of row.holdings) if (h.state === "draining") problems.push(["note", `${h.model} is draining${h.why ? `: ${h.why}` : ""}`, ""]);
  for (const s of row.syncs) if (s.state === "dirty") problems.push(["bad", `${s.name}: an update failed, so its weights are not usable`, "update again, or load the model"]);
  return problems;
}

function problem(kind, who, text, hint, blame) {
  return element("li", { class: kind }, element("strong", {}, who), ` ${text}`,
    ...(blame ? [" ", pill(`blame: ${blame}`)] : []), ...(hint ? [element("div", { class: "hint" }, hint)] : []));
}

function drawProblems(shown, jobs, failures) {
  const items = jobs.filter((job) => job.error).map((job) => problem("bad", `conversion ${job.name}`, `${job.error.error}: ${job.error.message}`, job.error.hint, job.error.blame));
  for (const job of jobs) {
    if (job.silent) items.push(problem("late", `conversion ${job.name}`, "has not reported for some seconds", job.process));
    else if (job.num_late) items.push(problem("late", `conversion ${job.name}`, `${plural(job.num_late, "worker")} late`, ""));
  }
  for (const f of failures) {
    const when = new Date(f.at * 1000).toLocaleTimeString();
    items.push(problem("bad", `${short(f.member)} ${f.name}`, `${f.verb}${f.model ? ` ${f.model}` : ""} failed at ${when}: ${f.error}: ${f.message}`, f.hint, f.blame));
  }
  for (const row of shown) for (const [kind, text, hint] of problemsOf(row)) items.push(problem(kind, label(row), text, hint));
  $("problems-section").hidden = !items.length;
  $("problems").replaceChildren(...items.slice(0, 50));
  if (items.length > 50) $("problems").append(element("li", {}, `and ${items.length - 50} more`));
}

// -- Conversions.

function drawConversions(jobs) {
  $("conversions-section").hidden = !jobs.length;
  $("conversions").replaceChildren(...jobs.slice(0, 30).map(conversion));
}

function conversion(job) {
  const share = job.total_bytes ? job.done_bytes / job.total_bytes : 0;
  const kind = job.phase === "failed" ? "bad" : job.phase === "done" ? "good" : job.silent || job.num_late ? "late" : "live";
  const resumed = job.total_bytes && job.num_tasks ? job.num_resumed / job.num_tasks : 0;
  const bar = drawing("svg", { class: "progress", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${job.name}: ${percent(share)} done` },
    drawing("rect", { width: 100 * share, height: 10, class: kind }), drawing("rect", { width: 100 * Math.min(resumed, share), height: 10, class: "resumed" }));
  const left = job.phase === "running" ? (job.eta_s >= 0 ? `${seconds(job.eta_s)} left` : "remaining time unknown") : `${seconds(job.elapsed_s)} in total`;
  const facts = [
    ["Tasks", `${job.num_done} of ${job.num_tasks}${job.num_resumed ? `, ${job.num_resumed} from an earlier run` : ""}`],
    ["Read and written", `${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}`],
    ["Rate", rate(job.gb_per_s)],
    ["Time", left],
    ["Workers", `${job.num_workers}${job.num_late ? `, ${job.num_late} late` : ""}`],
    ["Reassigned", String(job.num_reassigned)],
    ["Duplicated", String(job.num_duplicated)],
  ];
  const workers = element("ul", { class: "workers" }, ...job.workers.slice(0, 64).map((w) => {
    const state = w.is_late ? "late" : w.state;
    const text = w.is_late ? `late: no task finished for ${seconds(w.task_s)}, its tasks should take ${seconds(w.expected_s)}` : w.state === "lost" ? `lost: ${w.end}` : w.task >= 0 && w.state === "running" ? `task ${w.task}` : w.state;
    return element("li", { class: state }, element("strong", {}, `${w.worker} ${w.device}`), ` ${text}, ${w.num_tasks} done`);
  }));
  const error = job.error ? [element("p", { class: "bad" }, `${job.error.error}: ${job.error.message} `, pill(`blame: ${job.error.blame}`)), ...(job.error.hint ? [element("p", { class: "hint" }, job.error.hint)] : [])] : [];
  return element("div", { class: "card conversion", "data-job": job.id },
    element("h3", {}, `${job.name} `, pill(job.silent ? "silent" : job.phase, kind), ` ${percent(share)}`),
    element("p", { class: "note" }, `${job.operation}: ${job.sources.join(", ")} → ${job.destination}, by ${job.process}`),
    bar, element("dl", { class: "facts" }, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    ...error, ...(job.phase === "done" ? [] : [workers]));
}

// -- The last hour.

const CHARTS = [["Members", "members", String], ["Rate of all transfers", "gb_per_s", rate], ["In memory", "held_bytes", bytes], ["Storage reads saved", "saved_bytes", bytes]];

function drawCharts(history, totals) {
  const now = Date.now() / 1000;
  // Begin at the first point and show at least five minutes, because a new hub has no complete hour yet.
  const span = Math.min(3600, Math.max(300, history.length ? now - history[0].at : 0));
  $("charts").replaceChildren(...CHARTS.map(([title, field, text]) => {
    const points = history.map((point) => [point.at, point[field]]);
    // Points are sent with changes, so the last value holds until now.
    if (totals) points.push([now, totals[field]]);
    const top = Math.max(...points.map(([, value]) => value), 1e-9);
    const x = (at) => (300 * (1 - Math.min(1, (now - at) / span))).toFixed(1);
    const y = (value) => (78 - (value / top) * 70).toFixed(1);
    let line = "";
    points.forEach(([at, value], i) => { line += i ? `H${x(at)}V${y(value)}` : `M${x(at)} ${y(value)}`; });
    const area = line && `${line}V78H${x(points[0][0])}Z`;
    const last = totals ? text(totals[field]) : "no data";
    const picture = drawing("svg", { viewBox: "0 0 300 80", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${last}, at most ${points.length ? text(top) : "0"} in the last ${seconds(span)}` },
      drawing("path", { class: "grid", d: "M0 8H300M0 43H300M0 78H300" }), drawing("path", { class: "area", d: area }), drawing("path", { class: "line", d: line }));
    const axis = element("div", { class: "axis" }, element("span", {}, `${seconds(span)} ago`), element("span", {}, `at most ${text(top)}`), element("span", {}, "now"));
    return element("div", { class: "card" }, element("h3", {}, title), element("p", { class: "figure" }, last), picture, axis);
  }));
}

// -- Models by host and tier.

function drawModels(shown) {
  const models = new Map();
  for (const row of shown) for (const h of row.holdings) (models.get(h.model) || models.set(h.model, []).get(h.model)).push({ row, h });
  const cards = [...models].sort().map(([name, list]) => modelCard(name, list));
  $("models").replaceChildren(...(cards.length ? cards : [note("No member holds weights.")]));
  if (cards.length) {
    const names = [["gpu", "GPU"], ["host", "host memory"], ["disk", "disk or source"], ["rest", "not loaded yet"]];
    $("models").append(element("p", { class: "legend" }, ...names.map(([kind, text]) => element("span", {}, element("i", { class: `swatch ${kind}` }), text))));
  }
}

function modelCard(name, list) {
  const states = new Map();
  for (const { h } of list) states.set(h.state, (states.get(h.state) || 0) + 1);
  const revisions = new Map();
  for (const { h } of list) if (h.revision) revisions.set(h.revision.slice(0, 15), (revisions.get(h.revision.slice(0, 15)) || 0) + 1);
  const revisionText = [...revisions].sort((a, b) => b[1] - a[1]).map(([revision, count]) => (revisions.size > 1 ? `${revision} (${count})` : revision)).join(", ") || "no revision yet";
  const hosts = new Map();
  for (const { row, h } of list) (hosts.get(row.host) || hosts.set(row.host, []).get(row.host)).push(h);
  const held = list.reduce((sum, { h }) => sum + h.nbytes * h.share, 0);
  const pills = ["whole", "filling", "draining"].filter((state) => states.has(state)).map((state) => pill(`${states.get(state)} ${state}`, state));
  const lines = [...hosts].sort(([a], [b]) => hostName(a).localeCompare(hostName(b), undefined, { numeric: true })).slice(0, HOSTS_SHOWN).map(([host, holdings]) => hostLine(host, holdings));
  const more = hosts.size > HOSTS_SHOWN ? [note(`and ${hosts.size - HOSTS_SHOWN} more hosts. Search for a host to see it.`)] : [];
  return element("div", { class: "card model" }, element("h3", {}, name, " ", ...pills),
    note(`${bytes(list[0].h.nbytes)} each, ${bytes(held)} verified on ${plural(hosts.size, "host")}; ${revisionText}`),
    cells(name, list), ...lines, ...more);
}

// A cell for each member, filled from below by the fraction that it has verified.
function cells(name, list) {
  const some = list.slice(0, CELLS_SHOWN);
  const wide = columns(some.length);
  const high = Math.ceil(some.length / wide);
  const picture = drawing("svg", { class: "cells", viewBox: `0 0 ${wide * 10} ${high * 10}`, width: wide * 20, role: "img", "aria-label": `${name}: ${plural(list.length, "member")}, ${list.filter(({ h }) => h.share === 1).length} of them whole` });
  some.forEach(({ row, h }, i) => {
    const [x, y] = [(i % wide) * 10 + 1, Math.floor(i / wide) * 10 + 1];
    const kind = h.state === "draining" ? "draining" : row.silent ? "silent" : "";
    picture.append(drawing("g", {}, drawing("title", {}, `${label(row)} on ${hostName(row.host)}: ${h.state} ${percent(h.share)}, ${tierOf(h)}`),
      drawing("rect", { class: "rest", x, y, width: 8, height: 8, rx: 1.5 }), drawing("rect", { class: tierOf(h), x, y: y + 8 * (1 - h.share), width: 8, height: 8 * h.share, rx: 1.5 }),
      ...(kind ? [drawing("rect", { class: `frame ${kind}`, x: x + 0.5, y: y + 0.5, width: 7, height: 7, rx: 1.5 })] : [])));
  });
  return picture;
}

function hostLine(host, holdings) {
  const tiers = ["gpu", "host", "disk"].map((tier) => [tier, holdings.filter((h) => tierOf(h) === tier)]).filter(([, some]) => some.length);
  const all = holdings.reduce((sum, h) => sum + h.nbytes, 0) || 1;
  let x = 0;
  const bars = tiers.map(([tier, some]) => {
    const width = (some.reduce((sum, h) => sum + h.nbytes * h.share, 0) / all) * 100;
    const bar = drawing("rect", { x, width, height: 12, class: tier });
    x += width;
    return bar;
  });
  const picture = drawing("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
  return element("div", { class: "bar" }, element("span", { class: "cut", title: host }, hostName(host)), picture,
    element("span", { class: "num" }, `${percent(x / 100)}, ${tiers.map(([tier, some]) => `${some.length} × ${tier}`).join(", ")}`));
}

// -- Transfers: the source, receiver, transport, rate and reason of each.

let relayShown = ""; // the member whose path is explained

function drawRelay(shown) {
  const byShort = new Map(shown.map((row) => [short(row.id), row]));
  const edges = [];
  for (const row of shown) for (const h of row.holdings) {
    const parts = h.path.length ? h.path : [{ percent: 0, transport: "", source: short(h.parent) }];
    for (const part of parts) {
      const source = part.transport === "storage" ? "storage" : byShort.has(short(part.source)) ? short(part.source) : null;
      if (source && source !== short(row.id)) edges.push({ source, target: short(row.id), part, h, runs: h.state === "filling" });
    }
  }
  drawPaths(shown);
  if (!edges.length) {
    $("relay").replaceChildren(note("No member has received weights."));
    return;
  }
  // Show running transfers first if there is no space for all.
  edges.sort((a, b) => b.runs - a.runs || b.h.gb_per_s - a.h.gb_per_s);
  const nodes = new Set();
  const drawnEdges = edges.filter((e) => {
    if (nodes.size >= NODES_SHOWN && !(nodes.has(e.source) && nodes.has(e.target))) return false;
    nodes.add(e.source);
    nodes.add(e.target);
    return true;
  });
  const picture = relayPicture([...nodes], drawnEdges, byShort);
  const left = edges.length - drawnEdges.length;
  $("relay").replaceChildren(picture, ...(left ? [note(`and ${left} more transfers. Search for a host, a model or a member to see them.`)] : []));
  explainTransfer(shown);
}

function relayPicture(nodes, edges, byShort) {
  // Draw sources in columns to the left of their receivers.
  const sources = new Map();
  for (const e of edges) (sources.get(e.target) || sources.set(e.target, []).get(e.target)).push(e.source);
  const depth = new Map();
  const depthOf = (id, seen) => {
    if (depth.has(id)) return depth.get(id);
    if (seen.has(id)) return 0;
    seen.add(id);
    const value = Math.max(0, ...(sources.get(id) || []).map((above) => depthOf(above, seen) + 1));
    depth.set(id, value);
    return value;
  };
  const used = [];
  for (const id of nodes) (used[Math.min(depthOf(id, new Set()), 12)] ||= []).push(id);
  const levels = used.filter(Boolean);
  const place = new Map();
  const [WIDE, HIGH, STEP_X, STEP_Y] = [200, 44, 345, 62];
  const height = Math.max(...levels.map((ids) => ids.length)) * STEP_Y;
  levels.forEach((ids, x) => ids.forEach((id, y) => place.set(id, [x * STEP_X + 4, (height - ids.length * STEP_Y) / 2 + y * STEP_Y + 7])));
  const width = (levels.length - 1) * STEP_X + WIDE + 8;
  const picture = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "group", "aria-label": `${plural(edges.length, "transfer")} between ${nodes.length} sources and receivers` });
  const many = edges.length > 30;
  for (const { source, target, part, h, runs } of edges) {
    const [x1, y1] = place.get(source);
    const [x2, y2] = place.get(target);
    const [a, b, middle] = [y1 + HIGH / 2, y2 + HIGH / 2, (x1 + WIDE + x2) / 2];
    picture.append(drawing("path", { class: `edge${runs ? " runs" : ""}`, d: `M${x1 + WIDE} ${a}C${middle} ${a} ${middle} ${b} ${x2} ${b}` },
      drawing("title", {}, `${h.model}: ${part.percent} % by ${part.transport || "an unknown path"}; ${h.why}`)));
    if (!many || runs) picture.append(drawing("text", { class: "label", x: middle, y: (a + b) / 2 - 5, "text-anchor": "middle" }, [part.transport, runs && h.gb_per_s ? rate(h.gb_per_s) : part.percent ? `${part.percent} %` : ""].filter(Boolean).join(" ")));
  }
  for (const [id, [x, y]] of place) picture.append(relayNode(id, x, y, byShort.get(id), WIDE, HIGH));
  return picture;
}

function relayNode(id, x, y, row, wide, high) {
  if (!row) {
    return drawing("g", {}, drawing("rect", { class: "node storage", x, y, width: wide, height: high, rx: 8 }), drawing("text", { x: x + 12, y: y + high / 2 + 4 }, "storage"));
  }
  const best = Math.max(0, ...row.holdings.map((h) => h.share));
  const kind = row.drain || row.holdings.some((h) => h.state === "draining") ? "draining" : row.silent ? "silent" : best === 1 ? "full" : "";
  const name = row.name.length > 20 ? `…${row.name.slice(-19)}` : row.name;
  return drawing("g", { class: `member${relayShown === row.id ? " chosen" : ""}`, tabindex: "0", role: "button", "data-member": row.id, "aria-label": `${label(row)}, ${percent(best)}: why this path` },
    drawing("rect", { class: `node ${kind}`, x, y, width: wide, height: high, rx: 8 }),
    drawing("rect", { class: "node-fill", x: x + 1, y: y + high - 5, width: (wide - 2) * best, height: 4, rx: 2 }),
    drawing("text", { x: x + 12, y: y + 17 }, `${name || id}`), drawing("text", { class: "label", x: x + 12, y: y + 33 }, `${id}, ${kind === "draining" ? "draining" : percent(best)}, ${hostName(row.host).slice(0, 14)}`));
}

// The reasons for all paths, with the number of members for each.
function drawPaths(shown) {
  const reasons = new Map();
  for (const row of shown) for (const h of row.holdings) if (h.why) for (const why of h.why.split("; ")) reasons.set(why, (reasons.get(why) || 0) + 1);
  const list = [...reasons].sort((a, b) => b[1] - a[1]).slice(0, 6);
  $("reasons").replaceChildren(...list.map(([why, count]) => element("li", {}, `${plural(count, "member")}: ${why}`)));
}

function explainTransfer(shown) {
  const row = shown.find((member) => member.id === relayShown);
  $("relay-detail").hidden = !row;
  if (!row) return;
  const lines = row.holdings.map((h) => element("li", {}, element("strong", {}, `${h.model} ${percent(h.share)}`), `: ${pathText(h.path) || "no path yet"}. ${h.why || "No reason reported yet."} ${h.readers ? `${plural(h.readers, "reader")} now.` : ""}`));
  $("relay-detail").replaceChildren(element("h3", {}, label(row)), element("ul", {}, ...lines));
}

function chooseTransfer(event) {
  const node = event.target.closest("[data-member]");
  if (!node || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
  event.preventDefault();
  relayShown = relayShown === node.dataset.member ? "" : node.dataset.member;
  const id = node.dataset.member;
  redraw();
  // The picture was recreated. Restore the focus, so that a keyboard user does not start at the top again.
  $("relay").querySelector(`[data-member="${id}"]`)?.focus();
}

// -- Syncs: each replica's version, stragglers first.

function drawSyncs(shown) {
  const names = new Map();
  for (const row of shown) for (const s of row.syncs) (names.get(s.name) || names.set(s.name, []).get(s.name)).push({ row, s });
  const cards = [...names].sort().map(([name, list]) => syncCard(name, list));
  // Keep open tables open when the card is recreated.
  const open = new Set([...document.querySelectorAll("#syncs details[open]")].map((node) => node.dataset.sync));
  $("syncs").replaceChildren(...(cards.length ? cards : [note("No trainer publishes.")]));
  for (const node of document.querySelectorAll("#syncs details")) if (open.has(node.dataset.sync)) node.open = true;
}

function lagOf(s, newest) {
  if (s.state === "dirty") return "bad";
  if (s.state === "updating") return "updating";
  if (s.version < 0) return "none";
  return s.version === newest ? "current" : "behind";
}

function syncCard(name, list) {
  const newest = Math.max(...list.map(({ s }) => s.version));
  const publishers = list.filter(({ s }) => s.side === "publisher");
  const subscribers = list.filter(({ s }) => s.side === "subscriber");
  const byVersion = new Map();
  for (const { s } of subscribers) byVersion.set(s.version, (byVersion.get(s.version) || 0) + 1);
  const versions = [...byVersion].sort((a, b) => b[0] - a[0]).map(([version, count]) => `${version < 0 ? "none" : `version ${version}`}: ${plural(count, "replica")}`).join(", ") || "no replica yet";
  const publish = Math.max(0, ...publishers.map(({ s }) => s.took_s));
  const update = Math.max(0, ...subscribers.map(({ s }) => s.took_s));
  const pause = Math.max(0, ...subscribers.map(({ s }) => s.pause_s));
  const late = subscribers.filter(({ s }) => s.version < newest).length;
  const facts = [["Publish", publish ? seconds(publish) : "none yet"], ["Longest update", update ? seconds(update) : "none yet"], ["Longest pause", update ? seconds(pause) : "none yet"], ["Behind", `${late} of ${subscribers.length}`], ["Bytes of a version", bytes(publishers.reduce((sum, { s }) => sum + s.nbytes, 0))]];
  const body = element("tbody");
  const order = (entry) => entry.s.side + String(entry.s.rank).padStart(6, "0");
  for (const { row, s } of list.sort((a, b) => order(a).localeCompare(order(b))).slice(0, 200)) {
    const behind = s.side !== "subscriber" || s.version === newest ? "" : s.version < 0 ? "not yet" : `${newest - s.version} behind`;
    body.append(element("tr", {}, ...[`${s.rank} of ${s.world_size}`, label(row), s.side].map((text) => element("td", {}, text)),
      element("td", behind ? { class: "late" } : {}, [s.version < 0 ? "none" : String(s.version), behind].filter(Boolean).join(", ")),
      element("td", s.state === "dirty" ? { class: "bad" } : {}, [s.state, s.fleet].filter(Boolean).join("; ")), element("td", {}, bytes(s.nbytes)),
      element("td", {}, s.took_s ? seconds(s.took_s) : ""), element("td", {}, s.side === "subscriber" && s.took_s ? seconds(s.pause_s) : ""), element("td", {}, pathText(s.path))));
  }
  const head = ["Rank", "Member", "Side", "Version", "State", "Bytes", "Took", "Pause", "Path"].map((text) => element("th", { scope: "col" }, text));
  const table = element("div", { class: "scroll", role: "region", "aria-label": `Ranks of ${name}`, tabindex: "0" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), body));
  const details = element("details", { "data-sync": name }, element("summary", {}, plural(list.length, "rank")), table);
  if (list.length <= 12) details.open = true;
  return element("div", { class: "card" }, element("h3", {}, `${name}, version ${newest < 0 ? "none yet" : newest} `, pill(late ? `${late} behind` : "all current", late ? "late" : "good")),
    note(versions), ranks(name, list, newest), element("dl", { class: "facts" }, ...facts.map(([fact, value]) => element("div", {}, element("dt", {}, fact), element("dd", {}, value)))), details);
}

function ranks(name, list, newest) {
  const wide = columns(list.length);
  const ordered = [...list].sort((a, b) => a.s.side.localeCompare(b.s.side) || a.s.version - b.s.version || a.s.rank - b.s.rank).slice(0, CELLS_SHOWN);
  const picture = drawing("svg", { class: "cells", viewBox: `0 0 ${wide * 10} ${Math.ceil(ordered.length / wide) * 10}`, width: wide * 20, role: "img", "aria-label": `${name}: version of each rank, publishers first, then those behind` });
  ordered.forEach(({ row, s }, i) => {
    const kind = s.side === "publisher" ? "publisher" : lagOf(s, newest);
    picture.append(drawing("rect", { class: `rank ${kind}`, x: (i % wide) * 10 + 1, y: Math.floor(i / wide) * 10 + 1, width: 8, height: 8, rx: s.side === "publisher" ? 4 : 1.5 },
      drawing("title", {}, `${s.side} ${s.rank} of ${s.world_size}, ${label(row)}: version ${s.version < 0 ? "none" : s.version}, ${s.state}`)));
  });
  return picture;
}
