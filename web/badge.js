// The fidelity badge: label and colour at the foot of every node that has one, reasons on hover.
//
//   before a run   what Python foresees from the widgets (nodes/foresee.py)          LOSSLESS
//   after it       the label of the result, and whether it was foreseen             ≠ APPROXIMATE

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { follow, lists, nodeOf, unfollow } from "./forecast.js";
import { addStrip, made } from "./strip.js";
import { words } from "./words.js";

const HEIGHT = 20;
const CLASSES = { LOSSLESS: "lossless", "EXACT MATH": "exact", APPROXIMATE: "approximate" };

const style = document.createElement("style");
style.textContent = `
.h3-badge { display: flex; gap: 3px; align-items: center; }
.h3-badge span { flex: 0 1 auto; min-width: 0; padding: 2px 5px; border-radius: 4px; color: #fff; font-weight: 600;
  font-size: 10px; line-height: 16px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.h3-badge span.main { flex-shrink: 0; max-width: 100%; box-sizing: border-box; }
.h3-badge .lossless { background: #1c6b3c; }
.h3-badge .exact { background: #1d5fa6; }
.h3-badge .approximate { background: #8f4a00; }
.h3-badge .beyond { background: #67409c; }
.h3-badge .none { background: #5a5f66; font-weight: 400; }`;
document.head.append(style);

const badges = new Map(); // node -> Badge

class Badge {
  constructor(node) {
    this.node = node;
    this.element = document.createElement("div");
    this.element.classList.add("h3-badge");
    this.foreseen = null; // {fidelity, assumed} or {error}
    this.atStart = null;
    this.real = null; // the run's fidelity
    this.offline = false;
    addStrip(node, "h3_runtime_label", this.element, HEIGHT, () => this.lines());
    this.show();
  }

  hear(answer) {
    this.offline = Boolean(answer.offline);
    if (answer.label) {
      this.foreseen = answer.label;
      if (this.real && JSON.stringify(this.foreseen) !== this.atStart) this.real = null;
    }
    this.show();
  }

  began() {
    this.atStart = JSON.stringify(this.foreseen);
  }

  ran(fidelity) {
    this.atStart ??= JSON.stringify(this.foreseen);
    this.real = fidelity;
    this.show();
  }

  get differs() {
    return this.real !== null && this.foreseen !== null && this.real.title !== (this.foreseen.fidelity?.title ?? "");
  }

  show() {
    const told = words(app);
    const fidelity = this.real ?? this.foreseen?.fidelity ?? null;
    const pills = [];
    if (fidelity === null) {
      const text = this.foreseen === null ? told.reading : this.foreseen.error ? told.unknown : told.no_label;
      pills.push(made("span", this.offline ? told.offline : text, "main none"));
    } else {
      const text = `${this.differs ? "≠ " : ""}${fidelity.label}`;
      pills.push(made("span", text, `main ${CLASSES[fidelity.label] ?? "none"}`));
      if (fidelity.beyond_the_reference.length) pills.push(made("span", `+ ${told.beyond}`, "beyond"));
    }
    this.element.replaceChildren(...pills);
    this.element.setAttribute("aria-label", pills.map((pill) => pill.textContent).join(" "));
    this.element.dataset.title = fidelity?.title ?? "";
    this.element.dataset.source = this.real ? "run" : "foreseen";
  }

  lines() {
    const told = words(app);
    const fidelity = this.real ?? this.foreseen?.fidelity ?? null;
    if (fidelity === null) {
      return [told.no_label, this.offline ? told.offline : (this.foreseen?.error ?? ""), ...this.assumed(told)];
    }
    const lines = [fidelity.title, this.real ? told.measured : told.foreseen];
    if (this.differs) lines.push(`${told.differs} ${this.foreseen.fidelity?.title ?? this.foreseen.error ?? told.no_label}`);
    const causes = fidelity.parts.filter((part) => part.label !== "LOSSLESS");
    if (causes.length) lines.push(told.parts);
    lines.push(...causes.map((part) => `• ${part.label}: ${part.reason}`));
    if (!causes.length) lines.push(told.all_lossless);
    return [...lines, ...(this.real ? [] : this.assumed(told))];
  }

  assumed(told) {
    const assumed = this.foreseen?.assumed ?? [];
    return assumed.length ? [told.assumed, ...assumed.map((sentence) => `• ${sentence}`)] : [];
  }
}

app.registerExtension({
  name: "H3Runtime.Badge",
  nodeCreated(node) {
    if (!lists.labelled.includes(node.comfyClass)) return;
    const badge = new Badge(node);
    badges.set(node, badge);
    follow(node, (answer) => badge.hear(answer));
    const { onRemoved } = node;
    node.onRemoved = function () {
      badges.delete(node);
      unfollow(node);
      return onRemoved?.apply(this, arguments);
    };
    const { onAdded } = node;
    node.onAdded = function () {
      if (!badges.has(node)) {
        badges.set(node, badge);
        follow(node, (answer) => badge.hear(answer));
      }
      return onAdded?.apply(this, arguments);
    };
  },
  setup() {
    api.addEventListener("execution_start", () => badges.forEach((badge) => badge.began()));
    api.addEventListener("executed", ({ detail }) => {
      const fidelity = detail?.output?.h3_fidelity?.[0];
      if (fidelity) badges.get(nodeOf(detail.display_node ?? detail.node))?.ran(fidelity);
    });
  },
});
