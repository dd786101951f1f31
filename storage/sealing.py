"""Sealed rows: AES-256-GCM between the engine and the backend.

A sealed database is a storage.kv.Database that wraps another one. What is written to certain spaces
is sealed on its way down and opened on its way up, in the writer's and the reader's threads; engine
and backends do not know. A block of history is one row, so a commit costs one encryption, however
many messages are in it; live deliveries come from memory and cost none.

    SEALED_ROWS   values of HISTORY, HELD, RETAINED, WILL, OUTBOX_BODY: messages, with topics,
                  origins and sizes
    SEALED_NAMES  with ``seal_topics`` also values of TOPIC_NAME, FILTER, SUBSCRIPTION, and the
                  names in keys of TOPIC, RETAINED, FILTER, SUBSCRIPTION

A sealed value, numbers big-endian:

    +0   u8   0xff: no value that is not sealed begins with it
    +1   u8   version = 1
    +2   u16  number of the key
    +4   12s  derivation nonce: random, one for each opening of the database
    +16  12s  nonce: a counter
    +28  ciphertext, as long as the value
    ...  16s  tag

It is XAES-256-GCM (C2SP): AES-256-GCM under a key that is derived from the key of the ring and the
derivation nonce, with the nonce. Random 96-bit nonces under one key would begin to collide after
some 2^32 rows, days of a busy broker; these never do, whatever is restored, copied or killed.

The associated data are database id, space and key of the row: one that was moved to another place
or database does not open. What it cannot see is an older value of the same row that was put back.

A name in a key is replaced by 0xff and its keyed hash (BLAKE2b under the *topic key*, 256 random
bits of this database, sealed with the current key). Equality is kept, so that a row is found by its
name; order is not, so that wildcards look through names, not through a range of keys. A hash has
one length however long the name is, and nothing to decrypt: each row holds its name in its sealed
value.

Rows of META, in the form above, each followed by a CRC-32:

    b"key/" + id   the canary of a key that something may be sealed with: key ids are known by it
    b"seal"        u8 version = 1, u8 flags, topic key or nothing

Rule 1. A database with canaries is opened only with all their keys, and they must be right.
Rule 2. A row that does not open is damage (410 to whoever needs it), told once in the log
        ``amqtt_durable.security``, never passed over in silence.
Rule 3. Rows that are not sealed are read only while the flags say that there are some: until the
        first ``rekey`` after sealing was turned on. After that, one of them is as in Rule 2.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import TYPE_CHECKING, Final, TypeVar
from zlib import crc32

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher as Aes
from cryptography.hazmat.primitives.ciphers import algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from storage.errors import SealKeyMissing, SealKeyWrong
from storage.kv import Space
from storage.meta import MetaDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from storage.keyring import Key, Keyring
    from storage.kv import Database, ReadTxn, WriteTxn

__all__ = [
    "NAMED",
    "OVERHEAD_BYTES",
    "PLAIN_NAMES",
    "PLAIN_ROWS",
    "SEALED_NAMES",
    "SEALED_ROWS",
    "SealedDatabase",
    "SealedTxn",
    "Seals",
    "Xaes",
    "guarded",
    "is_sealed",
    "key_ids",
    "put_seal_rows",
    "seal_rows",
    "unlock",
]

T = TypeVar("T")

security = logging.getLogger("amqtt_durable.security")

SEALED_ROWS: Final = frozenset(
    {Space.HISTORY, Space.HELD, Space.RETAINED, Space.WILL, Space.OUTBOX_BODY}
)
SEALED_NAMES: Final = frozenset({Space.TOPIC_NAME, Space.FILTER, Space.SUBSCRIPTION})
NAMED: Final = frozenset({Space.TOPIC, Space.RETAINED, Space.FILTER, Space.SUBSCRIPTION})
"""Spaces whose keys have a name in them."""

PLAIN_ROWS: Final = 0x01
"""Flag: there may be rows of SEALED_ROWS that are not sealed."""
PLAIN_NAMES: Final = 0x02
"""Flag: there may be rows of SEALED_NAMES that are not sealed, and names in keys."""

_MARK: Final = 0xFF
_MARK_BYTE: Final = b"\xff"
_VERSION: Final = 1
_HEAD: Final = Struct(">BBH12s12s")
_TAG_BYTES: Final = 16
OVERHEAD_BYTES: Final = _HEAD.size + _TAG_BYTES
"""A sealed value is this much longer than the value."""

TOPIC_KEY_BYTES: Final = 32
_HASH_BYTES: Final = 32
_SHORT_HASH_BYTES: Final = 16
_ID_BYTES: Final = 8
"""Keys of SUBSCRIPTION begin with the consumer's id."""

