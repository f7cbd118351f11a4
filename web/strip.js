// A strip of our own at the foot of a node: an element that both renderers show, and a note that opens on hover.
//
// Neither the saved workflow nor the prompt knows of it: its value is in neither, and the height it adds to a node is
// taken off again where the node is saved.

import { app } from "../../scripts/app.js";

const MARGIN = 4;
const GAP = 6; // what the canvas leaves between two widgets, and a little

const style = document.createElement("style");
style.textContent = `
.h3-strip { box-sizing: border-box; width: 100%; padding: 0 7px; overflow: hidden; font: 11px/1.3 Inter, Arial, sans-serif;
  color: var(--input-text, #ddd); cursor: default; user-select: none; }
.h3-strip:focus-visible { outline: 2px solid #5aa9ff; outline-offset: -2px; border-radius: 4px; }
.h3-note { position: fixed; z-index: 10000; max-width: 440px; padding: 8px 10px; border-radius: 6px;
  font: 12px/1.45 Inter, Arial, sans-serif; white-space: pre-wrap; overflow-wrap: anywhere; pointer-events: none;
  background: var(--comfy-menu-bg, #222); color: var(--input-text, #eee); border: 1px solid var(--border-color, #666);
  box-shadow: 0 4px 16px rgba(0, 0, 0, .35); }
.h3-note b { display: block; margin-bottom: 2px; }
.h3-note p { margin: 4px 0 0; }`;
document.head.append(style);

const note = document.createElement("div");
note.className = "h3-note";
note.id = "h3-runtime-note";
note.setAttribute("role", "tooltip");
note.hidden = true;
document.body.append(note);

/** Put ``element`` of ``height`` px on ``node`` as the widget ``name``. ``lines()`` is what the note says: the first
 *  line is its heading. Returns the widget, or null where this page has no such widgets. */
export function addStrip(node, name, element, height, lines) {
  if (typeof node.addDOMWidget !== "function") return null;
  element.classList.add("h3-strip");
  element.tabIndex = 0;
  element.setAttribute("role", "status");
  element.setAttribute("aria-describedby", note.id);
  const tall = height + 2 * MARGIN;
  element.style.height = `${height}px`;
  const before = [...node.size];
  const widget = node.addDOMWidget(name, "h3_runtime_strip", element, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => tall,
    getMaxHeight: () => tall,
    getHeight: () => tall,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  node.setSize([before[0], before[1] + tall + GAP]);
  keepOutOfFiles(node, tall + GAP);
  for (const event of ["pointerenter", "focus"]) element.addEventListener(event, () => open(element, lines()));
  for (const event of ["pointerleave", "blur", "pointerdown"]) element.addEventListener(event, close);
  element.addEventListener("wheel", (event) => {
    close();
    if (!globalThis.LiteGraph?.vueNodesMode) app.canvas?.processMouseWheel?.(event);
  });
  return widget;
}

/** The height that our strip adds is in no file: taken off when the node is saved, put back when it is read. */
function keepOutOfFiles(node, added) {
  const { onSerialize, onConfigure } = node;
  node.onSerialize = function (saved) {
    const answer = onSerialize?.call(this, saved);
    if (saved.size) saved.size = [saved.size[0], saved.size[1] - added];
    return answer;
  };
  node.onConfigure = function (saved) {
    const answer = onConfigure?.call(this, saved);
    if (saved.size) this.setSize([this.size[0], this.size[1] + added]);
    return answer;
  };
}

function open(element, [heading, ...rest]) {
  note.replaceChildren(made("b", heading), ...rest.map((line) => made("p", line)));
  note.hidden = false;
  const from = element.getBoundingClientRect();
  const { width, height } = note.getBoundingClientRect();
  const below = from.bottom + 6 + height <= innerHeight;
  note.style.left = `${Math.max(4, Math.min(from.left, innerWidth - width - 4))}px`;
  note.style.top = `${below ? from.bottom + 6 : Math.max(4, from.top - height - 6)}px`;
}

function close() {
  note.hidden = true;
}

/** An element of ``tag`` that holds ``text`` as text. */
export function made(tag, text, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}
