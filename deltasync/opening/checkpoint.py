"""Checkpoints outside the channel, to which an anchor may refer: a model on the Hugging Face Hub, or a
directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open

from deltasync.channel import anchors
from deltasync.channel.anchors import INDEX
from deltasync.channel.documents import Reference
from deltasync.codec.base import LIBRARY_ERRORS, entries
from deltasync.errors import (
    UNREADABLE_JSON,
    ConfigError,
    CorruptDataError,
    ModelMismatchError,
    describe,
    first_five,
)
from deltasync.opening import ranges
from deltasync.tensors import SAFETENSORS_DTYPES, TensorSpec
from deltasync.tensors.bits import bits_of, cast

_WEIGHTS = "model.safetensors"
_SMALL = tuple(f"*{suffix}" for suffix in anchors.TEXTS)
_REPO = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(@(?P<revision>\S+))?")
_TORCH_DTYPES = {entry: getattr(torch, name) for name, entry in SAFETENSORS_DTYPES.items()}
_FLOATS = ("bfloat16", "float16", "float32", "float64")


class _Index(msgspec.Struct):
    weight_map: dict[
        str, Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+-]*\.safetensors\Z")]
    ]


describe(_Index)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on this machine; `files` names the weight file of each of its tensors."""

    reference: Reference
    files: Mapping[str, Path]

    def read(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, np.ndarray]]:
        """Read these tensors file by file: name, unsigned bit patterns of shape N, as they are served.

        Floating-point tensors are rounded to the dtype of their spec, to nearest even. Raises
        ModelMismatchError if a tensor is missing, or has another shape or dtype.
        """
        self._check_names(specs)
        for name, tensor in self.tensors(specs):
            yield name, bits_of(self._served(tensor, specs[name]))

    def ranges(self, specs: Mapping[str, TensorSpec], wanted: ranges.Ranges) -> Iterator[ranges.Piece]:
        """Read ranges of these tensors in pieces, as they are served, file by file. Raises like `read`."""
        self._check_names(specs)
        by_file: dict[Path, list[str]] = {}
        for name in specs:
            by_file.setdefault(self.files[self._source(name)], []).append(name)
        for path, names in by_file.items():
            file = ranges.RangedFile.local(path)
            found, given, spans = entries(file.header(), file.size), dict[str, torch.dtype](), []
            for name in names:
                if self._source(name) not in found:
                    raise CorruptDataError(f"{path} lacks {self._source(name)}, which its index names.")
                dtype, shape, first, _ = found[self._source(name)]
                given[name] = _TORCH_DTYPES[dtype]
                self._served(torch.empty(shape, dtype=given[name], device="meta"), specs[name])
                spans.append((name, first, given[name].itemsize, *wanted[name]))
            for name, at, data in ranges.read_spans(file, spans):
                piece = torch.frombuffer(bytearray(data), dtype=given[name])
                yield (
                    name,
                    at,
                    bits_of(cast(piece, specs[name].dtype) if specs[name].dtype in _FLOATS else piece),
                )

    def _check_names(self, specs: Mapping[str, TensorSpec]) -> None:
        if missing := sorted(name for name in specs if self._source(name) not in self.files):
            raise ModelMismatchError(f"{self.reference} lacks {first_five(missing)}, which the model has.")

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read these tensors, which the checkpoint has, file by file, as they are stored."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[self._source(name)], []).append(name)
        for file, held in by_file.items():
            with _opened(file) as opened:
                for name in held:
                    yield name, opened.get_tensor(self._source(name))

    def _source(self, name: str) -> str:
        return name if name in self.files else self.reference.tied.get(name, name)

    def alike(
        self, specs: Mapping[str, TensorSpec], bits: Callable[[str], np.ndarray]
    ) -> dict[str, list[str]]:
        """For each tensor that the checkpoint lacks: the tensors it has that are the same bits in the
        model.
        """
        return {
            name: [
                other
                for other in specs
                if other in self.files
                and (specs[other].dtype, specs[other].shape) == (spec.dtype, spec.shape)
                and np.array_equal(bits(other), bits(name))
            ]
            for name, spec in specs.items()
            if name not in self.files
        }

    def _served(self, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        served = cast(tensor, spec.dtype) if spec.dtype in _FLOATS else tensor
        found = str(served.dtype).removeprefix("torch."), tuple(served.shape)
        if found != (spec.dtype, spec.shape):
            raise ModelMismatchError(
                f"{self.reference} has {spec.name} as {found[0]}{list(found[1])}, the model as {spec}."
            )
        return served


def find(where: str | Path) -> Reference:
    """Make a reference to a directory, or to a model on the Hub (`namespace/name[@revision]`) at its current
    commit.
    """
    if isinstance(where, Path) or Path(where).is_dir():
        return Reference(path=str(Path(where).absolute()))
    match = _REPO.fullmatch(where)
    if match is None:
        raise ConfigError(f"{where} is neither a directory nor a model on the Hub (namespace/name@revision).")
    return Reference(
        repo=match["repo"], revision=_download(match["repo"], match["revision"], [_WEIGHTS, INDEX]).name
    )


def load(reference: Reference, limit_bytes: int | None = None, *, with_token: bool = True) -> Checkpoint:
    """Find a checkpoint on this machine; a model on the Hub is downloaded unless it is in the Hub's cache.

    The path of a reference may also be one safetensors file.

    `limit_bytes` is the most to download, None for no limit; `with_token` says whether the machine's token of
    the Hub may be used. Raises ConfigError if the checkpoint does not exist, cannot be reached, or is larger.
    """
    bounds = limit_bytes, with_token
    if reference.path is not None and (file := Path(reference.path)).is_file():
        with _opened(file) as tensors:
            return Checkpoint(reference, dict.fromkeys(tensors.keys(), file))
    directory = _directory(reference, [_WEIGHTS, INDEX], *bounds)
    if (directory / INDEX).is_file():
        names = _weight_map(directory / INDEX)
        directory = _directory(reference, sorted(set(names.values())), *bounds)
        files = {name: directory / file for name, file in names.items()}
    elif (directory / _WEIGHTS).is_file():
        with _opened(directory / _WEIGHTS) as tensors:
            files = dict.fromkeys(tensors.keys(), directory / _WEIGHTS)
    else:
        raise ConfigError(f"{directory} holds neither {_WEIGHTS} nor {INDEX}.")
    if absent := sorted({file.name for file in files.values() if not file.is_file()}):
        raise ConfigError(f"{directory} lacks {first_five(absent)}.")
    return Checkpoint(reference, files)


def stamp(reference: Reference) -> tuple[tuple[str, int, int, int], ...] | None:
    """Sizes, times and identities of a directory's weight files, to notice later that they were overwritten.

    None for a model on the Hub: a commit does not change.
    """
    if reference.path is None:
        return None
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(reference.path).iterdir()):
            if path.name.endswith((".safetensors", INDEX)):
                status = path.stat()
                found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


