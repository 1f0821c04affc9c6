"""The JSON documents of a channel, as `docs/format.md` defines them. Encoded, parsed and checked here and nowhere else."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
import re
from typing import Annotated, Any, TypeVar

import msgspec

from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.codec.base import FORMAT
from deltasync.errors import UNREADABLE_JSON, ConfigError, CorruptDataError, UnsupportedFormatError
from deltasync.stores.base import check_key
from deltasync.tensors import ITEM_BYTES, TensorSpec

REFERENCE = "reference"
COMPRESSED = "zstd"
"""The one way to compress weight files, and the feature that a record with such an anchor requires."""

FEATURES = frozenset({REFERENCE, COMPRESSED})
"""What a document may require of its readers."""

CHANNEL_BYTES = 32 << 20
SMALL_BYTES = 4 << 10
"""Most bytes of channel.json, and of head.json, of an epoch's document and of a heartbeat."""

_LARGEST = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Number = Annotated[int, msgspec.Meta(ge=1, le=keys.LARGEST_VERSION)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Epoch = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{6}-[0-9a-f]{8}\Z")]
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
_Requires = Annotated[list[str], msgspec.Meta(max_length=16)]
_Lag = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
_RunId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
_Time = Annotated[str, msgspec.Meta(max_length=40)]

TokenLag = tuple[_Lag, _Lag, _Lag]

_REPO = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[0-9A-Za-z]{1,64}")
_FILES, _COMPANIONS, _COMPANION_BYTES = 65_536, 1_024, 256 << 20


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256 of file bytes, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def now() -> str:
    """The time as documents tell it: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One immutable object: where it is and what it must contain."""

    key: str
    bytes: Count
    sha256: Sha256


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """The identity of a version: its number, the epoch that wrote it, and the digest of its record."""

    version: Number
    epoch: Epoch
    sha256: Sha256

    @property
    def slot(self) -> Slot:
        """Where its record lies."""
        return Slot(self.version, self.epoch)

    @property
    def key(self) -> str:
        """Key of its record."""
        return self.slot.key

    def __str__(self) -> str:
        return f"{self.version} ({self.sha256[:12]})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """How to get from the base to the version: the payload in the record, if it has one, and the parts."""

    codec: str
    changed: Count
    parts: Annotated[list[File], msgspec.Meta(max_length=_FILES)] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A checkpoint outside the channel: a model on the Hugging Face Hub at a commit, or an absolute directory.

    Attributes:
        fingerprints: Fingerprint of every tensor of the channel, as it is served.
        tied: Tensors of the channel that the checkpoint holds under the name of another one only.
    """

    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    fingerprints: dict[str, Fingerprint] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.path is None else self.path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """The full weights: files of an ordinary checkpoint directory, or a reference to a checkpoint elsewhere.

    Attributes:
        directory: Where all of its files are; empty for a reference.
        companions: What lies beside the weights: config, tokenizer, index.
    """

    directory: str = ""
    files: Annotated[list[File], msgspec.Meta(max_length=_FILES)] = dataclasses.field(default_factory=list)
    companions: Annotated[list[File], msgspec.Meta(max_length=_COMPANIONS)] = dataclasses.field(default_factory=list)
    reference: Reference | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The document of a record; `docs/format.md` has each field.

    Attributes:
        kind: `delta` or `anchor`, a version; `seal`, the end of a log; `fold`, another way to a version.
        version, epoch: The slot; in a fold, the version that it leads to.
        base: What it follows; in a fold, where it starts. None in version 1 and in folds from nothing.
        fingerprint: The model's, at `version`; None in a seal.
        sha256: In a fold, the digest of the record of `version`.
        token_lag: Mean, 95th percentile and maximum age, in versions, of the tokens trained for its last publish.
    """

    format: str = FORMAT
    run_id: _RunId
    kind: str
    version: Number
    epoch: Epoch
    created_at: _Time
    base: Version | None = None
    fingerprint: Fingerprint | None = None
    delta: Delta | None = None
    anchor: Anchor | None = None
    next_epoch: Epoch | None = None
    sha256: Sha256 | None = None
    step: Annotated[int, msgspec.Meta(ge=-_LARGEST - 1, le=_LARGEST)] | None = None
    coalesced: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)] = 1
    token_lag: TokenLag | msgspec.UnsetType = msgspec.UNSET
    requires: _Requires = dataclasses.field(default_factory=list)
    body_bytes: Count = 0
    body_sha256: Sha256 = "0" * 64

    @property
    def is_version(self) -> bool:
        """Whether it makes a version exist."""
        return self.kind in ("delta", "anchor")

    @property
    def files(self) -> list[File]:
        """All objects that it names."""
        found = [] if self.delta is None else list(self.delta.parts)
        return found if self.anchor is None else [*found, *self.anchor.files, *self.anchor.companions]

    @property
    def slot(self) -> Slot:
        """The slot; in a fold, that of the version that it leads to."""
        return Slot(self.version, self.epoch)

    @property
    def payload_files(self) -> list[File]:
        """The parts, or the weights, beside what is in the object itself."""
        return self.anchor.files if self.anchor is not None else [] if self.delta is None else self.delta.parts

    @property
    def payload_bytes(self) -> int:
        """Bytes to download for its bits: of the body and the parts, or of the weights."""
        return self.body_bytes + sum(file.bytes for file in self.payload_files)

    @property
    def reference(self) -> Reference | None:
        """The checkpoint elsewhere that its anchor is, if it is one."""
        return None if self.anchor is None else self.anchor.reference

    @property
    def created_s(self) -> float:
        """When it was encoded, seconds since the epoch."""
        return datetime.datetime.fromisoformat(self.created_at).timestamp()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A hint where the newest version is, and the newest announced anchor. Nothing that it says is believed."""

    format: str = FORMAT
    run_id: _RunId
    version: Number
    epoch: Epoch
    sha256: Sha256
    anchor: str | None = None
    requires: _Requires = dataclasses.field(default_factory=list)

    @property
    def newest(self) -> Version:
        """The version it names."""
        return Version(self.version, self.epoch, self.sha256)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """Who opened the channel, in `epochs/`; `continues` is None for nothing, or while it is not known."""

    format: str = FORMAT
    run_id: _RunId
    epoch: Epoch
    continues: Version | None
    writer: Annotated[str, msgspec.Meta(max_length=200)]
    created_at: _Time
    requires: _Requires = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """Written once: what the channel carries.

    Attributes:
        fencing: How writers succeed each other: `seal` or `lease`.
        epoch: The first one, whose log begins with number 1.
        tensors: Name -> [dtype, shape], in the publisher's order.
    """

    format: str = FORMAT
    run_id: _RunId
    created_at: _Time
    fencing: str
    epoch: Epoch
    dtype: str
    tensors: dict[str, tuple[str, _Shape]]
    tensors_sha256: Sha256
    requires: _Requires = dataclasses.field(default_factory=list)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by name."""
        return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in self.tensors.items()}


Document = Channel | Record | Head | Opening
_Document = TypeVar("_Document", bound=Document)


def table_sha256(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    """Digest of a tensor table: sha256 of its canonical JSON with sorted names."""
    return sha256_hex(msgspec.json.encode(tensors, order="deterministic"))


def encode(document: Document) -> bytes:
    """Canonical UTF-8 JSON, one line."""
    return msgspec.json.encode(document) + b"\n"


def decode(data: bytes | memoryview, kind: type[_Document], key: str) -> _Document:
    """Parse and check the document of the object at `key`.

    Raises:
        CorruptDataError: not valid JSON of this kind, or it contradicts itself or its key.
        UnsupportedFormatError: another format, or a required feature this reader lacks.
    """
    try:
        header: dict[str, Any] = msgspec.json.decode(data, type=dict)
    except UNREADABLE_JSON as error:
        raise CorruptDataError(f"{key} is not a JSON object: {error}.") from error
    if header.get("format") != FORMAT:
        raise UnsupportedFormatError(f"{key} has format {header.get('format')!r:.50}; this version reads {FORMAT!r}.")
    requires = header.get("requires")
    missing = sorted({name for name in requires if isinstance(name, str)} - FEATURES) if isinstance(requires, list) else []
    if missing:
        raise UnsupportedFormatError(
            f"{key} requires {', '.join(missing[:5]):.200}, unknown to this version. Upgrade deltasync."
        )
    try:
        document = msgspec.convert(header, type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptDataError(f"{key} is not valid: {error}.") from error
    problem = None
    if isinstance(document, Channel):
        problem = _channel_problem(document)
    elif isinstance(document, Record):
        problem = _record_problem(document, key)
    elif isinstance(document, Opening) and key != keys.epoch_document(document.epoch):
        problem = f"it is of epoch {document.epoch}"
    if problem is not None:
        raise CorruptDataError(f"{key} contradicts itself: {problem}.")
    return document


def _channel_problem(document: Channel) -> str | None:
    unknown = {dtype for dtype, _ in document.tensors.values()} - ITEM_BYTES.keys()
    if unknown:
        return f"unknown dtype {', '.join(sorted(unknown))}"
    if document.fencing not in ("seal", "lease"):
        return f"fencing is {document.fencing!r:.50}"
    # Bytes of a tensor; of an empty one, of its strides.
    reach = (ITEM_BYTES[dtype] * math.prod(max(size, 1) for size in shape) for dtype, shape in document.tensors.values())
    if sum(reach) > _LARGEST:
        return "the tensor table is of more bytes than there can be"
    if document.tensors_sha256 != table_sha256(document.tensors):
        return "the tensor table does not match its digest"
    return None


def _record_problem(document: Record, key: str) -> str | None:
    base = document.base
    if document.kind == "fold":
        span = keys.fold_of(key)
        if span is None or (span.base, span.version) != (0 if base is None else base.version, document.version):
            return f"it is a fold to version {document.version}"
        if base is not None and base.version >= document.version:
            return f"base version {base.version} is not before version {document.version}"
    elif keys.slot_of(key) != Slot(document.version, document.epoch):
        return f"it is of version {document.version} in epoch {document.epoch}"
    elif (0 if base is None else base.version) != document.version - 1:
        return "it does not follow the version before"
    if not _is_time(document.created_at):
        return f"it was created at {document.created_at!r}, which is no time with an offset"
    if (problem := _kind_problem(document)) is not None:
        return problem
    try:
        for file in document.files:
            check_key(file.key)
    except ConfigError as error:
        return str(error)
    return None if document.anchor is None else _anchor_problem(document.anchor, document.requires)


def _kind_problem(document: Record) -> str | None:
    """Whether a record has what one of its kind has."""
    has = {
        name
        for name in ("base", "fingerprint", "delta", "anchor", "next_epoch", "sha256")
        if getattr(document, name) is not None
    }
    base = {"base"} & has
    wanted = {
        "delta": {"base", "fingerprint", "delta"},
        "anchor": {"fingerprint", "anchor"} | base,
        "seal": {"next_epoch"} | base,
        "fold": {"fingerprint", "sha256", "delta" if base else "anchor"} | base,
    }
    if document.kind not in wanted:
        return f"kind is {document.kind!r:.50}"
    if has != wanted[document.kind]:
        return f"a record of kind {document.kind} has not {', '.join(sorted(has ^ wanted[document.kind]))}, or must have it"
    return None


def _is_time(text: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _anchor_problem(anchor: Anchor, requires: list[str]) -> str | None:
    reference, folder = anchor.reference, anchor.directory
    files = [*anchor.files, *anchor.companions]
    if sum(file.bytes for file in anchor.companions) > _COMPANION_BYTES:
        return "the files beside its weights are too large"
    if reference is None:
        if not folder.startswith(keys.ANCHORS):
            return f"the anchor's folder is {folder!r:.100}"
        outside = [file.key for file in files if not file.key.startswith(f"{folder}/")]
        return f"the anchor's folder {folder!r} does not hold {outside[0]!r}" if outside else None
    if files or folder or REFERENCE not in requires:
        return "its anchor is a reference and something else"
    by_repo = reference.repo is not None and reference.revision is not None
    if by_repo == (reference.path is not None):
        return "its reference names no checkpoint, or two"
    if reference.path is not None:
        return None if reference.path.startswith("/") else f"its reference's path {reference.path!r} is not absolute"
    # They become parts of paths and URLs.
    named = _REPO.fullmatch(reference.repo or "") and _REVISION.fullmatch(reference.revision or "")
    return None if named else f"{reference} is not a model on the Hub"
