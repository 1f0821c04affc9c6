from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from deltasync import Publisher
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, MissingVersionError, NotPublishedError
from deltasync.ops import bisect, blame, diff
from deltasync.ops.cli import main
from deltasync.stores import open_store

VERSIONS = 40
FIRST_BAD = 27


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 versions: number N changes N elements of `a`, each third one 5 of `b`. From 27 on an element of `b`
    is negative.
    """
    where = f"file://{tmp_path_factory.mktemp('history')}/run"
    weights = {"layer.a": torch.zeros(64, dtype=torch.bfloat16), "layer.b": torch.ones(10)}
    with Publisher(where, dtype="keep") as publisher:
        for version in range(1, VERSIONS + 1):
            weights["layer.a"][:version] += 1
            if version % 3 == 0:
                weights["layer.b"][:5] += 1
            if version == FIRST_BAD:
                weights["layer.b"][7] = -1
            publisher.publish(weights.items(), step=10 * version).wait()
    return where


def reader(url: str) -> ChannelReader:
    return ChannelReader(open_store(url))


def is_good(version: int, directory: Path) -> bool:
    return bool((load_file(directory / "model.safetensors")["layer.b"] >= 0).all())


def test_bisect_finds_the_first_bad_version_in_log2_tests(url: str) -> None:
    tested: list[int] = []
    found = bisect(reader(url), is_good, on_test=lambda version, good, left: tested.append(version))
    assert found == (FIRST_BAD - 1, FIRST_BAD, [])
    assert len(tested) == len(set(tested)) <= 2 + math.ceil(math.log2(VERSIONS))


@pytest.mark.parametrize("first_bad", [2, 3, 21, 39, 40])
def test_any_version_may_be_the_first_bad_one(url: str, first_bad: int) -> None:
    assert bisect(reader(url), lambda version, directory: version < first_bad)[:2] == (
        first_bad - 1,
        first_bad,
    )


def test_versions_that_cannot_be_tested_stay_between(url: str) -> None:
    def test(version: int, directory: Path) -> bool | None:
        return None if version in (25, 26, 27) else version < 26

    assert bisect(reader(url), test, good=20, bad=30) == (24, 28, [25, 26, 27])


def test_ends_that_cannot_be_right_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="Version 40 passes"):
        bisect(reader(url), lambda version, directory: True)
    with pytest.raises(ConfigError, match="Version 1 fails"):
        bisect(reader(url), lambda version, directory: False)
    with pytest.raises(ConfigError, match="could not be tested"):
        bisect(reader(url), lambda version, directory: None)
    with pytest.raises(ConfigError, match="must be before"):
        bisect(reader(url), is_good, good=5, bad=5)
    with pytest.raises(MissingVersionError, match="Version 41"):
        bisect(reader(url), is_good, bad=41)


def test_blame_counts_what_each_version_changed(url: str) -> None:
    changes = blame(reader(url), "layer.*")
    assert [change.version for change in changes] == list(range(1, VERSIONS + 1))
    assert changes[0].changed is None and [change.step for change in changes][:2] == [10, 20]
    for change in changes[1:]:
        wanted = {"layer.a": change.version}
        in_b = 5 * (change.version % 3 == 0) + (change.version == FIRST_BAD)
        assert change.changed == (wanted | {"layer.b": in_b} if in_b else wanted)
    assert all(set(change.changed or ()) <= {"layer.b"} for change in blame(reader(url), "layer.b"))


def test_blame_names_what_it_cannot_read_or_find(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches 'other"):
        blame(reader(url), "other.*")
    with pytest.raises(NotPublishedError):
        blame(reader(f"file://{tmp_path}/none"), "*")


def test_diff_counts_the_elements_whose_bits_differ(url: str) -> None:
    found = diff(reader(url), 2, 4)
    assert (found.first.version, found.second.version, found.equal) == (2, 4, 0)
    assert [(each.tensor, each.count, each.index) for each in found.differences] == [
        ("layer.a", 4, [0]),
        ("layer.b", 5, [0]),
    ]
    assert [(each.expected, each.found) for each in found.differences] == [
        ("0x4000", "0x4080"),  # 2 and 4 in bfloat16
        ("0x3f800000", "0x40000000"),  # 1 and 2 in float32
    ]
    back, same = diff(reader(url), 4, 2), diff(reader(url), VERSIONS, None)
    assert [each.count for each in back.differences] == [4, 5] and back.differences[0].expected == "0x4080"
    assert (same.first, same.equal, same.differences) == (same.second, 2, [])
    with pytest.raises(MissingVersionError):
        diff(reader(url), 1, VERSIONS + 1)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result.output


# Reads the file itself: an import of torch would take most of the time of each test.
_HAS_NEGATIVE = """
import json, sys
data = open(sys.argv[1] + "/model.safetensors", "rb").read()
size = int.from_bytes(data[:8], "little")
tensor = json.loads(data[8 : 8 + size])["layer.b"]
start, end = tensor["data_offsets"]
assert tensor["dtype"] == "F32"
sys.exit(any(byte & 0x80 for byte in data[8 + size + start : 8 + size + end][3::4]))
"""


def test_the_commands(url: str, tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text(_HAS_NEGATIVE)
    found = run("bisect", url, "--run", f"{sys.executable} {check} {{}}")
    assert (
        f"version {FIRST_BAD} (step {10 * FIRST_BAD}) is the first bad one; version {FIRST_BAD - 1} is good"
        in found
    )
    rows = [
        json.loads(line)
        for line in run("bisect", url, "--run", 'test "$VERSION" -lt 9 # {}', "--json").splitlines()
    ]
    assert (
        rows[-1] == {"first_bad": 9, "step": 90, "last_good": 8, "skipped": []}
        and rows[0]["version"] == VERSIONS
    )
    assert "needs {}" in run("bisect", url, "--run", "true", code=2)
    assert "the search ends" in run("bisect", url, "--run", "kill -9 $$ # {}", code=1)
    shown = run("blame", url, "layer.a", "--last", "3").splitlines()
    assert [line.split()[:4] for line in shown[1:4]] == [
        [str(version), str(10 * version), str(version), f"{version / 64:.3%}"] for version in (40, 39, 38)
    ]
    assert len(run("blame", url, "layer.b", "--json").splitlines()) == VERSIONS
    shown = run("diff", url, "1", "4")
    assert (
        "6.250% layer.a" in shown
        and "version 1 to version 4: 2 of 2 tensors differ, in 9 of 74 elements" in shown
    )
    assert run("diff", url, "40", "latest") == "version 40 to version 40: all 2 tensors have equal bits\n"
    told = json.loads(run("diff", url, "1", "2", "--json"))
    assert (told["from"]["version"], told["to"]["version"], told["equal"]) == (1, 2, 1)
    (row,) = told["differences"]
    assert row == {
        "tensor": "layer.a",
        "changed": 2,
        "elements": 64,
        "index": [0],
        "from": "0x3f80",
        "to": "0x4000",
    }
    assert "a number from 1 on" in run("diff", url, "0", "2", code=2)
