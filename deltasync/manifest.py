"""The JSON documents of a channel. Encoded, parsed and checked here and nowhere else.

Readers ignore fields they do not know and refuse features named in `requires` that they do not know.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
import re
from typing import Annotated, Any, TypeVar

import msgspec

from deltasync import layout
from deltasync.errors import UNREADABLE_JSON, ConfigError, CorruptDataError, UnsupportedFormatError
from deltasync.types import ITEM_BYTES, TensorSpec

FORMAT = "deltasync/1"
REFERENCE = "reference"
FEATURES = frozenset({REFERENCE})
"""What a document may require of its readers."""
CHAIN_LINKS = 128
"""Most links that a manifest names."""
DOCUMENT_BYTES = 1 << 26
"""Most bytes of a document."""

_LARGEST = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Version = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
"""Numbers that fit 64 bits."""
_Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Fingerprint = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]

_REPO = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[0-9A-Za-z]{1,64}")


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256 of file bytes, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileRef:
    """One immutable object: where it is and what it must contain."""

    key: str
    bytes: Count
    sha256: _Sha256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """How to get from `base_version`, whose manifest has `base_manifest_sha256`, to the manifest's version."""

    base_version: Version
    base_manifest_sha256: _Sha256
    codec: str
    changed: Count
    files: list[FileRef]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A checkpoint outside the channel: a model on the Hugging Face Hub at a commit, or a directory.

    Attributes:
        repo, revision: `namespace/name` and commit, or None.
        path: Absolute, or None.
        fingerprints: Of every tensor of the channel, as it is served.
        tied: Tensors of the channel that the checkpoint holds under the name of another one only.
    """

    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    fingerprints: dict[str, _Fingerprint] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.path is None else self.path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """The full weights: safetensors files of an ordinary checkpoint directory, or a reference to a checkpoint elsewhere.

    Attributes:
        directory: Where all of its files are.
        files: The weights.
        reference: The checkpoint elsewhere.
        companions: What lies beside the weights: config, tokenizer, index. None of writers that did not name them.
    """

    directory: str
    files: list[FileRef]
    reference: Reference | None = None
    companions: list[FileRef] | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of the weight files, 0 for a reference."""
        return sum(file.bytes for file in self.files)


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A version that a later one rests on, in short; written as an array.

    Attributes:
        manifest_sha256: Of its manifest.
        fingerprint: Of the model at this version.
        delta_bytes: Bytes of its delta, 0 if it has none.
    """

    version: Version
    manifest_sha256: _Sha256
    fingerprint: _Fingerprint
    delta_bytes: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One version. It has a delta, an anchor, or both (an anchor after the first also carries the delta to it).

    Attributes:
        version: Contiguous from 1.
        kind: `anchor` if it has full weights, else `delta`.
        step: The trainer's global step, as metadata; None if it gave none.
        created_at: UTC, ISO 8601.
        total: Elements of all tensors.
        fingerprint: Of the model at this version.
        anchor_version: Newest version up to this one that has an anchor.
        coalesced: Number of publishes that this version covers.
        chain: The versions before, each the base of the next and the last one the base of this: from the last one before it
            that has an anchor, but at most the last `CHAIN_LINKS`. So that a reader can plan without reading each manifest.
        requires: Features a reader must know.
    """

    format: str
    run_id: str
    version: Version
    kind: str
    step: Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None
    created_at: str
    total: Count
    fingerprint: _Fingerprint
    anchor_version: Version
    delta: Delta | None = None
    anchor: Anchor | None = None
    coalesced: Version = 1
    chain: list[Link] = dataclasses.field(default_factory=list)
    requires: list[str] = dataclasses.field(default_factory=list)

    @property
    def files(self) -> list[FileRef]:
        """All objects that it refers to and names the digest of."""
        found = [file for part in (self.delta, self.anchor) if part is not None for file in part.files]
        return found if self.anchor is None else [*found, *(self.anchor.companions or [])]

    @property
    def reference(self) -> Reference | None:
        """The checkpoint elsewhere that its anchor is, if it is one."""
        return None if self.anchor is None else self.anchor.reference

    def chain_onward(self, manifest_sha256: str) -> list[Link]:
        """The `chain` of a version whose delta builds on this one, whose manifest has this digest."""
        delta_bytes = 0 if self.delta is None else self.delta.payload_bytes
        link = Link(self.version, manifest_sha256, self.fingerprint, delta_bytes)
        return [link] if self.anchor is not None else [*self.chain, link][-CHAIN_LINKS:]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """A delta over several versions, for catching up. It exists when its document does.

    Attributes:
        base_version, base_manifest_sha256: The version it builds on, and its manifest.
        version, manifest_sha256: The version it leads to, and its manifest.
        changed: Elements that differ between the two.
    """

    format: str
    run_id: str
    base_version: Version
    base_manifest_sha256: _Sha256
    version: Version
    manifest_sha256: _Sha256
    codec: str
    changed: Count
    files: list[FileRef]
    created_at: str
    requires: list[str] = dataclasses.field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """Versions whose manifests were deleted; what they referred to is deleted some time after this document appeared."""

    format: str
    run_id: str
    versions: list[Version]
    created_at: str
    requires: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The newest complete version."""

    format: str
    run_id: str
    version: Version
    manifest_sha256: _Sha256
    requires: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """Written once: what the channel carries.

    Attributes:
        dtype: Served dtype policy of the publisher.
        tensors: Name -> [dtype, shape], in the publisher's order.
        tensors_sha256: Digest of that table (`table_sha256`).
    """

    format: str
    run_id: str
    created_at: str
    dtype: str
    tensors: dict[str, tuple[str, _Shape]]
    tensors_sha256: _Sha256
    requires: list[str] = dataclasses.field(default_factory=list)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by name."""
        return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in self.tensors.items()}


