// One viewer for two clips, on ComfyUI's canvas and in report.html: wipe, side by side, difference, frame by frame,
// the sound of either, and how far they differ under the time line. It fetches nothing but the two clips it is given.
//
//   mountViewer(element, data, {a: url, b: url}, {words, keys})  ->  {destroy, seek, mode, sound, state}
//
// data: {fps, frames, width, height, worst, basis, sides: {A, B: {name, label, costs}}, curves: [{name, unit, values}]}

export const WORDS = {
  en: {
    play: "Play", pause: "Pause", back: "Frame back", forward: "Frame forward", wipe: "Wipe", side: "Side by side",
    difference: "Difference", sound: "Sound", off: "Off", worst: "Worst frame", frame: "frame", loop: "Loop",
    curve: "Curve", gain: "Difference x", costs: "Cost", identical: "identical", none: "not measured",
    help: "Space play, arrows step (Shift: 10), W S D view, 1 2 0 sound, L loop, X worst frame, Home End",
    position: "Position of the wipe", time: "Frame", failed: "The clip cannot be played here",
  },
  zh: {
    play: "播放", pause: "暂停", back: "上一帧", forward: "下一帧", wipe: "划像", side: "并排",
    difference: "差异", sound: "声音", off: "关", worst: "最差帧", frame: "帧", loop: "循环",
    curve: "曲线", gain: "差异放大", costs: "开销", identical: "完全相同", none: "未测量",
    help: "空格播放，方向键逐帧（Shift：10 帧），W S D 视图，1 2 0 声音，L 循环，X 最差帧，Home End",
    position: "划像位置", time: "帧", failed: "此处无法播放该片段",
  },
};

const STYLE = `
:host { display: block;
  --ink: light-dark(#18181b, #ececf1); --soft: light-dark(#52525b, #a1a1aa); --line: light-dark(#d4d4d8, #3f3f46);
  --paper: light-dark(#ffffff, #1c1c21); --raised: light-dark(#f4f4f5, #27272c);
  --a: light-dark(#2563eb, #60a5fa); --b: light-dark(#c2410c, #fb923c); --mark: light-dark(#b91c1c, #f87171);
  color: var(--ink); font: 13px/1.4 system-ui, sans-serif; }
* { box-sizing: border-box; }
.viewer { outline: none; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; background: var(--paper); }
.viewer:focus-visible { border-color: var(--a); }
.names { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; padding: 8px 12px; }
.names div { min-width: 0; border-left: 4px solid var(--a); padding-left: 8px; }
.names div + div { border-color: var(--b); }
.names b, .names span { display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.names span { color: var(--soft); font-size: 12px; }
.stage { position: relative; background: #000; overflow: hidden; isolation: isolate; touch-action: none;
  margin: 0 auto; }
.stage video { position: absolute; inset: 0; width: 100%; height: 100%; object-fit: contain; background: #000; }
.stage[data-mode=side] video { width: 50%; }
.stage[data-mode=side] video.b { left: 50%; }
.stage[data-mode=difference] video.b { mix-blend-mode: difference; }
.stage .tag { position: absolute; top: 8px; padding: 1px 8px; border-radius: 4px; background: #000a; color: #fff;
  font-weight: 600; pointer-events: none; }
.stage .tag.a { left: 8px; border-bottom: 3px solid #60a5fa; }
.stage .tag.b { right: 8px; border-bottom: 3px solid #fb923c; }
.stage[data-mode=difference] .tag { display: none; }
.handle { position: absolute; top: 0; bottom: 0; width: 24px; margin-left: -12px; cursor: ew-resize; }
.handle::before { content: ""; position: absolute; left: 11px; top: 0; bottom: 0; width: 2px; background: #fff;
  box-shadow: 0 0 3px #000; }
.handle::after { content: ""; position: absolute; left: 4px; top: calc(50% - 8px); width: 16px; height: 16px;
  border-radius: 50%; background: #fff; box-shadow: 0 0 3px #000; }
.stage:not([data-mode=wipe]) .handle { display: none; }
.line { display: block; width: 100%; height: 72px; cursor: pointer; background: var(--raised); touch-action: none; }
.line path { fill: none; stroke: var(--b); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.line .head { stroke: var(--ink); stroke-width: 2; vector-effect: non-scaling-stroke; }
.line .worst { stroke: var(--mark); stroke-width: 1; stroke-dasharray: 3 3; vector-effect: non-scaling-stroke; }
.bar { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; padding: 8px 12px; }
.group { display: inline-flex; align-items: center; gap: 0; }
.group > .word { color: var(--soft); margin-right: 6px; }
button, select { font: inherit; color: var(--ink); background: var(--raised); border: 1px solid var(--line);
  padding: 3px 9px; border-radius: 5px; cursor: pointer; min-height: 28px; }
.group button { border-radius: 0; margin-left: -1px; }
.group button:first-of-type { border-radius: 5px 0 0 5px; margin-left: 0; }
.group button:last-of-type { border-radius: 0 5px 5px 0; }
button[aria-pressed=true] { background: var(--ink); color: var(--paper); border-color: var(--ink); }
button:focus-visible, select:focus-visible, input:focus-visible { outline: 2px solid var(--a); outline-offset: 1px; }
.now { font-variant-numeric: tabular-nums; white-space: pre; }
.help { color: var(--soft); font-size: 12px; padding: 0 12px 8px; }
table { border-collapse: collapse; width: 100%; font-size: 12px; border-top: 1px solid var(--line); }
th, td { text-align: right; padding: 2px 12px; font-weight: normal; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); }
.failed { position: absolute; inset: 0; display: grid; place-items: center; color: #fff; }
`;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function drawn(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The curve as an SVG path in a box of width `frames - 1` and height 100; gaps where a value is missing. */
export function curvePath(values) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return "";
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  const span = Math.max(high - low, Math.abs(high) * 0.02) || 1;  // noise in the last digits stays flat
  let path = "", open = false;
  values.forEach((value, frame) => {
    if (value === null) { open = false; return; }
    path += `${open ? "L" : "M"}${frame} ${(94 - 88 * (value - low) / span).toFixed(2)}`;
    open = true;
  });
  return path;
}