SEALS_MAX: Final = 1 << 32
"""Rows sealed under one derived key."""
DERIVED_MAX: Final = 1024
"""Derived keys kept: one for each opening that rows are left of."""
NAMES_KEPT_MAX: Final = 65_536
"""Opened names kept, some 10 MB: a wildcard looks through them at each read."""
BLOCKS_KEPT: Final = 256
BLOCK_KEPT_BYTES: Final = 64 << 10
"""Opened blocks kept: those that storage.history keeps taken apart, so they are in memory once."""
TOLD_MAX: Final = 10_000
"""Rows that are remembered to have been told about."""

_KEY_ROW: Final = b"key/"
_KEY_ROWS_END: Final = b"key0"
_SEAL_ROW: Final = b"seal"
_CANARY: Final = b"amqtt-durable seals with this key"
_CRC: Final = Struct(">I")


# ------------------------------------------------------------------------------------- cipher


class Xaes:
    """XAES-256-GCM (C2SP) under one key. number: what its id is stored as.

    May be used in any thread: a nonce is taken by one call, which two threads cannot be in.
    """

    __slots__ = ("_derived", "_encrypt", "_sealing", "_subkey", "id", "number")

    def __init__(self, key: Key, number: int) -> None:
        self.id = key.id
        self.number = number
        # one block at a time is what a key derivation by CMAC is made of
        self._encrypt = Aes(algorithms.AES(key.secret), modes.ECB()).encryptor().update  # noqa: S305
        zero = int.from_bytes(self._encrypt(bytes(16)), "big")
        doubled = (zero << 1) ^ (0x87 if zero >> 127 else 0)
        self._subkey = doubled & ((1 << 128) - 1)
        self._derived: dict[bytes, AESGCM] = {}
        self._sealing = self._begin()

    def __repr__(self) -> str:
        return f"Xaes({self.id!r})"

    def _begin(self) -> tuple[bytes, AESGCM, Iterator[int]]:
        """A new derivation nonce, its cipher, and the nonces under it."""
        derivation = os.urandom(12)
        return derivation, self._derive(derivation), count()

    def _derive(self, nonce: bytes) -> AESGCM:
        """The cipher of a derivation nonce: AES-CMAC as in NIST SP 800-108 with counter."""
        halves = [
            int.from_bytes(prefix + nonce, "big") ^ self._subkey
            for prefix in (b"\x00\x01X\x00", b"\x00\x02X\x00")
        ]
        return AESGCM(b"".join(self._encrypt(half.to_bytes(16, "big")) for half in halves))

    def seal(self, value: bytes, bound: bytes) -> bytes:
        """A sealed value. bound: associated data."""
        while True:
            derivation, cipher, numbers = self._sealing
            number = next(numbers)
            if number < SEALS_MAX:
                break
            self._sealing = self._begin()
        nonce = number.to_bytes(12, "big")
        head = _HEAD.pack(_MARK, _VERSION, self.number, derivation, nonce)
        return head + cipher.encrypt(nonce, value, bound)

    def open(self, derivation: bytes, nonce: bytes, sealed: bytes, bound: bytes) -> bytes:
        """Raises InvalidTag."""
        derived = self._derived.get(derivation)
        if derived is None:
            if len(self._derived) >= DERIVED_MAX:
                self._derived.clear()
            self._derived[derivation] = derived = self._derive(derivation)
        return derived.decrypt(nonce, sealed, bound)


