"""The site in a window of 1,000 pixels: no block is cut; what is too wide scrolls inside itself, with a bar
that is seen.

One build and one browser, which shows every page in a frame of its own.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys

import pytest

from tests.browser import browse, needs_browser
from tests.docs.pages import ROOT

pytest.importorskip("mkdocs")
pytestmark = [needs_browser, pytest.mark.slow]

WIDTH = 1000
CUT = ".md-typeset__scrollwrap { overflow: hidden; } .md-typeset td { min-width: 60rem !important; }"
FRAMES = """<!doctype html><body><script>
const found = {};
addEventListener("message", event => {
  if (!Array.isArray(event.data)) return;
  found[event.data[0]] = event.data[1];
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>"""
SCRIPT = """<script>
function cutBy(from, boxes, root) {  // the element that cuts this off, unless it scrolls where readers see it
  const left = Math.min(...boxes.map(box => box.left)), right = Math.max(...boxes.map(box => box.right));
  for (let at = from; at !== document.body; at = at.parentElement) {
    const style = getComputedStyle(at), box = at.getBoundingClientRect();
    if (style.display === "inline" || style.overflowX === "visible" && at !== root) continue;
    if (left >= box.left - 1 && right <= box.right + 1) continue;
    const scrolls = ["auto", "scroll"].includes(style.overflowX) && style.scrollbarWidth !== "none";
    return scrolls && (at.closest("pre") || at.querySelector("table, pre")) ? null : at;
  }
  return null;
}
function examine() {
  const wrong = new Set(), root = document.querySelector(".md-content"), parts = [];
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) wrong.add(`the page is ${width} wide`);
  for (const image of root.querySelectorAll("img"))
    parts.push([image.parentElement, [image.getBoundingClientRect()], image.src]);
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const range = document.createRange(), holder = node.parentElement, said = node.data.trim().slice(0, 60);
    if (!said || holder.closest("script, style") || !holder.checkVisibility()) continue;
    range.selectNodeContents(node);
    parts.push([holder, [...range.getClientRects()].filter(box => box.width > 1), said]);
  }
  for (const [holder, boxes, what] of parts) {
    const by = boxes.length ? cutBy(holder, boxes, root) : null;
    if (by) wrong.add(`${what} is cut by ${by.tagName} ${by.className}`);
  }
  return [...wrong];
}
addEventListener("load", () => setTimeout(() => parent.postMessage([NAME, examine()], "*"), 300));
</script></body>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What is cut on each page of the site."""
    folder = tmp_path_factory.mktemp("site")
    site = folder / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cut = (site / "glossary.html").read_text().replace("</head>", f"<style>{CUT}</style></head>")
    (site / "cut.html").write_text(cut)
    frames, names = FRAMES, []
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        if name == "404.html":
            continue
        names.append(name)
        page.write_text(page.read_text().replace("</body>", SCRIPT.replace("NAME", json.dumps(name))))
        frames += f'<iframe src="{name}" style="width: {WIDTH}px; height: 1000px; border: 0"></iframe>'
    (site / "all.html").write_text(f"{frames}<pre></pre>")
    dump = browse((site / "all.html").as_uri(), folder / "profile", "--dump-dom", width=1100, time_ms=10_000)
    told = re.search(r"<pre>(.*?)</pre>", dump, re.DOTALL)
    assert told is not None and told[1], dump[-2000:]
    looked_at: dict[str, list[str]] = json.loads(html.unescape(told[1]))
    assert set(names) == looked_at.keys()
    return looked_at


def test_nothing_is_cut(found: dict[str, list[str]]) -> None:
    assert {name: wrong for name, wrong in found.items() if wrong and name != "cut.html"} == {}


def test_what_is_cut_is_seen(found: dict[str, list[str]]) -> None:
    assert len(found) > 40 and "is cut by DIV md-typeset__scrollwrap" in found["cut.html"][0]
