"""Who may write: Ed25519 signatures at the end of a channel's documents, and the keys that a reader trusts.

A signature is of the exact bytes before it and of the object's key, so a document is good at its own place only.
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
from deltasync.errors import ConfigError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

logger = logging.getLogger(__name__)

_END = re.compile(rb',"signature":\{"key":"([0-9a-f]{64})","ed25519":"([0-9a-f]{128})"\}\}\n')
_END_BYTES = 230
_LINE = re.compile(r"([0-9a-f]{64})(\s.*)?")


class Signer:
    """An Ed25519 private key, read from a PEM file (PKCS 8) that is not encrypted.

    Attributes:
        public: The public key, 64 hexadecimal digits, which is also its name.
        trusted: That key, and those of the file of other trusted keys.

    Raises:
        ConfigError: there is no such key, or it is of another kind.
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
            raise ConfigError(f"{path} is not an Ed25519 private key in PEM without a password. See `deltasync keygen`.")
        if mode & 0o077:
            logger.warning("Others on this machine may read the signing key %s: chmod 600 it.", path)
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()
        self.trusted = Trusted([self.public, *(() if trusted_keys is None else _read(Path(trusted_keys)))])

    def seal(self, key: str, data: bytes) -> bytes:
        """Put a signature at the end of a document that is to be stored at `key`."""
        body = data.removesuffix(b"}\n")
        signature = self._key.sign(_signed(key, body)).hex()
        return body + f',"signature":{{"key":"{self.public}","ed25519":"{signature}"}}}}\n'.encode()


class Trusted:
    """Public keys, 64 hexadecimal digits each, one of which must have signed what is read.

    Args:
        names: The keys.
        path: A file of keys instead, read again when it changes: one on each line, and behind it what a person calls it.
            Lines may be empty, or begin with #.

    Raises:
        ConfigError: the file cannot be read, names no key, or has a line that is none.
    """

    def __init__(self, names: Iterable[str] = (), path: Path | None = None) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._keys = self._load(names)
        self._refresh()

    @property
    def names(self) -> list[str]:
        """The keys, sorted."""
        return sorted(self._keys)

    def check(self, key: str, data: bytes) -> None:
        """Make sure that a trusted key has signed these bytes for this key, before anything in them is interpreted.

        Raises:
            SignatureError: it has not.
            ConfigError: the file of keys has changed, and is none any more.
        """
        from cryptography.exceptions import InvalidSignature

        self._refresh()
        found = _end(data)
        if found is None:
            raise SignatureError(f"{key} is not signed, and only what a trusted key has signed is taken here.")
        name, signature = found[1].decode(), bytes.fromhex(found[2].decode())
        trusted = self._keys.get(name)
        if trusted is None:
            raise SignatureError(f"{key} is signed with the key {name}, which is not trusted here.")
        try:
            trusted.verify(signature, _signed(key, data[: found.start()]))
        except InvalidSignature:
            raise SignatureError(
                f"{key} was altered, or put where it does not belong: the signature of the key {name} does not fit."
            ) from None

    def _refresh(self) -> None:
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._keys = self._load(_read(self._path))
            self._stamp = stamp

    @staticmethod
    def _load(names: Iterable[str]) -> dict[str, ed25519.Ed25519PublicKey]:
        library = _library()
        return {name: library.Ed25519PublicKey.from_public_bytes(bytes.fromhex(name)) for name in names}


def signer_of(settings: PublisherSettings) -> Signer | None:
    """What a publisher signs with, None if it does not.

    Raises:
        ConfigError: as `Signer`, or only signed documents are trusted and there is no key to sign with.
    """
    if settings.signing_key is not None:
        return Signer(settings.signing_key, settings.trusted_keys)
    if settings.trusted_keys is not None:
        raise ConfigError("trusted_keys is set, so what is published must be signed: set signing_key too.")
    return None


def signed_by(data: bytes) -> str | None:
    """The key that a document says it is signed with; nothing is checked. None if it says nothing."""
    found = _end(data)
    return None if found is None else found[1].decode()


def require_signer(signer: Signer | None, signed: bool) -> None:
    """Raise ConfigError for adding to a signed channel what is not signed."""
    if signed and signer is None:
        raise ConfigError("This channel is signed: set signing_key (DELTASYNC_SIGNING_KEY) to add to it.")


def new_key(path: Path, name: str) -> str:
    """Make a key: the private one at `path`, for its owner only, the public one beside it with the suffix `.pub`.

    Returns:
        The line of the public one.

    Raises:
        ConfigError: one of the files is there already, which stays as it is, or cannot be written.
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


def _end(data: bytes) -> re.Match[bytes] | None:
    return _END.fullmatch(data, max(0, len(data) - _END_BYTES))


def _signed(key: str, body: bytes) -> bytes:
    return f"{FORMAT} {key}\n".encode() + body


def _read(path: Path) -> list[str]:
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
                raise ConfigError(f"Line {number} of {path} is no public key: 64 hexadecimal digits, then a name.")
            names.append(found[1])
    if not names:
        raise ConfigError(f"{path} names no trusted key.")
    return names


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"The trusted keys in {path} cannot be read: {error.strerror}.") from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _library() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError("Signatures need the package cryptography: pip install 'deltasync[signing]'.") from None
    return ed25519
