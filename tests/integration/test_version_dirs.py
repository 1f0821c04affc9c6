"""Version directories (`weight_v`) become a channel, and are written from one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import blake3
import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
import zstandard
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from deltasync import Publisher, Replica
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ChainError,
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    ModelMismatchError,
)
from deltasync.interchange import Export, Import
from deltasync.ops.cli import main
from deltasync.stores import open_store
from deltasync.tensors.bits import bits_of

SERVICES = Path(__file__).parents[2] / ".venv-services" / "python"
SUMS = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
}
State = dict[str, torch.Tensor]


def model(seed: int = 0) -> State:
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(64, 16).bfloat16(),
        "layer.weight": torch.randn(16, 16).bfloat16(),
        "layer.scale": torch.randn(16),
        "norm.weight": torch.ones(16).half(),
        "table": torch.arange(7),
        "scalar": torch.tensor(1.5),
    }


def train(state: State, step: int) -> State:
    """Change a few elements of most tensors; some steps change nothing at all."""
    new = {name: tensor.clone() for name, tensor in state.items()}
    if step % 7:
        for name in list(new)[: step % 6]:
            flat = new[name].view(-1)
            flat[:: 5 + step % 3] += 1
    return new


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return bits_of(tensor.contiguous()).view(np.uint8)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(bytes_of(one[name]), bytes_of(other[name]))
        for name in one
    )


def write_full(folder: Path, state: State) -> None:
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')


def write_delta(
    folder: Path, number: int, old: State, new: State, encoding: str = "xor", **metadata: str
) -> None:
    """As the layout's trainers write it, in two files."""
    folder.mkdir(parents=True)
    weight_map = {}
    changed = [name for name in new if not np.array_equal(bytes_of(old[name]), bytes_of(new[name]))]
    for part, names in enumerate((changed[::2], changed[1::2])):
        entries, sums, file = {}, {}, f"model-{part:05d}-of-00002.safetensors"
        for name in names:
            was, now = bytes_of(old[name]), bytes_of(new[name])
            data = was ^ now
            if encoding == "overwrite":
                at = np.flatnonzero(data).astype("<u4")
                data = np.concatenate([np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), now[at]])
            entries[name] = np.frombuffer(
                zstandard.ZstdCompressor(level=1).compress(data.tobytes()), np.uint8
            )
            sums[name] = f"{zlib.adler32(now.tobytes()):08x}"
            weight_map[name] = file
        if entries:
            safetensors.numpy.save_file(entries, folder / file, metadata=sums)
    said = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "adler32",
        **metadata,
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": said, "weight_map": weight_map})
    )


def read_dirs(root: Path) -> Iterator[tuple[int, State]]:
    """Every version of directories that deltasync wrote, by the rules of the layout's readers."""
    state: State = {}
    for folder in sorted(root.glob("weight_v*")):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        if "delta_encoding" not in index["metadata"]:
            state = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
            yield int(folder.name.removeprefix("weight_v")), state
            continue
        assert index["metadata"]["compression_format"] == "zstd"
        state = {name: tensor.clone() for name, tensor in state.items()}
        for file in files:
            with safetensors.safe_open(folder / file, framework="np") as opened:
                sums = opened.metadata()
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    data = np.frombuffer(
                        zstandard.ZstdDecompressor().decompress(opened.get_tensor(name).tobytes()), np.uint8
                    )
                    bytes_B = bytes_of(state[name])
                    if index["metadata"]["delta_encoding"] == "xor":
                        bytes_B[:] = bytes_B ^ data
                    else:
                        count = int.from_bytes(data[:4].tobytes(), "little")
                        bytes_B[np.frombuffer(data[4 : 4 + 4 * count].tobytes(), "<u4")] = data[
                            4 + 4 * count :
                        ]
                    assert sums[name] == SUMS[index["metadata"]["checksum_format"]](bytes_B.tobytes())
        yield int(index["metadata"]["version"]), state


