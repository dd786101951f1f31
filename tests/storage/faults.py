"""Faults on demand: a Store that wraps another one, and damage done to a MemoryStore.

The fault model: the disk is full or does not answer (a batch fails whole, before anything of it
was applied), answers late, or not at all until it is released; a read fails or hangs. A batch
that was applied is never reported as failed: the contract rules it out, so it is no fault here.
Batches stay in order whatever is injected: one that hangs holds up those behind it, as a writer
thread would.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from storage.api import Pruned
from storage.engine import frees
from storage.errors import StoreFull
from storage.outbox import Purged

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from storage.api import (
        Accept,
        Batch,
        Chunk,
        Consumer,
        Entry,
        LogState,
        Missed,
        Opened,
        Outcome,
        Snapshot,
        Store,
    )
    from storage.memory import MemoryStore
    from storage.outbox import OutboxReads

__all__ = ["FaultyStore", "Gate", "crash", "lose_tail", "restore"]

T = TypeVar("T")
Result: TypeAlias = "list[Outcome] | BaseException"


def _has_deleted(outcome: Outcome) -> bool:
    if isinstance(outcome, Pruned):
        return outcome.blocks > 0
    if isinstance(outcome, Purged):
        return outcome.messages > 0
    return bool(outcome)


class Gate:
    """Something that hangs until the test lets it go on.

    reached: set when a batch or a read stands before the gate.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.error: BaseException | None = None
        self._opened = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether what stood before the gate may go on."""
        return self._opened.is_set()

    def release(self, error: BaseException | None = None) -> None:
        """Let it go on, or fail with ``error`` without having been applied."""
        self.error = error
        self._opened.set()

    async def passed(self) -> None:
        """Wait in front of the gate; raises the error that it was released with."""
        self.reached.set()
        await self._opened.wait()
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _Waiting:
    """A batch on its way. gate: hangs there first. error: fails with it then."""

    batch: Batch
    done: Callable[[Result], None]
    gate: Gate | None
    error: BaseException | None


class FaultyStore:
    """A Store that passes everything on to ``inner``, but for the faults it was told of.

    batches: all that were submitted, in order, those that failed included.
    applied: those that ``inner`` has committed.
    delay_s: how long each batch is held back before it is passed on.

    Faults are counted from now: ``nth=1`` is the next submit or read.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self.batches: list[Batch] = []
        self.applied: list[Batch] = []
        self.reads = 0
        self.delay_s = 0.0
        self._is_full = False
        self._submits = 0
        self._errors: dict[int, BaseException] = {}
        self._gates: dict[int, Gate] = {}
        self._read_errors: dict[int, BaseException] = {}
        self._read_gates: dict[int, Gate] = {}
        self._queue: deque[_Waiting] = deque()
        self._passed_on = 0
        self._pump: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()

    # ----------------------------------------------------------------------------- controls

    def fail_submit(self, error: BaseException, *, nth: int = 1, times: int = 1) -> None:
        """Have the nth submit from now, and the ``times - 1`` after it, fail unapplied."""
        first = self._submits + nth
        self._errors.update((number, error) for number in range(first, first + times))

    def fill(self) -> None:
        """Have every batch fail that does not only delete, until one of those has deleted."""
        self._is_full = True

    def hang_submit(self, *, nth: int = 1) -> Gate:
        """Have the nth submit from now hang, and with it those behind it."""
        gate = self._gates[self._submits + nth] = Gate()
        return gate

    def fail_read(self, error: BaseException, *, nth: int = 1, times: int = 1) -> None:
        """Have the nth read from now fail, and the ``times - 1`` after it.

        Every method that reads counts: read, fetch, snapshot, consumers, retained, log.
        """
        first = self.reads + nth
        self._read_errors.update((number, error) for number in range(first, first + times))

    def hang_read(self, *, nth: int = 1) -> Gate:
        """Have the nth read from now hang."""
        gate = self._read_gates[self.reads + nth] = Gate()
        return gate

    def heal(self) -> None:
        """Forget every fault that has not happened yet, and release what hangs."""
        self._errors.clear()
        self._read_errors.clear()
        self._is_full = False
        self.delay_s = 0.0
        for gate in (*self._gates.values(), *self._read_gates.values()):
            gate.release()
        self._gates.clear()
        self._read_gates.clear()

    # -------------------------------------------------------------------------------- writes

    def submit(self, batch: Batch, done: Callable[[Result], None]) -> None:
        """Queue the batch behind those that are held up, or pass it on."""
        self._submits += 1
        self.batches.append(batch)
        gate = self._gates.get(self._submits)
        error = self._errors.pop(self._submits, None)
        if self._is_full and not frees(batch):
            error = StoreFull("no space")
        waiting = _Waiting(batch, done, gate, error)
        if self._pump is None and gate is None and error is None and not self.delay_s:
            self._pass_on(waiting)
            return
        self._queue.append(waiting)
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._work_off())

    def _pass_on(self, waiting: _Waiting) -> None:
        self._passed_on += 1
        self._quiet.clear()

        def done(result: Result) -> None:
            self._passed_on -= 1
            if not self._passed_on:
                self._quiet.set()
            if not isinstance(result, BaseException):
                self.applied.append(waiting.batch)
                self._is_full = self._is_full and not any(map(_has_deleted, result))
            waiting.done(result)

        self.inner.submit(waiting.batch, done)

    async def _work_off(self) -> None:
        while self._queue:
            waiting = self._queue[0]
            error = waiting.error
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if waiting.gate is not None:
                try:
                    await waiting.gate.passed()
                except Exception as released_with:  # noqa: BLE001 - the test chose it
                    error = released_with
            if error is None:
                self._pass_on(waiting)
            else:
                await self._all_done()  # the answers keep the order of the batches
                waiting.done(error)
            self._queue.popleft()
        self._pump = None

    async def _all_done(self) -> None:
        if self._passed_on:
            await self._quiet.wait()

    # --------------------------------------------------------------------------------- reads

    async def _read(self, answer: Coroutine[object, object, T]) -> T:
        self.reads += 1
        try:
            await self._faults_of(self.reads)
        except BaseException:
            answer.close()
            raise
        return await answer

    async def _faults_of(self, number: int) -> None:
        if gate := self._read_gates.pop(number, None):
            await gate.passed()
        if error := self._read_errors.pop(number, None):
            raise error

    async def read(
        self,
        after: int,
        accept: Accept,
        *,
        filters: Sequence[bytes] = (),
        entries_max: int,
        bytes_max: int,
        missed: Missed | None = None,
    ) -> Chunk:
        """As Store.read, unless it was told to fail or to hang."""
        return await self._read(
            self.inner.read(
                after,
                accept,
                filters=filters,
                entries_max=entries_max,
                bytes_max=bytes_max,
                missed=missed,
            )
        )

    async def fetch(self, offsets: Sequence[int]) -> list[Entry]:
        """As Store.fetch, unless it was told to fail or to hang."""
        return await self._read(self.inner.fetch(offsets))

    async def newest(self, topics: Sequence[bytes]) -> list[int]:
        """As Store.newest, unless it was told to fail or to hang."""
        return await self._read(self.inner.newest(topics))

    async def snapshot(self, client_id: bytes) -> Snapshot | None:
        """As Store.snapshot, unless it was told to fail or to hang."""
        return await self._read(self.inner.snapshot(client_id))

    async def consumers(self, after: bytes | None = None, limit: int = 1000) -> list[Consumer]:
        """As Store.consumers, unless it was told to fail or to hang."""
        return await self._read(self.inner.consumers(after, limit))

    async def retained(self, after: bytes | None = None, limit: int = 1000) -> list[Entry]:
        """As Store.retained, unless it was told to fail or to hang."""
        return await self._read(self.inner.retained(after, limit))

    async def log(self) -> LogState:
        """As Store.log, unless it was told to fail or to hang."""
        return await self._read(self.inner.log())

    @property
    def outbox(self) -> OutboxReads:
        """As Store.outbox."""
        return self.inner.outbox

    # ---------------------------------------------------------------------------- life cycle

    async def open(self, *, now_ms: int) -> Opened:
        """Open ``inner``."""
        return await self.inner.open(now_ms=now_ms)

    async def check(self) -> list[str]:
        """Check ``inner``; never fails on purpose."""
        return await self.inner.check()

    async def close(self) -> None:
        """Finish what was submitted (a batch that hangs has to be released), then close."""
        if self._pump is not None:
            await self._pump
        await self.inner.close()


# ------------------------------------------------------------------- damage to a MemoryStore


def crash(store: MemoryStore) -> None:
    """Close without finishing anything: what was submitted and not committed is lost."""
    store._is_open = False
    for handle in store._pending:
        handle.cancel()
    store._pending.clear()
    store._idle.set()


def restore(store: MemoryStore, generation: str | None = None) -> None:
    """Swap the database of a closed store for a backup: its next opening mints a generation."""
    store._generation = generation or uuid.uuid4().hex
    store._minted = "the database was replaced"


def lose_tail(store: MemoryStore, head: int) -> None:
    """Have a closed store lose the entries above ``head``, so that positions are ahead of it."""
    tables = store._tables
    for offset in range(head + 1, tables.ends.head + 1):
        tables.history.pop(offset, None)
    tables.ends = replace(tables.ends, head=head, floor=min(tables.ends.floor, head))