Document = Channel | Head | Manifest | Fold | Forgotten
_Document = TypeVar("_Document", bound=Document)


def table_sha256(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    """Digest of a tensor table: sha256 of its canonical JSON with sorted names."""
    return sha256_hex(msgspec.json.encode(tensors, order="deterministic"))


def encode(document: Document) -> bytes:
    """Canonical UTF-8 JSON, one line."""
    return msgspec.json.encode(document) + b"\n"


def decode(data: bytes, kind: type[_Document], key: str) -> _Document:
    """Parse and check one document.

    Args:
        data: The object's bytes.
        kind: Of document.
        key: Its key, for messages.

    Raises:
        CorruptDataError: not valid JSON of this kind, or it contradicts itself.
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
    problem = _problem(document)
    if problem is not None:
        raise CorruptDataError(f"{key} contradicts itself: {problem}.")
    return document


def _problem(document: Document) -> str | None:
    if isinstance(document, Channel):
        unknown = {dtype for dtype, _ in document.tensors.values()} - ITEM_BYTES.keys()
        if unknown:
            return f"unknown dtype {', '.join(sorted(unknown))}"
        if sum(_reach(dtype, shape) for dtype, shape in document.tensors.values()) > _LARGEST:
            return "the tensor table is of more bytes than there can be"
        if document.tensors_sha256 != table_sha256(document.tensors):
            return "the tensor table does not match its digest"
    if isinstance(document, Manifest):
        if document.delta is None and document.anchor is None:
            return "neither delta nor anchor"
        if document.kind != ("delta" if document.anchor is None else "anchor"):
            return f"kind is {document.kind!r}"
        if document.delta is not None and document.delta.base_version >= document.version:
            return f"base version {document.delta.base_version} is not before version {document.version}"
        if not _is_time(document.created_at):
            return f"it was created at {document.created_at!r:.50}, which is no time with an offset"
        if document.anchor_version > document.version:
            return f"anchor version {document.anchor_version} is after version {document.version}"
        if (problem := _chain_problem(document) or _anchor_problem(document)) is not None:
            return problem
    if isinstance(document, Fold) and document.base_version >= document.version:
        return f"base version {document.base_version} is not before version {document.version}"
    try:
        for file in _files(document):
            layout.check_key(file.key)
    except ConfigError as error:
        return str(error)
    return None


def _is_time(text: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _chain_problem(document: Manifest) -> str | None:
    if not document.chain:
        return None
    base, last = document.delta, document.chain[-1]
    if base is None or (base.base_version, base.base_manifest_sha256) != (last.version, last.manifest_sha256):
        return "its chain does not end at its base"
    versions = [link.version for link in document.chain]
    return None if versions == sorted(set(versions)) else "its chain does not ascend"


def _reach(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; of an empty one, of its strides."""
    return ITEM_BYTES[dtype] * math.prod(max(size, 1) for size in shape)


def _anchor_problem(document: Manifest) -> str | None:
    reference = document.reference
    if document.anchor is None:
        return None
    files, folder = [*document.anchor.files, *(document.anchor.companions or [])], document.anchor.directory
    if reference is None:
        outside = [file.key for file in files if not file.key.startswith(f"{folder}/")]
        return f"the anchor's folder {folder!r} does not hold {outside[0]!r}" if outside else None
    if files or folder or REFERENCE not in document.requires:
        return "its anchor is a reference and something else"
    by_repo = reference.repo is not None and reference.revision is not None
    if by_repo == (reference.path is not None):
        return "its reference names no checkpoint, or two"
    if reference.path is not None:
        return None if reference.path.startswith("/") else f"its reference's path {reference.path!r} is not absolute"
    # They become parts of paths and URLs.
    named = _REPO.fullmatch(reference.repo or "") and _REVISION.fullmatch(reference.revision or "")
    return None if named else f"{reference} is not a model on the Hub"


def _files(document: Document) -> list[FileRef]:
    return document.files if isinstance(document, Fold | Manifest) else []