class Followed:
    """What a replica of the channel holds after each version."""

    def __init__(self, target: str) -> None:
        self.replica, self.seen = Replica(target), dict[int, State]()

    def take(self, versions: Iterable[tuple[int, int]]) -> int:
        """Sync after each version, and return how many there were."""
        before = len(self.seen)
        for number, version in versions:
            assert self.replica.sync() == version
            self.seen[number] = {name: tensor.clone() for name, tensor in self.replica.state_dict().items()}
        return len(self.seen) - before


@pytest.mark.parametrize(("encoding", "name"), [("xor", "weight_v{:06d}"), ("overwrite", "v{}")])
def test_fifty_versions_become_a_channel_with_equal_bits(tmp_path: Path, encoding: str, name: str) -> None:
    """Full at first, full once more in the middle, one version a call and many in one, with a restart."""
    states = [model()]
    for step in range(1, 50):
        states.append(model(step) if step == 20 else train(states[-1], step))
    source, target = tmp_path / "dirs", f"file://{tmp_path}/channel"
    seen = dict[int, State]()
    bridge = Import(source, target)
    followed = Followed(target)
    for number, state in enumerate(states):
        folder = source / name.format(number)
        if number in (0, 20):
            write_full(folder, state)
        else:
            write_delta(folder, number, states[number - 1], state, encoding)
        if number == 30:
            bridge.close()
            bridge = Import(source, target)
        if number < 10 or number % 5 == 0 or number == 49:
            followed.take(bridge.versions())
            assert followed.take(bridge.versions()) == 0
    bridge.close()
    seen = followed.seen
    assert sorted(seen) == list(range(50))
    assert all(same(seen[number], states[number]) for number in range(50))


def test_deltas_alone_begin_with_the_named_checkpoint(tmp_path: Path) -> None:
    old, source, target = model(), tmp_path / "dirs", f"file://{tmp_path}/channel"
    new = train(old, 4)
    write_full(tmp_path / "base", old)
    write_delta(source / "weight_v000001", 1, old, new)
    with pytest.raises(ChainError, match="--base"):
        list(Import(source, target).versions())
    followed = Followed(target)
    bridge = Import(source, target, base=tmp_path / "base")
    assert followed.take(bridge.versions()) == 2
    bridge.close()
    assert same(followed.seen[0], old) and same(followed.seen[1], new)


