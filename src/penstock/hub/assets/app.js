// The fleet page: reads /v1/events and draws. No library; nothing is loaded from another origin.
"use strict";

const rows = new Map(); // member id -> row
let history = [];
let totals = null;
let cursor = "";
let token = location.hash.slice(1) || sessionStorage.getItem("penstock-token") || "";
let dirty = true;

const HOSTS_SHOWN = 12; // of a model, before a search
const $ = (id) => document.getElementById(id);

// A token in the address would stay in the browser's history.
if (location.hash) {
  sessionStorage.setItem("penstock-token", token);
  window.history.replaceState(null, "", location.pathname);
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function drawing(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function bytes(value) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= scale) return `${(value / scale).toFixed(value >= 100 * scale ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

const percent = (share) => `${Math.floor(share * 100)} %`;
const short = (id) => id.slice(0, 8);
const label = (row) => (row.name ? `${short(row.id)} ${row.name}` : short(row.id));
const pathText = (parts) => parts.map((p) => `${p.percent} % ${p.transport}${p.source ? ` from ${p.source}` : ""}`).join(", ");

// -- The stream.

async function follow() {
  for (;;) {
    try {
      const headers = token ? { Authorization: `Bearer ${token}` } : {};
      const answer = await fetch(`v1/events?since=${cursor}`, { headers, cache: "no-store" });
      if (answer.status === 401) {
        await login();
        continue;
      }
      if (!answer.ok) throw new Error(`the hub answered ${answer.status}`);
      say("Live", "live");
      await read(answer.body.getReader());
    } catch (error) {
      say(`No connection: ${error.message}. Trying again`, "lost");
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const event = text.slice(0, end);
      text = text.slice(end + 2);
      if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
  }
}

function take(message) {
  if (message.error) {
    say(message.error, "lost");
    return;
  }
  say("Live", "live");
  if (message.full) rows.clear();
  for (const row of message.rows) rows.set(row.id, row);
  for (const id of message.gone) rows.delete(id);
  if (message.totals) totals = message.totals;
  if (message.history) {
    history = message.full ? message.history : history.concat(message.history.filter((p) => !history.length || p.at > history.at(-1).at));
    history = history.slice(-720);
  }
  cursor = message.cursor;
  dirty = true;
}

function say(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

function login() {
  say("Waiting for a token", "lost");
  const dialog = $("login");
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      token = $("token").value.trim();
      $("token").value = "";
      sessionStorage.setItem("penstock-token", token);
      done();
    }, { once: true });
    dialog.showModal();
  });
}

// -- The page.

function matches(row) {
  const wanted = $("search").value.trim().toLowerCase();
  if (!wanted) return true;
  const words = [row.id, row.name, row.host, row.rack, ...row.holdings.map((h) => `${h.model} ${h.revision}`), ...row.syncs.map((s) => s.name)];
  return words.join(" ").toLowerCase().includes(wanted);
}

function draw() {
  if (!dirty) return;
  dirty = false;
  const shown = [...rows.values()].filter(matches);
  drawTiles(shown);
  drawProblems(shown);
  drawCharts();
  drawModels(shown);
  drawRelay(shown);
  drawSyncs(shown);
  drawMembers(shown);
}

function drawTiles(shown) {
  const holdings = shown.flatMap((row) => row.holdings);
  const filling = holdings.filter((h) => h.state === "filling");
  const tiles = [
    ["Members", shown.length],
    ["Hosts", new Set(shown.map((row) => row.host)).size],
    ["Models", new Set(holdings.map((h) => h.model)).size],
    ["Filling", filling.length],
    ["Rate", `${filling.reduce((sum, h) => sum + h.gb_per_s, 0).toFixed(2)} GB/s`],
    ["In memory", bytes(holdings.reduce((sum, h) => sum + h.nbytes * h.share, 0))],
  ];
  if (totals) tiles.push(["Not read from storage", bytes(totals.saved_bytes)]);
  $("tiles").replaceChildren(...tiles.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function problemsOf(row) {
  const found = [];
  if (row.silent) found.push("has not been heard of for some seconds");
  if (row.complaints) found.push(`${row.complaints} complaints of other members`);
  for (const h of row.holdings) if (h.state === "draining") found.push(`${h.model} is draining${h.why ? `: ${h.why}` : ""}`);
  for (const s of row.syncs) if (s.state === "dirty") found.push(`${s.name}: an update failed, its weights are not usable`);
  return found;
}

function drawProblems(shown) {
  const items = shown.flatMap((row) => problemsOf(row).map((text) => element("li", {}, `${label(row)}: ${text}`)));
  $("problems-section").hidden = !items.length;
  $("problems").replaceChildren(...items.slice(0, 50));
}

function drawCharts() {
  const charts = [["Members", "members", String], ["Rate of all transfers", "gb_per_s", (v) => `${v.toFixed(2)} GB/s`], ["In memory", "held_bytes", bytes], ["Not read from storage", "saved_bytes", bytes]];
  $("charts").replaceChildren(...charts.map(([title, field, text]) => {
    const values = history.map((point) => point[field]);
    const top = Math.max(...values, 1e-9);
    const last = totals ? text(totals[field]) : "no figures";
    const points = history.map((point, i) => `${((i + 720 - history.length) / 719) * 300},${80 - (point[field] / top) * 74}`).join(" ");
    const picture = drawing("svg", { viewBox: "0 0 300 84", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${last}, at most ${values.length ? text(top) : "0"} in the last hour` },
      drawing("polyline", { points, fill: "none", stroke: "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" }));
    return element("div", { class: "card" }, element("h3", {}, `${title}: ${last}`), picture);
  }));
}

