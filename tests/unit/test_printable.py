"""What a channel or a replica says reaches no terminal, log line or page as it is."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import json
import logging
import os
import pty
import re
import shutil
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load

import deltasync
from deltasync import errors, open_store
from deltasync.channel import keys
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.codec.base import RECORD, Encoded, read_metadata
from deltasync.errors import CorruptDataError, DeltaSyncError, get_logger, printable, printable_in, redacted
from deltasync.ops.cli import main
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.stores import Store
from tests.channels import EPOCH, RUN, filled

# Title, clipboard, clear screen; the same by C1 codes; delete, backspace, bell; right-to-left and its
# isolate; other lines.
HOSTILE = (
    "\x1b]0;title\x07\x1b]52;c;aGk=\x07\x1b[2J\x9d0;title\x9c\x9b2J\x7f\x08\u202eltr\u2066\u200b[red]"
    "\r\nFORGED\u2028LINE"
)
COMMANDS = (
    ["watch", "CHANNEL", "--once"],
    ["watch", "CHANNEL", "--once", "--json"],
    ["log", "CHANNEL"],
    ["log", "CHANNEL", "--json"],
    ["log", "CHANNEL", "latest"],
    ["log", "CHANNEL", "latest", "--json"],
    ["check", "CHANNEL", "--read-data"],
    ["check", "CHANNEL", "--json"],
    ["follow", "CHANNEL", "--once"],
    ["follow", "CHANNEL", "--once", "--json"],
    ["watch", "CHANNEL", "--out", "PAGE"],
    ["doctor", "CHANNEL"],
    ["doctor", "CHANNEL", "--json"],
    ["repair", "CHANNEL"],
    ["repair", "CHANNEL", "--no-replay", "--json"],
    ["diff", "CHANNEL", "1", "latest"],
    ["diff", "CHANNEL", "1", "latest", "--json"],
    ["blame", "CHANNEL", "*"],
    ["blame", "CHANNEL", "*", "--json"],
    ["gc", "CHANNEL", "--keep-last", "1", "--grace", "0"],
    ["gc", "CHANNEL", "--keep-last", "1", "--grace", "0", "--dry-run", "--json"],
    ["relay", "CHANNEL", "COPY", "--once"],
    ["relay", "CHANNEL", "COPY", "--once", "--json"],
    ["export", "CHANNEL", "latest", "FOLDER"],
    ["export", "CHANNEL", "latest", "FOLDER", "--json"],
)
"""Every command that reads a channel. `bench`, `demo`, `deploy`, `keygen`, `router` and `serve` read none."""


class _Terminal:
    """A terminal that is written to while the block goes on; afterwards `seen` holds all of it."""

    def __enter__(self) -> _Terminal:
        self._ours, theirs = pty.openpty()
        tty.setraw(theirs)  # what arrives is what was written
        self.stream = open(theirs, "w", encoding="utf-8", buffering=1)
        self._read = bytearray()
        self._reader = threading.Thread(target=self._take)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self._reader.join(10)
        os.close(self._ours)
        self.seen = self._read.decode()

    def _take(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                return
            if not data:
                return
            self._read += data


def _run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> str:
    """What a command writes to a terminal."""
    with _Terminal() as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal.stream)
        patch.setattr("sys.stderr", terminal.stream)
        patch.setenv("COLUMNS", "200")
        with contextlib.suppress(SystemExit, DeltaSyncError):
            main(arguments, standalone_mode=False)
    return terminal.seen


def _hostile_parts(text: str) -> list[str]:
    """What of `HOSTILE` got through. Rich writes colours and moves the cursor itself, but none of these."""
    forbidden = (
        "\x1b]",
        "\x1b[2J",
        "\x07",
        "\x08",
        "\x7f",
        "\x9b",
        "\x9c",
        "\x9d",
        "\u202e",
        "\u2066",
        "\u200b",
        "\u2028",
    )
    return [repr(part) for part in (*forbidden, "\nFORGED", "\rFORGED") if part in text]


def _leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where text stands in a document; `(..., None, name)` for the name of a field whose name is data."""
    if isinstance(document, str):
        yield path
    elif isinstance(document, dict):
        for name, value in document.items():
            if path and path[-1] in ("tensors", "fingerprints"):
                yield (*path, None, name)
            yield from _leaves(value, (*path, name))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from _leaves(value, (*path, number))