def is_sealed(raw: bytes) -> bool:
    """Whether a value looks like a sealed one."""
    return raw[:1] == _MARK_BYTE


# -------------------------------------------------------------------------------------- seals


@dataclass(frozen=True, slots=True, repr=False)
class _State:
    """The row b"seal"."""

    flags: int = 0
    topic_key: bytes = b""

    def pack(self) -> bytes:
        return bytes((_VERSION, self.flags)) + self.topic_key

    @classmethod
    def unpack(cls, packed: bytes) -> _State:
        return cls(packed[1], packed[2:])


class Seals:
    """What one database is sealed with. It does not change; ``rekey`` puts another in its place.

    ciphers: number -> key, of every key that something may be sealed with.
    """

    def __init__(
        self, db_id: str, ciphers: Mapping[int, Xaes], current: Xaes, state: _State
    ) -> None:
        self._db_id = bytes.fromhex(db_id)
        self._ciphers = ciphers
        self._state = state
        self.current = current
        self.flags = state.flags
        self.has_names = bool(state.topic_key)
        self.sealed = SEALED_ROWS | SEALED_NAMES if self.has_names else SEALED_ROWS
        self._names: dict[tuple[bytes, bytes], bytes] = {}
        self._blocks: dict[tuple[bytes, bytes], bytes] = {}
        self._told: set[tuple[Space, bytes]] = set()

    def __repr__(self) -> str:
        return f"Seals(current={self.current.id!r}, names={self.has_names})"

    @property
    def key_ids(self) -> list[str]:
        """Of every key that something may be sealed with; the current one first."""
        others = sorted(c.id for c in self._ciphers.values() if c is not self.current)
        return [self.current.id, *others]

    def is_plain(self, space: Space) -> bool:
        """Whether rows of a space may be there that are not sealed."""
        return bool(self.flags & (PLAIN_NAMES if space in SEALED_NAMES else PLAIN_ROWS))

    # ------------------------------------------------------------------------------- values

    def seal(self, space: Space, key: bytes, value: bytes) -> bytes:
        """Seal a value for the row of this key. In the writer's thread."""
        return self.current.seal(value, _bound(self._db_id, space, key))

    def try_open(self, space: Space, key: bytes, raw: bytes) -> bytes | None:
        """Open a value; None if it does not open (Rules 2 and 3)."""
        if raw[:1] != _MARK_BYTE:
            if self.is_plain(space):
                return raw
        else:
            try:
                _, version, number, derivation, nonce = _HEAD.unpack_from(raw)
                if version == _VERSION:
                    sealed = raw[_HEAD.size :]
                    bound = _bound(self._db_id, space, key)
                    return self._ciphers[number].open(derivation, nonce, sealed, bound)
            except (StructError, KeyError, InvalidTag):
                pass  # told below
        self._tell(space, key)
        return None

    def open(self, space: Space, key: bytes, raw: bytes) -> bytes:
        """Open a value. One that does not open is zeros, or no name: no reader takes that."""
        kept: dict[tuple[bytes, bytes], bytes]
        if space is Space.HISTORY and len(raw) <= BLOCK_KEPT_BYTES:
            kept, kept_max, name = self._blocks, BLOCKS_KEPT, (key, raw[: _HEAD.size])
        elif space in SEALED_NAMES:
            kept, kept_max, name = self._names, NAMES_KEPT_MAX, (key, raw)
        else:
            value = self.try_open(space, key, raw)
            return _broken(space, raw) if value is None else value
        if (value := kept.get(name)) is not None:
            return value
        value = self.try_open(space, key, raw)
        if value is None:
            return _broken(space, raw)
        if len(kept) >= kept_max:
            kept.clear()
        kept[name] = value
        return value

    def needs(self, space: Space, key: bytes, raw: bytes) -> bool:
        """Whether a row is not sealed as it would be sealed now."""
        if space in NAMED and self.place(space, key) != key:
            return True
        if space not in self.sealed:
            return False
        return not is_sealed(raw) or raw[2:4] != self.current.number.to_bytes(2, "big")

    def _tell(self, space: Space, key: bytes) -> None:
        row = (space, key)
        if row in self._told:
            return
        if len(self._told) < TOLD_MAX:
            self._told.add(row)
        security.error(
            "a row of kind %s does not open (key %s): it was changed, or comes from another place",
            space.name.lower(),
            key.hex()[:80],
        )

    # -------------------------------------------------------------------------------- names

    def place(self, space: Space, key: bytes) -> bytes:
        """The key that a row is stored under: with the hash of the name, if names are hidden."""
        topic_key = self._state.topic_key
        if not topic_key or space not in NAMED:
            return key
        if space is Space.SUBSCRIPTION:
            head, name, size = key[:_ID_BYTES], key[_ID_BYTES:], _SHORT_HASH_BYTES
            if len(name) == 1 + size:
                return key
        else:
            head, name, size = b"", key, _HASH_BYTES
            if name[:1] == _MARK_BYTE:  # no name begins with it: it is not UTF-8
                return key
        digest = blake2b(name, key=topic_key, digest_size=size, person=bytes((space,))).digest()
        return b"".join((head, _MARK_BYTE, digest))

    # --------------------------------------------------------------------------------- META

    def write_state(self, txn: WriteTxn) -> None:
        """Put the state, sealed with the current key. txn: of the database that is wrapped."""
        _put_meta(txn, _SEAL_ROW, self.seal(Space.META, _SEAL_ROW, self._state.pack()))

    def write_canary(self, txn: WriteTxn) -> None:
        """Put the canary of the current key."""
        key = _KEY_ROW + self.current.id.encode("ascii")
        _put_meta(txn, key, self.seal(Space.META, key, _CANARY))

    def finished(self, txn: WriteTxn) -> Seals:
        """Everything is sealed with the current key: the others are not needed any more."""
        done = Seals(
            self._db_id.hex(),
            {self.current.number: self.current},
            self.current,
            replace(self._state, flags=0),
        )
        done.write_state(txn)
        for key, _ in list(txn.scan(Space.META, _KEY_ROW, _KEY_ROWS_END)):
            if key != _KEY_ROW + self.current.id.encode("ascii"):
                txn.delete(Space.META, key)
        return done