function tierOf(holding) {
  const place = holding.tier || holding.device;
  if (place.startsWith("cuda") || place === "gpu") return "gpu";
  return place.includes("disk") ? "disk" : "host";
}

function drawModels(shown) {
  const models = new Map();
  for (const row of shown) for (const h of row.holdings) {
    const model = models.get(h.model) || models.set(h.model, new Map()).get(h.model);
    const host = model.get(row.host) || model.set(row.host, []).get(row.host);
    host.push(h);
  }
  const cards = [...models].sort().map(([name, hosts]) => {
    const revisions = new Set([...hosts.values()].flat().map((h) => h.revision.slice(0, 15)).filter(Boolean));
    const lines = [...hosts].sort().slice(0, HOSTS_SHOWN).map(([host, list]) => {
      const best = list.reduce((a, b) => (b.share > a.share ? b : a));
      const picture = drawing("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" },
        drawing("rect", { width: best.share * 100, height: 12, fill: `var(--${tierOf(best)})` }));
      return element("div", { class: "bar" }, element("span", { class: "cut", title: host }, host.slice(0, 12)), picture,
        element("span", { class: "num" }, `${percent(best.share)}, ${list.length} × ${tierOf(best)}`));
    });
    const more = hosts.size > HOSTS_SHOWN ? [element("p", { class: "note" }, `and ${hosts.size - HOSTS_SHOWN} more hosts; search for a host to see it`)] : [];
    const size = bytes([...hosts.values()][0][0].nbytes);
    return element("div", { class: "card" }, element("h3", {}, name), element("p", { class: "note" }, `${size}, ${[...revisions].join(", ") || "no revision yet"}`), ...lines, ...more);
  });
  const legend = element("p", { class: "legend" }, ...["gpu", "host", "disk"].map((tier) => element("span", {}, element("i", { class: `swatch ${tier}` }), tier)));
  $("models").replaceChildren(...(cards.length ? cards : [element("p", { class: "note" }, "No member holds weights.")]));
  if (cards.length) $("models").append(legend);
}

function drawRelay(shown) {
  const byShort = new Map(shown.map((row) => [short(row.id), row]));
  const edges = [];
  for (const row of shown) for (const h of row.holdings) {
    const parts = h.path.length ? h.path : [{ percent: 0, transport: "", source: short(h.parent) }];
    for (const part of parts) {
      const source = part.transport === "storage" ? "storage" : byShort.has(short(part.source)) ? short(part.source) : null;
      if (source && source !== short(row.id)) edges.push({ source, target: short(row.id), part, h });
    }
  }
  if (!edges.length) {
    $("relay").replaceChildren(element("p", { class: "note" }, "No member has received weights."));
    return;
  }
  // Sources in columns to the left of their receivers.
  const depth = new Map();
  const depthOf = (id, seen) => {
    if (depth.has(id)) return depth.get(id);
    if (seen.has(id)) return 0;
    seen.add(id);
    const above = edges.filter((e) => e.target === id).map((e) => depthOf(e.source, seen) + 1);
    const value = Math.max(0, ...above);
    depth.set(id, value);
    return value;
  };
  const nodes = [...new Set(edges.flatMap((e) => [e.source, e.target]))].slice(0, 120);
  const columns = [];
  for (const id of nodes) (columns[Math.min(depthOf(id, new Set()), 12)] ||= []).push(id);
  const place = new Map();
  const used = columns.filter(Boolean);
  used.forEach((ids, x) => ids.forEach((id, y) => place.set(id, [x * 310 + 8, y * 56 + 14])));
  const height = Math.max(...used.map((ids) => ids.length)) * 56 + 10;
  const picture = drawing("svg", { viewBox: `0 0 ${used.length * 310} ${height}`, width: used.length * 310, role: "img", "aria-label": `${edges.length} transfers between ${nodes.length} sources and receivers` });
  for (const { source, target, part, h } of edges) {
    if (!place.has(source) || !place.has(target)) continue;
    const [x1, y1] = place.get(source);
    const [x2, y2] = place.get(target);
    const runs = h.state === "filling";
    picture.append(drawing("path", { class: runs ? "edge runs" : "edge", d: `M${x1 + 190} ${y1 + 16} C${x1 + 240} ${y1 + 16} ${x2 - 50} ${y2 + 16} ${x2} ${y2 + 16}` },
      drawing("title", {}, `${h.model}: ${part.percent} % by ${part.transport}; ${h.why}`)));
    picture.append(drawing("text", { class: "label", x: (x1 + 190 + x2) / 2 - 40, y: (y1 + y2) / 2 + 10 }, runs && h.gb_per_s ? `${part.transport} ${h.gb_per_s.toFixed(2)} GB/s` : part.transport));
  }
  for (const [id, [x, y]] of place) {
    const row = byShort.get(id);
    const state = row ? percent(Math.max(0, ...row.holdings.map((h) => h.share))) : "";
    picture.append(drawing("rect", { class: `node${row && row.holdings.some((h) => h.share === 1) ? " full" : ""}`, x, y, width: 190, height: 34, rx: 6 }));
    picture.append(drawing("text", { x: x + 8, y: y + 21 }, row ? `${label(row).slice(0, 20)} ${state}` : id));
  }
  $("relay").replaceChildren(picture);
}

