"""Signatures of documents, files of keys, and who may write: without a store, or with one in memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltasync import Publisher, Replica, open_store
from deltasync.channel import documents, record, signing
from deltasync.channel.documents import Channel
from deltasync.channel.keys import CHANNEL as PLACE
from deltasync.channel.keys import HEAD
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer, Trusted
from deltasync.config import PublisherSettings, Retention
from deltasync.errors import (
    ChainError,
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
)
from deltasync.stores import Store
from tests.builders import trained, weights
from tests.channels import EPOCH, Made
from tests.conftest import assert_same_bits

SAMPLE = Channel(
    run_id="run",
    created_at="2026-01-01T00:00:00+00:00",
    fencing="seal",
    epoch=EPOCH,
    dtype="keep",
    tensors={},
    tensors_sha256=documents.table_sha256({}),
)


def sealed(signer: Signer, document: Channel = SAMPLE, place: str = PLACE) -> bytes:
    return signer.seal(place, documents.encode(document))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys `old`, `new` and `stranger`, and files that trust one or both of the first
    two.
    """
    folder = tmp_path_factory.mktemp("keys")
    lines = {name: signing.new_key(folder / name, name) for name in ("old", "new", "stranger")}
    (folder / "both").write_text(f"# who may write\n\n  {lines['old']}{lines['new']}")
    return folder


def publish(store: Store, count: int, **settings: object) -> list[dict[str, torch.Tensor]]:
    """Versions of a small model, each with other bits."""
    before = Replica(store) if settings.get("resume") else None
    weights = {"w": torch.arange(40, dtype=torch.bfloat16).reshape(5, 8), "b": torch.zeros(3)}
    if before is not None:
        before.sync()
        weights = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    published = []
    with Publisher(store, dtype="keep", **settings) as publisher:  # type: ignore[arg-type]
        for _ in range(count):
            weights["w"].view(torch.int16)[0, :3] += 1
            weights["b"] += 1
            publisher.publish(weights.items()).wait(60)
            published.append({name: tensor.clone() for name, tensor in weights.items()})
    return published


def test_a_new_key_is_for_its_owner_only_and_nothing_is_overwritten(tmp_path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    line = signing.new_key(tmp_path / "key", "trainer 7")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600 & ~mask
    assert (tmp_path / "key.pub").read_text() == line
    signer = Signer(tmp_path / "key")
    assert line == f"{signer.public} trainer 7\n"
    assert Trusted(path=tmp_path / "key.pub").names == signer.trusted.names == [signer.public]
    with pytest.raises(ConfigError, match="is there already"):
        signing.new_key(tmp_path / "key", "again")
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match="is there already"):
        signing.new_key(tmp_path / "key", "again")
    with pytest.raises(ConfigError, match="cannot be written"):
        signing.new_key(tmp_path / "nowhere" / "key", "lost")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.pub"]


def test_what_is_no_private_key_is_refused(tmp_path: Path) -> None:
    plain = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    key = ed25519.Ed25519PrivateKey.generate()
    contents = {
        "empty": b"",
        "text": b"-----BEGIN PRIVATE KEY-----\nnot one\n-----END PRIVATE KEY-----\n",
        "locked": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")),
        "raw": key.private_bytes_raw(),
        "rsa": rsa.generate_private_key(65537, 2048).private_bytes(*plain),
        "exchange": x25519.X25519PrivateKey.generate().private_bytes(*plain),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match="not an Ed25519 private key"):
            Signer(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        Signer(tmp_path / "missing")


@pytest.mark.parametrize(
    "text", ["", "# none\n", "abc\n", "A" * 64, "0" * 63, "0" * 65, f"{'0' * 64}, {'1' * 64}", "\xff"]
)
def test_a_file_that_names_no_key_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        Trusted(path=tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        Trusted(path=tmp_path / "missing")


def test_a_signed_document_is_the_document_with_a_signature_behind_it(keys: Path) -> None:
    signer = Signer(keys / "old")
    plain, data = documents.encode(SAMPLE), sealed(signer)
    assert data.startswith(plain[:-2]) and data.endswith(b"}\n") and data.count(b"\n") == 1
    document = json.loads(data)
    assert list(document)[-1] == "signature"
    assert (
        document["signature"].keys() == {"key", "ed25519"} and document["signature"]["key"] == signer.public
    )
    assert documents.decode(data, Channel, PLACE) == SAMPLE
    assert sealed(signer) == data
    assert signing.signed_by(data) == signer.public and signing.signed_by(plain) is None
    signer.trusted.check(PLACE, data)
    ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.public)).verify(
        bytes.fromhex(document["signature"]["ed25519"]), b"deltasync/2 channel.json\n" + plain[:-2]
    )


