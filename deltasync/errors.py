"""Every exception of deltasync, in one tree.

    DeltaSyncError                     1  root: catch this to catch everything
    ├── ConfigError (ValueError)       3  a setting or an argument is wrong; nothing was done
    ├── FormatError                    4  bytes from a store are not what the format says
    │   ├── UnsupportedFormatError     4    written by a newer or a foreign writer
    │   └── CorruptDataError           4    truncated, bit-flipped, or not decodable
    │       └── SignatureError         4      not signed with a trusted key, or not since it was signed
    ├── ChainError                     5  versions do not connect
    │   ├── NotPublishedError          5    the channel has no version yet: wait
    │   ├── MissingVersionError        5    a version or a payload it needs is gone
    │   ├── StaleChannelError          5    the newest version is too old to be taken
    │   └── RunMismatchError           5    the channel now belongs to another run
    ├── StoreError                     6  the object store refused or failed
    │   ├── ObjectMissingError         6    no object has this key
    │   ├── ObjectExistsError          6    a create-only put met an existing object
    │   └── TransientStoreError        6    worth another try
    ├── PublishError                   7  a version did not become visible
    │   ├── ChannelInUseError          7    the channel holds a run; resume it or choose another URL
    │   ├── FencedError                7    another publisher has opened the channel; this one must stop
    │   ├── PublishPendingError        7    the store has not answered yet; the next publish asks again
    │   └── PublishLostError           7    given up after all retries; the next publish is an anchor
    ├── ModelMismatchError             8  names, shapes or dtypes differ from the channel's
    ├── ApplyError                     9  a version did not become live
    │   ├── StageError                 9    live weights untouched, retry
    │   ├── FingerprintMismatchError   9    rolled back to the previous version; re-anchor
    │   ├── SleepingError              9    vLLM sleeps; live weights untouched, retry when it wakes up
    │   └── CommitError                9    weights uncertain, reload
    └── AckTimeoutError               10  the version is published, but the fleet does not serve it yet

The number is the process exit code of the command line for that class; 2 is a usage error, 130 is Ctrl-C.
"""

from __future__ import annotations

import msgspec

from deltasync.printable import printable, redacted

UNREADABLE_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that is malformed, that has other bytes than UTF-8, or that is nested too deeply."""


class DeltaSyncError(Exception):
    """Root of all errors raised by deltasync.

    Messages quote what a channel, a server or a replica said, and URLs. So each is one printable line without credentials.
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(redacted(arg)) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DeltaSyncError, ValueError):
    """A setting or an argument is wrong; nothing was done."""

    exit_code = 3


class FormatError(DeltaSyncError):
    """Bytes from a store are not what the format says."""

    exit_code = 4


class UnsupportedFormatError(FormatError):
    """The object was written in a format, or with a required feature, that this reader does not know."""


class CorruptDataError(FormatError):
    """The object is truncated, altered, or cannot be decoded."""


class SignatureError(CorruptDataError):
    """No trusted key has signed these bytes for this place; nothing in them was looked at."""


class ChainError(DeltaSyncError):
    """The versions of the channel do not connect."""

    exit_code = 5


class NotPublishedError(ChainError):
    """The channel has no complete version yet; wait for the first anchor."""


class MissingVersionError(ChainError):
    """A version, or an object that a version refers to, is not in the store."""


class StaleChannelError(ChainError):
    """The newest version is older than is allowed: nothing newer was published, or it is kept back."""


class RunMismatchError(ChainError):
    """The channel belongs to another run than the one that was followed."""


class StoreError(DeltaSyncError):
    """The object store refused a request or failed."""

    exit_code = 6


class ObjectMissingError(StoreError):
    """No object has this key."""


class ObjectExistsError(StoreError):
    """A create-only put met an existing object; the existing object is unchanged."""


class TransientStoreError(StoreError):
    """The request failed for a reason that may pass; a retry is safe."""


class PublishError(DeltaSyncError):
    """A version did not become visible."""

    exit_code = 7


class ChannelInUseError(PublishError):
    """The channel already holds a run; resume it or choose another URL."""


class FencedError(PublishError):
    """Another publisher has opened the channel, or has written this version; nothing of ours became visible. Stop."""


class PublishPendingError(PublishError):
    """The store has not said whether it has the version; the same bytes are put again by the next publish."""


class PublishLostError(PublishError):
    """The version was given up after all retries and is not visible; the next publish starts from an anchor."""


class ModelMismatchError(DeltaSyncError):
    """Names, shapes or dtypes of the tensors differ from the channel's."""

    exit_code = 8


class ApplyError(DeltaSyncError):
    """A version did not become live."""

    exit_code = 9


class StageError(ApplyError):
    """Staging failed; the live weights are untouched and a retry is safe."""


class FingerprintMismatchError(ApplyError):
    """The bits after commit were not the published ones; they were rolled back to the previous version."""


class SleepingError(ApplyError):
    """vLLM sleeps, so its weights are not in memory; they were not touched."""


class CommitError(ApplyError):
    """A commit failed half-way and could not be rolled back; reload the weights."""


class AckTimeoutError(DeltaSyncError):
    """The version is published, but the replicas did not report serving it in time."""

    exit_code = 10