def test_versions_that_are_being_written_are_waited_for(tmp_path: Path) -> None:
    old, source = model(), tmp_path / "dirs"
    new = train(old, 5)
    write_full(source / "weight_v000000", old)
    write_delta(source / "weight_v000001", 1, old, new)
    whole = {path: path.read_bytes() for path in (source / "weight_v000001").iterdir()}
    bridge = Import(source, "memory://being-written")
    assert len([*bridge.versions()]) == 2
    bridge.close()
    for cut in whole:
        for size in (0, 7, len(whole[cut]) // 2, len(whole[cut]) - 1):
            if cut.suffix == ".json" and size:
                continue  # the index is stored last, at once
            for path, data in whole.items():
                path.write_bytes(data)
            cut.unlink() if cut.suffix == ".json" else cut.write_bytes(whole[cut][:size])
            bridge = Import(source, f"memory://cut-{cut.name}-{size}")
            assert len([*bridge.versions()]) == 1 and bridge.number == 0
            cut.write_bytes(whole[cut])
            assert len([*bridge.versions()]) == 1 and bridge.number == 1
            bridge.close()


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ("flip", CorruptDataError, "checksum|zstd|Src size|frame|corrupt"),
        ("checksum", CorruptDataError, "other bits of"),
        ("bomb", CorruptDataError, "more than"),
        ("short", CorruptDataError, "bytes, the tensor"),
        ("name", ModelMismatchError, "does not have"),
        ("encoding", CorruptDataError, "encoded by 'diff'"),
        ("compression", CorruptDataError, "'lz4'"),
        ("version", CorruptDataError, "leads from version"),
        ("gap", ChainError, "It goes on with the next full version"),
        ("algorithm", ConfigError, "'md5' is none of"),
        ("path", CorruptDataError, "not a weight file beside it"),
        ("json", CorruptDataError, "not the index of a version"),
    ],
)
def test_a_damaged_version_is_refused_and_the_channel_stays_at_the_one_before(
    tmp_path: Path, damage: str, error: type[DeltaSyncError], words: str
) -> None:
    old, source, target = model(), tmp_path / "dirs", f"file://{tmp_path}/channel"
    new = train(old, 5)
    write_full(source / "weight_v000004", old)
    said = {
        "encoding": {"delta_encoding": "diff"},
        "compression": {"compression_format": "lz4"},
        "version": {"version": "9"},
    }
    said |= {"algorithm": {"checksum_format": "md5"}, "gap": {"base_version": "3"}}
    folder = source / "weight_v000005"
    write_delta(folder, 5, old, new, **said.get(damage, {}))
    file, index = folder / "model-00000-of-00002.safetensors", folder / "model.safetensors.index.json"
    with safetensors.safe_open(file, framework="np") as opened:
        entries, sums = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    name = next(iter(entries))
    size = bytes_of(old[name]).size
    compress = zstandard.ZstdCompressor().compress
    match damage:
        case "flip":
            entries[name] = entries[name].copy()
            entries[name][-1] ^= 1
        case "checksum":
            sums[name] = "00000000"
        case "bomb":
            entries[name] = np.frombuffer(compress(bytes(1 << 24)), np.uint8)
        case "short":
            entries[name] = np.frombuffer(compress(bytes(size - 1)), np.uint8)
        case "name":
            entries["stranger"], sums["stranger"] = entries[name], sums[name]
            said_there = json.loads(index.read_text())
            said_there["weight_map"]["stranger"] = file.name
            index.write_text(json.dumps(said_there))
        case "path":
            index.write_text(index.read_text().replace("model-00000", "../model-00000"))
        case "json":
            index.write_text("{")
    safetensors.numpy.save_file(entries, file, metadata=sums)
    followed = Followed(target)
    bridge = Import(source, target)
    with pytest.raises(error, match=words):
        followed.take(bridge.versions())
    if damage in ("path", "json", "encoding", "compression", "version"):  # seen before anything is published
        (folder / "model.safetensors.index.json").unlink()
        followed.take(bridge.versions())
    assert sorted(followed.seen) == [4] and same(followed.seen[4], old)
    write_full(source / "weight_v000006", new)
    shutil.rmtree(folder)
    followed.take(bridge.versions())
    bridge.close()
    assert sorted(followed.seen) == [4, 6] and same(followed.seen[6], new)


def write_parts(folder: Path, parts: dict[str, State], weight_map: dict[str, str]) -> None:
    """A full version in several files."""
    folder.mkdir(parents=True)
    for file, state in parts.items():
        save_file(state, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("twice", "holds scalar, which the index places in one.safetensors"),
        ("unnamed", "holds stranger, which the index does not name"),
        ("absent", "places absent in two.safetensors, which does not hold it"),
        ("unnamed file", "three.safetensors holds stranger, which the index does not name"),
        ("bytes", "holds no whole tensors"),
    ],
)
def test_an_index_that_differs_from_its_files_is_refused(tmp_path: Path, damage: str, words: str) -> None:
    state = model()
    one, two = dict(state), {"embed.weight": state["embed.weight"]}
    del one["embed.weight"]
    weight_map = dict.fromkeys(one, "one.safetensors") | dict.fromkeys(two, "two.safetensors")
    parts = {"one.safetensors": one, "two.safetensors": two}
    match damage:
        case "twice":
            two["scalar"] = state["scalar"]
        case "unnamed":
            two["stranger"] = state["scalar"]
        case "absent":
            weight_map["absent"] = "two.safetensors"
        case "unnamed file":
            parts["three.safetensors"] = {"stranger": state["scalar"]}
        case "bytes":
            parts = {"one.safetensors": {"a": torch.zeros(9, dtype=torch.uint8)}}
            weight_map = {"a": "one.safetensors"}
    write_parts(tmp_path / "dirs" / "v1", parts, weight_map)
    target = f"file://{tmp_path}/channel"
    bridge = Import(tmp_path / "dirs", target)
    with pytest.raises(CorruptDataError, match=words):
        list(bridge.versions())
    assert not (tmp_path / "channel" / "channel.json").exists()
    write_full(tmp_path / "dirs" / "v2", state)  # on the damaged one no version depends any more
    followed = Followed(target)
    assert followed.take(bridge.versions()) == 1 and same(followed.seen[2], state)
    bridge.close()


