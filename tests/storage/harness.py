"""What the tests of the store use: backends, a database that can be reopened, and its dump."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from storage import open_store
from storage.api import (
    Accept,
    Acquire,
    Acquired,
    Advance,
    Batch,
    Chunk,
    Consumer,
    Entry,
    LogState,
    Missed,
    Opened,
    Outcome,
    Prune,
    Pruned,
    Snapshot,
    Store,
    Subscribe,
    Subscription,
    Will,
)
from storage.keyring import Key, Keyring
from storage.memory import MemoryStore
from tests.storage.faults import restore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from storage.api import Op
    from storage.outbox import AuditRecord, Backlog, Message

A: Final = b"A" * 16
"""Incarnations, in the order they own a consumer."""
B: Final = b"B" * 16
C: Final = b"C" * 16

NOW_MS: Final = 1_700_000_000_000


# -------------------------------------------------------------------------------- backends


class Backend(Protocol):
    """How a database of one kind is started, and what can be done to its files while it is off."""

    def start(self) -> Store:
        """A store over the disk as it is, not yet open."""
        ...

    def back_up(self) -> None:
        """Copy the disk."""
        ...

    def restore(self) -> None:
        """Put the copy in the place of what is there."""
        ...


class Memory:
    """The store itself is the disk."""

    def __init__(self, _: Path) -> None:
        self._store = MemoryStore()

    def start(self) -> Store:
        return self._store

    def back_up(self) -> None:
        self._backup = deepcopy(self._store._tables)

    def restore(self) -> None:
        self._store._tables = self._backup
        restore(self._store)


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory where a sync costs nothing, if there is one: nothing here loses power."""
    shared_memory = Path("/dev/shm")  # noqa: S108 - the directory in it has a random name
    with TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as path:
        yield Path(path)


class OnDisk:
    """A directory, and a new store for each opening; sealed, if there are keys."""

    def __init__(
        self,
        kind: Literal["lmdb", "sqlite"],
        path: Path,
        keyring: Keyring | None = None,
        *,
        seal_topics: bool = False,
    ) -> None:
        self._kind: Literal["lmdb", "sqlite"] = kind
        self._path = path / (kind if keyring is None else f"{kind}-sealed")
        self.keyring = keyring
        self.seal_topics = seal_topics

    def start(self) -> Store:
        return open_store(
            self._kind,
            self._path,
            durability="os",
            keyring=self.keyring,
            seal_topics=self.seal_topics,
        )

    def back_up(self) -> None:
        copytree(self._path, self._path.with_suffix(".backup"))

    def restore(self) -> None:
        self._path.rename(self._path.with_suffix(".lost"))
        copytree(self._path.with_suffix(".backup"), self._path)


BACKENDS: Final[dict[str, Callable[[Path], Backend]]] = {
    "memory": Memory,
    "lmdb": partial(OnDisk, "lmdb"),
    "sqlite": partial(OnDisk, "sqlite"),
}

KEYRING: Final = Keyring([Key("test-1", b"1" * 32)])

SEALED: Final[dict[str, Callable[[Path], Backend]]] = {
    "lmdb, sealed": partial(OnDisk, "lmdb", keyring=KEYRING),
    "lmdb, topics sealed": partial(OnDisk, "lmdb", keyring=KEYRING, seal_topics=True),
    "sqlite, sealed": partial(OnDisk, "sqlite", keyring=KEYRING),
    "sqlite, topics sealed": partial(OnDisk, "sqlite", keyring=KEYRING, seal_topics=True),
}


# --------------------------------------------------------------------------------- dumping


@dataclass(frozen=True, slots=True)
class Dump:
    """Everything that a store tells of itself, in a form that compares. boot is left out."""

    log: tuple[str, str, int, int]
    filters: dict[bytes, int]
    wills: dict[bytes, Will]
    consumers: dict[bytes, Snapshot]
    retained: list[Entry]
    history: list[Entry]
    figures: list[Backlog]
    messages: list[Message]
    audit: list[AuditRecord]


def in_order(snapshot: Snapshot) -> Snapshot:
    """The snapshot with its subscriptions sorted: a store may list them in any order."""
    return replace(snapshot, subscriptions=tuple(sorted(snapshot.subscriptions)))


