"use strict";
// The page of a running job: asks for its state once a second and draws it.

const NAMES = {
  u: "useful", w: "waiting", d: "data", c: "checkpoint", p: "repeated",
  s: "stall", r: "restart", b: "start-up", i: "idle", m: "unmarked",
};
const PERIOD_MS = 1000;
const LAGS_S = 10;
const byId = (id) => document.getElementById(id);
const query = location.search;
let state = null;

function color(letter) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${letter}`).trim();
}

function made(tag, text = "", kind = "") {
  const one = document.createElement(tag);
  one.textContent = text; // recorded text is never markup
  one.className = kind;
  return one;
}

function time(seconds) {
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function drawTop() {
  byId("title").textContent = `${state.job_id}: ${state.num_ranks} ranks, ${state.run_dir}`;
  document.title = `${state.phase} - ${state.job_id}`;
  const phase = byId("phase");
  phase.textContent = state.phase;
  const fine = state.phase === "running" || state.phase.endsWith("exit code 0");
  phase.className = state.phase === "starting" ? "tag" : fine ? "tag good" : "tag bad";
  const again = state.attempts > 1 ? `, ${state.attempts} attempts` : "";
  byId("wall").textContent = time(state.wall_s) + again;
}

function drawShares() {
  byId("goodput").textContent = `${(100 * state.goodput).toFixed(1)} %`;
  const bar = byId("bar"), legend = byId("legend");
  bar.replaceChildren();
  legend.replaceChildren();
  for (const [letter, name] of Object.entries(NAMES)) {
    const share = state.shares[name] || 0;
    if (share < 0.0005) continue; // it would be shown as 0.0 %
    const part = made("div");
    part.style.width = `${100 * share}%`;
    part.style.background = `var(--${letter})`;
    part.title = name;
    bar.append(part);
    const mark = made("i");
    mark.style.background = `var(--${letter})`;
    const entry = made("li");
    entry.append(mark, `${name} ${(100 * share).toFixed(1)} %`);
    legend.append(entry);
  }
}

function rowOf(number) {
  const id = `rank-${number}`;
  let row = byId(id);
  if (!row) {
    row = made("div", "", "row");
    row.id = id;
    const canvas = document.createElement("canvas");
    canvas.addEventListener("pointermove", (event) => showTip(event, number));
    canvas.addEventListener("pointerleave", () => (byId("tip").style.display = "none"));
    row.append(made("span"), canvas, made("span"));
  }
  return row;
}

function drawRanks() {
  const rows = state.ranks.map((rank) => {
    const row = rowOf(rank.rank);
    const [name, canvas, doing] = row.children;
    name.textContent = `rank ${rank.rank}${rank.host ? ` (${rank.host})` : ""}`;
    const ended = rank.phase.startsWith("ended");
    const lag = rank.lag_s === null || ended ? "" : `${time(rank.lag_s)} ago`;
    const step = rank.step === null ? "" : `step ${rank.step}`;
    const what = [step, rank.phase, ended ? "" : rank.operation, lag];
    doing.textContent = what.filter(Boolean).join(" \u00b7 ");
    doing.title = doing.textContent;
    const lags = rank.lag_s !== null && rank.lag_s > LAGS_S && !ended;
    doing.className = lags ? "lags" : "";
    drawColumns(canvas, rank.columns);
    return row;
  });
  byId("rows").replaceChildren(...rows);
  const hidden = state.num_ranks - state.ranks.length;
  const more = hidden > 0 ? `${hidden} more ranks lag less` : state.phase.startsWith("ended") ? "end" : "now";
  byId("axis").replaceChildren(made("span", "begin"), made("span", more));
}

function drawColumns(canvas, letters) {
  canvas.width = Math.max(letters.length, 1);
  canvas.height = 1;
  const context = canvas.getContext("2d");
  for (let i = 0; i < letters.length; i++) {
    if (letters[i] === " ") continue;
    context.fillStyle = color(letters[i]);
    context.fillRect(i, 0, 1, 1);
  }
}

function showTip(event, number) {
  const rank = state.ranks.find((one) => one.rank === number);
  const box = event.currentTarget.getBoundingClientRect();
  const share = (event.clientX - box.left) / box.width;
  const letter = rank && rank.columns[Math.floor(share * rank.columns.length)];
  const tip = byId("tip");
  tip.textContent = `${NAMES[letter] || ""} at ${time(share * state.wall_s)}`;
  tip.style.display = letter && letter !== " " ? "block" : "none";
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 180)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

function ranksOf(ranks) {
  const more = ranks.length > 8 ? ` and ${ranks.length - 8} more` : "";
  return `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.slice(0, 8).join(", ")}${more}`;
}

function drawIncidents() {
  const cards = state.incidents.map((one) => {
    const card = made("div", "", "incident");
    const tags = made("div", "", "tags");
    tags.append(made("span", one.cause || one.kind || "no verdict yet", "tag cause"));
    if (one.ranks.length) tags.append(made("span", ranksOf(one.ranks), "tag"));
    if (one.confidence) tags.append(made("span", one.confidence, "tag"));
    if (state.attempts > 1 && one.attempt !== null) tags.append(made("span", `attempt ${one.attempt}`, "tag"));
    if (one.withdrawn) tags.append(made("span", "withdrawn: ranks made progress", "tag good"));
    if (one.withdrawn) card.classList.add("withdrawn");
    card.append(tags, made("p", one.summary || one.reason));
    if (one.next) card.append(made("p", one.next, "soft"));
    card.append(made("p", `dump/${one.folder}`, "soft"));
    return card;
  });
  byId("incidents").replaceChildren(...(cards.length ? cards : [made("p", "none so far", "none")]));
}

function draw() {
  if (!state) return;
  drawTop();
  drawShares();
  drawRanks();
  drawIncidents();
  document.documentElement.dataset.ready = "yes";
}

async function ask() {
  try {
    const answer = await fetch(`state${query}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    state = await answer.json();
    draw();
  } catch (error) {
    const phase = byId("phase");
    phase.textContent = `no answer from echelon status: ${error.message}`;
    phase.className = "tag bad";
  }
  setTimeout(ask, PERIOD_MS);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
ask();
