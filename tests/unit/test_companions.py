"""What lies beside an anchor's weights is bounded before any of it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltasync import Publisher, companions, housekeeping, open_store
from deltasync.errors import CorruptDataError
from deltasync.manifest import DOCUMENT_BYTES, Anchor, FileRef
from deltasync.reader import ChannelReader
from tests.faults import FaultyStore

FOLDER = "anchors/0000000001"


@pytest.fixture
def reader(memory_url: str) -> ChannelReader:
    with Publisher(memory_url) as publisher:
        publisher.publish({"w": torch.ones(4)}.items()).wait(30)
    return ChannelReader(FaultyStore(open_store(memory_url)))


def _anchor(*sizes: int) -> Anchor:
    files = [FileRef(key=f"{FOLDER}/{number}.json", bytes=size, sha256="0" * 64) for number, size in enumerate(sizes)]
    return Anchor(directory=FOLDER, files=[], companions=files)


TOO_MUCH = [(DOCUMENT_BYTES + 1,), (DOCUMENT_BYTES,) * 17, (1,) * 1001, (1 << 60, 0)]


@pytest.mark.parametrize("sizes", TOO_MUCH, ids=["one file", "all together", "how many", "2^60"])
def test_more_than_files_beside_weights_have_is_refused_unread(reader: ChannelReader, sizes: tuple[int, ...]) -> None:
    for look in (
        lambda: companions.names(reader, _anchor(*sizes)),
        lambda: companions.read(reader, _anchor(*sizes), "0.json"),
    ):
        with pytest.raises(CorruptDataError, match="lie beside the weights"):
            look()
    assert isinstance(reader.store, FaultyStore)
    assert not reader.store.calls


def test_what_a_listing_finds_is_bounded_too(reader: ChannelReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        reader.store.create(f"{FOLDER}/{number}.json", b"{}")
    unnamed = Anchor(directory=FOLDER, files=[], companions=None)
    assert len(companions.names(reader, unnamed)) == 3
    monkeypatch.setattr(companions, "MOST_FILES", 2)
    with pytest.raises(CorruptDataError, match="3 files with 6 bytes"):
        companions.names(reader, unnamed)


def test_ordinary_ones_are_taken(reader: ChannelReader, tmp_path: Path) -> None:
    assert companions.names(reader, _anchor(1_000, 30_000_000)) == ["0.json", "1.json"]
    assert housekeeping.export(reader, None, tmp_path / "out") == 1