export function mountViewer(element, data, urls, options = {}) {
  const words = { ...WORDS.en, ...(options.words || {}) };
  const root = element.shadowRoot || element.attachShadow({ mode: "open" });
  const last = Math.max(0, data.frames - 1), fps = data.fps || 24;
  const state = { mode: "wipe", sound: "a", wipe: 50, frame: 0, gain: 8, loop: true, curve: 0 };
  const sides = data.sides || {};
  const video = (letter) => make("video", { class: letter, playsinline: "", preload: "auto", src: urls[letter] });
  const a = video("a"), b = video("b");
  const clips = [a, b];

  const stage = make("div", { class: "stage" }, a, b, make("span", { class: "tag a" }, "A"),
    make("span", { class: "tag b" }, "B"));
  const handle = make("div", { class: "handle", role: "slider", tabindex: "0", "aria-label": words.position,
    "aria-valuemin": "0", "aria-valuemax": "100" });
  stage.append(handle);

  const line = drawn("svg", { class: "line", viewBox: `0 0 ${Math.max(1, last)} 100`, preserveAspectRatio: "none",
    role: "slider", tabindex: "0", "aria-label": words.time, "aria-valuemin": "0", "aria-valuemax": String(last) });
  const path = drawn("path"), head = drawn("line", { class: "head", y1: 0, y2: 100 });
  line.append(path);
  if (Number.isInteger(data.worst)) {
    line.append(drawn("line", { class: "worst", x1: data.worst, x2: data.worst, y1: 0, y2: 100 }));
  }
  line.append(head);

  const button = (text, action, more = {}) => make("button", { type: "button", onclick: action, ...more }, text);
  const now = make("span", { class: "now", "aria-live": "off" });
  const play = button(words.play, () => (a.paused ? start() : stop()));
  const modes = ["wipe", "side", "difference"].map((name) => button(words[name], () => setMode(name)));
  const ears = [["a", "A"], ["b", "B"], ["off", words.off]].map(([name, text]) => button(text, () => setSound(name)));
  const loop = button(words.loop, () => { state.loop = !state.loop; show(); });
  const gain = make("select", { "aria-label": words.gain, onchange: () => { state.gain = Number(gain.value); show(); } },
    ...[1, 4, 8, 16, 32].map((value) => make("option", { value }, `${words.gain} ${value}`)));
  const curves = (data.curves || []).filter((curve) => curve.values.some((value) => value !== null));
  const select = make("select", { "aria-label": words.curve, onchange: () => { state.curve = Number(select.value); show(); } },
    ...curves.map((curve, index) => make("option", { value: index }, curve.name)));
  const bar = make("div", { class: "bar" },
    play,
    make("span", { class: "group" }, button("<", () => step(-1), { "aria-label": words.back, title: words.back }),
      button(">", () => step(1), { "aria-label": words.forward, title: words.forward })),
    make("span", { class: "group" }, ...modes),
    make("span", { class: "group" }, make("span", { class: "word" }, words.sound), ...ears),
    gain, loop);
  if (curves.length) bar.append(select);
  if (Number.isInteger(data.worst)) bar.append(button(words.worst, () => goTo(data.worst)));
  bar.append(now);

  const name = (letter) => make("div", {}, make("b", { title: sides[letter]?.name || "" }, `${letter}  ${sides[letter]?.name || ""}`),
    make("span", { title: sides[letter]?.label || "" }, sides[letter]?.label || ""));
  const viewer = make("div", { class: "viewer", tabindex: "0" },
    make("div", { class: "names" }, name("A"), name("B")), stage, line, bar,
    make("div", { class: "help" }, words.help));
  const costs = costTable(sides, words);
  if (costs) viewer.append(costs);
  root.replaceChildren(make("style", {}, STYLE), viewer);

  function start() {
    if (state.frame >= last) seek(0);
    for (const clip of clips) clip.play().catch(() => stop());
  }
  function stop() {
    for (const clip of clips) clip.pause();
    seek(frameOf(a));
  }
  function frameOf(clip) { return Math.min(last, Math.max(0, Math.floor(clip.currentTime * fps + 0.001))); }
  function seek(frame) {
    state.frame = Math.min(last, Math.max(0, frame));
    for (const clip of clips) clip.currentTime = (state.frame + 0.5) / fps;  // the middle of a frame is no border
    show();
  }
  function goTo(frame) { for (const clip of clips) clip.pause(); seek(frame); }
  function step(by) { goTo(state.frame + by); }
  function setMode(mode) { state.mode = mode; show(); }
  function setSound(side) { state.sound = side; show(); }
  function setWipe(percent) { state.wipe = Math.min(100, Math.max(0, percent)); show(); }

  function show() {
    stage.dataset.mode = state.mode;
    const wide = state.mode === "side" ? 2 : 1;
    const ratio = wide * data.width / data.height;
    stage.style.aspectRatio = String(ratio);
    stage.style.width = `min(100%, calc(70vh * ${ratio}))`;  // no bars beside the picture: the wipe runs over it alone
    b.style.clipPath = state.mode === "wipe" ? `inset(0 0 0 ${state.wipe}%)` : "none";
    stage.style.filter = state.mode === "difference" ? `brightness(${state.gain})` : "none";
    handle.style.left = `${state.wipe}%`;
    handle.setAttribute("aria-valuenow", String(Math.round(state.wipe)));
    a.muted = state.sound !== "a";
    b.muted = state.sound !== "b";
    modes.forEach((one, index) => one.setAttribute("aria-pressed", String(["wipe", "side", "difference"][index] === state.mode)));
    ears.forEach((one, index) => one.setAttribute("aria-pressed", String(["a", "b", "off"][index] === state.sound)));
    loop.setAttribute("aria-pressed", String(state.loop));
    gain.style.display = state.mode === "difference" ? "" : "none";
    gain.value = String(state.gain);
    play.textContent = a.paused ? words.play : words.pause;
    const curve = curves[state.curve];
    const drawing = curve ? curvePath(curve.values) : "";
    if (path.getAttribute("d") !== drawing) path.setAttribute("d", drawing);
    showFrame();
  }
  function showFrame() {
    head.setAttribute("x1", state.frame);
    head.setAttribute("x2", state.frame);
    line.setAttribute("aria-valuenow", String(state.frame));
    const curve = curves[state.curve];
    let value = "";
    if (curve) {
      const one = curve.values[state.frame];
      value = one === null || one === undefined ? (curve.name === "PSNR" ? words.identical : words.none) : `${one.toFixed(one < 2 ? 4 : 2)} ${curve.unit}`;
      value = `   ${curve.name} ${value}`;
    }
    now.textContent = `${words.frame} ${state.frame} / ${last}   ${(state.frame / fps).toFixed(3)} s${value}`;
  }

  // While they play, B follows A: small drift by its speed, larger by a jump.
  let ticking = 0;
  function tick() {
    ticking = requestAnimationFrame(tick);
    if (a.paused) return;
    const drift = b.currentTime - a.currentTime;
    if (Math.abs(drift) > 0.12) b.currentTime = a.currentTime;
    b.playbackRate = Math.abs(drift) < 0.008 ? 1 : Math.min(1.1, Math.max(0.9, 1 - drift * 2));
    const frame = frameOf(a);
    if (frame !== state.frame) { state.frame = frame; showFrame(); }
  }
  ticking = requestAnimationFrame(tick);

  a.addEventListener("ended", () => {
    if (!state.loop) { stop(); return; }
    seek(0);
    start();
  });
  for (const clip of clips) {
    clip.addEventListener("play", show);
    clip.addEventListener("pause", show);
    clip.addEventListener("error", () => stage.append(make("div", { class: "failed" }, words.failed)));
    clip.addEventListener("loadedmetadata", () => seek(state.frame), { once: true });
  }

  function dragged(target, move) {
    target.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      event.stopPropagation();
      viewer.focus();
      target.setPointerCapture(event.pointerId);
      move(event);
    });
    target.addEventListener("pointermove", (event) => { if (target.hasPointerCapture(event.pointerId)) move(event); });
  }
  const part = (event, box) => (event.clientX - box.left) / Math.max(1, box.width);
  dragged(stage, (event) => { if (state.mode === "wipe") setWipe(100 * part(event, stage.getBoundingClientRect())); });
  dragged(line, (event) => goTo(Math.round(last * part(event, line.getBoundingClientRect()))));

  const KEYS = {
    " ": () => (a.paused ? start() : stop()), ArrowLeft: (e) => step(e.shiftKey ? -10 : -1),
    ArrowRight: (e) => step(e.shiftKey ? 10 : 1), Home: () => goTo(0), End: () => goTo(last),
    w: () => setMode("wipe"), s: () => setMode("side"), d: () => setMode("difference"),
    1: () => setSound("a"), 2: () => setSound("b"), 0: () => setSound("off"),
    l: () => { state.loop = !state.loop; show(); }, x: () => Number.isInteger(data.worst) && goTo(data.worst),
  };
  function pressed(event) {
    const target = event.composedPath()[0];
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) return;
    if (event.key === " " && target.tagName === "BUTTON") return;  // the button's own key
    if (target === handle && /^Arrow/.test(event.key)) {
      setWipe(state.wipe + (event.key === "ArrowLeft" || event.key === "ArrowDown" ? -2 : 2));
    } else {
      const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!action) return;
      action(event);
    }
    event.preventDefault();
    event.stopPropagation();
  }
  const keys = options.keys || viewer;
  keys.addEventListener("keydown", pressed);
  show();

  return {
    state, seek: goTo, mode: setMode, sound: setSound, wipe: setWipe, videos: clips,
    destroy() {
      cancelAnimationFrame(ticking);
      keys.removeEventListener("keydown", pressed);
      for (const clip of clips) { clip.pause(); clip.removeAttribute("src"); clip.load(); }
      root.replaceChildren();
    },
  };
}

function costTable(sides, words) {
  const rows = (sides.A?.costs || []).map((cost, index) => [cost.title, cost.text, sides.B?.costs?.[index]?.text]);
  const told = rows.filter(([, one, two]) => one || two);
  if (!told.length) return null;
  const body = told.map(([title, one, two]) => make("tr", {}, make("th", { scope: "row" }, title),
    make("td", {}, one || words.none), make("td", {}, two || words.none)));
  return make("table", {}, make("tr", {}, make("th", {}, words.costs), make("td", {}, "A"), make("td", {}, "B")), ...body);
}
