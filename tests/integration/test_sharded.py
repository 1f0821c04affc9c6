"""Real sharded trainers, 2 and 4 ranks of gloo on CPU: `sharded_ranks` is what they do, here is what they
must leave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.reading import ChannelReader
from deltasync.errors import NotPublishedError
from deltasync.ops.cli import main
from tests.builders import assert_holds
from tests.conftest import assert_same_bits

ROOT = Path(__file__).parents[2]
Told = list[dict[str, Any]]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(
    size: int,
    folder: Path,
    *more: str,
    script: str = "sharded_ranks.py",
    timeout_s: float = 300,
    **environ: str,
) -> None:
    path = str(ROOT / "tests/integration" / script)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        path,
        str(folder),
        *more,
    ]
    environ = environment() | environ
    done = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "2"
    torchrun(2, folder)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, two: Path) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "4"
    torchrun(4, folder, str(two / "train-packed/channel"))
    return folder


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> tuple[int, Path]:
    return request.param, request.getfixturevalue("two" if request.param == 2 else "four")


def told(folder: Path, size: int) -> Told:
    """What each rank was told, the same on all, their own messages aside."""
    found = [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(size)]
    without = [
        [{name: value for name, value in row.items() if name != "moved_bytes"} for row in rows]
        for rows in found
    ]
    assert all(rows == without[0] for rows in without)
    return found[0]


def expected(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    return {int(path.stem): torch.load(path) for path in sorted((folder / "expected").iterdir())}


def records(folder: Path) -> dict[int, Record]:
    reader = ChannelReader(open_store(f"file://{folder}/channel"))
    return {version.version: reader.record(version).record for version in reversed(list(reader.versions()))}


def anchors(folder: Path) -> dict[int, Record]:
    """Those beside the log."""
    reader = ChannelReader(open_store(f"file://{folder}/channel"))
    return {span.version: reader.stored(info.key).record for span, info in reader.announcements()}


def prove(folder: Path, size: int) -> Told:
    """Replicas come to the trainer's bits."""
    url, states = f"file://{folder}/channel", expected(folder)
    stepwise = Replica(url)
    for version, state in states.items():
        stepwise.sync(version)
        assert_same_bits(stepwise.state_dict(), state)
        assert_holds(url, state, version)
    # From far behind, several versions are merged into one commit.
    behind = Replica(url)
    behind.sync(min(states))
    behind.sync()
    assert_same_bits(behind.state_dict(), states[max(states)])
    rows = told(folder, size)
    published = ChannelReader(open_store(url)).versions()
    digests = {version.version: version.sha256 for version in published}
    assert all(row["digest"] == digests[row["version"]] for row in rows if "digest" in row)
    return rows


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_shards_give_the_bits_that_an_unsharded_publish_gives(
    ranks: tuple[int, Path], codec: str, memory_url: str
) -> None:
    size, folder = ranks[0], ranks[1] / f"train-{codec}"
    rows = prove(folder, size)
    if codec == "raw":
        assert Replica(f"file://{folder}/channel", trusted_keys=folder / "key.pub").sync() == 5
    states, documents = expected(folder), records(folder)
    with Publisher(memory_url, codec=codec) as publisher:
        for (version, state), row in zip(states.items(), rows, strict=True):
            receipt = publisher.publish(state.items()).wait(60)
            assert (receipt.version, receipt.changed, receipt.total) == (
                version,
                row["changed"],
                row["total"],
            )
            found = ChannelReader(publisher.store).numbered(version).record
            assert found.fingerprint == documents[version].fingerprint
    assert [document.kind for document in documents.values()] == ["anchor"] + ["delta"] * 4
    assert [document.step for document in documents.values()] == [0, 1, 1, 2, 3]
    # Each rank that holds a changed element stored a part, and nobody else's.
    delta = documents[2].delta
    assert delta is not None
    assert delta.codec == codec
    assert [file.key.rpartition("/")[2] for file in delta.parts] == [
        f"{rank:03d}-00001.safetensors" for rank in range(size)
    ]
    assert rows[1]["payload_bytes"] == sum(file.bytes for file in delta.parts)
    assert documents[3].delta is not None and documents[3].delta.parts == []
    ((version, document),) = anchors(folder).items()
    assert version == 4 and document.anchor is not None
    weights = document.anchor.files
    assert len(weights) > 1 and max(file.bytes for file in weights) < 80_000
    assert (folder / "channel" / document.anchor.directory / "config.json").read_bytes() == b"{}"
    # Messages carry a few numbers for each tensor, no weights.
    assert all(0 < row["moved_bytes"] < 2_000 for row in rows[1:4])


