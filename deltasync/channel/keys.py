"""Object keys of a channel. The only place that formats or parses a key."""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets

from deltasync.stores.base import check_key

CHANNEL = "channel.json"
HEAD = "head.json"
EPOCHS = "epochs/"
VERSIONS = "versions/"
PARTS = "parts/"
ANCHORS = "anchors/"
COMPACTIONS = "compactions/"
ANNOUNCEMENTS = "announcements/"
REPLICAS = "replicas/"
TOOL = "000000-"  # prefix of the author names of tools, which have no epoch

LARGEST_VERSION = 9_999_999_999
FOLDER = 1000  # numbers whose records share a folder

_EPOCH = r"[0-9]{6}-[0-9a-f]{8}"
_VERSION = r"[0-9]{10}"
_SLOT = re.compile(rf"versions/([0-9]{{7}})/({_VERSION})\.({_EPOCH})\.safetensors")
_FOLDER = re.compile(r"versions/[0-9]{7}/")
_COMPACTION = re.compile(rf"compactions/({_VERSION})-({_VERSION})\.({_EPOCH})\.safetensors")
_ANNOUNCEMENT = re.compile(rf"announcements/({_VERSION})\.({_EPOCH})\.safetensors")
_EPOCH_DOCUMENT = re.compile(rf"epochs/({_EPOCH})\.json")
_BOOT = re.compile(rf"{REPLICAS}[^/]+/([0-9a-f]{{8}})\.json")
_FILE = re.compile(rf"(?:parts|anchors)/({_VERSION})\.({_EPOCH})\.([0-9]{{1,9}})/.+")


@dataclasses.dataclass(frozen=True, order=True)
class Slot:
    """The place of a record: a number in the log of an epoch.

    Of a shortcut: the version that it leads to, its author, and where it starts. `base` is 0 for an
    announcement, whose anchor needs no other version, and None for a record.
    """

    version: int
    epoch: str
    base: int | None = None

    @functools.cached_property
    def key(self) -> str:
        """Key of the record."""
        return slot(self.version, self.epoch)

    @property
    def newness(self) -> tuple[str, int]:
        """Sort key: the epoch, then the number. The newer of two versions has the greater one."""
        return self.epoch, self.version


def new_epoch(number: int) -> str:
    """A name for an epoch: its number and random digits, so that two writers with the same number have
    different names.
    """
    return f"{number:06d}-{secrets.token_hex(4)}"


def new_author() -> str:
    """A name for a tool that writes compactions or anchors."""
    return TOOL + secrets.token_hex(4)


def epoch_number(epoch: str) -> int:
    """The number in the name of an epoch."""
    return int(epoch[:6])


def folder(version: int) -> str:
    """Folder of the records of a version; a thousand numbers share one."""
    return f"{VERSIONS}{version // FOLDER:07d}/"


def is_folder(name: str) -> bool:
    """Whether this is the name of a folder of records."""
    return _FOLDER.fullmatch(name) is not None


def slot(version: int, epoch: str) -> str:
    """Key of the record of a version."""
    return f"{folder(version)}{version:010d}.{epoch}.safetensors"


def slot_of(key: str) -> Slot | None:
    """The slot that a record's key names, None for any other key."""
    match = _SLOT.fullmatch(key)
    if match is None or int(match[1]) != int(match[2]) // FOLDER:
        return None
    return Slot(int(match[2]), match[3])


def compaction(base: int, version: int, author: str) -> str:
    """Key of a compaction from version `base`, at least 1."""
    return f"{COMPACTIONS}{base:010d}-{version:010d}.{author}.safetensors"


def compaction_of(key: str) -> Slot | None:
    """The slot that a compaction's key names, with its base; None for any other key."""
    match = _COMPACTION.fullmatch(key)
    return Slot(int(match[2]), match[3], int(match[1])) if match and int(match[1]) else None


def announcement(version: int, author: str) -> str:
    """Key of the announcement of an anchor."""
    return f"{ANNOUNCEMENTS}{version:010d}.{author}.safetensors"


def shortcut_of(key: str) -> Slot | None:
    """The slot that the key of a compaction or an announcement names, with its base; None for any other
    key.
    """
    match = _ANNOUNCEMENT.fullmatch(key)
    return Slot(int(match[1]), match[2], 0) if match else compaction_of(key)


def epoch_document(epoch: str) -> str:
    """Key of an epoch's document."""
    return f"{EPOCHS}{epoch}.json"


def epoch_of(key: str) -> str | None:
    """The epoch that the key of an epoch's document names, None for any other key."""
    match = _EPOCH_DOCUMENT.fullmatch(key)
    return match[1] if match else None


def parts_folder(version: int, author: str, attempt: int = 0) -> str:
    """Folder of the parts of a version."""
    return f"{PARTS}{version:010d}.{author}.{attempt}"


def part(rank: int, number: int) -> str:
    """File name of a part; each rank numbers its parts from 1."""
    return f"{rank:03d}-{number:05d}.safetensors"


def compaction_part(base: int, rank: int, number: int) -> str:
    """File name of a part of a compaction, among the parts of the version that it leads to; each rank numbers
    from 1.
    """
    return f"compaction-{base:010d}-{part(rank, number)}"


def anchor_folder(version: int, author: str, attempt: int = 0) -> str:
    """Folder of the files of an anchor."""
    return f"{ANCHORS}{version:010d}.{author}.{attempt}"


def anchor_shard(shard: int, shard_count: int) -> str:
    """File name of a weight file of an anchor, as transformers names it; shards are numbered from 1."""
    return "model.safetensors" if shard_count == 1 else f"model-{shard:05d}-of-{shard_count:05d}.safetensors"


def file_of(key: str) -> Slot | None:
    """Version and author of a file under parts/ or anchors/, as a slot; None for any other key."""
    match = _FILE.fullmatch(key)
    return Slot(int(match[1]), match[2]) if match else None


def boots_folder(replica_id: str) -> str:
    """Folder of the heartbeats of a replica's name: several replicas may have it, and each boot has its own key."""
    return f"{REPLICAS}{replica_id}/"


def replica(replica_id: str, boot: str | None = None) -> str:
    """Key of a replica's heartbeat."""
    return check_key(
        f"{REPLICAS}{replica_id}.json" if boot is None else f"{boots_folder(replica_id)}{boot}.json"
    )


def boot_of(key: str) -> str | None:
    """The boot that the key of a heartbeat in a `boots_folder` names, None for any other key."""
    match = _BOOT.fullmatch(key)
    return match[1] if match else None


def probe(epoch: str) -> str:
    """Key of the object with which a writer tests whether the store creates only absent objects."""
    return f"probe/{epoch}"
