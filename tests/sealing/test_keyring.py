"""Keys: where they may come from, and that nothing of them is ever told."""

from __future__ import annotations

import base64
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from storage.errors import KeysUnusable
from storage.keyring import Key, Keyring, add_key, looks_like_a_key, read_keys
from storage.sealing import Xaes

if TYPE_CHECKING:
    from pathlib import Path

ONE = base64.b64encode(bytes(range(32))).decode()
TWO = base64.b64encode(bytes(range(32, 64))).decode()


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    file = path / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_first_key_of_a_file_is_the_current_one(tmp_path: Path) -> None:
    text = f"# keys\n\n2026-11 {ONE}  # since November\n2025 {TWO}\n"
    ring = read_keys(file=key_file(tmp_path, text))
    assert ring is not None
    assert ring.current.id == "2026-11"
    assert ring.current.secret == bytes(range(32))
    assert ring.get("2025") is not None
    assert ring.get("2024") is None


def test_a_variable_has_keys_behind_commas() -> None:
    ring = read_keys(variable="KEYS", environment={"KEYS": f"a {ONE}, b {TWO}"})
    assert ring is not None
    assert ring.current.id == "a"
    assert ring.get("b") is not None


def test_no_keys_are_no_keyring() -> None:
    assert read_keys() is None


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o620, 0o644, 0o666, 0o601])
def test_a_key_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(KeysUnusable, match="chmod 600"):
        read_keys(file=key_file(tmp_path, f"a {ONE}\n", mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_key_file_may_be_read_by_its_group(tmp_path: Path, mode: int) -> None:
    assert read_keys(file=key_file(tmp_path, f"a {ONE}\n", mode)) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 keys"),
        ("# none\n", "0 keys"),
        (ONE, "line 1 is not a key id"),
        (f"a {ONE}\n{TWO}\n", "line 2 is not a key id"),
        (f"a {ONE[:-4]}\n", "line 1 is not the base64"),
        (f"a {ONE[:-2]}!=\n", "line 1 is not the base64"),
        (f"a {ONE}\na {TWO}\n", "id of line 2 is there twice"),
        (f"a {ONE}\nb {ONE}\n", "key of line 2 is there twice"),
        (f"ä {ONE}\n", "not ASCII"),
        (f"{ONE} a\n", "line 1 is not a key id"),
        ("a" * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_file_that_is_no_key_file_is_refused_without_a_word_of_it(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(KeysUnusable) as caught:
        read_keys(file=key_file(tmp_path, text))
    assert why in str(caught.value)
    assert ONE[:8] not in f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeysUnusable, match="No such file"):
        read_keys(file=tmp_path / "nothing")
    with pytest.raises(KeysUnusable, match="Is a directory"):
        read_keys(file=tmp_path)
    with pytest.raises(KeysUnusable, match="no such environment variable"):
        read_keys(variable="NOTHING", environment={})


def test_a_key_shows_nothing_but_its_id() -> None:
    key = Key("2026", b"secret-secret-secret-secret-1234")
    for shown in (key, Keyring([key]), Xaes(key, 1)):
        assert "2026" in repr(shown)
        assert "secret" not in f"{shown!r} {shown}"
    with pytest.raises(TypeError):
        pickle.dumps(key)


def test_a_new_key_is_put_first_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "keys"
    add_key(file, "one")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    first = read_keys(file=file)
    add_key(file, "two")
    second = read_keys(file=file)
    assert first is not None
    assert second is not None
    assert (first.current.id, second.current.id) == ("one", "two")
    kept = second.get("one")
    assert kept is not None
    assert kept.secret == first.current.secret != second.current.secret
    with pytest.raises(KeysUnusable, match="already"):
        add_key(file, "one")
    with pytest.raises(KeysUnusable, match="key id"):
        add_key(file, "a b")


def test_what_looks_like_a_key_is_known() -> None:
    assert looks_like_a_key(ONE)
    assert looks_like_a_key(ONE.rstrip("="))
    assert looks_like_a_key(f"2026-11 {TWO}")
    assert looks_like_a_key("00" * 32)
    assert not looks_like_a_key("/etc/amqtt-durable/keys")
    assert not looks_like_a_key("AMQTT_DURABLE_KEYS")


@pytest.mark.parametrize(
    ("key", "nonce", "bound", "sealed"),
    [
        (
            b"\x01" * 32,
            b"ABCDEFGHIJKLMNOPQRSTUVWX",
            b"",
            "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271",
        ),
        (
            b"\x03" * 32,
            b"ABCDEFGHIJKLMNOPQRSTUVWX",
            b"c2sp.org/XAES-256-GCM",
            "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
        ),
    ],
)
def test_the_cipher_is_xaes_256_gcm(key: bytes, nonce: bytes, bound: bytes, sealed: str) -> None:
    """The vectors of https://c2sp.org/XAES-256-GCM."""
    xaes = Xaes(Key("vector", key), 1)
    assert xaes.open(nonce[:12], nonce[12:], bytes.fromhex(sealed), bound) == b"XAES-256-GCM"


def test_no_two_rows_have_one_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.sealing.SEALS_MAX", 10)
    key = Key("a", bytes(32))
    nonces = {Xaes(key, 1).seal(b"x", b"")[4:28] for _ in range(5)}
    xaes = Xaes(key, 1)
    nonces |= {xaes.seal(b"x", b"")[4:28] for _ in range(35)}
    assert len(nonces) == 40
    assert len({nonce[:12] for nonce in nonces}) == 5 + 4


def test_no_two_threads_take_one_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.sealing.SEALS_MAX", 997)
    xaes = Xaes(Key("a", bytes(32)), 1)
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: [xaes.seal(b"x", b"")[4:28] for _ in range(2500)], range(4))
        )
    assert len({nonce for some in found for nonce in some}) == 10_000
