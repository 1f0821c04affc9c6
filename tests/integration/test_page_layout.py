"""Both pages in narrow and wide windows, light and dark, with nothing, little and much to show: nothing is
cut or overlaps.

What is shown is made up; `test_dashboard_page.py` shows a real channel. One browser shows every case in a
frame of its own.
"""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import deltasync
from deltasync.ops.dashboard import ChannelSnapshot, page
from deltasync.ops.dashboard.observe import CompactionRow, LagRow, ReplicaRow, VersionRow
from tests.browser import browse, needs_browser

pytestmark = needs_browser

WIDTHS = (390, 800, 1600)
WINDOWS = [*(("light", width) for width in WIDTHS), ("dark", 390)]
ELEMENTS, LAYERS, HEAT = 8_030_261_248, 40, 200
ERROR = (
    "parts/0000000042.000001-9f8e7d6c.0/000-00001.safetensors does not have the sha256 that it is named by."
)
NOW_S = 1_763_800_000.0

SCRIPT = Path(__file__).with_name("page_layout.js").read_text()
FRAMES = """<!doctype html><body><script>
const found = {};
addEventListener("message", event => {
  found[event.data[0]] = event.data[1];
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>"""


def snapshot(count: int, replicas: int = 0, first: int = 1) -> ChannelSnapshot:
    """`count` versions of a large model, the newest long after the one before the last; every third replica
    behind.
    """
    newest = first + count - 1
    times_s = [
        NOW_S - 5.2 * (newest - version) - (40_000 if version < newest - 1 else 0)
        for version in range(first, newest + 1)
    ]
    rows = []
    for version, time_s in zip(range(first, newest + 1), times_s, strict=True):
        changed = None if version == 1 else int(ELEMENTS * 0.01 * (1 + 0.5 * math.sin(version / 9)))
        rows.append(
            VersionRow(
                version=version,
                epoch="000001-9f8e7d6c",
                sha256=f"{version:064x}"[::-1],
                kind="anchor" if version == 1 else "delta",
                base_version=version - 1 or None,
                step=4 * version,
                created_s=time_s,
                codec="context",
                changed=changed,
                delta_bytes=None if changed is None else int(1.4 * changed),
                anchor_bytes=16_060_522_496 if version % 100 == 1 else None,
                delta_objects=1,
                anchor_objects=4,
                coalesced=1,
                token_lag=None
                if changed is None or version % 50 == 7
                else (version % 5 / 3, 2, 3 + version % 2),
            )
        )
    heat = {
        version: [0.001 * layer for layer in range(LAYERS)]
        for version in range(max(first, 2, newest - HEAT + 1), newest + 1)
    }
    fleet = [
        ReplicaRow(
            replica_id=f"vllm-decode-7f9c6d5b8-x2x4z-{number}" if number % 5 == 3 else f"gpu-{number}",
            state="failed" if number % 7 == 3 else ("serving", "staging", "waiting")[number % 3],
            live=number % 11 != 10,
            version=None if number == 1 else newest - (number % 3 and number),
            sha256=None,
            strange=number == 6,
            behind=None if number == 1 else number % 3 and number,
            lag_s=5810.2 if number % 3 else 0.0,
            age_s=4.2,
            pin="10" if number % 9 == 5 else None,
            error=" ".join([ERROR] * (1 + number % 3)) if number % 7 == 3 else None,
        )
        for number in range(replicas)
    ]
    lags = [
        LagRow(time_s=NOW_S - 200 + i, replica_id=f"gpu-{i % 5}", version=newest, lag_s=0.1 * (i % 13))
        for i in range(replicas)
    ]
    return ChannelSnapshot(
        url="s3://a-bucket-with-a-long-name/and/a/prefix/run-2026-11-23",
        time_s=NOW_S + 3,
        run_id="113b2bf3f5250123",
        created_s=times_s[0],
        newest_version=newest,
        head_sha256=rows[-1].sha256,
        element_count=ELEMENTS,
        tensor_count=291,
        full_bytes=2 * ELEMENTS,
        versions=rows,
        forgotten=first - 1,
        compactions=[
            CompactionRow(
                base_version=version,
                version=version + 10,
                created_s=NOW_S,
                changed=10**8,
                payload_bytes=10**9,
                objects=2,
            )
            for version in range(first, newest - 9, 10)
        ],
        replicas=fleet,
        lags=lags,
        layers=["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(LAYERS - 2)), "lm_head"],
        heat=heat,
        stored_bytes=98_765_432_100,
        problems=[f"versions/0000000/{ERROR}"] if replicas else [],
        error=ERROR if replicas > 10 else None,
    )


def status(count: int, error: str | None) -> dict[str, Any]:
    """Of a replica that began late: its first commit caught up."""
    commits = [
        {"version": 9_999_990 + number, "anchor": not number, "lag_s": 0.1 * number if number else None, "stage_s": 0.2,
         "pause_s": 0.01, "changed": 80_302_612, "payload_bytes": 112_345_678, "served_at": NOW_S + number}
        for number in range(count)
    ]  # fmt: skip
    return {
        "replica_id": "vllm-decode-7f9c6d5b8-x2x4z.cluster.local",
        "channel": "s3://a-bucket-with-a-long-name/and/a/prefix/run-2026-11-23",
        "run_id": "113b2bf3f5250123",
        "state": "failed" if error else "serving",
        "version": commits[-1]["version"] if commits else None,
        "newest_version": 10_000_123,
        "error": error,
        "commits": commits,
    }


def _examined(document: str, report: str) -> str:
    script = f'addEventListener("load", () => setTimeout(() => {report}(NAME), 300));'
    return document.replace("</html>", f"<script>{SCRIPT}{script}</script></html>")


def cases() -> dict[str, str]:
    """Pages by name."""
    shown = {
        "nothing": ChannelSnapshot(url="s3://bucket/run", time_s=NOW_S),
        "1": snapshot(1, 1),
        "60": snapshot(60, 6, first=16),
        "5000": snapshot(5000, 50),
        "late": snapshot(30, 3, first=9_999_000),
    }
    found = {name: _examined(page(each).decode(), "reportDashboard") for name, each in shown.items()}
    replica = (Path(deltasync.__file__).parents[1] / "vllm_plugin" / "page.html").read_text()
    for name, each in {
        "replica 0": status(0, None),
        "replica 1": status(1, ERROR),
        "replica 500": status(500, ERROR),
    }.items():
        answer = f"<script>window.fetch = async () => ({{ ok: true, json: async () => ({json.dumps(each)}) }});</script>"
        found[name] = _examined(replica.replace("<script>", f"{answer}<script>", 1), "reportReplica")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each page says of itself, by name, scheme and width."""
    folder = tmp_path_factory.mktemp("pages")
    frames = FRAMES
    for name, document in cases().items():
        for scheme, width in WINDOWS:
            case = f"{name} {scheme} {width}"
            place = folder / f"{case}.html".replace(" ", "-")
            own = document.replace("color-scheme: light dark", f"color-scheme: {scheme}").replace(
                "NAME", json.dumps(case)
            )
            place.write_text(own)
            frames += (
                f'<iframe src="{place.name}" style="width: {width}px; height: 1000px; border: 0"></iframe>'
            )
    (folder / "all.html").write_text(f"{frames}<pre></pre>")
    dump = browse((folder / "all.html").as_uri(), folder / "profile", "--dump-dom", width=1700, time_ms=4000)
    told = re.search(r"<pre>(.*?)</pre>", dump, re.DOTALL)
    assert told is not None and told[1], dump[-2000:]
    return json.loads(html.unescape(told[1]))


NAMES = ("nothing", "1", "60", "5000", "late", "replica 0", "replica 1", "replica 500")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_and_nothing_overlaps(found: dict[str, Any], name: str) -> None:
    for scheme, width in WINDOWS:
        seen = found[f"{name} {scheme} {width}"]
        wrong = {key: seen[key] for key in ("wrong", "wrong_by_time", "wrong_version") if seen.get(key)}
        assert wrong == {}, f"{scheme}, {width} pixels"


@pytest.mark.parametrize("width", WIDTHS)
def test_an_error_is_as_wide_as_the_table(found: dict[str, Any], width: int) -> None:
    seen = found[f"5000 light {width}"]
    assert seen["errors"] == 7 and seen["narrowest_error"] > 0.9


@pytest.mark.parametrize("width", WIDTHS)
def test_layers_are_shown_of_the_versions_whose_headers_were_read(found: dict[str, Any], width: int) -> None:
    seen = found[f"5000 light {width}"]
    assert (seen["deltas"], seen["unread"]) == (4999, 0)
    assert seen["notes"] == f"% of its elements; the newest {HEAT} versions"
    assert found[f"60 light {width}"]["notes"] == "% of its elements"


@pytest.mark.parametrize("width", WIDTHS)
def test_by_time_and_a_version_by_a_click(found: dict[str, Any], width: int) -> None:
    seen = found[f"60 light {width}"]
    assert seen["times"] >= 2
    assert re.match(
        r"Version 75 older close encoded [\d-]+ [\d:]+ step 300 digest b4000.* from version 74 changed ",
        seen["version"],
    )
    assert "Served by gpu-0 (serving), vllm-decode-7f9c6d5b8-x2x4z-3 (failed)" in seen["version"]
    assert re.search(r"model\.layers\.0 0\.1 % .*lm_head 3\.9 %$", seen["version"])
    assert (
        "No replica" not in found[f"1 light {width}"]["version"]
        and "without a delta" in found[f"1 light {width}"]["version"]
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_catching_up_is_no_lag_on_a_replicas_page(found: dict[str, Any], width: int) -> None:
    first, all_of_them = found[f"replica 1 light {width}"], found[f"replica 500 light {width}"]
    assert (first["lag"], first["dots"], first["error"]) == ("\N{EN DASH}", 0, ERROR)
    assert (all_of_them["lag"], all_of_them["dots"]) == ("49.9 s", 499)


def test_labels_of_the_replica_s_versions_are_whole_and_in_their_places(tmp_path: Path) -> None:
    """From version 3 to 7 the axis goes from 2 to 7: its middle is labelled where 5 is, not at 4.5."""
    replica = (Path(deltasync.__file__).parents[1] / "vllm_plugin" / "page.html").read_text()
    answer = status(5, None)
    for number, commit in enumerate(answer["commits"]):
        commit["version"] = 3 + number
    reply = f"<script>window.fetch = async () => ({{ ok: true, json: async () => ({json.dumps(answer)}) }});</script>"
    place = tmp_path / "replica.html"
    place.write_text(replica.replace("<script>", f"{reply}<script>", 1))
    shown = browse(place.as_uri(), tmp_path / "profile", "--dump-dom")
    chart = re.search(r'<svg id="versions".*?</svg>', shown, re.DOTALL)
    assert chart is not None
    ticks = {
        int(label): float(y)
        for y, label in re.findall(r'class="tick"[^>]* y="([\d.]+)"[^>]*>(\d+)<', chart[0])
    }
    assert ticks.keys() == {2, 5, 7}
    assert ticks[5] == pytest.approx(ticks[2] + (ticks[7] - ticks[2]) * 3 / 5)
