// The fleet page reads /v1/events and draws the changes. It uses no library and loads nothing from another origin.
"use strict";

const rows = new Map(); // member id -> row
let history = [];
let jobs = [];
let failures = [];
let totals = null;
let cursor = "";
let token = sessionStorage.getItem("penstock-token") || "";
let dirty = true;

// The fragment of the address is a token from `penstock ui`, or the name of a section on the page.
const fragment = location.hash.slice(1);
if (fragment && !$(fragment)) {
  token = fragment;
  sessionStorage.setItem("penstock-token", token);
  // A token in the address would stay in the browser's history.
  window.history.replaceState(null, "", location.pathname);
}

const authorization = () => (token ? { Authorization: `Bearer ${token}` } : {});

// -- The stream.

async function follow() {
  for (;;) {
    try {
      const answer = await fetch(`v1/events?since=${cursor}`, { headers: authorization(), cache: "no-store" });
      if (answer.status === 401) {
        await login();
        continue;
      }
      if (!answer.ok) throw new Error(`the hub answered ${answer.status}`);
      say("Live", "live");
      await read(answer.body.getReader(), take);
    } catch (error) {
      say(`No connection: ${error.message}. Retrying`, "lost");
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
}

// Calls `take` with each message of an event stream, until the stream ends.
async function read(reader, take) {
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
  if (message.jobs) jobs = message.jobs;
  if (message.failures) failures = message.failures;
  if (message.totals) totals = message.totals;
  if (message.history) {
    history = message.full ? message.history : history.concat(message.history.filter((p) => !history.length || p.at > history.at(-1).at));
    history = history.slice(-720);
  }
  mayDrain = message.may_drain;
  $("operator").hidden = !mayDrain;
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

const words = () => $("search").value.trim().toLowerCase();

function matches(row) {
  const all = [row.id, row.name, row.host, row.rack, hostName(row.host), row.drain ? "draining" : "", ...row.holdings.map((h) => `${h.model} ${h.revision} ${h.state}`), ...row.syncs.map((s) => s.name)];
  return all.join(" ").toLowerCase().includes(words());
}

const matchesJob = (job) => [job.name, job.process, job.phase, job.operation, job.destination, ...job.sources].join(" ").toLowerCase().includes(words());
const matchesFailure = (f) => [f.member, f.name, f.host, f.model, f.verb, f.error].join(" ").toLowerCase().includes(words());

function draw() {
  if (!dirty) return;
  dirty = false;
  nameHosts(rows.values());
  const shown = [...rows.values()].filter(matches);
  const shownJobs = jobs.filter(matchesJob);
  drawTiles(shown, shownJobs, totals);
  drawProblems(shown, shownJobs, failures.filter(matchesFailure));
  drawConversions(shownJobs);
  drawCharts(history, totals);
  drawModels(shown);
  drawRelay(shown);
  drawSyncs(shown);
  drawMembers(shown);
}

function redraw() {
  dirty = true;
  draw();
}

$("search").addEventListener("input", () => { dirty = true; });
$("all").addEventListener("click", () => { showsAll = true; redraw(); });
$("members").addEventListener("click", askToDrain);
for (const kind of ["click", "keydown"]) $("relay").addEventListener(kind, chooseTransfer);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT" && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "Escape" && event.target === $("search")) {
    $("search").value = "";
    dirty = true;
  }
});
setInterval(() => requestAnimationFrame(draw), 250);
// The charts advance even if nothing changes.
setInterval(() => { if (!document.hidden) drawCharts(history, totals); }, 5000);
follow();
