"""Translate obstore's errors to ours. Ours have no `__cause__`: obstore's hold whole requests, credentials
included.
"""

from __future__ import annotations

import re

from obstore import exceptions as obstore_errors

from deltasync.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from deltasync.stores.replies import Meaning, Operation, error_class, is_panic, meaning
from deltasync.threads import NO_FILES, NO_THREADS

CLIENT_ERRORS = (obstore_errors.BaseError, FileNotFoundError)

RENEWABLE = (401, 403)
_NO_FILES = re.compile(r"Too many open files|os error 2[34]\b|code: 2[34]\b")
_RENEW = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
)
_REGION = "The bucket is in another region: check region= and AWS_REGION."
_HINTS = {
    "ExpiredToken": "The session token has expired: renew the credentials.",
    "ExpiredTokenException": "The session token has expired: renew the credentials.",
    "InvalidToken": "The session token is not valid: renew the credentials.",
    "TokenRefreshRequired": "The session token has expired: renew the credentials.",
    "InvalidAccessKeyId": "The server does not know the access key id: check AWS_ACCESS_KEY_ID and the endpoint.",
    "SignatureDoesNotMatch": "The secret does not belong to the access key: check AWS_SECRET_ACCESS_KEY.",
    "AuthenticationFailed": "Check the credentials: the account's key, or the SAS token, which may have expired.",
    "RequestTimeTooSkewed": "This machine's clock is off by too much: set it.",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "Delete something, or have the quota raised.",
    "InvalidObjectState": "The object is archived: restore it first.",
    "BlobImmutableDueToPolicy": "deltasync replaces objects such as head.json: use a container without such a policy.",
}
_DENIED = "Check the credentials, and that they may list the bucket and get, put and delete objects in it."
_METADATA = {
    "s3": ("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", r"/latest/(api/token|meta-data)"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or a SAS token in AZURE_STORAGE_SAS_KEY",
        r"/metadata/identity|[?&]resource=",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", r"/computeMetadata/"),
}
"""By scheme: the variables that hold credentials, and a pattern of requests to the machine's metadata
service.
"""


def translate(
    error: BaseException, place: str, operation: Operation, answered: bool = True
) -> StoreError | ConfigError:
    """Return our error for an error of obstore, or a panic, about the object at `place`.

    `answered` says whether the store has answered this client before, which proves that credentials are set.
    """
    if is_panic(error) and re.search(r"Invalid(Uri|Port|Domain|Ipv4|Ipv6)|EmptyHost", str(error)):
        return ConfigError(
            f"{place}: the address of the server is not valid. Check the endpoint, and gcs_base_url in the "
            "file of a Google "
            "service account."
        )
    if is_panic(error):
        what = " ".join((str(error).splitlines() or [""])[0].split())[:300]
        if "PoisonError" in what:
            return StoreError(
                f"{place}: the store's client could not start when it was first used. Restart this process."
            )
        if re.search(
            r"WouldBlock|Resource temporarily unavailable|os error 11\b|code: 11\b|spawn", str(error)
        ):
            return TransientStoreError(f"{place}: {NO_THREADS}.")
        if _NO_FILES.search(str(error)):
            return TransientStoreError(f"{place}: {NO_FILES}.")
        return StoreError(
            f"{place}: the store's client failed ({what}); the server's reply may be malformed."
        )
    message, _, internals = str(error).partition("\n\nDebug source")
    if isinstance(error, obstore_errors.InvalidPathError):
        odd = re.search(r'Path "([^"]*)"', message)
        key = odd[1] if odd else message
        return StoreError(
            f"{place}: another program's object has the key {key!r}, which cannot be listed: delete or "
            "rename it."
        )
    answer, status, code = _answer(message, internals)
    if not status and not code and _NO_FILES.search(internals):
        return TransientStoreError(f"{place}: {NO_FILES}.")
    found = meaning(status, code)
    if not status and not code:
        if isinstance(error, obstore_errors.AlreadyExistsError):
            found = Meaning.EXISTS
        elif isinstance(error, FileNotFoundError | obstore_errors.NotFoundError):
            found = Meaning.MISSING
        elif not isinstance(error, obstore_errors.GenericError):
            found = Meaning.REFUSED
    variables, request = _METADATA.get(place.partition(":")[0], ("", "$^"))
    if re.search(request, message):
        reply = answer.replace("the store answered", "its metadata service answered")
        problem = f"{place}: this machine's role gives no credentials: {reply}"
        if answered:
            return TransientStoreError(f"{problem}.")
        return ConfigError(f"{problem}, and no others are set ({variables}).")
    hint = _hint(found, status, code, message, internals)
    if found is Meaning.MISSING and "<html" in message.lower():
        found, hint = Meaning.REFUSED, "The reply is a web page: check the endpoint."
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StoreError(
            f"{place}: there is no such bucket; create it, or check its name, the region and the endpoint."
        )
    kind = error_class(operation, found)
    if kind is ObjectExistsError:
        return kind(f"{place} already exists.")
    if kind is ObjectMissingError:
        return kind(f"{place} does not exist.")
    if kind is TransientStoreError and hint:
        kind = StoreError  # a certificate, or a redirect to another region
    if found is Meaning.RACE:
        return kind(f"{place}: another request was writing it ({code}).")
    if not hint and found is Meaning.MISSING:
        hint = "Check the bucket's name and the endpoint."
    return kind(f"{place}: {answer}.{f' {hint}' if hint else ''}")


def may_be_renewed(error: BaseException) -> bool:
    """Whether other credentials may help, so that the next attempt should read them again."""
    _, status, _ = _answer(*str(error).partition("\n\nDebug source")[::2])
    return status in RENEWABLE or has_expired(error)


def has_timed_out(error: BaseException) -> bool:
    """Whether there was no answer in time, as over a connection that the network has forgotten."""
    message, _, internals = str(error).partition("\n\nDebug source")
    is_sent = "status code" not in message and "kind: Connect," not in internals
    return is_sent and re.search(r"\bTimedOut\b|timed out", internals) is not None


def has_expired(error: BaseException) -> bool:
    """Whether the store recognises the credentials but no longer accepts them."""
    return _answer(*str(error).partition("\n\nDebug source")[::2])[2] in _RENEW


def _answer(message: str, internals: str) -> tuple[str, int, str]:
    """Return a short description, the HTTP status (0 without one), and the store's own code."""
    status = re.search(r"status code: ((\d+)[^:<\n]*)", message)
    code = re.search(r"<Code>([\w.]+)</Code>|\(code: ([\w.]+)\)", message)
    name = (code[1] or code[2]) if code else ""
    text = re.search(r"<Message>([^<\n]*)|DeleteObjects request failed for key [^:]*: (.*) \(code: ", message)
    reason = " ".join((text[1] or text[2] or "").split())[:120].rstrip(".") if text else ""
    if status:
        named = f" ({name}{': ' if name and reason else ''}{reason})" if name or reason else ""
        return f"the store answered {status[1].strip()}{named}", int(status[2]), name
    if name.isdecimal():  # of one key in a bulk request to Azure
        return f"the store answered {name}{f' ({reason})' if reason else ''}", int(name), ""
    if name:
        return f"the store refused ({name}{': ' if reason else ''}{reason})", 0, name
    cause = re.search(r'(?:message|error): "([^"]*)"|\b(TimedOut)\b', internals)
    # a query may hold credentials
    tail = re.sub(r"\?\S*", "", message.rpartition(" - ")[2]).strip().rstrip(".")
    tail = tail.partition(", this normally indicates")[0]
    server = re.search(r"https?://[^/\s]+", message) if "kind: Connect," in internals else None
    where = f" at {server[0]}" if server else ""
    return tail + (f" ({cause[1] or 'timed out'}{where})" if cause else ""), 0, ""


def _hint(found: Meaning, status: int, code: str, message: str, internals: str) -> str:
    """Return the cure for a lasting refusal, empty if none is known."""
    if found is Meaning.REFUSED:
        if code in _HINTS:
            return _HINTS[code]
        if code.startswith("KMS."):
            return "The bucket's key (SSE-KMS) cannot be used: ask its owner."
        if "x-amz-checksum-" in message:
            return "Buckets with object lock need AWS_CHECKSUM_ALGORITHM=sha256."
        if status in (401, 403) or code == "AccessDenied":
            return _DENIED
    certificate = re.search(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)", internals)
    if certificate and certificate[1] == "CaUsedAsEndEntity":
        return "The server presents a CA certificate as its own (CaUsedAsEndEntity): install one that the CA signed."
    if certificate:
        return (
            f"The server's certificate is not trusted ({certificate[1]}). If a private authority signed it, "
            "set "
            "SSL_CERT_FILE to the authority's certificate."
        )
    if "InvalidContentType" in internals:
        return "The server does not speak TLS at this port: write http://, or use its https port."
    if "TunnelUnsuccessful" in internals or status == 407:
        return "The proxy refused (HTTPS_PROXY, HTTP_PROXY): check its address and password, or add the host to NO_PROXY."
    if "redirect without LOCATION" in message:
        return _REGION
    return ""
