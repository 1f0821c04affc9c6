"""The JSON documents of a channel, as `docs/format.md` defines them. They are encoded, parsed and checked
here only.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, get_args

import msgspec

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.codec.base import FORMAT
from deltasync.errors import UNREADABLE_JSON, ConfigError, CorruptDataError, FormatError, describe
from deltasync.stores.base import check_key
from deltasync.tensors import ITEM_BYTES, Layout, TensorSpec, weight_elements

REFERENCE = "reference"

SHORTCUTS = ("compaction", "announcement")
"""Kinds of shortcuts: objects outside the log, each of which makes the chain to a version shorter."""

FEATURES = frozenset({REFERENCE})  # features that this reader knows

_LARGEST = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Number = Annotated[int, msgspec.Meta(ge=1, le=keys.LARGEST_VERSION)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Epoch = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{6}-[0-9a-f]{8}\Z")]
Boot = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
_Requires = Annotated[list[str], msgspec.Meta(max_length=16)]
_Lag = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
_RunId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
_Owner = Annotated[str, msgspec.Meta(max_length=200)]
_Time = Annotated[str, msgspec.Meta(max_length=40)]

TokenLag = tuple[_Lag, _Lag, _Lag]

_REPO = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[0-9A-Za-z]{1,64}")


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256 as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def now() -> str:
    """The current time in the form of documents: ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """An immutable object, named by a document: its key, size and digest."""

    key: str
    bytes: Count
    sha256: Sha256


@dataclasses.dataclass(frozen=True, slots=True)
class VersionId:
    """The identity of a version: its number, the epoch that wrote it, the digest of its record."""

    version: Number
    epoch: Epoch
    sha256: Sha256

    @property
    def slot(self) -> Slot:
        """Slot of its record."""
        return Slot(self.version, self.epoch)

    @property
    def key(self) -> str:
        """Key of its record."""
        return self.slot.key

    def __str__(self) -> str:
        return f"{self.version} ({self.sha256[:12]})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFiles:
    """The change from the base to the version: the payload in the record, if there is one, and the parts."""

    codec: str
    changed: Count
    parts: Annotated[list[File], msgspec.Meta(max_length=limits.RECORD_FILES)] = dataclasses.field(
        default_factory=list
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A checkpoint outside the channel: a model on the Hugging Face Hub at a commit, or an absolute
    directory.
    """

    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    # of all tensors, as they are served
    fingerprints: dict[str, Fingerprint] = dataclasses.field(default_factory=dict)
    # tensors that it holds only under another's name
    tied: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.path is None else self.path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """Full weights: files of a checkpoint directory, or a reference; `model_files` are config, tokenizer and
    the index.
    """

    directory: str = ""
    files: Annotated[list[File], msgspec.Meta(max_length=limits.RECORD_FILES)] = dataclasses.field(
        default_factory=list
    )
    model_files: Annotated[list[File], msgspec.Meta(max_length=limits.COMPANION_FILES)] = dataclasses.field(
        default_factory=list
    )
    reference: Reference | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The document of a record; `docs/format.md` describes each field.

    Attributes:
        kind: `delta` or `anchor` for a version; `seal` for the end of a log; `compaction` and `announcement`
            for other routes to a version, by a delta or by an announced anchor.
        version, epoch: The slot; of a compaction or an announcement, that of the version it leads to.
        base: The version that it follows; of a compaction, where it starts. None in version 1 and in
            announcements.
        token_lag: Mean, 95th percentile and maximum age, in versions, of the tokens trained for its last
            publish.
    """

    format: str = FORMAT
    run_id: _RunId
    kind: str
    version: Number
    epoch: Epoch
    created_at: _Time
    base: VersionId | None = None
    fingerprint: Fingerprint | None = None  # fingerprint of the model at `version`; None in a seal
    delta: DeltaFiles | None = None
    anchor: Anchor | None = None
    next_epoch: Epoch | None = None
    sha256: Sha256 | None = None  # digest of the record of `version`; in compactions and announcements only
    step: Annotated[int, msgspec.Meta(ge=-_LARGEST - 1, le=_LARGEST)] | None = None
    coalesced: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)] = 1
    token_lag: TokenLag | msgspec.UnsetType = msgspec.UNSET
    requires: _Requires = dataclasses.field(default_factory=list)
    body_bytes: Count = 0
    body_sha256: Sha256 = "0" * 64

    @property
    def is_version(self) -> bool:
        """Whether it is a version, not a seal and not a shortcut."""
        return self.kind in ("delta", "anchor")

    @property
    def files(self) -> list[File]:
        """All files that it names."""
        return [*self.payload_files, *(() if self.anchor is None else self.anchor.model_files)]

    @property
    def slot(self) -> Slot:
        """The slot; of a compaction or an announcement, that of the version it leads to."""
        return Slot(self.version, self.epoch)

    @property
    def payload_files(self) -> list[File]:
        """The parts or the weight files."""
        return (
            self.anchor.files if self.anchor is not None else [] if self.delta is None else self.delta.parts
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes to download for its bits: the body, and the parts or weight files."""
        return self.body_bytes + sum(file.bytes for file in self.payload_files)

    @property
    def reference(self) -> Reference | None:
        """The reference that its anchor is, if it is one."""
        return None if self.anchor is None else self.anchor.reference

    @property
    def created_s(self) -> float:
        """When it was encoded, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.created_at).timestamp()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A hint where the newest version is. Readers believe nothing that it says."""

    format: str = FORMAT
    run_id: _RunId
    version: Number
    epoch: Epoch
    sha256: Sha256
    requires: _Requires = dataclasses.field(default_factory=list)

    @property
    def newest(self) -> VersionId:
        """The version it names."""
        return VersionId(self.version, self.epoch, self.sha256)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochDocument:
    """The document of an epoch: its writer, and the version that it continues from (None: none, or not known
    yet).
    """

    format: str = FORMAT
    run_id: _RunId
    epoch: Epoch
    continues: VersionId | None
    writer: Annotated[str, msgspec.Meta(max_length=200)]
    created_at: _Time
    requires: _Requires = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channel:
    """channel.json, written once. Its tensors are in the publisher's order, and bound the size of everything
    else.

    `fencing` says how writers succeed each other: `seal` or `lease`. `epoch` is the first one, whose log
    begins with number
    1. `owner` is the id by which the job that began the run knows it again; it proves nothing.
    """

    format: str = FORMAT
    run_id: _RunId
    created_at: _Time
    fencing: str
    epoch: Epoch
    dtype: str
    tensors: dict[str, tuple[str, _Shape]]
    tensors_sha256: Sha256
    owner: _Owner | msgspec.UnsetType = msgspec.UNSET
    requires: _Requires = dataclasses.field(default_factory=list)

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by name."""
        return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in self.tensors.items()}

    @functools.cached_property
    def layout(self) -> Layout:
        """The tensors as vectors."""
        return Layout(self.specs)

    @functools.cached_property
    def _name_bytes(self) -> int:
        return sum(len(name.encode()) for name in self.tensors)

    def most_bytes(self, key: str) -> int:
        """Most bytes that the record, compaction or announcement at this key may have."""
        most = (5 << 20) + (len(self.tensors) << 10) + 32 * self._name_bytes
        return most if keys.compaction_of(key) is None else most + self.most_payload_bytes

    @functools.cached_property
    def most_payload_bytes(self) -> int:
        """Most bytes that the parts or weight files of one record may have together."""
        elements = weight_elements(self.specs.values())
        return 32 * elements + (len(self.tensors) << 12) + 64 * self._name_bytes + (1 << 20)


