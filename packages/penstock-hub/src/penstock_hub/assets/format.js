// Elements, numbers and names, shared by all pictures on the page.
"use strict";

const $ = (id) => document.getElementById(id);

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
  return `${Math.round(value)} B`;
}

function rate(gbPerS) {
  if (!gbPerS) return "0 GB/s";
  if (gbPerS >= 1000) return `${(gbPerS / 1000).toFixed(2)} TB/s`;
  return gbPerS < 0.1 ? `${(gbPerS * 1000).toFixed(1)} MB/s` : `${gbPerS.toFixed(gbPerS < 10 ? 2 : 0)} GB/s`;
}

function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const percent = (share) => `${Math.floor(share * 100)} %`;
const short = (id) => id.slice(0, 8);
const label = (row) => (row.name ? `${short(row.id)} ${row.name}` : short(row.id));
const pathText = (parts) => parts.map((p) => `${p.percent} % ${p.transport}${p.source ? ` from ${p.source}` : ""}`).join(", ");
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const note = (text) => element("p", { class: "note" }, text);
const pill = (text, kind = "") => element("span", { class: `pill ${kind}` }, text);

// A host's id changes with each boot. Show its name instead, if its members agree on it and no other host has it.
let hostNames = new Map();
function nameHosts(all) {
  const names = new Map();
  const hosts = new Map();
  for (const row of all) {
    const name = row.name.split(":")[0];
    (names.get(row.host) || names.set(row.host, new Set()).get(row.host)).add(name);
    (hosts.get(name) || hosts.set(name, new Set()).get(name)).add(row.host);
  }
  hostNames = new Map();
  for (const [host, own] of names) {
    const [name] = own;
    if (own.size === 1 && name && hosts.get(name).size === 1) hostNames.set(host, name);
  }
}
const hostName = (host) => hostNames.get(host) || host.slice(0, 12);

function tierOf(holding) {
  const place = holding.tier || holding.device;
  if (place.startsWith("cuda") || place === "gpu") return "gpu";
  return place.includes("disk") || place === "source" ? "disk" : "host";
}

// Return the number of columns in a picture with this many cells. A card has space for about 28 columns.
const columns = (count) => (count <= 28 ? Math.max(count, 8) : count <= 300 ? 28 : 40);
