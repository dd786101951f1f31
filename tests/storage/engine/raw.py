"""The durable stores from below: their files, and the rows in them."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from storage import open_store
from storage.durable import FILES, DurableStore
from storage.kv import U64, Space
from storage.lmdb_store import _LmdbDatabase
from storage.sqlite_store import _SqliteDatabase
from tests.storage.harness import Database

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from storage.api import Store
    from storage.kv import WriteTxn

T = TypeVar("T")
Kind: TypeAlias = Literal["lmdb", "sqlite"]

KINDS: Final[tuple[Kind, ...]] = ("lmdb", "sqlite")


class Files:
    """A data directory; a Backend of the harness, to be looked into while it is closed."""

    def __init__(self, kind: Kind, directory: Path, *, map_bytes_max: int | None = None) -> None:
        self.kind = kind
        self.directory = directory
        self.map_bytes_max = map_bytes_max

    @property
    def file(self) -> Path:
        return self.directory / FILES[self.kind]

    @property
    def sidecar(self) -> Path:
        return self.directory / f"{FILES[self.kind]}.identity.json"

    def start(self) -> Store:
        return open_store(
            self.kind, self.directory, durability="os", map_bytes_max=self.map_bytes_max
        )

    def back_up(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def database(self) -> Database:
        return Database(self)

    def alter(self, work: Callable[[WriteTxn], T]) -> T:
        """Do something to the rows of a closed database, behind the store's back."""
        if self.kind == "lmdb":
            lmdb = _LmdbDatabase(self.file, "os", None, create=False)
            try:
                return lmdb.write(work)
            finally:
                lmdb.close()
        connection = sqlite3.connect(self.file, isolation_level=None)
        try:
            sqlite = _SqliteDatabase(connection)
            sqlite.prepare("os", create=False, writes=True)
            return sqlite.write(work)
        finally:
            connection.close()

    def flip(self, space: Space, key: bytes, at: int, mask: int = 0x01) -> None:
        """Flip bits of one byte of a value."""

        def work(txn: WriteTxn) -> None:
            value = txn.get(space, key)
            assert value is not None
            spoiled = bytearray(value)
            spoiled[at] ^= mask
            txn.put(space, key, bytes(spoiled))

        self.alter(work)

    def flip_block(self, first: int, at: int) -> None:
        self.flip(Space.HISTORY, U64.pack(first), at)


def engine_of(store: Store) -> object:
    assert isinstance(store, DurableStore)
    return store._engine
