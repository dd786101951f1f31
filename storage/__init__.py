"""The durable store of amqtt-durable; ``storage.api`` says what it promises.

``open_store`` makes a store of a kind; everything else is for those who write another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from storage.api import Batch, Opened, Store
from storage.errors import StoreError, StoreUnavailable, StoreUnusable

if TYPE_CHECKING:
    from pathlib import Path

    from storage.keyring import Keyring

__all__ = [
    "Batch",
    "Opened",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "StoreUnusable",
    "open_store",
]


def open_store(
    kind: Literal["lmdb", "sqlite", "memory"],
    data_dir: Path,
    *,
    durability: Literal["fsync", "os"] = "fsync",
    map_bytes_max: int | None = None,
    keyring: Keyring | None = None,
    seal_topics: bool = False,
) -> Store:
    """Make a store, not opened yet: ``await store.open(now_ms=...)`` does that.

    data_dir: a directory of its own; not used by "memory".
    durability: "fsync" = on disk when it is reported, "os" = with the operating system.
    map_bytes_max: "lmdb" only: the largest file; None = 64 GiB, or what the disk has.
    keyring, seal_topics: what is on disk is sealed (storage.sealing); not for "memory".
    Backends are imported when they are asked for, so that one does not need the others' packages.
    """
    if kind == "lmdb":
        from storage.lmdb_store import LmdbStore  # noqa: PLC0415

        return LmdbStore(
            data_dir,
            durability=durability,
            map_bytes_max=map_bytes_max,
            keyring=keyring,
            seal_topics=seal_topics,
        )
    if kind == "sqlite":
        from storage.sqlite_store import SqliteStore  # noqa: PLC0415

        return SqliteStore(
            data_dir, durability=durability, keyring=keyring, seal_topics=seal_topics
        )
    if kind == "memory":
        from storage.memory import MemoryStore  # noqa: PLC0415

        return MemoryStore()
    msg = f"a store is 'lmdb', 'sqlite' or 'memory', not {kind!r}"
    raise ValueError(msg)