def _poisoned(document: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(document)
    at = changed
    if len(path) >= 2 and path[-2] is None:
        for part in path[:-2]:
            at = at[part]
        at[path[-1] + HOSTILE] = at.pop(path[-1])
        return changed
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] += HOSTILE
    return changed


def _channel(url: str) -> Store:
    first = {"a.weight": torch.linspace(-1, 1, 100), "b": torch.ones(3, 3)}
    second = {"a.weight": first["a.weight"].clone().index_fill_(0, torch.tensor([3]), 7.0), "b": first["b"]}
    store = open_store(url)
    filled(store, [first, second], compactions=[(1, 2)], anchors=(2,))
    heartbeat.write(
        store, Heartbeat(replica_id="r", run_id=RUN, version=2, state="serving", error="none really")
    )
    return store


def _documents(store: Store) -> list[str]:
    compactions = [info.key for _, info in ChannelReader(store).shortcuts()]
    return [
        keys.CHANNEL,
        keys.HEAD,
        keys.slot(1, EPOCH),
        keys.slot(2, EPOCH),
        *compactions,
        keys.replica("r"),
    ]


def _document(data: bytes) -> Any:
    """The document of a record, or of an object that is one."""
    if data.startswith(b"{"):
        return json.loads(data)
    length = int.from_bytes(data[-8:], "little")
    return json.loads(data[-8 - length : -8])


def _with(data: bytes, document: Any, path: tuple[Any, ...]) -> bytes:
    """The object with another document, whose body is what it says."""
    if data.startswith(b"{"):
        return json.dumps(document).encode()
    arrays = {name: array for name, array in load(data).items() if name != RECORD}
    try:
        metadata = read_metadata(data)
    except CorruptDataError:
        metadata = {}
    text = b""
    while True:
        front = b"".join(Encoded(arrays, metadata).of_record(len(text) + 8))
        if path[-1] != "body_sha256":
            document |= {"body_bytes": len(front), "body_sha256": sha256_hex(front)}
        before, text = text, json.dumps(document).encode()
        if len(before) == len(text):
            return front + text + len(text).to_bytes(8, "little")


def _relink(store: Store) -> None:
    """Have head name the record that is there, so that readers get past its digest."""
    head = json.loads(store.read(keys.HEAD, 1 << 30))
    head["sha256"] = sha256_hex(store.read(keys.slot(2, EPOCH), 1 << 30))
    store.put(keys.HEAD, json.dumps(head).encode())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_a_channels_text_as_it_is(
    command: list[str], memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, page = _channel(memory_url), tmp_path / "page.html"
    original = {info.key: store.read(info.key, 1 << 30) for info in store.list("")}
    places = {
        "CHANNEL": memory_url,
        "PAGE": str(page),
        "COPY": f"{memory_url}/copy",
        "FOLDER": str(tmp_path / "there"),
    }
    arguments = [places.get(word, word) for word in command]

    def run() -> str:
        """What the command shows of what the store holds now, which afterwards is what it was at first."""
        seen = _run(monkeypatch, arguments)
        if page.exists():
            data = page.read_text().split('id="data">')[1].split("</script>")[0]
            seen += "".join(_strings(json.loads(data)))
            page.unlink()
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        copy = open_store(f"{memory_url}/copy")
        copy.delete(*(info.key for info in copy.list("")))
        store.delete(*({info.key for info in store.list("")} - original.keys()))
        for key, data in original.items():
            store.put(key, data)
        return seen

    assert not _hostile_parts(run())
    shown, planted = (
        0,
        ((key, path) for key in _documents(store) for path in _leaves(_document(original[key]))),
    )
    for key, path in planted:
        if shown == 3 and ("--json" in command or command[0] not in ("watch", "log", "check")):
            # documents as JSON are written by one function, and lines too; these three show most of what is
            # there
            break
        store.put(key, _with(original[key], _poisoned(_document(original[key]), path), path))
        if key == keys.slot(2, EPOCH):
            _relink(store)
        seen = run()
        assert not _hostile_parts(seen), (key, path)
        shown += "FORGED" in seen
    assert shown, "nothing of what was planted was shown, so this test shows nothing"


def test_every_command_that_reads_a_channel_is_here() -> None:
    help_text = CliRunner().invoke(main, ["--help"]).output
    commands = re.findall(r"^  ([a-z]+)  ", help_text.partition("Commands:")[2], re.MULTILINE)
    assert set(commands) == {command[0] for command in COMMANDS} | {"bisect", "keygen", "serve"}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command[0] != "export"], ids=" ".join)
