"""What a reply of a store means: one table from operation, status and code, for all clouds and the Hub."""

from __future__ import annotations

import enum
from typing import Literal

from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError

Operation = Literal["create", "put", "read", "list", "delete"]


class Meaning(enum.Enum):
    """What a reply means; of the first two only where the operation asked for it (`error_class`)."""

    EXISTS = "the object exists"
    MISSING = "there is no such object"
    RACE = "another request was writing the object"
    THROTTLED = "too many requests"
    LATER = "the server cannot do it now"
    REFUSED = "the server will not do it"


_CODES = {
    **dict.fromkeys(("BlobAlreadyExists", "PreconditionFailed", "ConditionNotMet"), Meaning.EXISTS),
    **dict.fromkeys(("NoSuchKey", "BlobNotFound", "EntryNotFound"), Meaning.MISSING),
    **dict.fromkeys(("ConditionalRequestConflict", "OperationAborted"), Meaning.RACE),
    **dict.fromkeys(
        (
            *("SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded", "BandwidthLimitExceeded"),
            *("Throttling", "ThrottlingException", "KMS.ThrottlingException", "SnapshotOperationRateExceeded"),
            *("rateLimitExceeded", "userRateLimitExceeded"),
        ),
        Meaning.THROTTLED,
    ),
    **dict.fromkeys(
        (
            *("InternalError", "ServiceUnavailable", "RequestTimeout", "OperationTimedOut", "KMS.KMSInternalException"),
            *("ContainerBeingDeleted", "ContainerBeingDisabled", "AccountBeingCreated", "backendError"),
        ),
        Meaning.LATER,
    ),
}
_NO_PLACE = ("NoSuchBucket", "ContainerNotFound", "ResourceNotFound", "RepoNotFound", "RevisionNotFound")
"""Codes of a missing bucket, which is never a missing object."""
_FINAL = (501, 505, 507)  # not implemented; no more room


def meaning(status: int, code: str = "") -> Meaning:
    """Return what an HTTP status and the store's own code mean. The status is 0 if there was no reply.

    The code counts first, where it is known. A 412 or 304 with an unknown code is a lost precondition only without a code:
    Azure answers 412 for leases, too. A 409 says what is wrong by its code alone.
    """
    if code in _NO_PLACE:
        return Meaning.REFUSED
    if code in _CODES:
        return _CODES[code]
    if status in (304, 412):
        return Meaning.REFUSED if code else Meaning.EXISTS
    if status == 404:
        return Meaning.REFUSED if code else Meaning.MISSING
    if status == 429:
        return Meaning.THROTTLED
    if status in (408, 425) or (status >= 500 and status not in _FINAL):
        return Meaning.LATER
    # Without a reply, or with one that cannot be read, it was damaged or lost on the way; but an unknown code is an answer.
    return Meaning.REFUSED if status >= 300 or code else Meaning.LATER


def error_class(operation: Operation, found: Meaning) -> type[StoreError]:
    """Return the class of the error that an operation raises: "exists" only answers `create`, "missing" only a read.

    A `delete` of a missing object raises ObjectMissingError too, which its store takes for success.
    """
    if found is Meaning.EXISTS and operation == "create":
        return ObjectExistsError
    if found is Meaning.MISSING and operation in ("read", "delete"):
        return ObjectMissingError
    return TransientStoreError if found in (Meaning.RACE, Meaning.THROTTLED, Meaning.LATER) else StoreError


def is_panic(error: BaseException) -> bool:
    """Whether a native module failed in a way that is no `Exception`: pyo3's PanicException."""
    return type(error).__name__ == "PanicException"