def test_the_signature_of_a_record_covers_its_body(keys: Path, memory_url: str) -> None:
    signer = Signer(keys / "old")
    channel = Made(open_store(memory_url), signer)
    channel.create(weights())
    channel.anchor(weights())
    data = channel.delta(trained(weights(), 1)).data
    assert data is not None and channel.tip is not None
    found = record.decode(data, channel.tip.key, signer.trusted)
    assert record.signed_by(data) == signer.public and found.record.body_bytes > 500
    for at in range(len(data)):
        altered = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(DeltaSyncError):
            record.decode(altered, channel.tip.key, signer.trusted)
    for key in (
        channel.tip.key.replace("0000000002", "0000000003"),
        channel.tip.key.replace(EPOCH, "000002-00000001"),
    ):
        with pytest.raises(CorruptDataError, match="put where it does not belong"):
            record.decode(data, key, signer.trusted)


@given(data=st.data())
def test_no_other_bytes_pass(keys: Path, data: st.DataObject) -> None:
    signer = Signer(keys / "old")
    good = sealed(signer)
    at = data.draw(st.integers(0, len(good) - 1))
    mask = data.draw(st.integers(1, 255))
    length = data.draw(st.integers(0, len(good) - 1))
    behind = data.draw(st.binary(min_size=1, max_size=300))
    others = [
        good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :],
        good[:length],
        good[at + 1 :],
        good + behind,
        good[:at] + behind + good[at:],
    ]
    for other in others:
        if other != good:
            with pytest.raises(CorruptDataError):
                signer.trusted.check(PLACE, other)
    for place in (PLACE + "x", "head.json", ""):
        with pytest.raises(CorruptDataError, match="does not fit"):
            signer.trusted.check(place, good)


def test_neither_another_key_nor_another_algorithm_passes(keys: Path) -> None:
    signer, stranger = Signer(keys / "old"), Signer(keys / "stranger")
    good, theirs = sealed(signer), sealed(stranger)
    refused = {
        "not signed": documents.encode(dataclasses.replace(SAMPLE, run_id="other")),
        "not trusted": theirs,
        "does not fit": theirs.replace(stranger.public.encode(), signer.public.encode()),
        "does not fit ": good.replace(b'"run_id":"run"', b'"run_id":"ran"'),
    }
    for why, data in refused.items():
        with pytest.raises(CorruptDataError, match=why.strip()):
            signer.trusted.check(PLACE, data)
    digits = json.loads(good)["signature"]["ed25519"].encode()
    for confused in [
        good.replace(b'"ed25519":', b'"none":'),
        good.replace(b'"ed25519":', b'"hs256":'),
        good.replace(digits, b""),
        good.replace(digits, b"0" * 128),
        good.replace(digits, digits.upper()),
        good.replace(b'"signature"', b'"Signature"'),
        good.replace(b',"signature":{', b',"signature": {'),
        good.replace(signer.public.encode(), b"0" * 64),
        good.replace(b"}}\n", b'},"version":9}\n'),
    ]:
        assert confused != good
        with pytest.raises(CorruptDataError):
            signer.trusted.check(PLACE, confused)