def _bound(db_id: bytes, space: Space, key: bytes) -> bytes:
    """Associated data: the place of a row."""
    return b"".join((db_id, bytes((space,)), key))


def _broken(space: Space, raw: bytes) -> bytes:
    """What stands for a value that does not open; a block is as long as it was counted."""
    return b"" if space in SEALED_NAMES else bytes(max(0, len(raw) - OVERHEAD_BYTES))


def _put_meta(txn: WriteTxn, key: bytes, sealed: bytes) -> None:
    txn.put(Space.META, key, sealed + _CRC.pack(crc32(sealed, crc32(key))))


def seal_rows(txn: ReadTxn) -> list[tuple[bytes, bytes]]:
    """The rows of META about keys, for a database that takes the place of this one."""
    rows = list(txn.scan(Space.META, _KEY_ROW, _KEY_ROWS_END))
    state = txn.get(Space.META, _SEAL_ROW)
    return rows if state is None else [*rows, (_SEAL_ROW, state)]


def put_seal_rows(txn: WriteTxn, rows: list[tuple[bytes, bytes]]) -> None:
    """Put what ``seal_rows`` gave."""
    for key, raw in rows:
        txn.put(Space.META, key, raw)


def _meta(key: bytes, raw: bytes) -> bytes:
    """Raises MetaDamaged."""
    sealed = raw[: -_CRC.size]
    if len(sealed) < OVERHEAD_BYTES or _CRC.pack(crc32(sealed, crc32(key))) != raw[-_CRC.size :]:
        raise MetaDamaged(f"what it says about its keys ({key.decode('ascii', 'replace')})")
    return sealed


