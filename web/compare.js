// The A/B viewer on the nodes H3 Compare and H3 Compare Videos: report.html's own viewer, served by the package.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const NODES = new Set(["H3RuntimeCompare", "H3RuntimeCompareVideos"]);
const VIEWER = "/h3_runtime/compare_viewer.js";
const BESIDE = 290; // pixels of the viewer that are not picture: names, time line, controls
const LOWEST = 320, HIGHEST = 900;

let viewer = null;
const loadViewer = () => (viewer ??= import(api.apiURL(VIEWER)));

function fileUrl(file) {
  return api.apiURL(`/view?${new URLSearchParams(file)}`);
}

function language() {
  try {
    return app.extensionManager?.setting?.get("Comfy.Locale") || app.ui?.settings?.getSettingValue?.("Comfy.Locale") || "en";
  } catch {
    return "en";
  }
}

function isDark() {
  const body = document.body.classList;
  return body.contains("dark-theme") || document.documentElement.classList.contains("dark-theme") ||
    !/^(light|solarized|arc|nord-light|github-light)/.test(app.ui?.settings?.getSettingValue?.("Comfy.ColorPalette") || "dark");
}

/** Room for the picture at the node's width, and for what stands around it. */
function height(node) {
  const made = node.h3Compare?.made;
  if (!made) return LOWEST;
  return Math.min(HIGHEST, Math.max(LOWEST, Math.round(node.size[0] * made.height / made.width) + BESIDE));
}

async function show(node, made) {
  const { mountViewer, WORDS } = await loadViewer();
  if (!node.h3Compare) {
    const element = document.createElement("div");
    element.style.cssText = "width: 100%; height: 100%; overflow: auto;";
    const widget = node.addDOMWidget("h3_compare_viewer", "h3_compare_viewer", element, {
      serialize: false, hideOnZoom: false, getMinHeight: () => height(node),
    });
    node.h3Compare = { element, widget, shown: null, made };
    const removed = node.onRemoved;
    node.onRemoved = function () {
      node.h3Compare?.shown?.destroy();
      node.h3Compare = null;
      return removed?.apply(this, arguments);
    };
    const wide = Math.max(node.size[0], 560);
    node.setSize?.([wide, node.size[1]]);
    node.setSize?.([wide, Math.max(node.size[1], node.computeSize()[1])]);
  }
  const held = node.h3Compare;
  held.shown?.destroy();
  held.made = made;
  held.element.style.colorScheme = isDark() ? "dark" : "light";
  const urls = { a: fileUrl(made.clips.a), b: fileUrl(made.clips.b) };
  held.shown = mountViewer(held.element, made, urls, { words: WORDS[language().split("-")[0]] || WORDS.en });
  app.graph?.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "H3Runtime.Compare",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.has(nodeData.name)) return;
    const executed = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      const result = executed?.apply(this, arguments);
      const made = output?.h3_compare?.[0];
      if (made) show(this, made).catch((error) => console.warn("H3 Compare: the viewer could not be shown", error));
      return result;
    };
  },
});
