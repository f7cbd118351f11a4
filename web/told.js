// What our nodes say of a run stays on them. Newer pages take the text off a node when its job is over, as if it had
// been progress alone: it is shown again then, by the page's own means.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { nodeOf } from "./forecast.js";

const SHOWN = "$$node-text-preview"; // the page's widget for such a text
const AFTER_MS = 400;

const kept = new Map(); // node -> {nodeId, text} as it came

function find(id) {
  return nodeOf(id) ?? (app.rootGraph ?? app.graph)?.getNodeById?.(Number(id)) ?? null;
}

function showAgain() {
  for (const [node, detail] of kept) {
    if (find(detail.nodeId) !== node) kept.delete(node); // another graph is open, or the node is gone
    else if (!node.widgets?.some((widget) => widget.name === SHOWN)) {
      api.dispatchEvent(new CustomEvent("progress_text", { detail }));
    }
  }
}

app.registerExtension({
  name: "H3Runtime.Told",
  setup() {
    api.addEventListener("progress_text", ({ detail }) => {
      const node = detail?.nodeId ? find(detail.nodeId) : null;
      if (node?.comfyClass?.startsWith("H3Runtime")) kept.set(node, { nodeId: detail.nodeId, text: detail.text });
    });
    for (const event of ["execution_success", "execution_error", "execution_interrupted"]) {
      api.addEventListener(event, () => setTimeout(showAgain, AFTER_MS));
    }
  },
});