# ---------------------------------------------------------------------------------- unlocking


def key_ids(txn: ReadTxn) -> list[str]:
    """Ids of the keys that something in a database may be sealed with; empty = it is not sealed."""
    rows = txn.scan(Space.META, _KEY_ROW, _KEY_ROWS_END)
    return [key[len(_KEY_ROW) :].decode("ascii", "replace") for key, _ in rows]


def unlock(
    database: Database,
    db_id: str,
    keyring: Keyring | None,
    *,
    path: str,
    seal_topics: bool = False,
    is_new: bool = False,
    is_readonly: bool = False,
) -> Seals | None:
    """What a database is sealed with; None = it is not, and no keys were given.

    With keys, a database that is not sealed is from now on, and a current key that is new to it
    becomes one of its keys; unless ``is_readonly``: then it is taken as it is.
    is_new: there is nothing in it yet. path: of the data directory, for errors.
    Raises SealKeyMissing, SealKeyWrong, MetaDamaged; then nothing was changed.
    """
    rows, raw_state = database.read(
        lambda txn: (
            list(txn.scan(Space.META, _KEY_ROW, _KEY_ROWS_END)),
            txn.get(Space.META, _SEAL_ROW),
        )
    )
    if keyring is None:
        if rows:
            wanted = rows[0][0][len(_KEY_ROW) :].decode("ascii", "replace")
            reason = (
                "the database is sealed; name its keys with seal_key_file or seal_key_env, those of"
                " a command with --key-file or --key-env"
            )
            raise SealKeyMissing(path, reason, wanted)
        return None
    if not rows and is_readonly:
        return None
    ciphers = {cipher.number: cipher for cipher in _known(rows, keyring, db_id, path)}
    current = next((c for c in ciphers.values() if c.id == keyring.current.id), None)
    if current is None and not is_readonly:
        current = Xaes(keyring.current, max(ciphers, default=0) + 1)
        ciphers[current.number] = current
    if current is None:
        current = ciphers[max(ciphers)]
    state = _state(raw_state, ciphers, current, db_id) if rows else None
    flags = 0 if is_new else PLAIN_ROWS | PLAIN_NAMES
    wanted_state = state or _State(flags & PLAIN_ROWS)
    if seal_topics and not wanted_state.topic_key:
        wanted_state = _State(wanted_state.flags | flags & PLAIN_NAMES, os.urandom(TOPIC_KEY_BYTES))
    if is_readonly:
        return Seals(db_id, ciphers, current, state or wanted_state)
    seals = Seals(db_id, ciphers, current, wanted_state)
    is_known = any(key == _KEY_ROW + current.id.encode("ascii") for key, _ in rows)
    if not is_known or wanted_state != state:
        database.write(lambda txn: _begin(txn, seals))
    return seals


def _begin(txn: WriteTxn, seals: Seals) -> None:
    seals.write_canary(txn)
    seals.write_state(txn)


def _known(
    rows: list[tuple[bytes, bytes]], keyring: Keyring, db_id: str, path: str
) -> Iterator[Xaes]:
    """The keys behind the canaries. Raises SealKeyMissing, SealKeyWrong, MetaDamaged."""
    for row_key, raw in rows:
        key_id = row_key[len(_KEY_ROW) :].decode("ascii", "replace")
        sealed = _meta(row_key, raw)
        key = keyring.get(key_id)
        if key is None:
            reason = (
                "something in the database is sealed with it: put it back among the keys; `rekey`"
                " makes it needless"
            )
            raise SealKeyMissing(path, reason, key_id)
        _, _, number, derivation, nonce = _HEAD.unpack_from(sealed)
        cipher = Xaes(key, number)
        bound = _bound(bytes.fromhex(db_id), Space.META, row_key)
        try:
            cipher.open(derivation, nonce, sealed[_HEAD.size :], bound)
        except InvalidTag:
            reason = "the database was sealed with another key of this id"
            raise SealKeyWrong(path, reason, key_id) from None
        yield cipher