class Database:
    """A store, opened, with the calls that tests make again and again."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.store = backend.start()
        self.opened: Opened

    async def open(self, now_ms: int = NOW_MS) -> Opened:
        self.opened = await self.store.open(now_ms=now_ms)
        return self.opened

    async def reopen(self, now_ms: int = NOW_MS) -> Opened:
        """Close, and open what is on the disk."""
        await self.store.close()
        self.store = self.backend.start()
        return await self.open(now_ms)

    async def stop(self) -> None:
        """Check every invariant, then close."""
        try:
            assert await self.store.check() == []
        finally:
            await self.store.close()

    # ------------------------------------------------------------------------------ writes

    async def commit(self, batch: Batch) -> list[Outcome]:
        """Submit and wait; raises the error that the whole batch met."""
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()

        def done(result: list[Outcome] | BaseException) -> None:
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.store.submit(batch, done)
        outcomes = await future
        assert len(outcomes) == len(batch.ops)
        return outcomes

    async def write(
        self, *ops: Op, entries: Iterable[Entry] = (), stored_ms: int = NOW_MS
    ) -> list[Outcome]:
        return await self.commit(Batch(list(entries), list(ops), stored_ms))

    async def do(self, op: Op) -> Any:
        """The outcome of one operation."""
        return (await self.write(op))[0]

    async def append(self, *entries: Entry, stored_ms: int = NOW_MS) -> list[Entry]:
        """Append as one batch; the offsets are assigned here."""
        head = (await self.store.log()).head
        numbered = [entry._replace(offset=head + n) for n, entry in enumerate(entries, 1)]
        await self.write(entries=numbered, stored_ms=stored_ms)
        return numbered

    async def append_each(self, *entries: Entry, stored_ms: int = NOW_MS) -> list[Entry]:
        """Append each in a batch of its own, so that it can be pruned by itself."""
        return [(await self.append(entry, stored_ms=stored_ms))[0] for entry in entries]

    async def acquire(
        self,
        client_id: bytes = b"dev",
        incarnation: bytes = A,
        *,
        user: bytes = b"",
        clean: bool = False,
        expiry_s: int | None = None,
    ) -> Snapshot:
        acquired = await self.do(
            Acquire(client_id, incarnation, user, NOW_MS, clean=clean, expiry_s=expiry_s)
        )
        assert isinstance(acquired, Acquired)
        assert acquired.snapshot is not None
        return acquired.snapshot

    async def subscriber(
        self,
        client_id: bytes,
        *filters: bytes,
        qos: int = 1,
        incarnation: bytes = A,
        from_offset: int | None = None,
    ) -> Consumer:
        """A consumer that has subscribed now, at the head."""
        consumer = (await self.acquire(client_id, incarnation)).consumer
        if from_offset is None:
            from_offset = (await self.store.log()).head
        subs = tuple(Subscription(name, qos, from_offset) for name in filters)
        assert await self.do(Subscribe(consumer.id, incarnation, subs)) is None
        return consumer

    async def move(self, consumer: Consumer, cursor: int) -> None:
        """Everything through ``cursor`` is settled, and the retention index knows."""
        op = Advance(consumer.id, consumer.incarnation, cursor=cursor, checkpoint=True)
        assert await self.do(op) is None

    async def prune(
        self,
        *,
        through: int = 0,
        before_ms: int = 0,
        blocks_max: int = 1000,
        topics_max: int = 500,
        marks_max: int = 1000,
        older_than_ms: int = 0,
        now_ms: int = 0,
    ) -> Pruned:
        op = Prune(
            through,
            before_ms,
            blocks_max,
            marks_max,
            older_than_ms,
            now_ms=now_ms,
            topics_max=topics_max,
        )
        pruned = await self.do(op)
        assert isinstance(pruned, Pruned)
        assert pruned.floor == (await self.store.log()).floor
        return pruned

    # ------------------------------------------------------------------------------- reads

    async def snapshot(self, client_id: bytes = b"dev") -> Snapshot:
        snapshot = await self.store.snapshot(client_id)
        assert snapshot is not None
        return in_order(snapshot)

    async def read(
        self,
        after: int = 0,
        accept: Accept | None = None,
        *,
        filters: Sequence[bytes] = (),
        entries_max: int = 1000,
        bytes_max: int = 1 << 30,
        missed: Missed | None = None,
    ) -> Chunk:
        return await self.store.read(
            after,
            accept or everything,
            filters=filters,
            entries_max=entries_max,
            bytes_max=bytes_max,
            missed=missed,
        )

    async def history(self) -> list[Entry]:
        return await self.read_all(0, everything)

    async def read_all(
        self,
        after: int,
        accept: Accept,
        *,
        filters: Sequence[bytes] = (),
        entries_max: int = 1000,
        bytes_max: int = 1 << 30,
    ) -> list[Entry]:
        """Read chunk by chunk to the head, and check each chunk."""
        taken: list[Entry] = []
        while True:
            chunk = await self.read(
                after, accept, filters=filters, entries_max=entries_max, bytes_max=bytes_max
            )
            offsets = [entry.offset for entry, _ in chunk.entries]
            assert offsets == sorted(set(offsets))
            assert all(after < offset <= chunk.through for offset in offsets)
            assert len(offsets) <= entries_max
            assert all(qos == accept(entry.topic) for entry, qos in chunk.entries)
            taken += [entry for entry, _ in chunk.entries]
            if chunk.through >= chunk.head:
                return taken
            assert offsets, "a chunk that is not the last one has an entry"
            after = chunk.through

    async def pages(self, limit: int) -> tuple[list[Consumer], list[Entry]]:
        """All consumers and all retained messages, ``limit`` at a time."""
        consumers: list[Consumer] = []
        while page := await self.store.consumers(
            consumers[-1].client_id if consumers else None, limit
        ):
            assert len(page) <= limit
            consumers += page
        retained: list[Entry] = []
        while messages := await self.store.retained(
            retained[-1].topic if retained else None, limit
        ):
            assert len(messages) <= limit
            retained += messages
        return consumers, retained

    async def dump(self, now_ms: int = NOW_MS) -> Dump:
        """Reopen, which detaches owners at ``now_ms``, and tell everything."""
        opened = await self.reopen(now_ms)
        consumers, retained = await self.pages(1000)
        snapshots = {c.client_id: await self.snapshot(c.client_id) for c in consumers}
        assert len(snapshots) == len(consumers)
        assert [snapshots[c.client_id].consumer for c in consumers] == consumers
        return Dump(
            log=_without_boot(opened.log),
            filters=counts(opened),
            wills=wills(opened),
            consumers=snapshots,
            retained=retained,
            history=await self.history(),
            figures=await self.store.outbox.backlog(),
            messages=await self.messages(),
            audit=await self.store.outbox.audit(),
        )

    async def messages(self) -> list[Message]:
        """All of the outbox, by id."""
        found: list[Message] = []
        left = sum(sum(one[1:8]) for one in await self.store.outbox.backlog())
        number = 0
        while len(found) < left:
            number += 1
            shown = await self.store.outbox.show(number)
            found += [] if shown is None else [shown]
        return found


def _without_boot(log: LogState) -> tuple[str, str, int, int]:
    return log.db_id, log.generation, log.head, log.floor


def counts(opened: Opened) -> dict[bytes, int]:
    """Filter -> how many consumers have it."""
    found = dict(opened.filters)
    assert len(found) == len(opened.filters)
    return found


def wills(opened: Opened) -> dict[bytes, Will]:
    """Incarnation -> will."""
    found = {will.incarnation: will for will in opened.wills}
    assert len(found) == len(opened.wills)
    return found


# ---------------------------------------------------------------------------------- values


def message(
    topic: bytes = b"t",
    payload: bytes = b"x",
    *,
    qos: int = 1,
    flags: int = 0,
    origin: bytes = b"",
    expires_ms: int = 0,
    properties: bytes = b"",
) -> Entry:
    """An entry whose offset is assigned when it is appended."""
    return Entry(0, topic, payload, qos, flags, origin, expires_ms, properties)


def everything(_: bytes) -> int:
    """Accept every topic, at QoS 1."""
    return 1


def matching(*filters: bytes, qos: int = 1) -> Accept:
    """Accept what one of the MQTT topic filters matches: a second opinion, by regex."""
    patterns = [re.compile(_pattern(topic_filter), re.DOTALL) for topic_filter in filters]
    return lambda topic: qos if any(pattern.fullmatch(topic) for pattern in patterns) else 0


def _pattern(topic_filter: bytes) -> bytes:
    hidden = rb"(?!\$)" if topic_filter[:1] in (b"+", b"#") else b""
    if topic_filter == b"#":
        return hidden + b".*"
    many = topic_filter.endswith(b"/#")
    levels = (topic_filter[:-2] if many else topic_filter).split(b"/")
    escaped = b"/".join(b"[^/]*" if level == b"+" else re.escape(level) for level in levels)
    return hidden + escaped + (b"(/.*)?" if many else b"")
