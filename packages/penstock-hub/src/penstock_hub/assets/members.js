// The table of members, and the drain orders of an operator.
"use strict";

const ROWS_SHOWN = 100; // until the user asks for all
const drawn = new Map(); // member id -> { row, mayDrain, nodes }
let showsAll = false;
let mayDrain = false;

function drawMembers(shown) {
  const body = $("members").tBodies[0];
  const some = showsAll ? shown : shown.slice(0, ROWS_SHOWN);
  const wanted = new Set(some.map((row) => row.id));
  for (const [id, entry] of drawn) {
    if (wanted.has(id) && entry.row === rows.get(id) && entry.mayDrain === mayDrain) continue;
    for (const node of entry.nodes) node.remove();
    drawn.delete(id);
  }
  // Recreate only the rows that changed and insert each at its position, so that 1,000 members stay fast.
  let before = null;
  for (const row of [...some].reverse()) {
    const entry = drawn.get(row.id);
    if (!entry) {
      const nodes = memberRows(row);
      if (before) before.before(...nodes);
      else body.append(...nodes);
      drawn.set(row.id, { row, mayDrain, nodes });
    }
    before = drawn.get(row.id).nodes[0];
  }
  for (const node of document.querySelectorAll(".operators")) node.hidden = !mayDrain;
  $("all").hidden = some.length === shown.length;
  $("all").textContent = `Show all ${shown.length} members`;
}

function memberRows(row) {
  const lines = row.holdings.length ? row.holdings : [null];
  return lines.map((h, i) => {
    const texts = h
      ? [[label(row)], [hostName(row.host)], [h.model], [`${h.state}${h.kept ? ", kept" : ""} ${percent(h.share)}`, row.silent || h.state === "draining" ? "late" : ""], [tierOf(h)],
        [bytes(h.nbytes)], [h.max_readers ? `${h.readers} of ${h.max_readers}` : String(h.readers)], [h.gb_per_s ? rate(h.gb_per_s) : ""], [pathText(h.path)], [h.why, "why"]]
      : [[label(row)], [hostName(row.host)], [row.syncs.map((s) => s.name).join(", ")], [row.drain ? "draining" : row.syncs.length ? "sync" : "idle", row.drain ? "late" : ""], [""], [""], [""], [""], [""], ["", "why"]];
    const cells = texts.map(([text, kind]) => element("td", kind ? { class: kind } : {}, text));
    const operate = element("td", { class: "operators" });
    operate.hidden = !mayDrain;
    if (mayDrain && i === 0) operate.append(element("button", { type: "button", class: "small", "data-drain": row.id, "aria-label": `${row.drain ? "Undo the drain of" : "Drain"} ${label(row)}` }, row.drain ? "Undo drain" : "Drain"));
    return element("tr", { "data-member": row.id }, ...cells, operate);
  });
}

function askToDrain(event) {
  const id = event.target.dataset.drain;
  const row = id && rows.get(id);
  if (!row) return;
  if (row.drain) {
    order(row, "DELETE");
    return;
  }
  $("drain-title").textContent = `Drain ${label(row)}`;
  $("drain-reason").value = "";
  const dialog = $("drain");
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "drain") order(row, "PUT", JSON.stringify({ reason: $("drain-reason").value.trim() }));
  }, { once: true });
  dialog.showModal();
}

async function order(row, method, body) {
  try {
    const answer = await fetch(`v1/drains/${encodeURIComponent(row.id)}`, { method, body, headers: { ...authorization(), ...(body ? { "Content-Type": "application/json" } : {}) } });
    if (!answer.ok) throw new Error((await answer.json()).error);
    $("told").textContent = `${label(row)} ${method === "PUT" ? "is draining and gets no new readers" : "gets readers again"}.`;
  } catch (error) {
    $("told").textContent = `${label(row)} did not change: ${error.message}.`;
  }
}