def test_the_file_of_keys_is_read_again_when_it_changes(keys: Path, tmp_path: Path) -> None:
    old, new = (sealed(Signer(keys / name)) for name in ("old", "new"))
    file = tmp_path / "trusted"

    def write(name: str) -> None:
        (tmp_path / "next").write_bytes((keys / name).read_bytes())
        (tmp_path / "next").replace(file)

    write("old.pub")
    trusted = Trusted(path=file)
    trusted.check(PLACE, old)
    with pytest.raises(CorruptDataError, match="not trusted"):
        trusted.check(PLACE, new)
    write("both")
    trusted.check(PLACE, old)
    trusted.check(PLACE, new)
    write("new.pub")
    trusted.check(PLACE, new)
    with pytest.raises(CorruptDataError, match="not trusted"):
        trusted.check(PLACE, old)
    file.write_text("nonsense")
    for _ in range(2):
        with pytest.raises(ConfigError, match="no public key"):
            trusted.check(PLACE, new)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        trusted.check(PLACE, new)
    write("both")
    trusted.check(PLACE, old)


def test_a_signed_channel_is_read_with_keys_and_without(channel_url: str, keys: Path) -> None:
    store = open_store(channel_url)
    published = publish(store, 9, signing_key=keys / "old", retention=Retention(compact_every=3))
    for trusted_keys in (None, keys / "old.pub", str(keys / "both")):
        replica = Replica(store, trusted_keys=trusted_keys)
        assert replica.sync(1) == 1
        assert replica.sync() == 9
        assert_same_bits(replica.state_dict(), published[-1])
    assert len(ChannelReader(store, keys / "old.pub").compactions()) > 0
    with pytest.raises(
        CorruptDataError, match=r"channel\.json is signed with the key \w+, which is not trusted"
    ):
        Replica(store, trusted_keys=keys / "new.pub").sync()