def test_a_delta_in_a_lone_file_is_nothing_before_its_index(tmp_path: Path) -> None:
    old, source, target = model(), tmp_path / "dirs", f"file://{tmp_path}/channel"
    new = train(old, 1)  # one tensor: one file
    folder = source / "weight_v000005"
    write_delta(folder, 5, old, new)
    index, (file,) = folder / "model.safetensors.index.json", list(folder.glob("*.safetensors"))
    file.rename(folder / "model.safetensors")
    text = index.read_text().replace(file.name, "model.safetensors")
    index.unlink()
    bridge, followed = Import(source, target), Followed(target)
    assert followed.take(bridge.versions()) == 0 and "no model.safetensors.index.json" in str(
        bridge.unfinished
    )
    write_full(source / "weight_v000004", old)
    assert followed.take(bridge.versions()) == 1 and bridge.unfinished is not None
    index.write_text(text)
    assert followed.take(bridge.versions()) == 1 and bridge.unfinished is None
    bridge.close()
    assert same(followed.seen[4], old) and same(followed.seen[5], new)


@pytest.mark.parametrize("damage", ["short", "no index", "missing file", "other bits", "no base"])
def test_a_version_that_stays_unreadable_is_passed_over_for_full_weights(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    states, source, target = [model()], tmp_path / "dirs", f"file://{tmp_path}/channel"
    write_full(source / "weight_v000000", states[0])
    for number in range(1, 4):
        states.append(train(states[-1], 5))
        write_delta(source / f"weight_v{number:06d}", number, states[-2], states[-1])
    folder = source / "weight_v000002"
    file, index = folder / "model-00000-of-00002.safetensors", folder / "model.safetensors.index.json"
    match damage:
        case "short":
            file.write_bytes(file.read_bytes()[:-1])
        case "no index":
            index.unlink()
        case "missing file":
            file.unlink()
        case "other bits":
            file.write_bytes(file.read_bytes()[:-1] + b"\0")
        case "no base":
            shutil.rmtree(folder)
    if damage in ("short", "no index", "missing file"):
        result = CliRunner().invoke(main, ["relay", f"weight_v+file://{source}", target, "--once"])
        assert result.exit_code == 5 and "weight_v000002" in result.output and "unfinished" in result.output
    states.append(model(7))
    write_full(source / "weight_v000004", states[4])
    states.append(train(states[-1], 5))
    write_delta(source / "weight_v000005", 5, states[4], states[5])
    bridge, followed = Import(source, target), Followed(target)
    if damage in ("short", "no index", "missing file"):
        assert followed.take(bridge.versions()) == 2 and "passed over for version 4" in caplog.text
    else:
        bridge = Import(source, f"file://{tmp_path}/new")  # begins with the newest full weights
        followed = Followed(f"file://{tmp_path}/new")
        assert followed.take(bridge.versions()) == 2
    assert bridge.unfinished is None
    bridge.close()
    assert same(followed.seen[4], states[4]) and same(followed.seen[5], states[5])


def killed(arguments: list[str], where: str) -> None:
    """Run a command of deltasync that dies by SIGKILL where it calls a function for the first time."""
    module, _, name = where.rpartition(".")
    module, _, owner = module.rpartition(".")
    code = (
        f"import os, {module}\n"
        f"{module}.{owner}.{name} = lambda *args, **named: os.kill(os.getpid(), 9)\n"
        f"from deltasync.ops.cli import main\nmain({arguments!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


@pytest.mark.parametrize(
    ("where", "named_base"),
    [
        ("opening.acquire._Opener.open", False),  # before anything of the channel
        ("opening.acquire._Opener.open", True),
        ("publish.log.Log.describe", False),
        ("publish.log.Log.describe", True),
        ("publish.log.Log.put_file", False),  # in the first upload; a version that is a reference has none
        ("publish.log.Log.append", False),
        ("publish.log.Log.append", True),
    ],
)
def test_a_relay_that_was_killed_is_continued_by_the_same_command(
    tmp_path: Path, where: str, named_base: bool
) -> None:
    old, source, target = model(), tmp_path / "dirs", f"file://{tmp_path}/channel"
    new = train(old, 5)
    write_full(tmp_path / "base" if named_base else source / "weight_v000000", old)
    write_delta(source / "weight_v000001", 1, old, new)
    base = ["--base", str(tmp_path / "base")] if named_base else []
    arguments = ["relay", f"weight_v+file://{source}", target, "--once", "--json", *base]
    killed(arguments, f"deltasync.{where}")
    command(*arguments)
    replica = Replica(target)
    assert replica.sync() == 2 and same(replica.state_dict(), new)


def test_a_channel_of_somebody_else_stays_refused_after_an_attempt(tmp_path: Path) -> None:
    """What was noted before the opening is no claim on a channel that another publisher opens at that
    moment.
    """
    target = f"file://{tmp_path}/channel"
    write_full(tmp_path / "dirs" / "v7", model(1))
    arguments = ["relay", f"weight_v+file://{tmp_path}/dirs", target, "--once", "--json"]
    killed(arguments, "deltasync.opening.acquire._Opener.open")
    with Publisher(target, dtype="keep") as publisher:
        publisher.publish(model().items(), step=3).wait()
    with pytest.raises(ChannelInUseError, match="was not made from"):
        list(Import(tmp_path / "dirs", target).versions())


@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("where", ["_end", "_put"])
def test_directories_whose_relay_was_killed_are_continued(tmp_path: Path, where: str, later: int) -> None:
    url, root, states = f"file://{tmp_path}/channel", tmp_path / "dirs", [model()]
    with Publisher(url, dtype="keep") as publisher:
        publisher.publish(states[0].items()).wait()
        killed(
            ["relay", url, f"weight_v+{root}", "--once", "--json"],
            f"deltasync.interchange.bridge.Export.{where}",
        )
        for step in range(1, later + 1):
            states.append(train(states[-1], step))
            publisher.publish(states[-1].items()).wait()
        command("relay", url, f"weight_v+{root}", "--once", "--json")
        if later:
            states.append(train(states[-1], 5))
            publisher.publish(states[-1].items()).wait()
            killed(
                ["relay", url, f"weight_v+{root}", "--once", "--json"],
                "deltasync.interchange.bridge.Export._end",
            )
            command("relay", url, f"weight_v+{root}", "--once", "--json")
    back, followed = Import(root, f"file://{tmp_path}/back"), Followed(f"file://{tmp_path}/back")
    followed.take(back.versions())
    back.close()
    assert max(followed.seen) == len(states) and back.unfinished is None
    assert all(same(seen, states[number - 1]) for number, seen in followed.seen.items())


def test_directories_behind_what_was_forgotten_go_on_with_full_weights(tmp_path: Path) -> None:
    url, root, states = f"file://{tmp_path}/channel", tmp_path / "dirs", [model()]
    with Publisher(url, dtype="keep", anchor_every=4) as publisher:
        publisher.publish(states[0].items()).wait()
        command("relay", url, f"weight_v+{root}", "--once", "--json")
        for step in range(1, 12):
            states.append(train(states[-1], step))
            publisher.publish(states[-1].items()).wait()
    assert CliRunner().invoke(main, ["gc", url, "--keep-last", "2", "--grace", "0s"]).exit_code == 0
    written = command("relay", url, f"weight_v+{root}", "--once", "--json")
    assert written and written[-1]["version"] == 12
    assert command("relay", url, f"weight_v+{root}", "--once", "--json") == []
    found = dict(read_dirs(root))
    assert all(same(state, states[number - 1]) for number, state in found.items()) and {1, 12} <= found.keys()


def test_another_channel_is_not_continued(tmp_path: Path) -> None:
    target = f"file://{tmp_path}/channel"
    with Publisher(target, dtype="keep") as publisher:
        publisher.publish(model().items(), step=3).wait()
    write_full(tmp_path / "dirs" / "v7", model(1))
    with pytest.raises(ChannelInUseError, match="was not made from"):
        list(Import(tmp_path / "dirs", target).versions())
    write_full(tmp_path / "dirs" / "weight_v000007", model(1))
    with pytest.raises(ConfigError, match="both"):
        list(Import(tmp_path / "dirs", f"file://{tmp_path}/other").versions())


@pytest.mark.parametrize(
    ("encoding", "algorithm"), [("xor", "adler32"), ("overwrite", "xxh3-128"), ("xor", "blake3")]
)
def test_fifty_versions_of_a_channel_become_directories_with_equal_bits(
    tmp_path: Path, encoding: str, algorithm: str
) -> None:
    url, root = f"file://{tmp_path}/channel", tmp_path / "dirs"
    states = [model()]
    with Publisher(url, dtype="keep", model_files={"config.json": b"{}"}) as publisher:
        publisher.publish(states[0].items()).wait()
        export = Export(ChannelReader(open_store(url)), root, encoding, algorithm)
        for step in range(1, 50):
            states.append(train(states[-1], step))
            publisher.publish(states[-1].items(), step=step).wait()
            if step == 25:
                export = Export(ChannelReader(open_store(url)), root, encoding, algorithm)
            if step % 4 == 0 or step == 49:
                list(export.versions(first=1))
    assert export.number == 50 and len(list(root.glob("weight_v*"))) == 50
    assert (root / "weight_v000001" / "config.json").read_bytes() == b"{}"
    found = dict(read_dirs(root))
    assert sorted(found) == list(range(1, 51))
    assert all(same(state, states[number - 1]) for number, state in found.items())
    back, followed = Import(root, f"file://{tmp_path}/back"), Followed(f"file://{tmp_path}/back")
    followed.take(back.versions())
    back.close()
    assert same(followed.seen[50], states[49])


def test_directories_of_another_run_are_not_continued(tmp_path: Path) -> None:
    write_full(tmp_path / "dirs" / "weight_v000001", model())
    with Publisher(f"file://{tmp_path}/channel") as publisher:
        publisher.publish(model().items()).wait()
    with pytest.raises(ChannelInUseError, match="choose another target"):
        list(Export(ChannelReader(open_store(f"file://{tmp_path}/channel")), tmp_path / "dirs").versions())


def command(*arguments: object) -> list[dict[str, object]]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_commands_make_a_channel_of_directories_and_directories_of_a_channel(tmp_path: Path) -> None:
    old, source, channel = model(), tmp_path / "dirs", f"file://{tmp_path}/channel"
    new = train(old, 5)
    write_full(tmp_path / "base", old)
    write_delta(source / "weight_v000001", 1, old, new)
    where = f"weight_v+file://{source}", "--base", tmp_path / "base"
    (followed,) = command("follow", *where, "--once", "--json")
    assert followed["version"] == 2
    relayed = command("relay", *where, channel, "--once", "--json")
    assert relayed == [{"directory": 0, "version": 1}, {"directory": 1, "version": 2}]
    assert command("relay", *where, channel, "--once", "--json") == []
    report = CliRunner().invoke(main, ["check", channel, "--read-data"])
    assert report.exit_code == 0, report.output
    written = command("export", channel, 2, tmp_path / "out", "--layout", "weight_v", "--json")
    assert [row["version"] for row in written] == [1, 2]
    assert [
        number for number, state in read_dirs(tmp_path / "out") if same(state, old if number == 1 else new)
    ] == [1, 2]
    assert (
        command("relay", channel, f"weight_v+file://{tmp_path}/newest", "--once", "--json")[0]["version"] == 2
    )
    assert same(dict(read_dirs(tmp_path / "newest"))[2], new)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("relay", "weight_v+file:///a", "weight_v+file:///b"), "with one TARGET"),
        (("relay", "weight_v+file:///a", "file:///b", "file:///c"), "with one TARGET"),
        (("relay", "file:///a", "file:///b", "--base", "c"), "begin with weight_v+"),
        (("log", "weight_v+file:///a"), "deltasync relay weight_v"),
    ],
)
def test_other_uses_are_refused_in_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (2, 3) and words in result.output, result.output


