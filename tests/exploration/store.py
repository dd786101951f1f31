"""The memory store with every answer held back until the test lets it go, and watched.

A batch goes through two moments: it is *stored* (reads see it), and later its submitter is *told*.
Between them the process may do anything; before the first it may fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from storage.api import (
    Accept,
    Advance,
    Batch,
    Bind,
    Chunk,
    Consumer,
    Detach,
    Discard,
    Entry,
    LogState,
    Op,
    Opened,
    Outcome,
    Snapshot,
    Subscribe,
    Unsubscribe,
)
from storage.errors import StoreUnavailable
from storage.memory import MemoryStore
from tests.exploration.loop import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from storage.outbox import OutboxReads

__all__ = ["ControlledStore", "OwnerOp", "Watch", "WatchedMemory"]

OwnerOp = Advance | Subscribe | Unsubscribe | Bind | Detach | Discard
"""Operations of an owner on its record."""


class Watch(Protocol):
    """Who is told of each operation as it is applied."""

    def appended(self, entry: Entry) -> None: ...

    def applied(
        self, op: Op, before: Snapshot | None, after: Snapshot | None, outcome: Outcome
    ) -> None:
        """before, after: the record of a ``OwnerOp``; otherwise None."""
        ...


class WatchedMemory(MemoryStore):
    """rewrite: what a broken build makes of an operation; the healthy one leaves it alone."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.rewrite: Callable[[WatchedMemory, Op], Op] | None = None

    def record(self, consumer_id: int) -> Snapshot | None:
        """The record of a consumer as it is stored now."""
        client_id = self._tables.names.get(consumer_id)
        return None if client_id is None else self._tables.consumers[client_id]

    def record_of(self, client_id: bytes) -> Snapshot | None:
        """The same, by client id."""
        return self._tables.consumers.get(client_id)

    @property
    def records(self) -> list[Snapshot]:
        """All of them."""
        return list(self._tables.consumers.values())

    @property
    def head(self) -> int:
        return self._tables.ends.head

    def entry(self, offset: int) -> Entry | None:
        stored = self._tables.history.get(offset)
        return None if stored is None else stored.entry

    @property
    def entries(self) -> list[Entry]:
        return [stored.entry for stored in self._tables.history.values()]

    @property
    def wills(self) -> frozenset[bytes]:
        """Incarnations that have a will stored."""
        return frozenset(self._tables.wills)

    def counts(self) -> dict[bytes, int]:
        """Distinct durable filters and how many consumers have them."""
        return dict(self._filter_counts())

    def apply_whole(self, batch: Batch) -> list[Outcome]:
        outcomes = self._apply_whole(batch)
        for entry in batch.entries:
            self._watch.appended(entry)
        return outcomes

    def _outcome(self, op: Op) -> Outcome:
        consumer_id = op.consumer_id if isinstance(op, OwnerOp) else 0
        before = self.record(consumer_id)
        outcome = super()._outcome(op if self.rewrite is None else self.rewrite(self, op))
        self._watch.applied(op, before, self.record(consumer_id), outcome)
        return outcome


class _Submitted:
    def __init__(self, batch: Batch, done: Callable[[list[Outcome] | BaseException], None]) -> None:
        self.batch = batch
        self.done = done
        self.result: list[Outcome] | BaseException | None = None


class _Asked:
    def __init__(self, name: str, read: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.name = name
        self.read = read
        self.answer = answer


class ControlledStore:
    """A ``Store`` whose answers wait. submitted, asked: what waits, oldest first."""

    name = "controlled"

    def __init__(self, watch: Watch) -> None:
        self.memory = WatchedMemory(watch)
        self.submitted: deque[_Submitted] = deque()
        self.asked: deque[_Asked] = deque()

    # ----------------------------------------------------------------- what the test calls

    @property
    def may_commit(self) -> bool:
        return bool(self.submitted) and self.submitted[0].result is None

    @property
    def may_tell(self) -> bool:
        return bool(self.submitted) and self.submitted[0].result is not None

    def commit(self) -> None:
        """The oldest batch reaches the disk."""
        first = self.submitted[0]
        try:
            first.result = self.memory.apply_whole(first.batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the submitter is told
            first.result = error

    def fail(self) -> None:
        """The oldest batch does not."""
        self.submitted[0].result = StoreUnavailable("injected")

    def tell(self) -> None:
        """Its submitter hears of it."""
        first = self.submitted.popleft()
        assert first.result is not None
        first.done(first.result)

    def answer(self) -> None:
        """The oldest read is answered, with what is stored now."""
        asked = self.asked.popleft()
        if asked.answer.done():
            return
        try:
            asked.answer.set_result(asked.read())
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader is told
            asked.answer.set_exception(error)

    def refuse(self) -> None:
        """The oldest read fails."""
        asked = self.asked.popleft()
        if not asked.answer.done():
            asked.answer.set_exception(StoreUnavailable("injected"))

    # ---------------------------------------------------------------- what the broker calls

    async def open(self, *, now_ms: int) -> Opened:
        return await self.memory.open(now_ms=now_ms)

    async def close(self) -> None:
        await self.memory.close()

    def submit(self, batch: Batch, done: Callable[[list[Outcome] | BaseException], None]) -> None:
        self.submitted.append(_Submitted(batch, done))

    async def _ask(self, name: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self.asked.append(_Asked(name, lambda: result_of(make()), answer))
        return await answer

    async def read(
        self,
        after: int,
        accept: Accept,
        *,
        filters: Sequence[bytes] = (),
        entries_max: int,
        bytes_max: int,
        missed: Callable[[bytes, int], bool] | None = None,
    ) -> Chunk:
        def make() -> Coroutine[Any, Any, Any]:
            return self.memory.read(
                after,
                accept,
                filters=filters,
                entries_max=entries_max,
                bytes_max=bytes_max,
                missed=missed,
            )

        chunk: Chunk = await self._ask(f"read after {after}", make)
        return chunk

    async def fetch(self, offsets: Sequence[int]) -> list[Entry]:
        found: list[Entry] = await self._ask("fetch", lambda: self.memory.fetch(offsets))
        return found

    async def newest(self, topics: Sequence[bytes]) -> list[int]:
        found: list[int] = await self._ask("newest", lambda: self.memory.newest(topics))
        return found

    async def snapshot(self, client_id: bytes) -> Snapshot | None:
        found: Snapshot | None = await self._ask(
            f"snapshot of {client_id.decode()}", lambda: self.memory.snapshot(client_id)
        )
        return found

    async def consumers(self, after: bytes | None = None, limit: int = 1000) -> list[Consumer]:
        return await self.memory.consumers(after, limit)

    async def retained(self, after: bytes | None = None, limit: int = 1000) -> list[Entry]:
        return await self.memory.retained(after, limit)

    async def log(self) -> LogState:
        return await self.memory.log()

    @property
    def outbox(self) -> OutboxReads:
        return self.memory.outbox

    async def check(self) -> list[str]:
        return await self.memory.check()
