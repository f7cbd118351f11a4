// Run inside ComfyUI's page: builds a workflow from a plain description, lays it out, and tells what is on the canvas.
//
//   h3.build({nodes, groups}) ─▶ nodes on the canvas    h3.arrange(...) ─▶ columns left to right, wires round the nodes
//   h3.read() ─▶ {canvas, api}                                h3.faults() ─▶ overlaps and texts that do not fit
window.h3 = (() => {
  const COLUMN_GAP = 150, ROW_GAP = 100, TITLE = 30, PAD = 20, HEAD = 44, SLOTS = 10 // wires in a gap of columns
  const graph = () => app.rootGraph ?? app.graph
  const made = new Map()

  function build (spec) {
    graph().clear()
    made.clear()
    for (const about of spec.nodes) {
      const node = LiteGraph.createNode(about.type)
      if (!node) throw new Error(`no node type ${about.type}`)
      graph().add(node)
      made.set(about.name, node)
      if (about.title) node.title = about.title
      if (about.muted) node.mode = 2
      if (about.colour) { node.color = about.colour[0]; node.bgcolor = about.colour[1] }
      for (const [name, value] of Object.entries(about.widgets ?? {})) {
        const widget = node.widgets?.find(one => one.name === name) ?? (about.type.endsWith('Note') && node.widgets[0])
        if (!widget) throw new Error(`${about.type} has no widget ${name}`)
        widget.value = value
        widget.callback?.(value)
      }
    }
    for (const about of spec.nodes) {
      for (const [input, [source, output]] of Object.entries(about.links ?? {})) {
        const from = made.get(source), to = made.get(about.name)
        const out = from.outputs.findIndex(slot => slot.name === output)
        const into = to.inputs.findIndex(slot => slot.name === input)
        if (out < 0 || into < 0 || !from.connect(out, to, into)) {
          const there = [from.outputs, to.inputs].map(slots => slots.map(slot => slot.name).join(', '))
          throw new Error(`${source}.${output} -> ${about.name}.${input}: no such link (${there.join(' | ')})`)
        }
      }
    }
    return Object.fromEntries([...made].map(([name, node]) => [name, node.id]))
  }

  // Sizes of the nodes as they are now, by the description's names.
  const sizes = () => Object.fromEntries([...made].map(([name, node]) => [name, [...node.size]]))

  // The same in the page's newer rendering, where nodes are elements of the page.
  const drawn = () => Object.fromEntries([...made].map(([name, node]) => [name, sizeDrawn(node)]))

  function sizeDrawn (node) {
    const element = document.querySelector(`[data-node-id="${node.id}"]`)
    if (!element) throw new Error(`${node.title} is not drawn as an element`)
    const { width, height } = element.getBoundingClientRect(), scale = app.canvas.ds.scale
    return [width / scale, height / scale - TITLE]
  }

  // Columns and rows from the largest size seen of every node; then a frame around each group.
  function arrange (spec, grown) {
    const width = {}, height = {}
    for (const group of [...graph()._groups]) graph().remove(group)
    for (const id of [...graph().reroutes.keys()]) graph().removeReroute(id)
    for (const { name, column, row, rows = 1, size } of spec.nodes) {
      const node = made.get(name)
      const own = size ?? node.computeSize()
      const told = !size && name !== 'note' && node.type.startsWith('H3Runtime') ? 66 : 0 // what a node says of its run
      node.setSize([Math.max(own[0], size ? 0 : 270), own[1] + told])
      const tall = Math.max(grown[name]?.[1] ?? 0, node.size[1])
      width[column] = Math.max(width[column] ?? 0, node.size[0])
      if (rows === 1) height[row] = Math.max(height[row] ?? 0, tall)
    }
    for (const { name, column, size } of spec.nodes) { // as wide as the column, save for those that a size was given
      const node = made.get(name)
      if (!size) node.setSize([width[column], node.size[1]])
    }
    for (const { name, row, rows = 1 } of spec.nodes) { // one that spans rows has room in them
      if (rows === 1 || made.get(name).type.endsWith('Note')) continue
      const spanned = Array.from({ length: rows }, (_, index) => row + index)
      const last = spanned.at(-1)
      const others = spanned.slice(0, -1).reduce((sum, at) => sum + (height[at] ?? 0) + TITLE + ROW_GAP, 0)
      const tall = Math.max(grown[name]?.[1] ?? 0, made.get(name).size[1])
      height[last] = Math.max(height[last] ?? 0, tall - others)
    }
    const place = (lengths, gap) => {
      const starts = {}
      let at = 0
      for (const key of Object.keys(lengths).map(Number).sort((a, b) => a - b)) {
        starts[key] = at
        at += lengths[key] + gap
      }
      return starts
    }
    const x = place(width, COLUMN_GAP), y = place(height, TITLE + ROW_GAP)
    for (const { name, column, row } of spec.nodes) made.get(name).pos = [x[column], y[row]]
    for (const { title, members, colour } of spec.groups) {
      const boxes = members.map(name => {
        const [left, top] = made.get(name).pos, node = made.get(name)
        const about = spec.nodes.find(one => one.name === name)
        const tall = Math.max(grown[name]?.[1] ?? 0, node.size[1])
        return [left, top - TITLE, left + width[about.column], top + tall]
      })
      const [left, top] = [0, 1].map(i => Math.min(...boxes.map(box => box[i])))
      const [right, bottom] = [2, 3].map(i => Math.max(...boxes.map(box => box[i])))
      const group = new LiteGraph.LGraphGroup(title)
      group.pos = [left - PAD, top - PAD - HEAD]
      group.size = [right - left + 2 * PAD, bottom - top + 2 * PAD + HEAD]
      if (colour) group.color = colour
      graph().add(group)
    }
    route(spec, grown)
  }

  const box = one => [one.pos[0], one.pos[1] - (one.computeSize ? TITLE : 0), one.pos[0] + one.size[0],
    one.pos[1] + one.size[1]]

  // Points of the curve that the page draws between two points.
  function curve (a, b) {
    const reach = Math.hypot(b[0] - a[0], b[1] - a[1]) / 4
    const points = [a, [a[0] + reach, a[1]], [b[0] - reach, b[1]], b]
    return Array.from({ length: 41 }, (_, step) => {
      const t = step / 40, weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3]
      return [0, 1].map(axis => weights.reduce((sum, weight, index) => sum + weight * points[index][axis], 0))
    })
  }

  // Wires that would run behind a node go round it: along a lane between two rows, up or down between two columns.
  function route (spec, grown) {
    const boxes = graph()._nodes.map(node => {
      const name = [...made].find(([, one]) => one === node)[0]
      const [left, top, right, bottom] = box(node)
      return { node, area: [left - 8, top - 8, right + 8, Math.max(bottom, node.pos[1] + (grown[name]?.[1] ?? 0)) + 8] }
    })
    const free = (points, ends) => !boxes.some(({ node, area }) => !ends.includes(node) && points.some(([x, y]) =>
      x > area[0] && x < area[2] && y > area[1] && y < area[3]))
    const edges = [...new Set(boxes.map(({ area }) => area[3]))]
    const used = []
    const links = [...graph().links.values()].map(link => {
      const from = graph().getNodeById(link.origin_id), to = graph().getNodeById(link.target_id)
      const slots = from.getOutputPos ? [from.getOutputPos(link.origin_slot), to.getInputPos(link.target_slot)]
        : [from.getConnectionPos(false, link.origin_slot), to.getConnectionPos(true, link.target_slot)]
      return { link, from, to, a: [...slots[0]], b: [...slots[1]] }
    })
    const taken = {}, outs = {}
    for (const { link, from, to, a, b } of links) {
      if (a[0] < b[0] && free(curve(a, b), [from, to])) continue
      const origin = `${link.origin_id} ${link.origin_slot}` // wires of one output run as one
      const keys = [`out ${from.pos[0]}`, `in ${to.pos[0]}`], slots = [origin, keys[1]]
      const first = slots.map((key, index) => (outs[key] ?? taken[keys[index]] ?? 0) % SLOTS)
      let best = null
      const tryWay = (y, out, into) => {
        const one = [from.pos[0] + from.size[0] + 26 + 10 * out, y], two = [to.pos[0] - 26 - 10 * into, y]
        const span = [Math.min(one[0], two[0]), Math.max(one[0], two[0])]
        if (two[0] < one[0] && to.pos[0] > from.pos[0]) return
        const near = used.filter(other => Math.abs(other.y - y) < 9 && other.from < span[1] && span[0] < other.to)
        if (near.some(other => other.origin !== origin || other.y !== y)) return
        const cost = (near.length ? 0 : 100) + Math.abs(y - a[1]) + Math.abs(y - b[1]) + 3 * (Math.abs(out - first[0]) + Math.abs(into - first[1]))
        if (best && cost >= best.cost) return
        const points = [...middle(a, one), one, two, ...middle(b, two)]
        const path = [a, ...points, b].flatMap((point, index, all) => index ? curve(all[index - 1], point) : [])
        if (free(path, [])) best = { cost, points, one, two, y, out }
        else if ((!best || cost + 500 < best.cost) && free(path, [from, to])) best = { cost: cost + 500, points, one, two, y, out }
      }
      for (const edge of edges) for (let lane = 0; lane < 6; lane++) tryWay(edge + 8 + 11 * lane, ...first)
      for (let out = 0; out < SLOTS && !best; out++) {
        for (let into = 0; into < SLOTS; into++) {
          for (const edge of edges) for (let lane = 0; lane < 6; lane += 2) tryWay(edge + 8 + 11 * lane, out, into)
        }
      }
      if (!best) continue
      const ends = [best.one[0], best.two[0]]
      outs[origin] ??= best.out
      if (!used.some(other => other.origin === origin)) taken[keys[0]] = (taken[keys[0]] ?? 0) + 1
      taken[keys[1]] = (taken[keys[1]] ?? 0) + 1
      used.push({ origin, y: best.y, from: Math.min(...ends), to: Math.max(...ends) })
      for (const point of best.points) graph().createReroute(point, link)
    }
  }

  // A point half way of a long way up or down at ``far``: one curve over all of it would bulge into its neighbours.
  const middle = (end, far) => Math.abs(end[1] - far[1]) > 330 ? [[far[0], (end[1] + far[1]) / 2]] : []

  // Notes as tall as their words, which the page knows once it has drawn them.
  function fitNotes () {
    for (const node of graph()._nodes.filter(node => node.type === 'MarkdownNote')) {
      const words = node.widgets[0].element
      const inner = words.querySelector('.tiptap, .ProseMirror') ?? words
      const last = inner.lastElementChild
      node.setSize([node.size[0], last.offsetTop + last.offsetHeight + 2 * TITLE])
    }
  }

  // Look at the notes closely: at a distance the page does not draw their words.
  function lookAtNotes () {
    const note = graph()._nodes.find(node => node.type === 'MarkdownNote')
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [100 - note.pos[0], 100 - note.pos[1]]
    app.canvas.setDirty(true, true)
  }

  async function read () {
    const prompt = await app.graphToPrompt()
    return { canvas: graph().serialize(), api: prompt.output }
  }

  // Bring all of the graph into view.
  function fit (left0 = 80, top0 = 110, margin = 30) {
    const boxes = [...graph()._nodes.map(node => [node.pos[0], node.pos[1] - TITLE, node.pos[0] + node.size[0],
      node.pos[1] + node.size[1]]), ...graph()._groups.map(group => [group.pos[0], group.pos[1],
      group.pos[0] + group.size[0], group.pos[1] + group.size[1]])]
    const [left, top] = [0, 1].map(i => Math.min(...boxes.map(box => box[i])))
    const [right, bottom] = [2, 3].map(i => Math.max(...boxes.map(box => box[i])))
    const canvas = app.canvas, seen = canvas.canvas.getBoundingClientRect()
    const scale = Math.min(1, (seen.width - left0 - margin) / (right - left), (seen.height - top0 - margin) / (bottom - top))
    canvas.ds.scale = scale
    canvas.ds.offset[0] = left0 / scale - left
    canvas.ds.offset[1] = top0 / scale - top
    canvas.setDirty(true, true)
    return [right - left, bottom - top]
  }

  // What a viewer would stumble over: nodes over each other, nodes outside a frame they are partly in; with the sizes
  // of the page's elements where nodes are such.
  function faults (elements = false) {
    const found = []
    const area = node => {
      const [left, top] = box(node), [width, height] = elements ? sizeDrawn(node) : node.size
      return [left, top, left + width, top + TITLE + height]
    }
    const cross = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
    const inside = (a, b) => a[0] >= b[0] && a[1] >= b[1] && a[2] <= b[2] && a[3] <= b[3]
    const nodes = graph()._nodes
    nodes.forEach((one, index) => nodes.slice(index + 1).forEach(other => {
      if (cross(area(one), area(other))) found.push(`${one.title} lies over ${other.title}`)
    }))
    for (const group of graph()._groups) {
      for (const node of nodes) {
        const a = area(node), b = box(group)
        if (cross(a, b) && !inside(a, b)) found.push(`${node.title} sticks out of the frame ${group.title}`)
      }
    }
    return found
  }

  return { build, sizes, drawn, arrange, lookAtNotes, fitNotes, read, fit, faults }
})()
