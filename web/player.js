// The page's own player of a saved clip stays out of the prompt: as an input of the node that saved the clip it would
// have that node, and all after it, run again though nothing was changed.

import { app } from "../../scripts/app.js";

const PLAYER = "video-preview";

app.registerExtension({
  name: "H3Runtime.Player",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("H3Runtime") || typeof node.addDOMWidget !== "function") return;
    const { addDOMWidget } = node;
    node.addDOMWidget = function (name, type, element, options) {
      return addDOMWidget.call(this, name, type, element, name === PLAYER ? { ...options, serialize: false } : options);
    };
  },
});