def test_no_command_shows_an_objects_name_as_it_is(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    store = _channel(f"file://{root}")
    for key in [info.key for info in store.list("")]:
        path = root / key
        strange = path.with_name(path.stem + HOSTILE.replace("/", "") + path.suffix)
        strange.write_bytes(path.read_bytes())
    places = {
        "CHANNEL": f"file://{root}",
        "PAGE": str(tmp_path / "page.html"),
        "COPY": f"file://{tmp_path}/copy",
    }
    seen = _run(monkeypatch, [places.get(word, word) for word in command])
    assert not _hostile_parts(seen)


def _strings(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        for name, value in document.items():
            yield name
            yield from _strings(value)
    elif isinstance(document, list):
        for value in document:
            yield from _strings(value)
    elif isinstance(document, str):
        yield document


def test_watch_shows_no_replica_text_as_it_is_not_on_a_terminal_either(
    memory_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _channel(memory_url)
    beat = Heartbeat(
        replica_id=f"r{HOSTILE}", run_id=RUN, version=1, state=f"s{HOSTILE}", error=f"e{HOSTILE}"
    )
    store.put(keys.replica("r"), json.dumps({name: getattr(beat, name) for name in beat.__slots__}).encode())
    with pytest.raises(SystemExit):  # a replica that reports an error
        main(["watch", memory_url, "--once"], standalone_mode=False)
    seen = "".join(capsys.readouterr())
    assert seen.count("FORGED") == 6
    assert not _hostile_parts(seen)


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, RecursionError, UnicodeError])
def test_an_unexpected_error_is_printable_too(
    kind: type[Exception], memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "CHANNEL": memory_url,
        "PAGE": str(tmp_path / "page"),
        "COPY": f"{memory_url}/copy",
        "FOLDER": str(tmp_path),
    }

    def fail(*_: object) -> None:
        try:
            raise RuntimeError(f"before {HOSTILE}")
        except RuntimeError as error:
            found = kind(f"{HOSTILE} of {URLS[0]}")
            found.add_note(HOSTILE.replace("\n", ""))  # a note may have lines
            raise found from error

    monkeypatch.setattr("deltasync.stores.open_store", fail)
    for command in COMMANDS:
        seen = _run(monkeypatch, [places.get(word, word) for word in command])
        assert seen.count("FORGED") == 3 and "in fail" in seen and kind.__name__ in seen
        assert not _hostile_parts(seen)
        assert not _planted(seen)


def test_an_unexpected_error_is_printable_in_a_log_too() -> None:
    stream, logger = io.StringIO(), get_logger("tests.printable.unexpected")
    logger.addHandler(logging.StreamHandler(stream))
    try:
        raise ValueError(f"{HOSTILE} of {URLS[0]}")
    except ValueError as error:
        logger.exception("Failed: %s", error)
    assert stream.getvalue().count("FORGED") == 2
    assert f"in {inspect.currentframe().f_code.co_name}\n" in stream.getvalue()  # type: ignore[union-attr]
    assert not _hostile_parts(stream.getvalue())
    assert not _planted(stream.getvalue())


def test_whoever_logs_unexpected_errors_has_a_logger_that_makes_them_printable() -> None:
    packages = [
        Path(deltasync.__file__).parents[1] / name for name in ("deltasync", "vllm_plugin", "trl_callback")
    ]
    printable = re.compile(
        r"^logger = get_logger\(|^from vllm_plugin import (compat, )?logger$", re.MULTILINE
    )
    wrong = [
        str(path)
        for package in packages
        for path in package.rglob("*.py")
        if "logger.exception(" in (text := path.read_text())
        if not printable.search(text)
    ]
    assert wrong == []


def test_commands_print_by_one_function() -> None:
    folder = Path(deltasync.__file__).parent / "cli"
    wrong = [
        f"{path.name}:{node.lineno}"
        for path in folder.glob("*.py")
        if path.name != "output.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("echo", "secho", "from_markup"))
        or (isinstance(node, ast.Name) and node.id in ("print", "Text"))
    ]
    assert not wrong


def _error_classes(root: type[DeltaSyncError] = DeltaSyncError) -> Iterator[type[DeltaSyncError]]:
    if not root.__name__.startswith("_"):  # of a module, which raises none of them
        yield root
    for inner in root.__subclasses__():
        yield from _error_classes(inner)


@pytest.mark.parametrize("kind", sorted(set(_error_classes()), key=lambda kind: kind.__name__))
def test_errors_are_printable_wherever_they_are_written(kind: type[DeltaSyncError]) -> None:
    try:
        raise kind(f"head names {HOSTILE}")
    except DeltaSyncError as error:
        stream = io.StringIO()
        logger = logging.getLogger("tests.printable")
        logger.addHandler(logging.StreamHandler(stream))
        logger.exception("Failed: %s, %r", error, error)
        assert "FORGED" in stream.getvalue()
        assert not _hostile_parts(stream.getvalue())
        assert not _hostile_parts(str(error))


def test_a_heartbeat_in_an_ack_error_is_printable(memory_url: str) -> None:
    store = open_store(memory_url)
    heartbeat.write(store, Heartbeat(replica_id="r", run_id="run", version=1, state="staging", error=HOSTILE))
    with pytest.raises(errors.AckTimeoutError, match="FORGED") as raised:
        heartbeat.wait_for(store, "run", 2, {2: "0" * 64}, 0)
    assert not _hostile_parts(str(raised.value))


def test_printable_text_stays_as_it_is() -> None:
    text = "Versión 3: 重み → 0.5 %, 'x' \\n ▁▂█"
    assert printable(text) is text
    assert printable("a\tb\ud800") == r"a\tb\ud800"
    assert printable_in({"a\x1b": ["\x07", 1, None, ("\n",)]}) == {r"a\x1b": [r"\x07", 1, None, [r"\n"]]}


SECRETS = ("AKIAPLANTED", "pLaNtEd/S3+cret", "hf_planted", "planted-token", "planted%2Fpassword", "c2lnbmVk")
URLS = (
    "s3://AKIAPLANTED:pLaNtEd/S3+cret@bucket/run",
    "s3://AKIAPLANTED:pLaNtEd/S3+cret",
    "s3://AKIAPLANTED:x/bucket/run",
    "hf://user:hf_planted@buckets/namespace/name/run",
    "hf://hf_planted@buckets/namespace/name/run",
    "s3://bucket/run?token=planted-token",
    "s3://bucket/run?region=eu-1&secret_access_key=pLaNtEd/S3+cret",
    "s3://bucket/run?endpoint=https://user:planted-token@host/",
    "s3://bucket/run?endpoint=https%3A%2F%2Fuser%3Aplanted-token%40host",
    "s3://bucket/run?planted-token",
    "https://user:planted%2Fpassword@host:8000/deltasync/status",
    "https://bucket.s3.amazonaws.com/run/head.json?X-Amz-Signature=c2lnbmVk",
    "gs://AKIAPLANTED:x@bucket/run",
    "az://container/run?sig=c2lnbmVk",
    "file:///data/run?token=planted-token",
    "memory://name?token=planted-token",
    "ftp://user:planted-token@host/run",
)


def _planted(text: str) -> list[str]:
    return [secret for secret in (*SECRETS, "S3+cret") if secret in text]


@pytest.mark.parametrize("url", URLS)
def test_secrets_in_urls_are_in_no_message(url: str) -> None:
    assert _planted(url), "the URL has no secret, so this test shows nothing"
    for kind in set(_error_classes()):
        error = kind(f"{url}/head.json cannot be read: {url!r}, '{url}'.")
        assert not _planted(f"{error} {error!r} {error.args}"), kind
    try:
        store = open_store(url)
    except DeltaSyncError as error:
        assert not _planted(f"{error} {error!r}")
    else:
        assert not _planted(store.url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b/run?endpoint=http://127.0.0.1:9000&region=eu-1&virtual_hosted=1&profile=p&anonymous=1",
        "hf://buckets/namespace/name/run",
        "file:///data/a@b/run:1",
        "http://127.0.0.1:8000/deltasync/status?commits=0",
        "http://[::1]:8000/v1",
    ],
)
def test_urls_without_secrets_stay_as_they_are(url: str) -> None:
    assert redacted(f"Cannot read '{url}' now.") == f"Cannot read '{url}' now."
