// Asks Python what the open graph's labels and plans are, whenever the graph has changed and then stood still.
//
//   every 300 ms: read the graph ─▶ changed? ─▶ the same once more? ─▶ one request ─▶ each follower hears of its node

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { readGraph } from "./graph.js";
import { setting } from "./words.js";

const TICK_MS = 300;
const RETRY_MS = 3000;
export const CARD_SETTING = "H3Runtime.Plan.CardGiB";
export const RAM_SETTING = "H3Runtime.Plan.RamGiB";

/** Which of our nodes have a label and which a plan; empty lists where the server does not say. */
export const lists = await askJson("/h3_runtime/nodes").catch(() => ({ labelled: [], planned: [] }));

const followers = new Map(); // node -> Set of {hear(kind, told)}
let seen = "";
let asked = "";
let asking = false;
let failedAt = 0;
let nodesById = new Map();

/** ``hear(answer)`` gets {label, plan} of ``node`` at each change; {offline: true} when the server does not answer. */
export function follow(node, hear) {
  if (!followers.has(node)) followers.set(node, new Set());
  followers.get(node).add(hear);
  asked = "";
  start();
}

export function unfollow(node) {
  followers.delete(node);
}

/** The node of the open graph that the server calls ``id``. */
export function nodeOf(id) {
  return nodesById.get(String(id));
}

/** Ask again, though the graph is the same. */
export function refresh() {
  asked = "";
}

let timer = null;
function start() {
  timer ??= setInterval(tick, TICK_MS);
}

async function tick() {
  if (document.hidden || asking || followers.size === 0 || Date.now() - failedAt < RETRY_MS) return;
  asking = true;
  try {
    const { read, body } = question();
    nodesById = read.nodes;
    const still = body === seen;
    seen = body;
    if (!still || body === asked) return;
    const answer = await askJson("/h3_runtime/forecast", body);
    asked = body;
    for (const [id, node] of read.nodes) {
      for (const hear of followers.get(node) ?? []) hear({ label: answer.labels?.[id], plan: answer.plans?.[id] });
    }
  } catch {
    failedAt = Date.now();
    for (const hears of followers.values()) for (const hear of hears) hear({ offline: true });
  } finally {
    asking = false;
  }
}

function question() {
  const read = readGraph(app.rootGraph ?? app.graph);
  return { read, body: JSON.stringify({ graph: read.graph, vram_gib: size(CARD_SETTING), ram_gib: size(RAM_SETTING) }) };
}

/** Whether what is shown is of the graph as it stands now. */
export function isSettled() {
  return !asking && asked !== "" && question().body === asked;
}

function size(id) {
  const value = Number(setting(app, id));
  return Number.isFinite(value) && value > 0 ? value : 0;
}

async function askJson(path, body) {
  const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body } : {};
  const answer = await api.fetchApi(path, options);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return await answer.json();
}
