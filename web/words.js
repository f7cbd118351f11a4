// The page's own words in English and Chinese; sentences about a model come from Python as they are.

const EN = {
  no_label: "no label",
  reading: "reading ...",
  beyond: "BEYOND THE REFERENCE",
  unproven: "UNPROVEN HERE",
  foreseen: "Foreseen from the widgets; the run decides.",
  measured: "The label of the last run.",
  differs: "The run gave another label than was foreseen:",
  parts: "What decides it:",
  all_lossless: "Every part is the baseline, bit for bit.",
  assumed: "Assumed until it runs:",
  unknown: "not known yet",
  offline: "the server does not answer",
  fits: "fits",
  tight: "tight",
  no: "does not fit",
  busy: "a run is going on: planned again after it",
  no_card: "no card here: the CPU computes, in main memory",
  cpu: "CPU, no card",
  card: "card",
  ram: "RAM",
  free: "free",
  streamed: "weights are streamed",
  in_all: "about {0} in all, loading left out",
  text: "text",
  encode: "pictures",
  denoise: "denoise",
  "video decode": "picture",
  "sound decode": "sound",
  setting_card: "Plan for a card of so many GiB (0: this machine's)",
  setting_ram: "Plan for so many GiB of main memory (0: this machine's)",
};

const ZH = {
  no_label: "无标签",
  reading: "读取中 ...",
  beyond: "超出参考实现 BEYOND THE REFERENCE",
  unproven: "此处未验证 UNPROVEN HERE",
  foreseen: "由控件预测；以实际运行为准。",
  measured: "上次运行的标签。",
  differs: "实际运行的标签与预测不同：",
  parts: "决定因素：",
  all_lossless: "每个部分都与基线逐位一致。",
  assumed: "运行前的假设：",
  unknown: "尚不可知",
  offline: "服务器没有响应",
  fits: "放得下",
  tight: "勉强放得下",
  no: "放不下",
  busy: "正在运行：结束后重新规划",
  no_card: "没有显卡：由 CPU 在内存中计算",
  cpu: "CPU，无显卡",
  card: "显存",
  ram: "内存",
  free: "可用",
  streamed: "权重流式加载",
  in_all: "总共约 {0}，不含加载",
  text: "文本",
  encode: "图像",
  denoise: "去噪",
  "video decode": "画面",
  "sound decode": "声音",
  setting_card: "按此显存（GiB）规划（0：本机）",
  setting_ram: "按此内存（GiB）规划（0：本机）",
};

export function words(app) {
  const chosen = setting(app, "Comfy.Locale") || navigator.language || "en";
  return { ...EN, ...(String(chosen).startsWith("zh") ? ZH : {}) };
}

/** A setting's value, undefined where this page has no such setting. */
export function setting(app, id) {
  try {
    return app.extensionManager?.setting?.get(id);
  } catch {
    return undefined;
  }
}