@pytest.fixture
def modelexpress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ModelExpress's own receiver (`make services`)."""
    monkeypatch.syspath_prepend(str(SERVICES))
    pytest.importorskip(
        "modelexpress_rl", reason="no modelexpress here (make services)", exc_type=ImportError
    )
    yield
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("modelexpress")]:
        del sys.modules[name]


class Bucket:
    """What ModelExpress's receiver uses of its S3 client, over a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, uri: str) -> bytes:
        return (self.root / uri.removeprefix("s3://bucket/")).read_bytes()

    def size(self, uri: str) -> int:
        return len(self.get(uri))


@pytest.mark.usefixtures("modelexpress")
def test_modelexpress_reads_what_a_channel_becomes(tmp_path: Path) -> None:
    from modelexpress_rl.inference import receiver
    from modelexpress_rl.object_storage import ObjectStorageType
    from modelexpress_rl.train import WeightPayloadFormat

    url, root, states = f"file://{tmp_path}/channel", tmp_path / "dirs", [model()]
    with Publisher(url, dtype="keep") as publisher:
        publisher.publish(states[0].items()).wait()
        for step in range(1, 12):
            states.append(train(states[-1], step))
            publisher.publish(states[-1].items()).wait()
    list(Export(ChannelReader(open_store(url)), root).versions(first=1))
    versions = tuple(
        receiver._S3Version(
            version_id=f"{number:06d}",
            base_version_id=f"{number - 1:06d}",
            payload_format=WeightPayloadFormat.XOR_DELTA,
            uri=f"s3://bucket/weight_v{number:06d}/model.safetensors.index.json",
        )
        for number in range(2, 13)
    )
    config = receiver.ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3,
        initial_base_version_id="000001",
        seed_checkpoint_path=root / "weight_v000001",
        refit_checkpoint_dir=tmp_path / "theirs",
    )
    held = receiver._LocalCheckpoint(model_name="tiny", config=config, s3=Bucket(root))
    held.initialize()
    prepared = held.prepare_chain(versions)
    assert same(
        {n: t for path in prepared.path.glob("*.safetensors") for n, t in load_file(path).items()}, states[-1]
    )


@pytest.mark.usefixtures("modelexpress")
def test_what_modelexpress_encodes_becomes_a_channel(tmp_path: Path) -> None:
    from modelexpress_rl import utils

    old, source = model(), tmp_path / "dirs"
    new = train(old, 5)
    write_full(source / "v0", old)
    entries, sums = {}, {}
    for name in new:
        delta, changed = utils.compute_delta(bytes_of(new[name]), bytes_of(old[name]))
        if changed:
            entries[name], checksum = utils.compress_delta(delta), utils.checksum_factory("adler32")
            checksum.update(bytes_of(new[name]))
            sums[name] = checksum.hexdigest()
    (source / "v1").mkdir()
    safetensors.numpy.save_file(entries, source / "v1" / "model-00000-of-00001.safetensors", metadata=sums)
    said = {"version": "v1", "base_version": "v0", "delta_encoding": "xor", "compression_format": "zstd"}
    index = {
        "metadata": said | {"checksum_format": "adler32"},
        "weight_map": dict.fromkeys(entries, "model-00000-of-00001.safetensors"),
    }
    (source / "v1" / "model.safetensors.index.json").write_text(json.dumps(index))
    followed = Followed(f"file://{tmp_path}/channel")
    bridge = Import(source, f"file://{tmp_path}/channel")
    followed.take(bridge.versions())
    bridge.close()
    assert same(followed.seen[1], new)
