// The starts of replicas as waterfall charts: follows /v1/phases and draws. Uses the elements and the token of the page.
"use strict";

(() => {
  const SHOWN = 50; // those that are not ready first, then the newest
  const OPEN = 4; // that are unfolded until the reader folds them
  const boots = new Map(); // member -> { boot, at: when it came }
  const drawn = new Map(); // member -> { details, summary, body, boot }
  const chosen = new Map(); // member -> whether the reader unfolded it
  let counts = { ready: 0, starting: 0, failed: 0 };

  // -- The stream.

  async function follow() {
    for (;;) {
      // The page asks for a token where the hub wants one; until it has what it asked for, neither is there anything here.
      if (!cursor) {
        await pause(300);
        continue;
      }
      try {
        const answer = await fetch(`v1/phases?stream&limit=${SHOWN}`, { headers: authorization(), cache: "no-store" });
        if (!answer.ok) throw new Error(`the hub answered ${answer.status}`);
        await read(answer.body.getReader(), taker());
      } catch {
        // The page says that the hub does not answer.
        await pause(3000);
      }
    }
  }

  const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

  // A stream begins with all replicas, and then sends those that changed.
  function taker() {
    let isFirst = true;
    return (message) => {
      if (message.error) return;
      if (isFirst) boots.clear();
      isFirst = false;
      for (const member of message.gone) boots.delete(member);
      for (const boot of message.replicas) boots.set(boot.member, { boot, at: performance.now() });
      counts = message;
      draw();
    };
  }

  // -- The charts.

  function span(seconds) {
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    return seconds < 100 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
  }

  function kindOf(phase) {
    if (phase.state === "failed") return "failed";
    if (phase.journey === "engine") return "engine";
    if (phase.name === "move" || phase.name === "write") return "move";
    return ["commit", "finish", "verify"].includes(phase.name) ? "verify" : "wait";
  }

  // Seconds that have passed here since the record came, for phases that run.
  const since = ({ boot, at }) => (boot.state === "starting" ? (performance.now() - at) / 1000 : 0);

  function titleOf(entry) {
    const { boot } = entry;
    const took = span(boot.seconds + since(entry));
    const state = { ready: `ready after ${took}`, starting: `starting, ${boot.phase || "between phases"}, ${took} so far`, failed: `failed in ${boot.phase} after ${took}` }[boot.state];
    const before = boot.process_s > 1 ? `; ${span(boot.process_s)} before the first phase` : "";
    return `${short(boot.member)} ${boot.name} ${boot.models.join(", ")}: ${state}${before}${boot.has_left ? "; it has left" : ""}`;
  }

  function waterfall(entry) {
    const { boot } = entry;
    const whole = Math.max(boot.seconds + since(entry), 1e-3);
    const head = element("thead", {}, element("tr", {}, ...["Phase", "Time", "Begin", "Length", "Bytes"].map((text, i) => element("th", { scope: "col", class: i > 1 ? "num" : "" }, text))));
    const body = element("tbody");
    for (const phase of boot.phases) {
      const length = phase.seconds + (phase.state === "running" ? since(entry) : 0);
      const x = (phase.start_s / whole) * 1000;
      const width = Math.max((length / whole) * 1000, 3);
      const share = phase.nbytes && phase.state !== "done" ? phase.done_bytes / phase.nbytes : 1;
      const kind = `phase-${kindOf(phase)}`;
      // A step of the engine around others is pale: they say what it was spent on.
      const isAround = phase.state === "done" && boot.phases.some((other) => other !== phase && other.start_s >= phase.start_s && other.start_s + other.seconds <= phase.start_s + length);
      const bar = drawing("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" },
        drawing("rect", { class: `${kind} phase-left`, x, width, height: 14 }), drawing("rect", { class: kind, x, width: isAround ? 0 : width * share, height: 14 }));
      const moved = phase.nbytes ? (phase.done_bytes === phase.nbytes ? bytes(phase.nbytes) : `${bytes(phase.done_bytes)} of ${bytes(phase.nbytes)}`) : "";
      body.append(element("tr", {}, element("th", { scope: "row", title: phase.model }, `${phase.name}${phase.state === "done" ? "" : ` (${phase.state})`}`),
        element("td", { class: "chart" }, bar), element("td", { class: "num" }, span(phase.start_s)), element("td", { class: "num" }, span(length)), element("td", { class: "num" }, moved)));
    }
    return element("table", { "aria-label": `Phases of ${boot.name}` }, head, body);
  }

  function matching({ boot }) {
    const wanted = $("search").value.trim().toLowerCase();
    return !wanted || [boot.member, boot.name, boot.host, boot.state, ...boot.models].join(" ").toLowerCase().includes(wanted);
  }

  function place(member) {
    const summary = element("summary");
    const body = element("div", { class: "scroll", role: "region", tabindex: "0" });
    const details = element("details", { class: "card" }, summary, body);
    summary.addEventListener("click", () => chosen.set(member, !details.open));
    details.addEventListener("toggle", draw);
    return { details, summary, body, boot: null };
  }

  function draw() {
    const shown = [...boots.values()].filter(({ boot }) => boot.phases.length).filter(matching)
      .sort((a, b) => (a.boot.state === "ready") - (b.boot.state === "ready") || b.boot.started_at - a.boot.started_at);
    const wanted = new Set(shown.map(({ boot }) => boot.member));
    for (const [member, { details }] of drawn) {
      if (wanted.has(member)) continue;
      details.remove();
      drawn.delete(member);
    }
    shown.forEach((entry, index) => {
      const { boot } = entry;
      const view = drawn.get(boot.member) || drawn.set(boot.member, place(boot.member)).get(boot.member);
      // The elements stay, so that the focus of a reader at the keyboard does too.
      if ($("boots").children[index] !== view.details) $("boots").insertBefore(view.details, $("boots").children[index] || null);
      const isOpen = chosen.has(boot.member) ? chosen.get(boot.member) : index < OPEN;
      if (view.details.open !== isOpen) view.details.open = isOpen;
      if (view.boot === boot && boot.state !== "starting" && view.body.hasChildNodes() === isOpen) return;
      view.boot = boot;
      view.summary.textContent = titleOf(entry);
      view.body.setAttribute("aria-label", `Start of ${boot.name}`);
      if (!isOpen) {
        view.body.replaceChildren();
        return;
      }
      const fault = boot.error ? [element("p", { class: "fault" }, `${boot.error.error} (blame: ${boot.error.blame || "not Penstock"})${boot.error.hint ? `; ${boot.error.hint}` : ""}`)] : [];
      view.body.replaceChildren(...fault, waterfall(entry));
    });
    const legend = [["wait", "find and prepare"], ["move", "move"], ["verify", "verify"], ["engine", "engine"], ["failed", "failed"]]
      .map(([kind, text]) => element("span", { class: "legend" }, element("span", {}, element("i", { class: `swatch phase-${kind}` }), text)));
    const total = counts.ready + counts.starting + counts.failed;
    const text = total ? `${counts.starting} starting, ${counts.ready} ready, ${counts.failed} failed. ${total > SHOWN ? `The ${SHOWN} newest are here. ` : ""}` : "No process has loaded weights yet.";
    if ($("boots-note").dataset.text !== text) {
      $("boots-note").dataset.text = text;
      $("boots-note").replaceChildren(text, ...(total ? legend : []));
    }
  }

  $("search").addEventListener("input", draw);
  // What runs grows; a page that nobody looks at need not draw it.
  setInterval(() => { if (!document.hidden && counts.starting) draw(); }, 500);
  follow();
})();
