// The open graph as {id: {class_type, inputs: {name: value or [id, output]}}}, read from the canvas and changed nowhere.
//
//   reroutes, primitives, bypassed nodes and subgraphs ─▶ followed to the node that runs; ids as the server knows them
//
// A widget's value is read as it stands: nothing is uploaded, captured or drawn at random, as queueing would do.

const SUBGRAPH_INPUT = -10;
const NEVER = 2;
const BYPASS = 4;
const DEEPEST = 100;

/** {graph, nodes: Map id -> node} of all nodes that would run. */
export function readGraph(root) {
  const graph = {};
  const nodes = new Map();
  visit({ graph: root, prefix: "", host: null, parent: null });
  return { graph, nodes };

  function visit(place) {
    for (const node of place.graph?.nodes ?? place.graph?._nodes ?? []) {
      if (node.mode === NEVER || node.mode === BYPASS) continue;
      if (node.subgraph) {
        if (depth(place) < DEEPEST) visit(inside(place, node));
        continue;
      }
      if (node.isVirtualNode) continue;
      const id = place.prefix + node.id;
      nodes.set(id, node);
      graph[id] = { class_type: String(node.comfyClass ?? node.type ?? ""), inputs: inputsOf(place, node) };
    }
  }
}

function inside(place, node) {
  return { graph: node.subgraph, prefix: `${place.prefix}${node.id}:`, host: node, parent: place };
}

function depth(place) {
  return place.parent === null ? 0 : 1 + depth(place.parent);
}

function inputsOf(place, node) {
  const inputs = {};
  for (const widget of node.widgets ?? []) {
    if (!widget.name || widget.options?.serialize === false || !isPlain(widget.value)) continue;
    inputs[widget.name] = widget.value;
  }
  (node.inputs ?? []).forEach((input, index) => {
    if (linkInto(place, node, index) === null) return;
    const origin = originOf(place, node, index, 0);
    if (origin === null) delete inputs[input.name];
    else inputs[input.name] = "value" in origin ? origin.value : [origin.id, origin.slot];
  });
  return inputs;
}

function isPlain(value) {
  return ["string", "boolean"].includes(typeof value) || (typeof value === "number" && Number.isFinite(value));
}

/** What an input is fed by: {id, slot} of a node that runs, {value} of a primitive, or null. */
function originOf(place, node, index, steps) {
  const link = linkInto(place, node, index);
  return link === null || steps > DEEPEST ? null : follow(place, link, steps);
}

function follow(place, link, steps) {
  if (Number(link.origin_id) === SUBGRAPH_INPUT) return fromOutside(place, link, steps);
  const origin = place.graph.getNodeById(link.origin_id);
  if (!origin || origin.mode === NEVER) return null;
  if (origin.mode === BYPASS) {
    const type = origin.outputs?.[link.origin_slot]?.type;
    const fits = (input) => input?.type === type;
    const same = fits(origin.inputs?.[link.origin_slot]) ? link.origin_slot : (origin.inputs ?? []).findIndex(fits);
    return same < 0 ? null : originOf(place, origin, same, steps + 1);
  }
  if (origin.subgraph) {
    const within = inside(place, origin);
    const out = linkOf(within.graph, within.graph.outputs?.[link.origin_slot]?.linkIds?.[0]);
    return out === null || steps > DEEPEST ? null : follow(within, out, steps + 1);
  }
  if (origin.isVirtualNode) return fromVirtual(place, origin, link.origin_slot, steps);
  return { id: place.prefix + origin.id, slot: link.origin_slot };
}

function fromOutside(place, link, steps) {
  if (place.host === null) return null;
  const name = place.graph.inputs?.[link.origin_slot]?.name;
  const index = (place.host.inputs ?? []).findIndex((input) => input.name === name);
  if (index >= 0 && linkInto(place.parent, place.host, index) !== null) {
    return originOf(place.parent, place.host, index, steps + 1);
  }
  const value = place.host.widgets?.find((widget) => widget.name === name)?.value;
  return isPlain(value) ? { value } : null;
}

function fromVirtual(place, node, slot, steps) {
  if (node.inputs?.length === 1 && linkInto(place, node, 0) !== null) return originOf(place, node, 0, steps + 1);
  const source = node.resolveVirtualOutput?.(slot);
  if (source) return { id: place.prefix + source.node.id, slot: source.slot };
  const value = node.widgets?.[0]?.value;
  return isPlain(value) ? { value } : null;
}

/** The link into an input, or null. A subgraph's own getInputLink tells of the links inside it. */
function linkInto(place, node, index) {
  if (node.subgraph) {
    const all = place.graph.links;
    const links = typeof all?.values === "function" ? [...all.values()] : Object.values(all ?? {});
    return links.find((link) => String(link.target_id) === String(node.id) && link.target_slot === index) ?? null;
  }
  if (typeof node.getInputLink === "function") return node.getInputLink(index) ?? null;
  return linkOf(place.graph, node.inputs?.[index]?.link);
}

function linkOf(graph, id) {
  if (id == null) return null;
  return graph.getLink?.(id) ?? graph.links?.get?.(id) ?? graph.links?.[id] ?? null;
}
