"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const select = document.getElementById("figure"), panel = document.getElementById("details");
const all = [...document.querySelectorAll("figure.layer")];
let shown = null, chosen = -1;
document.body.classList.add("live");

const svg = () => all[shown].querySelector("svg");
const size = s => s.dataset.size.split(" ").map(Number);
function look(x, y, w) {
  const s = svg(), [W, H] = size(s), ratio = s.clientHeight / Math.max(1, s.clientWidth);
  w = Math.min(Math.max(w, 160), Math.max(W, H / ratio) * 1.1);
  const within = (at, part, all) => part > all ? (all - part) / 2 : Math.min(Math.max(at, -20), all - part + 20);
  x = within(x, w, W); y = w * ratio > H ? 0 : within(y, w * ratio, H);
  s.setAttribute("viewBox", [x, y, w, w * ratio].map(v => v.toFixed(1)).join(" "));
}
const box = () => svg().getAttribute("viewBox").split(" ").map(Number);
function start() {
  const s = svg(), [W] = size(s), w = Math.min(Math.max(s.clientWidth, W), s.clientWidth / 0.8);
  look((W - w) / 2, 0, w);
}
function whole() {
  const s = svg(), [W, H] = size(s), w = Math.max(W, H * s.clientWidth / s.clientHeight);
  look((W - w) / 2, 0, w);
}
function zoom(by, at) {
  const [x, y, w, h] = box(), [cx, cy] = at || [x + w / 2, y + h / 2], wide = w / by;
  look(cx - (cx - x) / by, cy - (cy - y) / by, wide);
}
function show(i) {
  shown = i; chosen = -1; select.value = i;
  all.forEach((f, n) => f.hidden = n !== i);
  for (const b of document.querySelectorAll("[data-figure]")) b.setAttribute("aria-pressed", b.dataset.figure == i);
  start(); choose(-1);
}
function entry(list, term, lines) {
  if (!lines.length) return;
  const dt = document.createElement("dt"); dt.textContent = term; list.append(dt);
  for (const line of lines) { const dd = document.createElement("dd"); dd.className = "mono"; dd.textContent = line; list.append(dd); }
}
function choose(n, bring) {
  const s = svg(), f = figures[shown];
  s.querySelectorAll(".chosen, .near").forEach(e => e.classList.remove("chosen", "near"));
  chosen = n; panel.replaceChildren();
  const head = document.createElement("h3"), list = document.createElement("dl");
  if (n < 0) {
    head.textContent = "Nothing chosen";
    entry(list, "Point at a node, or", ["Tab to the graph", "\u2193 \u2191 next, previous node", "+ \u2212 0 larger, smaller, whole", "drag to move, Ctrl and wheel to zoom"]);
  } else {
    const b = f[n];
    head.textContent = b.type || b.name;
    if (b.type) entry(list, "name", [b.name]);
    entry(list, "line of layer code", b.source ? [b.source] : b.type ? ["not kept: a pass made this node"] : []);
    entry(list, "collective", b.carries ? [b.carries] : []);
    const reads = [...s.querySelectorAll(`.edge[data-b="${n}"]`)].map(e => `${f[e.dataset.a].name} ${e.textContent}`);
    entry(list, "reads", reads); entry(list, b.type ? "gives" : "value", b.results); entry(list, "reads of the graph", b.held); entry(list, "attributes", b.attributes);
    s.querySelectorAll(".box")[n].classList.add("chosen");
    s.querySelectorAll(`.edge[data-a="${n}"], .edge[data-b="${n}"]`).forEach(e => e.classList.add("near"));
    if (bring) {
      const r = s.querySelectorAll(".box rect")[n], [x, y, w, h] = box(), at = a => Number(r.getAttribute(a));
      const bx = at("x") + at("width") / 2, by = at("y") + at("height") / 2;
      if (bx < x + 60 || bx > x + w - 60 || by < y + 40 || by > y + h - 40) look(bx - w / 2, by - h / 2, w);
    }
  }
  panel.append(head, list);
}
all.forEach((figure, i) => {
  const s = figure.querySelector("svg");
  s.querySelectorAll(".box").forEach((b, n) => {
    b.addEventListener("mouseenter", () => { if (!s.dataset.held) choose(n); });
    b.addEventListener("click", () => { s.dataset.held = chosen === n && s.dataset.held ? "" : "1"; choose(n); });
  });
  s.addEventListener("wheel", e => {
    if (!e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(s.getScreenCTM().inverse());
    zoom(e.deltaY < 0 ? 1.2 : 1 / 1.2, [p.x, p.y]);
  }, { passive: false });
  let from = null;
  s.addEventListener("pointerdown", e => { from = [e.clientX, e.clientY, ...box()]; });
  window.addEventListener("pointerup", () => { from = null; });
  s.addEventListener("pointermove", e => {
    if (!from || e.pointerType === "touch" && Math.abs(e.clientY - from[1]) > Math.abs(e.clientX - from[0])) return;
    const k = from[4] / s.clientWidth;
    look(from[2] - (e.clientX - from[0]) * k, from[3] - (e.clientY - from[1]) * k, from[4]);
  });
  s.addEventListener("keydown", e => {
    const [x, y, w] = box(), last = figures[i].length - 1, order = figures[i].map((_, n) => n);
    const keys = {
      ArrowDown: () => choose(Math.min(last, chosen + 1), true), ArrowUp: () => choose(Math.max(0, chosen - 1), true),
      ArrowLeft: () => look(x - w / 8, y, w), ArrowRight: () => look(x + w / 8, y, w), Home: () => choose(0, true), End: () => choose(last, true),
      "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), "0": whole, Escape: () => { s.dataset.held = ""; choose(-1); },
    };
    if (keys[e.key] && !e.ctrlKey && !e.metaKey) { e.preventDefault(); keys[e.key](); s.dataset.held = chosen < 0 ? "" : "1"; }
  });
});
select.addEventListener("change", () => show(Number(select.value)));
for (const b of document.querySelectorAll("[data-figure]")) b.addEventListener("click", () => { show(Number(b.dataset.figure)); });
for (const cells of document.querySelectorAll(".cells")) {
  const buttons = [...cells.querySelectorAll("button")];
  buttons.forEach((b, n) => { b.tabIndex = n ? -1 : 0; });
  cells.addEventListener("keydown", e => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key], n = buttons.indexOf(document.activeElement) + step;
    if (step && buttons[n]) { e.preventDefault(); buttons[n].focus(); }
  });
}
const tools = { larger: () => zoom(1.25), smaller: () => zoom(0.8), whole, start };
for (const b of document.querySelectorAll("[data-tool]")) b.addEventListener("click", () => tools[b.dataset.tool]());
window.addEventListener("resize", () => look(...box().slice(0, 3)));
window.addEventListener("beforeprint", () => { const s = svg(), [W, H] = size(s); s.setAttribute("viewBox", `0 0 ${W} ${H}`); });
window.addEventListener("afterprint", start);
if (all.length) show(Math.max(0, all.findIndex(f => f.dataset.first)));
