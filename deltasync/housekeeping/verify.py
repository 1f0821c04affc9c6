"""Check a channel: what its documents promise against what is there. Reports, never repairs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from deltasync import chain, companions, layout, retention
from deltasync.errors import ApplyError, ChainError, CorruptDataError, DeltaSyncError, FormatError, MissingVersionError
from deltasync.housekeeping.survey import Progress, fold_keys, in_parallel, quiet, read_fold
from deltasync.live import LiveMemory
from deltasync.manifest import FileRef, Fold, Head, Manifest
from deltasync.reader import ChannelReader
from deltasync.replica import CommittedVersion, Follower


@dataclasses.dataclass(kw_only=True)
class Report:
    """What `check` found.

    Attributes:
        problems: One for each thing that is wrong.
        head: Head's version, None if head cannot be read.
        versions, anchors, folds: How many there are, damaged ones included.
        data_bytes: Bytes of all data objects.
        publishing: Versions after head: being published, or left by a publisher that died before moving head.
        garbage_objects, garbage_bytes: Data objects that nothing refers to, which `prune` deletes when they are old. 0
            while a document is damaged, because nobody knows what it refers to.
        proven: Versions whose bits were replayed and compared with their fingerprints; None if data was not read.
        unproven: The others, if data was read: a problem lies there or at a version that they build on.
    """

    problems: list[DeltaSyncError] = dataclasses.field(default_factory=list)
    head: int | None = None
    versions: int = 0
    anchors: int = 0
    folds: int = 0
    data_bytes: int = 0
    publishing: int = 0
    garbage_objects: int = 0
    garbage_bytes: int = 0
    proven: list[int] | None = None
    unproven: list[int] = dataclasses.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The highest of its problems' exit codes, 0 if there is none."""
        return max((problem.exit_code for problem in self.problems), default=0)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Take what is wrong with the channel as a problem and go on. Errors of the store itself are raised."""
        try:
            yield
        except (FormatError, ChainError, ApplyError) as error:
            self.note(error)

    def note(self, problem: DeltaSyncError) -> None:
        """Take a problem, once."""
        if str(problem) not in map(str, self.problems):
            self.problems.append(problem)


def check(reader: ChannelReader, *, read_data: bool = False, progress: Progress = quiet) -> Report:
    """Compare a channel with what its documents promise.

    Always: documents parse and are of one run, digests of manifests agree with those that refer to them, every version can
    be reached from an anchor, every object that a document refers to is there and has the right size. Data is only listed.

    With `read_data` every payload is also read and checked against its sha256, and every version, anchor and fold is applied
    to weights in host memory and compared with the published fingerprints.

    Args:
        reader: The channel; a fresh one, since a reader remembers manifests.
        read_data: Read everything.
        progress: Told how far it is.

    Raises:
        NotPublishedError, FormatError: channel.json is missing or damaged; nothing else can be told then.
        StoreError: the store failed.
    """
    report = Report()
    reader.channel()
    head = None
    # Documents first, then objects: what a document refers to was stored before it.
    with report.noting():
        head = reader.head()
        report.head = head.version
    manifests = _manifests(reader, report, progress)
    folds = _folds(reader, report, progress)
    sizes = {info.key: info.bytes for info in reader.store.list("")}
    _check_links(reader, report, head, manifests, folds)
    damaged = _check_objects(report, manifests, folds, sizes)
    report.data_bytes = sum(size for key, size in sizes.items() if key.startswith(layout.DATA))
    if head is not None:
        report.publishing = sum(version > head.version for version in manifests)
        if (len(manifests), len(folds)) == (report.versions, report.folds):
            references = retention.References(manifests.values(), folds.values())
            garbage = retention.prunable(dict.fromkeys(sizes, 0.0), references, head.version, {}, now_s=0.0, grace_s=0.0)
            report.garbage_objects, report.garbage_bytes = len(garbage), sum(sizes[key] for key in garbage)
    if read_data:
        _Replay(reader, report, head, damaged).run(manifests, folds, progress)
    return report


def _manifests(reader: ChannelReader, report: Report, progress: Progress) -> dict[int, Manifest]:
    def read(version: int) -> Manifest | None:
        document = None
        with report.noting():
            document = reader.manifest(version)
        return document

    versions = reader.versions()
    found = [document for document in in_parallel(read, versions, "manifests", progress) if document is not None]
    report.versions, report.anchors = len(versions), sum(document.anchor is not None for document in found)
    return {document.version: document for document in found}


def _folds(reader: ChannelReader, report: Report, progress: Progress) -> dict[str, Fold]:
    keys = fold_keys(reader)
    report.folds = len(keys)
    found = {}
    for done, key in enumerate(keys, start=1):
        with report.noting():
            found[key] = read_fold(reader, key)
        progress("folds", done, len(keys))
    return found


def _check_links(
    reader: ChannelReader, report: Report, head: Head | None, manifests: Mapping[int, Manifest], folds: Mapping[str, Fold]
) -> None:
    """Digests of manifests, and that every version can be reached."""
    links: dict[tuple[int, str], None] = {}  # each once, in order
    if head is not None:
        if head.version not in manifests:
            report.note(MissingVersionError(f"Head names version {head.version}, which has no manifest."))
        links[head.version, head.manifest_sha256] = None
    for version, document in manifests.items():
        if document.delta is None:
            continue
        base, sha256 = manifests.get(document.delta.base_version), document.delta.base_manifest_sha256
        links[document.delta.base_version, sha256] = None
        if base is None and document.anchor is None:  # with an anchor it does without, and the base may have been forgotten
            report.note(
                MissingVersionError(
                    f"Version {version} has no anchor and builds on version {document.delta.base_version}, "
                    "whose manifest is missing or damaged."
                )
            )
        known = base.chain_onward(sha256) if base is not None else []
        both = min(len(known), len(document.chain))  # a writer may name fewer
        if document.chain[len(document.chain) - both :] != known[len(known) - both :]:
            report.note(
                CorruptDataError(f"{layout.manifest(version)} names another chain than the manifest that it builds on.")
            )
    for fold in folds.values():
        links[fold.base_version, fold.base_manifest_sha256] = None
        links[fold.version, fold.manifest_sha256] = None
    for version, sha256 in links:
        if version in manifests:
            with report.noting():
                reader.manifest(version, sha256)


def _check_objects(
    report: Report, manifests: Mapping[int, Manifest], folds: Mapping[str, Fold], sizes: Mapping[str, int]
) -> set[str]:
    """That what the documents refer to is there, by the listing. Returns the keys of what is missing or has another size."""
    damaged = set()
    named = [(layout.manifest(version), file) for version, document in manifests.items() for file in document.files]
    named += [(key, file) for key, fold in folds.items() for file in fold.files]
    for key, file in named:
        if file.key not in sizes:
            report.note(MissingVersionError(f"{file.key}, which {key} refers to, is not in the store."))
        elif sizes[file.key] != file.bytes:
            report.note(CorruptDataError(f"{file.key} has {sizes[file.key]} bytes, {key} says {file.bytes}."))
        else:
            continue
        damaged.add(file.key)
    return damaged


class _Replay:
    """Weights in host memory that every delta, anchor and fold of a channel is applied to, version by version.

    Args:
        reader: The channel.
        report: Where problems go.
        head: The channel's, None if it cannot be read.
        damaged: Keys of files that are known to be bad and are not tried.
    """

    def __init__(self, reader: ChannelReader, report: Report, head: Head | None, damaged: Collection[str]) -> None:
        memory, _ = LiveMemory.on_host(reader.specs)
        memory.audit()
        self._reader = reader
        self._report = report
        self._head = head
        self._damaged = damaged
        self._follower = Follower(reader, memory)

    def run(self, manifests: Mapping[int, Manifest], folds: Mapping[str, Fold], progress: Progress) -> None:
        """Go through all versions in ascending order."""
        proven: list[int] = []
        folds_from: dict[int, list[tuple[str, Fold]]] = {}
        for key, fold in folds.items():
            folds_from.setdefault(fold.base_version, []).append((key, fold))
        for done, (version, document) in enumerate(manifests.items(), start=1):
            self._prove(document, proven)
            if self._follower.version == version:
                proven.append(version)
            for key, fold in folds_from.pop(version, []):
                self._prove_fold(key, fold)
            progress("replaying", done, len(manifests))
        for orphans in folds_from.values():  # of a base version that is not there: nothing to apply them to
            for _, fold in orphans:
                self._read(fold.files)
        self._report.proven, self._report.unproven = proven, sorted(manifests.keys() - set(proven))

    def _prove(self, document: Manifest, proven: Collection[int]) -> None:
        """By its delta if the bits that it builds on can be had, and by its anchor; then one proves the other."""
        version, delta, part = document.version, document.delta, document.anchor
        if delta is not None:
            base = delta.base_version
            if self._follower.version != base and base in proven and self._head is not None:
                with self._report.noting():
                    self._follower.advance(self._head, base)
            if self._follower.version == base:
                self._apply(chain.Step(version, None, base, delta.payload_bytes), delta.files)
            else:
                self._read(delta.files)
        if part is not None:
            self._apply(chain.Step(version, None, None, part.payload_bytes), part.files)
            with self._report.noting():
                self._read(companions.named(part))

    def _prove_fold(self, key: str, fold: Fold) -> None:
        """Apply it, compare, and go back to where it starts."""
        base, before = fold.base_version, dict(self._follower.memory.fingerprints)
        if self._follower.version != base:
            self._read(fold.files)
            return
        committed = self._apply(chain.Step(fold.version, fold.manifest_sha256, base, fold.payload_bytes, key), fold.files)
        if committed is not None:
            self._follower.rollback(committed)
            self._follower.version = base
        assert self._follower.memory.fingerprints == before

    def _apply(self, step: chain.Step, files: Sequence[FileRef]) -> CommittedVersion | None:
        """None if it could not be applied or did not give the bits; then the bits are those from before."""
        if any(file.key in self._damaged for file in files):
            self._read(files)
            return None
        applied = None
        with self._report.noting():
            committed = self._follower.commit(self._follower.stage(step))
            self._follower.confirm(committed)
            applied = committed
        return applied

    def _read(self, files: Sequence[FileRef]) -> None:
        """Only compare the sha256."""
        for file in files:
            if file.key not in self._damaged:
                with self._report.noting():
                    self._reader.fetch(file)
