"""What the tests of operations work on: a database with something of everything in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from storage.api import (
    GROUP,
    HELD,
    RECEIVED,
    Advance,
    Claim,
    Delivery,
    Retain,
    StoreWill,
    Subscribe,
    Subscription,
    Will,
)
from storage.files import database_file, open_database, sidecar_file
from storage.kv import U64, Space
from tests.storage.harness import A, Database, Dump, OnDisk, message
from tests.storage.outbox import fill_outbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from storage.api import Opened
    from storage.files import Kind
    from storage.keyring import Keyring
    from storage.kv import ReadTxn, WriteTxn

__all__ = ["LONG", "Files", "content", "populate"]

LONG: Final = b"long/" + b"x" * 600
"""A name longer than a key."""

ENTRIES: Final = 100
"""In blocks of one; those from about 65 on are not indexed yet."""


@dataclass
class Files:
    """A scratch directory; ``data`` is the data directory of a store of this kind."""

    path: Path
    kind: Kind
    keyring: Keyring | None = None
    seal_topics: bool = False

    @property
    def data(self) -> Path:
        return self.path / self.kind

    @property
    def database(self) -> Path:
        return database_file(self.data, self.kind)

    @property
    def sidecar(self) -> Path:
        return sidecar_file(self.data, self.kind)

    @property
    def other(self) -> Kind:
        return "sqlite" if self.kind == "lmdb" else "lmdb"

    def store(self, kind: Kind | None = None, data: Path | None = None) -> Database:
        """A store in ``data``, not open."""
        data = data or self.data
        kind = kind or self.kind
        backend = OnDisk(kind, data.parent, self.keyring, seal_topics=self.seal_topics)
        backend._path = data
        return Database(backend)

    async def dump(self, kind: Kind | None = None, data: Path | None = None) -> Dump:
        """Open, tell everything, check, close."""
        store = self.store(kind, data)
        await store.open()
        dump = await store.dump()
        await store.stop()
        return dump

    async def opened(self, data: Path | None = None) -> Opened:
        """Open and close."""
        store = self.store(data=data)
        opened = await store.open()
        await store.stop()
        return opened

    def read(self, work: Callable[[ReadTxn], object]) -> object:
        database = open_database(self.database, self.kind)
        try:
            return database.read(work)
        finally:
            database.close()

    def write(self, work: Callable[[WriteTxn], object]) -> None:
        """Change rows behind the store's back."""
        database = open_database(self.database, self.kind)
        try:
            database.write(work)
        finally:
            database.close()

    def flip(self, space: Space, key: bytes, at: int) -> None:
        """One bit of a stored value."""

        def work(txn: WriteTxn) -> None:
            value = bytearray(txn.get(space, key) or b"")
            value[at] ^= 0x10
            txn.put(space, key, bytes(value))

        self.write(work)

    def flip_block(self, first: int, at: int) -> None:
        self.flip(Space.HISTORY, U64.pack(first), at)


def content(dump: Dump) -> Dump:
    """All of a dump but for the identity, which an operation may change."""
    return replace(dump, log=("", "", *dump.log[2:]))


async def populate(files: Files) -> Dump:
    """Sessions in every state; what they are is told by their names. Closed when it returns.

    behind has had nothing of ``a/#``; flying has 90 of ``b`` under way and had what was before;
    done had everything of ``c``; never is subscribed to nothing that was published. The group of
    ``b`` has one delivery with flying, and one with nobody.
    """
    store = files.store()
    await store.open()
    await store.subscriber(b"behind", b"a/#", LONG)
    flying = await store.subscriber(b"flying", b"b", b"qos0", qos=2)
    done = await store.subscriber(b"done", b"c", incarnation=A)
    await store.subscriber(b"never", b"other/+/x")
    topics = (b"a/1", b"b", b"c", b"a/2", LONG)
    await store.append_each(
        *[message(topics[n % 5], b"m%d" % n, origin=b"sensor") for n in range(1, ENTRIES + 1)]
    )
    await store.do(
        Advance(
            flying.id,
            A,
            cursor=ENTRIES,
            claims=[
                Claim(1, (Delivery(86, 7, 2, RECEIVED), Delivery(91, 8, 2))),
                Claim(2, (Delivery(96, 9, 2), Delivery(1, 10, 1, HELD))),
            ],
            held=[(1, message(b"kept", b"held", flags=4))],
            received=[1, 65_535],
            next_packet_id=11,
            checkpoint=True,
        )
    )
    group = await store.subscriber(GROUP + b"g/b", b"b", qos=2)
    shared = (Claim(1, (Delivery(92, 7, 2),), flying.id), Claim(2, (Delivery(97, 0, 1),)))
    await store.do(Subscribe(flying.id, A, (Subscription(b"$share/g/b", 1, 0),)))
    await store.do(Advance(group.id, A, cursor=ENTRIES, claims=shared, checkpoint=True))
    await store.move(done, ENTRIES)
    await store.do(Retain(message(b"state", b"on", flags=4)))
    await store.do(Retain(message(LONG, b"long", flags=4)))
    await store.do(StoreWill(Will(b"flying", A, b"user", message(b"will", b"gone"))))
    await fill_outbox(store, b"flying")
    dump = await store.dump()
    await store.stop()
    return dump