def _state(raw: bytes | None, ciphers: Mapping[int, Xaes], current: Xaes, db_id: str) -> _State:
    """Raises MetaDamaged."""
    reader = Seals(db_id, ciphers, current, _State())
    packed = reader.try_open(Space.META, _SEAL_ROW, _meta(_SEAL_ROW, raw or b""))
    if not packed or packed[0] != _VERSION or len(packed) not in (2, 2 + TOPIC_KEY_BYTES):
        raise MetaDamaged("what it says about its keys (seal)")
    return _State.unpack(packed)


# -------------------------------------------------------------------------------- the wrapper


class SealedTxn:
    """storage.kv.WriteTxn over one of a backend."""

    __slots__ = ("_seals", "_txn", "hides_names")

    def __init__(self, txn: WriteTxn, seals: Seals) -> None:
        self._txn = txn
        self._seals = seals
        self.hides_names = seals.has_names

    def place(self, space: Space, key: bytes) -> bytes:
        seals = self._seals
        placed = seals.place(space, key)
        if placed != key and seals.flags & PLAIN_NAMES and self._txn.get(space, placed) is None:
            return key if self._txn.get(space, key) is not None else placed
        return placed

    def get(self, space: Space, key: bytes) -> bytes | None:
        seals = self._seals
        if space in NAMED and seals.has_names:
            key = self.place(space, key)
        value = self._txn.get(space, key)
        if value is None or space not in seals.sealed:
            return value
        return seals.open(space, key, value)

    def put(self, space: Space, key: bytes, value: bytes) -> None:
        seals = self._seals
        if space in NAMED and seals.has_names:
            placed = seals.place(space, key)
            if placed != key and seals.flags & PLAIN_NAMES:
                self._txn.delete(space, key)
            key = placed
        if space in seals.sealed:
            value = seals.seal(space, key, value)
        self._txn.put(space, key, value)

    def delete(self, space: Space, key: bytes) -> bool:
        seals = self._seals
        if space in NAMED and seals.has_names:
            placed = seals.place(space, key)
            if placed != key:
                was_plain = seals.flags & PLAIN_NAMES and self._txn.delete(space, key)
                return self._txn.delete(space, placed) or bool(was_plain)
        return self._txn.delete(space, key)

    def scan(
        self,
        space: Space,
        start: bytes = b"",
        stop: bytes | None = None,
        *,
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        rows = self._txn.scan(space, start, stop, reverse=reverse)
        seals = self._seals
        if space not in seals.sealed:
            return rows
        return ((key, seals.open(space, key, value)) for key, value in rows)


class SealedDatabase:
    """storage.kv.Database over another one."""

    def __init__(self, database: Database, seals: Seals) -> None:
        self._database = database
        self._seals = seals

    def write(self, work: Callable[[WriteTxn], T], *, frees: bool = False) -> T:
        """See storage.kv.Database."""
        return self._database.write(lambda txn: work(SealedTxn(txn, self._seals)), frees=frees)

    def read(self, work: Callable[[ReadTxn], T]) -> T:
        """See storage.kv.Database."""
        # a transaction that only reads is asked for nothing else
        return self._database.read(lambda txn: work(SealedTxn(txn, self._seals)))  # type: ignore[arg-type]

    def scrub(self) -> None:
        """See storage.kv.Database."""
        self._database.scrub()

    def close(self) -> None:
        """See storage.kv.Database."""
        self._database.close()


def guarded(database: Database, seals: Seals | None) -> Database:
    """The database to work on: the wrapped one, if it is sealed."""
    return database if seals is None else SealedDatabase(database, seals)