def test_the_environment_tells_every_reader_which_keys_count(
    memory_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(open_store(memory_url), 1)
    monkeypatch.setenv("DELTASYNC_TRUSTED_KEYS", str(keys / "old.pub"))
    with pytest.raises(CorruptDataError, match="not signed"):
        ChannelReader(open_store(memory_url)).channel()
    with pytest.raises(CorruptDataError, match="not signed"):
        Replica(memory_url).sync()
    with pytest.raises(ConfigError, match="set signing_key too"):
        Publisher(memory_url, resume=True)
    monkeypatch.setenv("DELTASYNC_SIGNING_KEY", str(keys / "new"))
    with pytest.raises(CorruptDataError, match="not signed"):
        Publisher(memory_url, resume=True)
    monkeypatch.setenv("DELTASYNC_TRUSTED_KEYS", str(keys / "missing"))
    with pytest.raises(ConfigError, match="cannot be read"):
        Replica(memory_url)


def test_a_signed_channel_goes_on_signed(memory_url: str, keys: Path) -> None:
    store = open_store(memory_url)
    publish(store, 1, signing_key=keys / "old")
    with pytest.raises(ConfigError, match="This channel is signed"):
        Publisher(store, resume=True, dtype="keep")
    with pytest.raises(CorruptDataError, match="not trusted"):
        Publisher(store, resume=True, dtype="keep", signing_key=keys / "new")
    with pytest.raises(ChannelInUseError):
        Publisher(store, dtype="keep", signing_key=keys / "old")
    assert Replica(store, trusted_keys=keys / "old.pub").sync() == 1


def test_a_new_key_takes_over_and_the_old_one_is_revoked(memory_url: str, keys: Path, tmp_path: Path) -> None:
    store, file = open_store(memory_url), tmp_path / "trusted"
    file.write_bytes((keys / "old.pub").read_bytes())
    publish(store, 2, signing_key=keys / "old")
    running = Replica(store, trusted_keys=file)
    running.sync()
    published = publish(store, 2, signing_key=keys / "new", trusted_keys=keys / "both", resume=True)
    with pytest.raises(CorruptDataError, match="which is not trusted here"):
        running.sync()
    assert running.version == 2, "the newest that it may take"
    file.write_bytes((keys / "both").read_bytes())
    for replica in (running, Replica(store, trusted_keys=file)):
        assert replica.sync() == 4
        assert_same_bits(replica.state_dict(), published[-1])
    file.write_bytes((keys / "new.pub").read_bytes())
    assert running.sync() == 4
    with pytest.raises(CorruptDataError, match="not trusted"):
        Replica(store, trusted_keys=file).sync()


@pytest.mark.parametrize("referring", [False, True])
def test_a_publisher_that_died_before_its_first_version_is_continued_with_another_key(
    memory_url: str, keys: Path, tmp_path: Path, referring: bool
) -> None:
    store = open_store(memory_url)
    publish(store, 1, signing_key=keys / "old")
    store.delete(*(info.key for info in list(store.list("")) if info.key.startswith(("head", "versions/"))))
    weights = {"w": torch.ones(5, 8, dtype=torch.bfloat16), "b": torch.zeros(3)}
    save_file(weights, tmp_path / "model.safetensors")
    initial = tmp_path if referring else None
    signed = {"signing_key": keys / "new", "trusted_keys": keys / "both"}
    with Publisher(store, dtype="keep", resume=True, initial=initial, **signed) as publisher:  # type: ignore[arg-type]
        publisher.publish(weights.items()).wait(60)
    assert Replica(store, trusted_keys=keys / "both").sync() == 1


def test_a_replica_does_not_go_back_unless_told(memory_url: str, keys: Path) -> None:
    store = open_store(memory_url)
    heads, published = [], []
    for resume in (False, True, True):
        published += publish(store, 1, signing_key=keys / "old", resume=resume)
        heads.append(store.read(HEAD, 1 << 30))
    replica = Replica(store, trusted_keys=keys / "old.pub")
    replica.sync()
    for head in heads[:2]:
        store.put(HEAD, head)
        assert replica.sync() == 3
        assert_same_bits(replica.state_dict(), published[2])
    assert replica.sync(2) == 2
    assert_same_bits(replica.state_dict(), published[1])
    assert replica.sync() == 3  # by the log, whatever head says


def test_a_channel_whose_newest_version_is_too_old_is_refused(
    memory_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(memory_url)
    channel = Made(store, Signer(keys / "old"))
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.channel.documents.now", lambda: "2026-01-01T00:00:00.000+00:00")
        channel.create(weights())
        channel.anchor(weights())
    replica = Replica(store, trusted_keys=keys / "old.pub", max_age_s=3600)
    with pytest.raises(ChainError, match="newest version, 1, is"):
        replica.sync()
    monkeypatch.setenv("DELTASYNC_MAX_AGE_S", "3600")
    with pytest.raises(ChainError):
        Replica(store).sync()
    channel.delta(trained(weights(), 1))
    assert Replica(store).sync() == replica.sync() == 2


def test_without_cryptography_signatures_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    for action in (
        lambda: Trusted(path=keys / "old.pub"),
        lambda: Signer(keys / "old"),
        lambda: Publisher("memory://nowhere", signing_key=keys / "old"),
        lambda: Replica("memory://nowhere", trusted_keys=keys / "old.pub"),
    ):
        with pytest.raises(ConfigError, match="pip install cryptography"):
            action()


def test_the_private_key_is_never_shown(
    memory_url: str,
    keys: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    private = tmp_path / "key"
    private.write_bytes((keys / "old").read_bytes())
    private.chmod(0o644)
    caplog.set_level(logging.DEBUG)
    publish(open_store(memory_url), 2, signing_key=private, retention=Retention(compact_every=2))
    signer = Signer(private)
    shown = [
        repr(signer),
        repr(vars(signer)),
        repr(PublisherSettings(signing_key=private)),
        caplog.text,
        *capfd.readouterr(),
    ]
    assert "chmod 600 it" in caplog.text and "published version=2" in caplog.text
    secret = signer._key.private_bytes_raw()
    for text in ["".join(private.read_text().splitlines()[1:-1]), secret.hex(), str(secret)]:
        assert not any(text in part for part in shown)
