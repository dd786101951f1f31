"""Keys that databases are sealed with: where they come from, and that they are never shown.

A key has an id, which is no secret and is stored with what the key sealed, and 32 secret bytes.
Keys are read from a file or from an environment variable, a line each:

    # the first one seals, the others only open what they sealed
    2026-11 qkqLS2cmR3A0cBWJCcAXMmzOxnCmjqPGKMlRzQcqYOY=
    2025-03 9mTI9FpX2OdTTvFzUj0rUBnfO9HPnLKSxJkVPEEyc4A=

In a variable a comma may stand for the end of a line. A file must not be readable by others, and
not writable by its group.

Rule 1. No text that this module raises or shows has anything of a key in it but its id (P13).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING, Final

from storage.errors import KeysUnusable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["KEY_BYTES", "Key", "Keyring", "add_key", "looks_like_a_key", "read_keys"]

KEY_BYTES: Final = 32
"""AES-256."""

FILE_BYTES_MAX: Final = 65_536
KEYS_MAX: Final = 256

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{43}=?")
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")


class Key:
    """A key. Its secret is not in its ``repr``, and it cannot be pickled by mistake."""

    __slots__ = ("id", "secret")

    def __init__(self, key_id: str, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES, "a key has 32 bytes"
        self.id = key_id
        self.secret = secret

    def __repr__(self) -> str:
        return f"Key({self.id!r})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not to be pickled")


class Keyring:
    """Keys by id; the first one is ``current``: what is written from now on is sealed with it."""

    __slots__ = ("_keys", "current")

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.id: key for key in keys}
        self.current = next(iter(self._keys.values()))

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._keys)})"

    def get(self, key_id: str) -> Key | None:
        """The key of an id, or None."""
        return self._keys.get(key_id)


def read_keys(
    *, file: Path | None = None, variable: str = "", environment: Mapping[str, str] = os.environ
) -> Keyring | None:
    """The keys in a file, or in a variable of the environment; None if neither is named.

    Raises KeysUnusable.
    """
    if file is not None:
        return _parse(_read(file), str(file))
    if not variable:
        return None
    text = environment.get(variable)
    if text is None:
        raise KeysUnusable(f"${variable}", "there is no such environment variable")
    return _parse(text.replace(",", "\n"), f"${variable}")


def _read(file: Path) -> str:
    """Raises KeysUnusable."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise KeysUnusable(str(file), "it is not a file")
            if mode & (stat.S_IRWXO | stat.S_IWGRP):
                reason = f"its mode is {stat.S_IMODE(mode):04o}: others may use it; chmod 600"
                raise KeysUnusable(str(file), reason)
            raw = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeysUnusable(str(file), error.strerror or "it cannot be read") from error
    if len(raw) > FILE_BYTES_MAX:
        raise KeysUnusable(str(file), f"it has more than {FILE_BYTES_MAX} bytes")
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise KeysUnusable(str(file), "it is not ASCII text") from None


def _parse(text: str, source: str) -> Keyring:
    """Raises KeysUnusable, which names lines by their numbers."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _ID.fullmatch(words[0]):
            reason = f"line {number} is not a key id and the base64 of its key"
            raise KeysUnusable(source, reason)
        secret = _decode(words[1])
        if secret is None:
            reason = f"the key of line {number} is not the base64 of {KEY_BYTES} bytes"
            raise KeysUnusable(source, reason)
        if any(secrets.compare_digest(key.secret, secret) for key in keys):
            raise KeysUnusable(source, f"the key of line {number} is there twice")
        if any(key.id == words[0] for key in keys):
            raise KeysUnusable(source, f"the key id of line {number} is there twice")
        keys.append(Key(words[0], secret))
    if not 0 < len(keys) <= KEYS_MAX:
        raise KeysUnusable(source, f"it has {len(keys)} keys; there must be 1 to {KEYS_MAX}")
    return Keyring(keys)


def _decode(word: str) -> bytes | None:
    try:
        secret = base64.b64decode(word, validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if len(secret) == KEY_BYTES else None


def looks_like_a_key(text: str) -> bool:
    """Whether somebody wrote a key where the name of a file or a variable belongs."""
    return any(
        _BASE64.fullmatch(word) is not None or _HEX.fullmatch(word) is not None
        for word in text.replace(",", " ").split()
    )


def add_key(file: Path, key_id: str) -> None:
    """Make a new key and put it first in a key file, which is made if it is not there.

    The file is replaced as a whole; a key that is in it stays. Raises KeysUnusable.
    """
    if not _ID.fullmatch(key_id) or looks_like_a_key(key_id):
        raise KeysUnusable(str(file), "a key id has 1 to 64 letters, digits, dots and dashes")
    before = ""
    if file.exists():
        before = _read(file)
        if _parse(before, str(file)).get(key_id) is not None:
            raise KeysUnusable(str(file), f"it has a key {key_id} already")
    secret = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode("ascii")
    fresh = file.with_name(f"{file.name}.new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{key_id} {secret}\n{before}")
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
    except OSError as error:
        raise KeysUnusable(str(file), error.strerror or "it cannot be written") from error
