"""Group commit: the event loop collects writes while the store commits the previous batch.

Rule 1. First in, first out. A batch is retried until the store takes it, so an offset that was
        assigned is never given to another entry and nothing that was promised is dropped.
        Only what makes room for it goes first (``make_room``).
Rule 2. Who waits for nothing does not hurry: ``lazy`` work (settlements) rides along with the next
        batch, or goes by itself after LAZY_MS. Who answers what was sent (PUBREC) goes with the
        next message while they come close together (``hurry_soon``).
Rule 3. A batch is closed at the last moment. Whoever joined it is asked for its operations then
        (``Participant.collect``), so that one consumer writes once for each batch.
Rule 4. Bytes in flight are bounded. Above ``bytes_max`` ``over`` is true; who feeds us stops
        reading and is called back when there is room (P12).

Failures (P11): StoreUnavailable and its kind keep the batch and try again, 50 ms to 1 s later;
operations that somebody is waiting for with an answer of its own (``retry=False``: CONNECT,
SUBSCRIBE) get the error at once and leave the batch. Any other exception is a bug in one operation:
the batch is taken apart, so that it fails alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from storage.api import Batch, Entry, Op, Outcome, Retain, Store, StoreWill
from storage.errors import StoreError, StoreFull, StoreUnavailable
from storage.outbox.rights import Role
from storage.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from storage.clock import Clock

__all__ = ["LAZY_MS", "Committer", "Done", "Participant"]

LAZY_MS: Final = 10
"""How long a settlement may wait for company: a crash within it sends a message again."""
SOON_MS: Final = 1
"""How long one side of a conversation waits for the other (``hurry_soon``), or as long as the last
commit took, if that was longer."""
RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 1000
TAIL_BYTES_MAX: Final = 4 << 20
"""Recent entries kept in memory, so that a consumer that is a moment behind need not read."""
ENTRY_OVERHEAD_BYTES: Final = 64

Done: TypeAlias = Callable[[Outcome], None]
"""Called in the event loop with the outcome of an operation, or the exception that it met."""

log = logging.getLogger("amqtt_durable.store")


class Participant(Protocol):
    """Somebody who writes at most one thing for each batch."""

    def collect(self) -> None:
        """Add operations to the open batch now; it is closed right after."""
        ...


class _Open:
    """A batch that is being filled."""

    __slots__ = ("after", "appended_bytes", "done", "entries", "ops", "participants", "retry")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ops: list[Op] = []
        self.done: list[Done] = []
        self.retry: list[bool] = []
        self.after: list[Callable[[], None]] = []
        self.participants: dict[Participant, None] = {}
        self.appended_bytes = 0

    def fail_impatient(self, error: StoreError) -> None:
        """Take out what is not to be retried, and tell who waits."""
        gone = [done for done, retry in zip(self.done, self.retry, strict=True) if not retry]
        if not gone:
            return
        keep = [i for i, retry in enumerate(self.retry) if retry]
        self.ops = [self.ops[i] for i in keep]
        self.done = [self.done[i] for i in keep]
        self.retry = [True] * len(keep)
        for done in gone:
            _call(done, error)


class _Part(NamedTuple):
    """Of a batch that is taken apart: its entries, or one of its operations."""

    entries: list[Entry]
    op: Op | None
    done: Done
    retry: bool


def _message_bytes(message: Entry) -> int:
    return (
        len(message.payload) + len(message.topic) + len(message.properties) + ENTRY_OVERHEAD_BYTES
    )


def _call(done: Done, outcome: Outcome) -> None:
    try:
        done(outcome)
    except Exception:
        # our own bug, in one session's bookkeeping: the others of this batch must still be told
        log.exception("a completion failed")


class Committer:
    """The one writer's queue. All methods are called from the event loop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        head: int,
        bytes_max: int = 16 << 20,
        role: Role = Role.BROKER,
    ) -> None:
        self.store = store
        self.role = role
        """In whose name batches are submitted."""
        self.clock = clock
        self.head = head
        """Highest committed offset."""
        self.last = head
        """Highest assigned offset."""
        self.bytes_max = bytes_max
        self.over = False
        self.batches = 0
        self.failing_since: float | None = None
        self._told_since: float | None = None
        self.full = False
        """It cannot write since there is no space."""
        self.on_health: Callable[[StoreError | None], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._open = _Open()
        self._flying: _Open | None = None
        self._bytes = 0
        self._handle: asyncio.Handle | None = None
        self._hurry = False
        self._is_soon = False
        self._sent_s = 0.0
        self._gap_s = 1.0
        self._took_s = 0.0
        self._retry_ms = RETRY_MS_MIN
        self._recent = Recent()
        self._room: list[Callable[[], None]] = []
        self._watchers: list[asyncio.Future[None]] = []
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._closed = False

    # ------------------------------------------------------------------ filling a batch

    def append(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        flags: int = 0,
        origin: bytes = b"",
        expires_ms: int = 0,
        properties: bytes = b"",
    ) -> Entry:
        """Assign the next offset to a message. It is durable when the open batch is."""
        self.last = offset = self.last + 1
        entry: Entry = tuple.__new__(
            Entry, (offset, topic, payload, qos, flags, origin, expires_ms, properties)
        )
        batch = self._open
        batch.entries.append(entry)
        batch.appended_bytes += len(payload) + len(topic) + len(properties) + ENTRY_OVERHEAD_BYTES
        if not self._hurry:
            self.hurry()
        return entry

    def submit(self, op: Op, done: Done, *, retry: bool = True) -> None:
        """Add one operation. done: gets its outcome after the commit.

        retry: keep trying while the store cannot write; False = ``done`` gets the error instead.
        """
        if self._closed:
            if not retry:
                self._loop.call_soon(_call, done, StoreUnavailable("the store is closed"))
            return
        batch = self._open
        kind = type(op)
        if kind is Retain:
            batch.appended_bytes += _message_bytes(op.message)  # type: ignore[union-attr]
        elif kind is StoreWill:
            batch.appended_bytes += _message_bytes(op.will.message)  # type: ignore[union-attr]
        batch.ops.append(op)
        batch.done.append(done)
        batch.retry.append(retry)
        if not self._hurry:
            self.hurry()

    async def apply(self, op: Op, *, retry: bool = False) -> Outcome:
        """Submit and wait. Raises what the batch met; refusals are raised too."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[Outcome] = self._loop.create_future()

        def done(outcome: Outcome) -> None:
            if future.done():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.submit(op, done, retry=retry)
        return await future

    @property
    def can_delete(self) -> bool:
        """Whether the store takes what only deletes: when it is full, that makes room."""
        return self.failing_since is None or self.full

    async def make_room(self, op: Op) -> Outcome:
        """Apply an operation that only deletes, and whose place among others does not matter, in
        front of what waits for room: behind that it would wait for itself. Raises as ``apply``."""
        future: asyncio.Future[list[Outcome] | BaseException] = self._loop.create_future()

        def done(result: list[Outcome] | BaseException) -> None:
            if not future.done():
                future.set_result(result)

        self.store.submit(Batch([], [op], self.clock.now_ms(), self.role), done)
        result = await future
        if isinstance(result, BaseException):
            raise result
        (outcome,) = result
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def join(self, participant: Participant, *, lazy: bool) -> None:
        """Have ``participant.collect`` called when the open batch is closed."""
        if self._closed:
            return
        self._open.participants[participant] = None
        if not self._hurry:
            if not lazy:
                self.hurry()
            elif self._handle is None:
                self._idle.clear()
                self._handle = self._loop.call_later(LAZY_MS / 1000, self._flush)

    def after(self, call: Callable[[], None]) -> object:
        """Have ``call`` run when the open batch is committed. Returns the batch's identity."""
        batch = self._open
        batch.after.append(call)
        if not self._hurry:
            self.hurry()
        return batch

    @property
    def open_batch(self) -> object:
        """Identity of the batch that is being filled."""
        return self._open

    def hurry(self) -> None:
        """Close the open batch as soon as this turn of the loop is over and the store is free."""
        if self._hurry or self._closed:
            return
        self._hurry = True
        self._idle.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._flying is None:
            self._handle = self._loop.call_soon(self._flush)

    def hurry_soon(self) -> None:
        """``hurry``; but while messages come close together, go with the next one, if it comes
        soon: then one commit does for both sides of a conversation."""
        if self._hurry or self._is_soon or self._closed:
            return
        wait_s = max(self._took_s, SOON_MS / 1000)
        if self._gap_s > 3 * wait_s or self._loop.time() - self._sent_s > 3 * wait_s:
            self.hurry()
            return
        self._is_soon = True
        self._idle.clear()
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(wait_s, self._flush)

    # ----------------------------------------------------------------------- committing

    def _flush(self) -> None:
        self._handle = None
        self._is_soon = False
        if self._flying is not None:
            self._hurry = True
            return
        batch = self._open
        self._hurry = True  # what is submitted now is in this batch: no need to call again
        joined, batch.participants = batch.participants, {}
        for participant in joined:
            try:
                participant.collect()
            except Exception:
                # our own bug, in one session's bookkeeping: the others must still be written
                log.exception("a participant could not be collected")
        self._hurry = False
        self._open = _Open()
        if batch.participants:  # who joins now is collected with the next batch
            self._open.participants = batch.participants
            self.hurry()
        if not (batch.entries or batch.ops):
            self._run_after(batch)
            if self._flying is None and not self._hurry:
                self._idle.set()
            return
        self._flying = batch
        self._bytes += batch.appended_bytes
        if batch.entries:
            now_s = self._loop.time()
            self._gap_s = now_s - self._sent_s
            self._sent_s = now_s
            self._recent.add(batch.entries, batch.appended_bytes)
        self._send(batch)

    def _send(self, batch: _Open) -> None:
        self.store.submit(
            Batch(batch.entries, batch.ops, self.clock.now_ms(), self.role),
            lambda result: self._done(batch, result),
        )

    def _done(self, batch: _Open, result: list[Outcome] | BaseException) -> None:
        if isinstance(result, BaseException):
            self._failed(batch, result)
            return
        self._succeeded(is_proved=bool(result or batch.entries))
        self.batches += 1
        self._flying = None
        self._bytes -= batch.appended_bytes
        if batch.entries:
            self._took_s = self._loop.time() - self._sent_s
            self.head = batch.entries[-1].offset
            self._recent.trim(TAIL_BYTES_MAX, self.head)
        if self._hurry:
            self._flush()
        elif not self._open.participants:
            self._idle.set()
        # outcomes first: who was refused is closed before its acknowledgements would leave
        for done, outcome in zip(batch.done, result, strict=True):
            _call(done, outcome)
        self._run_after(batch)
        if batch.entries and self._watchers:
            watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                if not watcher.done():
                    watcher.set_result(None)
        if self.over or self._room:
            self._make_room()

    def _run_after(self, batch: _Open) -> None:
        for call in batch.after:
            try:
                call()
            except Exception:
                log.exception("a completion failed")

    def _failed(self, batch: _Open, error: BaseException) -> None:
        if not isinstance(error, StoreUnavailable) and len(batch.ops) > 0:
            log.error("a write failed for an unexpected reason", exc_info=error)
            self._take_apart(batch)
            return
        told = self._cannot_write(error)
        batch.fail_impatient(told)
        self._open.fail_impatient(told)
        if self._closed:
            return
        self._loop.call_later(self._retry_ms / 1000, self._retry, batch)
        self._retry_ms = min(self._retry_ms * 2, RETRY_MS_MAX)
        self.over = self._bytes + self._open.appended_bytes > self.bytes_max

    def _cannot_write(self, error: BaseException) -> StoreError:
        """Note it, and say it once."""
        told = error if isinstance(error, StoreError) else StoreUnavailable("write failed")
        if self.failing_since is None:
            self.failing_since = self.clock.monotonic()
        if self._told_since is None:
            self._told_since = self.failing_since
            log.error(
                "the store cannot write (%s): nothing is acknowledged until it can; retrying",
                told,
                exc_info=None if told is error else error,
            )
            if self.on_health is not None:
                self.on_health(told)
        self.full = isinstance(told, StoreFull)
        return told

    def _retry(self, batch: _Open) -> None:
        if self._closed:
            return
        self._open.fail_impatient(StoreUnavailable("the store cannot write"))
        self._send(batch)

    def _succeeded(self, *, is_proved: bool) -> None:
        """A batch is committed. is_proved: it was written; one that nobody wanted any more when it
        was tried again proves nothing, so it is not said either that all is well."""
        if self._told_since is None:
            return
        self.failing_since = None
        self.full = False
        if not is_proved:
            return
        seconds = self.clock.monotonic() - self._told_since
        self._told_since = None
        self._retry_ms = RETRY_MS_MIN
        log.warning("the store writes again after %.1f s", seconds)
        if self.on_health is not None:
            self.on_health(None)

    def _take_apart(self, batch: _Open) -> None:
        """One operation is poison: apply the entries, then each operation by itself."""
        parts: deque[_Part] = deque(
            _Part([], op, done, retry)
            for op, done, retry in zip(batch.ops, batch.done, batch.retry, strict=True)
        )
        if batch.entries:
            parts.appendleft(_Part(batch.entries, None, lambda _: None, retry=True))
        batch.ops, batch.done, batch.retry = [], [], []

        def step(result: list[Outcome] | BaseException) -> None:
            part = parts[0]
            if isinstance(result, StoreUnavailable) or (
                isinstance(result, BaseException) and part.op is None
            ):
                told = self._cannot_write(result)
                impatient = [one for one in parts if not one.retry]
                patient = [one for one in parts if one.retry]
                parts.clear()
                parts.extend(patient)
                for one in impatient:
                    _call(one.done, told)
                self._open.fail_impatient(told)
                if not self._closed:
                    self._loop.call_later(RETRY_MS_MAX / 1000, send)
                return
            self._succeeded(is_proved=not isinstance(result, BaseException))
            if isinstance(result, BaseException):
                _call(part.done, result)
            elif part.op is not None:
                _call(part.done, result[0])
            if part.entries:
                self.head = part.entries[-1].offset
            parts.popleft()
            send()

        def send() -> None:
            if not parts:
                self._done(batch, [])
                return
            entries, op, _, _ = parts[0]
            self.store.submit(
                Batch(entries, [op] if op is not None else [], self.clock.now_ms(), self.role), step
            )

        send()

    def next_commit(self) -> asyncio.Future[None]:
        """Done when the next batch with entries is committed."""
        watcher: asyncio.Future[None] = self._loop.create_future()
        self._watchers.append(watcher)
        return watcher

    # --------------------------------------------------------------------- back pressure

    def pressure(self) -> bool:
        """Whether the feeder that asks must stop reading (and call ``when_room``)."""
        self.over = self._bytes + self._open.appended_bytes > self.bytes_max
        return self.over

    @property
    def is_at_ease(self) -> bool:
        """Whether something may be written that nobody was promised: it would keep nobody from
        being read, and nothing from being written (P11)."""
        return self.failing_since is None and 2 * self.waiting_bytes < self.bytes_max

    @property
    def told_level(self) -> int:
        """Of a log line about one client, when something of it could not be written: that the
        store cannot write is told once, and not again for every client that comes back."""
        return logging.WARNING if self.failing_since is None else logging.DEBUG

    @property
    def waiting_bytes(self) -> int:
        """What counts against ``bytes_max``: not committed yet."""
        return self._bytes + self._open.appended_bytes

    def when_room(self, call: Callable[[], None]) -> None:
        """Have ``call`` run once there is room again."""
        self._room.append(call)

    def _make_room(self) -> None:
        if self._bytes + self._open.appended_bytes <= self.bytes_max // 2:
            self.over = False
            waiting, self._room = self._room, []
            for call in waiting:
                call()

    # ------------------------------------------------------------------------- the tail

    def since(self, offset: int) -> list[Entry] | None:
        """All entries after ``offset``, committed or not; None if some are no longer in memory."""
        if offset >= self.last:
            return []
        return self._recent.since(offset, self._open.entries)

    def tail(self, offset: int, entries_max: int) -> list[Entry] | None:
        """``since``, if that is little, or the store does not have all of it yet."""
        if self.last - offset > entries_max and offset < self.head:
            return None
        return self.since(offset)

    def wanted_since(
        self,
        offset: int,
        topics: Sequence[bytes] | None,
        accepts: Callable[[bytes], object],
        *,
        stretches_max: int,
    ) -> Iterable[Entry] | None:
        """Of those, the ones whose topic ``accepts`` takes. None, too, if they lie in more than
        ``stretches_max`` stretches and the store has some of them: its planner finds them at less
        cost.

        topics: all that ``accepts`` takes, None = not known. To be used up before the next append.
        """
        if offset >= self.last:
            return ()
        if offset >= self.head:  # flying and open: nobody else has them
            stretches_max = max(stretches_max, 1)
        return self._recent.wanted_since(offset, self._open.entries, topics, accepts, stretches_max)

    # --------------------------------------------------------------------------- the end

    async def drain(self) -> None:
        """Wait until everything that was submitted is committed."""
        while self._flying is not None or self._hurry or self._open.participants:
            self.hurry()
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Take no more. Who still waits for an answer is told; what the store has already, it
        finishes."""
        self._closed = True
        self._open.fail_impatient(StoreUnavailable("the store is closed"))
        self._open = _Open()
        self._hurry = False
        if self._handle is not None:
            self._handle.cancel()