def test_ranks_that_resume_with_other_weights_of_a_step_publish_nothing(ranks: tuple[int, Path]) -> None:
    size, folder = ranks[0], ranks[1] / "resumed-step"
    rows, states = told(folder, size), expected(folder)
    assert [row["version"] for row in rows if "version" in row] == [1, 2, 3, 4, 5, 6]
    for row, version in zip([row for row in rows if "said" in row], (2, 4), strict=True):
        assert f"step {version // 2} as version {version if version == 2 else 3}" in row["said"]
        assert row["tensors"] and row["tensors"].keys() <= states[1].keys()
        elements = sum(tensor.numel() for tensor in states[1].values())
        assert row["fraction"] == sum(row["tensors"].values()) / elements
    for version, state in states.items():
        assert_holds(f"file://{folder}/channel", state, version)


def test_a_rank_that_fails_takes_all_along_and_the_next_version_is_an_anchor(ranks: tuple[int, Path]) -> None:
    size, folder = ranks[0], ranks[1] / "failures"
    rows = prove(folder, size)
    assert [row["version"] for row in rows] == [1, 2, 3, 3, 4, 4, 5, 6]
    assert [row["kind"] for row in rows] == [
        "anchor",
        "delta",
        "delta",
        "anchor",
        "delta",
        "anchor",
        "delta",
        "delta",
    ]
    assert sorted(records(folder)) == [1, 2, 3, 4, 5, 6]


def test_a_rank_that_dies_leaves_no_version_and_hangs_nobody(tmp_path: Path) -> None:
    script = str(ROOT / "tests/integration/dying_rank.py")
    shared = environment() | {"RENDEZVOUS": f"file://{tmp_path}/rendezvous"}
    folder = tmp_path / "channel"
    command = [sys.executable, script, str(folder)]
    dying = subprocess.Popen([*command, "1"], env=shared)
    try:
        survivor = subprocess.run(
            [*command, "0"], env=shared, stdout=subprocess.PIPE, text=True, timeout=120, check=True
        ).stdout
        assert dying.wait(60) == 9
    finally:
        dying.kill()
    assert survivor.splitlines() == [
        "lost version 2",
        "no publish without rank 1",
        "still no publish",
        "closed",
    ]
    assert_holds(f"file://{folder}", {"w": torch.zeros(1000, dtype=torch.bfloat16)}, 1)


def test_flat_partitions_whole_tensors_and_copies_are_published_once(ranks: tuple[int, Path]) -> None:
    size, folder = ranks[0], ranks[1] / "other"
    rows = prove(folder, size)
    assert rows[1]["changed"] == 5 + 4 + 12
    with pytest.raises(NotPublishedError):
        Replica(f"file://{folder}/none").sync()


def test_the_first_version_may_be_a_checkpoint_that_all_ranks_read(ranks: tuple[int, Path]) -> None:
    size, folder = ranks[0], ranks[1] / "free"
    rows = prove(folder, size)
    # The reference was stored before the delta on it was lost, so what follows is full weights.
    assert [(row["version"], row["kind"]) for row in rows] == [(2, "delta"), (2, "anchor"), (3, "delta")]
    assert records(folder)[1].reference is not None
    rows = prove(ranks[1] / "free-same", size)
    assert [(row["version"], row["kind"], row["anchor_bytes"]) for row in rows] == [
        (1, "anchor", 0),
        (2, "delta", 0),
    ]
    assert records(ranks[1] / "free-same")[1].reference.tied == {"head.weight": "embed.weight"}  # type: ignore[union-attr]