function drawSyncs(shown) {
  const names = new Map();
  for (const row of shown) for (const s of row.syncs) (names.get(s.name) || names.set(s.name, []).get(s.name)).push({ row, s });
  const cards = [...names].sort().map(([name, list]) => {
    const newest = Math.max(...list.map(({ s }) => s.version));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...["Rank", "Member", "Side", "Version", "State", "Bytes", "Path"].map((text) => element("th", { scope: "col" }, text)))));
    const body = element("tbody");
    for (const { row, s } of list.sort((a, b) => (a.s.side + a.s.rank).localeCompare(b.s.side + b.s.rank)).slice(0, 200)) {
      const late = s.side !== "subscriber" || s.version === newest ? "" : s.version < 0 ? "not yet" : `${newest - s.version} behind`;
      body.append(element("tr", {}, ...[`${s.rank} of ${s.world_size}`, label(row), s.side].map((text) => element("td", {}, text)),
        element("td", late ? { class: "late" } : {}, [s.version < 0 ? "none" : String(s.version), late].filter(Boolean).join(", ")),
        element("td", s.state === "dirty" ? { class: "bad" } : {}, s.state), element("td", {}, bytes(s.nbytes)), element("td", {}, pathText(s.path))));
    }
    table.append(body);
    return element("div", { class: "card scroll", role: "region", "aria-label": `Sync ${name}`, tabindex: "0" }, element("h3", {}, `${name}, version ${newest < 0 ? "none yet" : newest}`), table);
  });
  $("syncs").replaceChildren(...(cards.length ? cards : [element("p", { class: "note" }, "No trainer publishes.")]));
}

const drawn = new Map(); // member id -> { row, nodes }

function cells(values) {
  return values.map(([text, kind]) => element("td", kind ? { class: kind } : {}, text));
}

function drawMembers(shown) {
  const body = $("members").tBodies[0];
  const wanted = new Set(shown.map((row) => row.id));
  for (const [id, entry] of drawn) {
    if (wanted.has(id) && entry.row === rows.get(id)) continue;
    for (const node of entry.nodes) node.remove();
    drawn.delete(id);
  }
  // Only rows that changed are made again: 1,000 members stay quick.
  for (const row of shown) {
    if (drawn.has(row.id)) continue;
    const lines = row.holdings.length ? row.holdings : [null];
    const nodes = lines.map((h) => element("tr", {}, ...cells(h
      ? [[label(row)], [row.host.slice(0, 12)], [h.model], [`${h.state}${h.kept ? ", kept" : ""} ${percent(h.share)}`, row.silent ? "late" : ""],
        [bytes(h.nbytes)], [h.max_readers ? `${h.readers} of ${h.max_readers}` : String(h.readers)], [h.gb_per_s ? `${h.gb_per_s.toFixed(2)} GB/s` : ""], [pathText(h.path)], [h.why, "why"]]
      : [[label(row)], [row.host.slice(0, 12)], [row.syncs.map((s) => s.name).join(", ")], [row.syncs.length ? "sync" : "idle"], [""], [""], [""], [""], ["", "why"]])));
    body.append(...nodes);
    drawn.set(row.id, { row, nodes });
  }
}

$("search").addEventListener("input", () => { dirty = true; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== $("search") && !$("login").open) {
    event.preventDefault();
    $("search").focus();
  }
});
setInterval(() => requestAnimationFrame(draw), 250);
follow();
