"""Classify a store's reply: one table from operation, status and code, for all clouds and the Hub."""

from __future__ import annotations

import enum
from typing import Literal

from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError

Operation = Literal["create", "put", "read", "list", "delete"]


class Meaning(enum.Enum):
    """The meaning of a reply. The first two count only for operations that asked for them (`error_class`)."""

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
            *(
                "Throttling",
                "ThrottlingException",
                "KMS.ThrottlingException",
                "SnapshotOperationRateExceeded",
            ),
            *("rateLimitExceeded", "userRateLimitExceeded"),
        ),
        Meaning.THROTTLED,
    ),
    **dict.fromkeys(
        (
            *(
                "InternalError",
                "ServiceUnavailable",
                "RequestTimeout",
                "OperationTimedOut",
                "KMS.KMSInternalException",
            ),
            *("ContainerBeingDeleted", "ContainerBeingDisabled", "AccountBeingCreated", "backendError"),
        ),
        Meaning.LATER,
    ),
}
_NO_PLACE = ("NoSuchBucket", "ContainerNotFound", "ResourceNotFound", "RepoNotFound", "RevisionNotFound")
"""Codes of a missing bucket, which is never a missing object."""
_FINAL = (501, 505, 507)  # not implemented, HTTP version not supported, no more room


def meaning(status: int, code: str = "") -> Meaning:
    """Return the meaning of an HTTP status and the store's own code. The status is 0 without a reply.

    A known code counts first. A 412 or 304 is a failed precondition only without a code, because Azure
    answers 412 for leases too. A 409 has a meaning only through its code.
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
    # A missing or unreadable reply was lost or damaged in transit. An unknown code is an answer.
    return Meaning.REFUSED if status >= 300 or code else Meaning.LATER


def error_class(operation: Operation, found: Meaning) -> type[StoreError]:
    """Return the class of the error that an operation raises. EXISTS answers only `create`, MISSING only a
    read.

    A `delete` of a missing object raises ObjectMissingError too, and its store treats that as success.
    """
    if found is Meaning.EXISTS and operation == "create":
        return ObjectExistsError
    if found is Meaning.MISSING and operation in ("read", "delete"):
        return ObjectMissingError
    return TransientStoreError if found in (Meaning.RACE, Meaning.THROTTLED, Meaning.LATER) else StoreError


def is_panic(error: BaseException) -> bool:
    """Whether a native module panicked: pyo3's PanicException, which is no `Exception`."""
    return type(error).__name__ == "PanicException"
