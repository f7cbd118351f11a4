// The plan as a bar on the sampler, before a run: what each stage takes of the card and of main memory.
//
//   tight · weights are streamed
//   GiB        card, 22.9 free    RAM, 58.1 free
//   text       ███▏       7.1     █           1.0
//   denoise    █████████▏20.4     ██████     33.6

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import "./badge.js"; // stands above the bar
import { CARD_SETTING, RAM_SETTING, follow, lists, refresh, unfollow } from "./forecast.js";
import { addStrip, made } from "./strip.js";
import { setting, words } from "./words.js";

const ROWS = 7; // heading, columns, and up to five stages
const ROW_HEIGHT = 15;

const style = document.createElement("style");
style.textContent = `
.h3-plan { display: grid; grid-template-columns: minmax(48px, max-content) 1fr; column-gap: 8px; align-content: start;
  grid-auto-rows: ${ROW_HEIGHT}px; font-size: 10.5px; line-height: ${ROW_HEIGHT}px; white-space: nowrap; }
.h3-plan.both { grid-template-columns: minmax(48px, max-content) 1fr 1fr; }
.h3-plan .state { grid-column: 1 / -1; font-weight: 600; overflow: hidden; text-overflow: ellipsis; }
.h3-plan .state i { display: inline-block; width: 9px; height: 9px; margin-right: 5px; border-radius: 2px; }
.h3-plan .words { grid-column: 1 / -1; grid-row: span 3; white-space: normal; overflow: hidden; }
.h3-plan .cell { display: flex; gap: 4px; align-items: center; min-width: 0; }
.h3-plan .track { flex: 1 1 auto; min-width: 12px; height: 7px; border-radius: 3px; overflow: hidden;
  background: rgba(128, 128, 128, .35); }
.h3-plan .track div { height: 100%; min-width: 1px; }
.h3-plan .number { flex: 0 0 30px; text-align: right; font-variant-numeric: tabular-nums; }
.h3-plan .column { overflow: hidden; text-overflow: ellipsis; opacity: .85; }
.h3-fits { background: #2f9e5b; } .h3-tight { background: #d08700; } .h3-no { background: #e0483a; }
.h3-unknown { background: #8a8f98; }`;
document.head.append(style);

class PlanBar {
  constructor(node) {
    this.element = document.createElement("div");
    this.element.classList.add("h3-plan");
    this.plan = null;
    this.offline = false;
    addStrip(node, "h3_runtime_plan", this.element, ROWS * ROW_HEIGHT, () => this.lines());
    this.show();
  }

  hear(answer) {
    this.offline = Boolean(answer.offline);
    if (answer.plan?.busy && this.plan?.stages) this.plan = { ...this.plan, busy: true };
    else if (answer.plan) this.plan = answer.plan;
    this.show();
  }

  show() {
    const told = words(app);
    const plan = this.plan;
    this.element.classList.toggle("both", Boolean(plan?.card));
    this.element.dataset.state = plan?.stages ? plan.state : "unknown";
    if (!plan?.stages) {
      const text = this.offline ? told.offline : (plan?.error ?? (plan?.busy ? told.busy : told.reading));
      this.element.replaceChildren(heading("unknown", told.unknown), made("div", text, "words"));
      this.element.setAttribute("aria-label", text);
      return;
    }
    const why = plan.busy ? told.busy : plan.streamed && plan.state === "tight" ? told.streamed : "";
    const said = [told[plan.state], why, plan.card ? "" : told.cpu].filter(Boolean).join(" · ");
    const cells = [heading(plan.state, said)];
    cells.push(made("div", "GiB", "column"));
    if (plan.card) cells.push(made("div", `${told.card}, ${gib(plan.free_card)} ${told.free}`, "column"));
    cells.push(made("div", `${told.ram}, ${gib(plan.free_host)} ${told.free}`, "column"));
    for (const stage of plan.stages) {
      cells.push(made("div", told[stage.name] ?? stage.name, "stage"));
      if (plan.card) cells.push(bar(stage.card, plan.free_card, plan.state));
      cells.push(bar(stage.host, plan.free_host, plan.state));
    }
    this.element.replaceChildren(...cells);
    this.element.setAttribute("aria-label", [said, ...this.lines().slice(1)].join(". "));
  }

  lines() {
    const told = words(app);
    const plan = this.plan;
    if (!plan?.stages) return [told.unknown, this.offline ? told.offline : (plan?.error ?? (plan?.busy ? told.busy : ""))];
    const lines = [plan.card || told.no_card];
    if (plan.refusal) lines.push(plan.refusal);
    for (const stage of plan.stages) {
      const card = plan.card ? `${told.card} ${gib(stage.card)} GiB, ` : "";
      lines.push(`${told[stage.name] ?? stage.name}: ${card}${told.ram} ${gib(stage.host)} GiB (${stage.from})`);
    }
    if (!plan.refusal) lines.push(told.in_all.replace("{0}", duration(plan.seconds)));
    lines.push(...(plan.notes ?? []).map((sentence) => `• ${sentence}`));
    if (plan.assumed?.length) lines.push(told.assumed, ...plan.assumed.map((sentence) => `• ${sentence}`));
    return lines;
  }
}

function heading(state, text) {
  const line = made("div", "", "state");
  line.append(made("i", "", `h3-${state}`), document.createTextNode(text));
  return line;
}

/** A bar of ``used`` in ``free`` GiB with its number; more than there is fills it in the colour of "does not fit". */
function bar(used, free, state) {
  const share = free > 0 ? used / free : used > 0 ? 1 : 0;
  const cell = made("div", "", "cell");
  const track = made("div", "", "track");
  const filled = made("div", "", share > 1 ? "h3-no" : state === "no" || share <= 0.9 ? "h3-fits" : "h3-tight");
  filled.style.width = `${Math.min(1, share) * 100}%`;
  track.append(filled);
  cell.append(track, made("span", gib(used), "number"));
  cell.dataset.gib = String(used);
  return cell;
}

function gib(value) {
  return value >= 100 ? value.toFixed(0) : value >= 0.995 ? value.toFixed(1) : value.toFixed(2);
}

function duration(seconds) {
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const told = words(app);
const sizeSetting = (id, name, max) => ({
  id,
  name,
  category: ["H3 Runtime", "Plan", name],
  type: "number",
  defaultValue: 0,
  attrs: { min: 0, max, step: 1 },
  onChange: refresh,
});

app.registerExtension({
  name: "H3Runtime.PlanBar",
  settings: [sizeSetting(CARD_SETTING, told.setting_card, 1024), sizeSetting(RAM_SETTING, told.setting_ram, 4096)],
  nodeCreated(node) {
    if (!lists.planned.includes(node.comfyClass)) return;
    const shown = new PlanBar(node);
    follow(node, (answer) => shown.hear(answer));
  },
  setup() {
    for (const event of ["execution_success", "execution_error", "execution_interrupted"]) {
      api.addEventListener(event, refresh);
    }
  },
});
