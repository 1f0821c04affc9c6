"""Ed25519 signatures at the end of documents, and the keys that a reader trusts.

A signature covers the bytes before it and the object's key, so a signed document is valid at its own key
only.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from deltasync.codec.base import FORMAT
from deltasync.config import PublisherSettings
from deltasync.errors import ConfigError, CorruptDataError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

logger = logging.getLogger(__name__)

_END = re.compile(rb',"signature":\{"key":"([0-9a-f]{64})","ed25519":"([0-9a-f]{128})"\}\}\n')
_END_BYTES = 230

SIGNATURE_BYTES = _END_BYTES - len(b"}\n")
"""By how many bytes a signature makes a document longer."""

_LINE = re.compile(r"([0-9a-f]{64})(\s.*)?")


class Signer:
    """An Ed25519 private key, read from a PEM file (PKCS 8) without a password.

    Attributes:
        public: The public key as 64 hexadecimal digits.
        trusted: The public key, and the keys in the file `trusted_keys`.

    Raises:
        ConfigError: a file cannot be read, or holds no key.
    """

    def __init__(self, path: str | Path, trusted_keys: str | Path | None = None) -> None:
        library = _library()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            with open(path, "rb") as file:
                data, mode = file.read(), os.fstat(file.fileno()).st_mode
        except OSError as error:
            raise ConfigError(f"The signing key {path} cannot be read: {error.strerror}.") from None
        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, library.Ed25519PrivateKey):
            raise ConfigError(
                f"{path} is not an Ed25519 private key in PEM without a password. See `deltasync keygen`."
            )
        if mode & 0o077:
            logger.warning("Others on this machine may read the signing key %s: chmod 600 it.", path)
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()
        self.trusted = Trusted([self.public, *(() if trusted_keys is None else _read(Path(trusted_keys)))])

    def seal(self, key: str, data: bytes) -> bytes:
        """Return the document with a signature at its end, to be stored at `key`."""
        body = data.removesuffix(b"}\n")
        signature = self._key.sign(_signed_bytes(key, body)).hex()
        return body + f',"signature":{{"key":"{self.public}","ed25519":"{signature}"}}}}\n'.encode()


class Trusted:
    """The public keys that a reader trusts: one of them must have signed each record.

    Args:
        names: The keys, 64 hexadecimal digits each.
        path: A file of keys instead of `names`, read again for each check. A line holds a key, then
            optionally a name for people. Empty lines and lines that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, holds no key, or has an invalid line.
    """

    def __init__(self, names: Iterable[str] = (), path: Path | None = None) -> None:
        self._path = path
        self._keys = _public_keys(names if path is None else _read(path))

    @property
    def names(self) -> list[str]:
        """The keys, sorted, as hexadecimal digits."""
        return sorted(self._keys)

    def check(self, key: str, data: bytes) -> None:
        """Check that a trusted key has signed this document for this object key. Nothing else in it is
        interpreted.

        Raises:
            CorruptDataError: no trusted key has.
            ConfigError: the file of keys has changed and is not valid any more.
        """
        from cryptography.exceptions import InvalidSignature

        if self._path is not None:
            names = _read(self._path)
            if self._keys.keys() != set(names):
                self._keys = _public_keys(names)
        found = _signature_at_end(data)
        if found is None:
            raise CorruptDataError(
                f"{key} is not signed, and this reader accepts only records that a trusted key signed."
            )
        name, signature = found[1].decode(), bytes.fromhex(found[2].decode())
        trusted = self._keys.get(name)
        if trusted is None:
            raise CorruptDataError(f"{key} is signed with the key {name}, which is not trusted here.")
        try:
            trusted.verify(signature, _signed_bytes(key, data[: found.start()]))
        except InvalidSignature:
            raise CorruptDataError(
                f"{key} was altered, or put where it does not belong: the signature of the key {name} does "
                "not fit."
            ) from None


def signer_of(settings: PublisherSettings) -> Signer | None:
    """The signer that a publisher's settings name, None if it does not sign. ConfigError if only trusted keys
    are set.
    """
    if settings.signing_key is not None:
        return Signer(settings.signing_key, settings.trusted_keys)
    if settings.trusted_keys is not None:
        raise ConfigError("trusted_keys is set, so versions must be signed: set signing_key too.")
    return None


def signed_by(data: bytes) -> str | None:
    """The public key that a document names in its signature, which is not checked. None without a
    signature.
    """
    found = _signature_at_end(data)
    return None if found is None else found[1].decode()


def require_signer(signer: Signer | None, signed: bool) -> None:
    """Raise ConfigError if the channel is signed and there is no signer to add to it."""
    if signed and signer is None:
        raise ConfigError("This channel is signed: set signing_key (DELTASYNC_SIGNING_KEY) to add to it.")


def new_key(path: Path, name: str) -> str:
    """Make a key pair: the private key at `path`, readable by its owner only, the public key in `path` with
    `.pub` appended.

    Returns the line in `.pub`: the public key and `name`. Raises ConfigError if a file exists already or
    cannot be written.
    """
    library = _library()
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    public = path.with_name(f"{path.name}.pub")
    key = library.Ed25519PrivateKey.generate()
    line = f"{key.public_key().public_bytes_raw().hex()} {name}\n"
    contents = {
        path: (key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600),
        public: (line.encode(), 0o644),
    }
    for file in contents:
        if file.exists():
            raise ConfigError(f"{file} is there already. It was left as it is; choose another name.")
    for file, (data, mode) in contents.items():
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
                opened.write(data)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
    return line


def _signature_at_end(data: bytes) -> re.Match[bytes] | None:
    return _END.fullmatch(data, max(0, len(data) - _END_BYTES))


def _signed_bytes(key: str, body: bytes) -> bytes:
    return f"{FORMAT} {key}\n".encode() + body


def _public_keys(names: Iterable[str]) -> dict[str, ed25519.Ed25519PublicKey]:
    library = _library()
    return {name: library.Ed25519PublicKey.from_public_bytes(bytes.fromhex(name)) for name in names}


def _read(path: Path) -> list[str]:
    """The names of the keys in a file of trusted keys."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"The trusted keys in {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a file of public keys.") from None
    names = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            found = _LINE.fullmatch(text)
            if found is None:
                raise ConfigError(
                    f"Line {number} of {path} is no public key: 64 hexadecimal digits, then a name."
                )
            names.append(found[1])
    if not names:
        raise ConfigError(f"{path} holds no public key.")
    return names


def _library() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError("Signatures need the package cryptography: pip install cryptography.") from None
    return ed25519