Document = Channel | Record | Head | EpochDocument
describe(*get_args(Document))
_Document = TypeVar("_Document", bound=Document)


def table_sha256(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    """sha256 of the canonical JSON of a tensor table, names sorted."""
    return sha256_hex(msgspec.json.encode(tensors, order="deterministic"))


def encode(document: Document, size: int = 0) -> bytes:
    """A document as canonical UTF-8 JSON in one line, with blanks before its last brace up to `size` bytes."""
    text = msgspec.json.encode(document)[:-1]
    return text + b" " * (size - len(text) - 2) + b"}\n"


def decode(data: bytes | memoryview, kind: type[_Document], key: str) -> _Document:
    """Parse and check the document of the object at `key`.

    Raises FormatError if it has another format or needs a feature that this reader lacks,
    CorruptDataError if it is not valid, or contradicts itself or its key.
    """
    try:
        header: dict[str, Any] = msgspec.json.decode(data, type=dict)
    except UNREADABLE_JSON as error:
        raise CorruptDataError(f"{key} is not a JSON object: {error}.") from error
    if header.get("format") != FORMAT:
        raise FormatError(f"{key} has format {header.get('format')!r:.50}; this version reads {FORMAT!r}.")
    requires = header.get("requires")
    missing = (
        sorted({name for name in requires if isinstance(name, str)} - FEATURES)
        if isinstance(requires, list)
        else []
    )
    if missing:
        raise FormatError(
            f"{key} requires {', '.join(missing[:5]):.200}, unknown to this version. Upgrade deltasync."
        )
    try:
        document = msgspec.convert(header, type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptDataError(f"{key} is not valid: {error}.") from error
    problem = next(_problems(document, key), None)
    if problem is not None:
        raise CorruptDataError(f"{key} contradicts itself: {problem}.")
    return document


def _problems(document: Document, key: str) -> Iterator[str]:
    """How a document contradicts itself or its key. Each check relies on the ones before it."""
    if isinstance(document, Channel):
        yield from _channel_problems(document)
    elif isinstance(document, Record):
        yield from _record_problems(document, key)
    elif isinstance(document, EpochDocument) and key != keys.epoch_document(document.epoch):
        yield f"it is the document of epoch {document.epoch}"


def _channel_problems(document: Channel) -> Iterator[str]:
    if unknown := {dtype for dtype, _ in document.tensors.values()} - ITEM_BYTES.keys():
        yield f"unknown dtype {', '.join(sorted(unknown))}"
    if document.fencing not in ("seal", "lease"):
        yield f"fencing is {document.fencing!r:.50}"
    # Bytes of each tensor; for an empty one, the bytes that its strides span.
    reach = (
        ITEM_BYTES[dtype] * math.prod(max(size, 1) for size in shape)
        for dtype, shape in document.tensors.values()
    )
    if sum(reach) > _LARGEST:
        yield "its tensors have 2^63 bytes or more"
    if document.tensors_sha256 != table_sha256(document.tensors):
        yield "the tensor table does not match its digest"


def _record_problems(document: Record, key: str) -> Iterator[str]:
    base_number = 0 if document.base is None else document.base.version
    if document.kind in SHORTCUTS:
        span = keys.shortcut_of(key)
        if span is None or (span.base, span.version) != (base_number, document.version):
            yield f"its kind is {document.kind} and it leads to version {document.version}"
        if base_number >= document.version:
            yield f"base version {base_number} is not before version {document.version}"
    elif keys.slot_of(key) != document.slot:
        yield f"it is the record of version {document.version} in epoch {document.epoch}"
    elif base_number != document.version - 1:
        yield "its base is not the version before it"
    try:
        zone = datetime.datetime.fromisoformat(document.created_at).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        yield f"created_at is {document.created_at!r}, which is not a time with an offset"
    yield from _kind_problems(document)
    try:
        for file in document.files:
            check_key(file.key)
    except ConfigError as error:
        yield str(error)
    if document.anchor is not None:
        yield from _anchor_problems(document.anchor, document.requires)


def _kind_problems(document: Record) -> Iterator[str]:
    fields = ("base", "fingerprint", "delta", "anchor", "next_epoch", "sha256")
    has = {name for name in fields if getattr(document, name) is not None}
    base = {"base"} & has
    wanted = {
        "delta": {"base", "fingerprint", "delta"},
        "anchor": {"fingerprint", "anchor"} | base,
        "seal": {"next_epoch"} | base,
        "compaction": {"base", "fingerprint", "sha256", "delta"},
        "announcement": {"fingerprint", "sha256", "anchor"},
    }
    if document.kind not in wanted:
        yield f"kind is {document.kind!r:.50}"
    elif has != wanted[document.kind]:
        yield f"a {document.kind} must have {', '.join(sorted(wanted[document.kind]))}, and has {', '.join(sorted(has))}"


def _anchor_problems(anchor: Anchor, requires: list[str]) -> Iterator[str]:
    reference, folder = anchor.reference, anchor.directory
    files = [*anchor.files, *anchor.model_files]
    if sum(file.bytes for file in anchor.model_files) > limits.COMPANION_BYTES:
        yield "its model files have more than 256 MiB"
    if reference is None:
        if not folder.startswith(keys.ANCHORS):
            yield f"the anchor's folder is {folder!r:.100}"
        if outside := [file.key for file in files if not file.key.startswith(f"{folder}/")]:
            yield f"the anchor's folder {folder!r} does not hold {outside[0]!r}"
        return
    if files or folder or REFERENCE not in requires:
        yield "its anchor is a reference, and has files too or is not required as one"
    by_repo = reference.repo is not None and reference.revision is not None
    if by_repo == (reference.path is not None):
        yield "its reference must name a model on the Hub or a path, and not both"
    if reference.path is not None:
        if not reference.path.startswith("/"):
            yield f"its reference's path {reference.path!r} is not absolute"
    # Both become parts of paths and URLs.
    elif not (_REPO.fullmatch(reference.repo or "") and _REVISION.fullmatch(reference.revision or "")):
        yield f"{reference} is not a model on the Hub"