def test_ranks_that_resume_with_another_adapter_config_publish_full_weights_with_it(
    ranks: tuple[int, Path],
) -> None:
    size, folder = ranks[0], ranks[1] / "adapter"
    rows = prove(folder, size)
    assert [(row["version"], row["kind"]) for row in rows] == [
        (1, "anchor"),
        (2, "delta"),
        (3, "anchor"),
        (4, "delta"),
    ]
    anchor = records(folder)[3].anchor
    assert anchor is not None
    assert (
        folder / "channel" / anchor.directory / "adapter_config.json"
    ).read_bytes() == b'{"lora_alpha": 2}'


def test_messages_between_ranks_are_kilobytes(ranks: tuple[int, Path]) -> None:
    size, folder = ranks[0], ranks[1] / "messages"
    first, every, _, few = prove(folder, size)
    assert 0 < first["moved_bytes"] < 60_000
    assert 0 < every["moved_bytes"] < 3_000  # 308 of 310 tensors changed
    assert 0 < few["moved_bytes"] < 200  # 4 did


def compactions(folder: Path) -> dict[tuple[int, int], Record]:
    reader = ChannelReader(open_store(f"file://{folder}/channel"))
    return {(span.base, span.version): reader.stored(info.key).record for span, info in reader.compactions()}


def test_each_rank_makes_its_parts_of_compactions_and_a_failing_one_costs_no_version(
    ranks: tuple[int, Path],
) -> None:
    size, folder = ranks[0], ranks[1] / "compacted"
    prove(folder, size)
    found = compactions(folder)
    assert sorted(found) == [(1, 4), (1, 8)]  # that to version 7 failed
    for (base, _), record in found.items():
        assert record.delta is not None
        names = [file.key.rpartition("/")[2] for file in record.delta.parts]
        assert names == [keys.compaction_part(base, rank, 1) for rank in range(size)]
    checked = CliRunner().invoke(main, ["check", f"file://{folder}/channel", "--read-data"])
    assert checked.exit_code == 0, checked.output


def test_ranks_write_compactions_and_anchors_that_the_deltas_pay_for(ranks: tuple[int, Path]) -> None:
    size, folder = ranks[0], ranks[1] / "afforded"
    prove(folder, size)
    found, beside = compactions(folder), anchors(folder)
    assert found and max(version for _, version in found) < 80  # while 1 % changed
    assert beside and min(beside) > 60  # once half of all did
    stored = sum(path.stat().st_size for path in folder.rglob("channel/**/*") if path.is_file())
    deltas = sum(row.stat().st_size for row in folder.glob("channel/versions/*/*"))
    deltas += sum(
        row.stat().st_size for row in folder.glob("channel/parts/*/*") if "compaction-" not in row.name
    )
    assert stored < 1.4 * deltas


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_run(two: Path, four: Path, tmp_path: Path) -> None:
    rows = told(four / "resumed", 4)
    states = expected(two / "train-packed") | expected(four / "resumed")
    assert [(row["version"], row["kind"]) for row in rows] == [(6, "delta"), (7, "delta")]
    url = f"file://{two}/train-packed/channel"
    replica = Replica(url)
    for version, state in states.items():
        replica.sync(version)
        assert_same_bits(replica.state_dict(), state)
    with Publisher(url, resume=True) as alone:
        receipt = alone.publish(states[5].items()).wait(60)
        assert (receipt.version, receipt.kind) == (8, "delta")
    replica.sync()
    assert_same_bits(replica.state_dict(), states[5])