def small_files(reference: Reference, limit_bytes: int | None = None, *, with_token: bool = True) -> Path:
    """A directory with the config, tokenizer and templates of a checkpoint. Arguments and errors as of
    `load`.
    """
    return _directory(reference, _SMALL, limit_bytes, with_token)


def _directory(
    reference: Reference, patterns: Sequence[str], limit_bytes: int | None = None, with_token: bool = True
) -> Path:
    if reference.repo is not None:
        return _download(reference.repo, reference.revision, patterns, limit_bytes, with_token)
    assert reference.path is not None
    directory = Path(reference.path)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory on this machine.")
    return directory


def _download(
    repo: str,
    revision: str | None,
    patterns: Sequence[str],
    limit_bytes: int | None = None,
    with_token: bool = True,
) -> Path:
    """Download files of a model into the Hub's cache; returns its folder there, whose name is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(patterns),
        "token": None if with_token else False,
    }
    try:
        if limit_bytes is not None:
            found = snapshot_download(repo, dry_run=True, **wanted)
            size = sum(file.file_size or 0 for file in found if file.will_download)
            if size > limit_bytes:
                raise ConfigError(
                    f"{repo}@{revision} has {size:,} bytes, and the channel's model at most {limit_bytes:,}."
                )
        return Path(snapshot_download(repo, **wanted))
    except ConfigError:
        raise
    except Exception as error:  # of the Hub's client, of its HTTP client, or of the disk
        # By itself the client falls back to its cache only for whole snapshots; `load` checks which files are
        # there.
        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
            return Path(snapshot_download(repo, revision=revision, local_files_only=True))
        reason = " ".join(str(error).split())
        hint = (
            ""
            if with_token
            else " It was asked for without a token: set DELTASYNC_REFERENCE_REPOS if it needs one."
        )
        raise ConfigError(
            f"{repo}@{revision or 'main'} is neither on the Hub nor in its cache: {reason}{hint}"
        ) from error


def _weight_map(path: Path) -> dict[str, str]:
    """The weight file of each tensor, by the index of a checkpoint."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, *UNREADABLE_JSON) as error:
        raise CorruptDataError(f"{path} is not the index of a checkpoint: {error!r}.") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (*LIBRARY_ERRORS, OSError) as error:
        raise CorruptDataError(
            f"{path} is not a safetensors file with the tensors that it should have: {error}."
        ) from error
