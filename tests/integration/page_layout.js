// Runs in a page: what is wrong with its layout and its colours, and what it shows, told to the page whose frame it is in.
const luminance = colour => {
  const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
function examine() {
  const wrong = new Set(), root = document.querySelector("dialog[open]") ?? document.body, texts = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.add(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const node of root.querySelectorAll("*"))
    if (node instanceof HTMLElement && node.clientWidth && node.scrollWidth > node.clientWidth + 1)
      wrong.add(`${node.tagName} ${node.id || node.textContent.slice(0, 40)} is cut`);
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const holder = node.parentElement, said = node.data.trim(), range = document.createRange();
    if (!said || holder.closest("script, style, pre, select, title") || !holder.checkVisibility()) continue;
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(box => box.width > 1);
    const style = getComputedStyle(holder), ink = holder.closest("svg") ? style.fill : style.color;
    let ground = holder;
    while (ground.parentElement && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
    const [a, b] = [ink, getComputedStyle(ground).backgroundColor].map(luminance), contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) wrong.add(`${said.slice(0, 40)} has a contrast of ${contrast.toFixed(1)}`);
    const frame = (holder.closest("section, dialog") ?? root).getBoundingClientRect();
    for (const box of boxes) {
      if (box.left < frame.left || box.right > frame.right) wrong.add(`${said.slice(0, 40)} sticks out`);
      texts.push([said, box]);
    }
  }
  texts.sort((a, b) => a[1].top - b[1].top);
  texts.forEach(([said, a], i) => {
    for (let j = i + 1; j < texts.length && texts[j][1].top < a.bottom - 1; j++) {
      const [other, b] = texts[j];
      if (a.left < b.right - 1 && b.left < a.right - 1 && b.bottom - b.top > 1) wrong.add(`${said.slice(0, 40)} / ${other.slice(0, 40)}`);
    }
  });
  return [...wrong];
}
const count = selector => document.querySelectorAll(selector).length;
const text = selector => document.querySelector(selector).innerText.replace(/\s+/g, " ");

function reportDashboard(name) {
  document.querySelectorAll("details").forEach(node => { node.open = true; });
  const found = { wrong: examine(), texts: count("text"), deltas: count("#sizes circle"), unread: count("#heat rect.unread") };
  const errors = [...document.querySelectorAll(".below td")].map(node => node.clientWidth / node.closest("section").clientWidth);
  found.errors = errors.length;
  found.narrowest_error = Math.min(...errors);
  found.notes = byId("heatnote").textContent;
  const box = byId("sizes").getBoundingClientRect(), at = { bubbles: true, clientX: box.right - 10.5, clientY: box.top + 40 };
  byId("sizes").dispatchEvent(new MouseEvent("click", at));
  setTimeout(() => {
    found.version = byId("version").open ? text("#version") : "";
    found.wrong_version = byId("version").open ? examine() : [];
    byId("version").close();
    byId("axis").value = "time";
    byId("axis").dispatchEvent(new Event("change"));
    found.wrong_by_time = examine();
    found.times = [...document.querySelectorAll("#sizes text")].filter(node => node.textContent.includes(":")).length;
    parent.postMessage([name, found], "*");
  }, 300);
}

function reportReplica(name) {
  parent.postMessage([name, { wrong: examine(), lag: text("#lag"), dots: count("#lags circle"), error: text("#error") }], "*");
}
