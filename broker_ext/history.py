"""The history as an API: read on from a position, and know that nothing was missed.

    async with plugin.history.subscribe(["sensors/#"], resume=position) as messages:
        async for message in messages:
            store(message.topic, message.payload)
            position = messages.progress()      # keep it where you keep your results

It is the same checked replay that MQTT sessions resume through (``broker_ext.replay``).

What can be resumed. A message is in the history if a durable session wants it, or if it matches
one of ``history_filters`` in the configuration. While you are away only the latter is sure, so a
position is accepted for filters that ``history_filters`` cover, and from when they do: anything
else would be a gap that nobody could tell. Without ``resume`` any filter will do: what matches is
logged for as long as the subscription lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from broker_ext.replay import READ_ENTRIES_MAX, Replay, Wanted
from broker_ext.topics import covers
from broker_ext.wire import valid_filter
from storage.api import (
    INCARNATION_BYTES,
    Acquire,
    Acquired,
    Advance,
    Discard,
    Position,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.errors import DatabaseGenerationChanged, ResumeHistoryUnavailable, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from broker_ext.hub import Hub
    from storage.api import Entry

__all__ = ["HISTORY_CLIENT_ID", "History", "HistoryMessage", "HistorySubscription"]

log = logging.getLogger("amqtt_durable.history")

HISTORY_CLIENT_ID: Final = b"\x00history"
"""Consumer behind ``history_filters``; no MQTT client id has a NUL [MQTT-1.5.3-2]."""
_INCARNATION: Final = b"history filters "[:INCARNATION_BYTES]


class HistoryMessage(NamedTuple):
    """One message. qos: as published, 1 or 2. properties: MQTT 5, encoded, as they came."""

    topic: str
    payload: bytes
    qos: int
    position: Position
    properties: bytes = b""

    def __repr__(self) -> str:
        """No payload in logs (P13)."""
        return f"HistoryMessage({self.topic!r}, {len(self.payload)} bytes, {self.position})"


class History:
    """The history of one broker. ``plugin.history``, while the broker runs."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._kept: dict[bytes, int] = {}
        self._consumer_id = 0
        self._saved = -1
        self._open: set[HistorySubscription] = set()

    @property
    def generation(self) -> str:
        """Of the database; every position carries it."""
        return self.hub.opened.log.generation

    @property
    def position(self) -> Position:
        """The end of the history, as committed."""
        return Position(self.generation, self.hub.committer.head)

    def subscribe(
        self,
        filters: Iterable[str],
        *,
        resume: Position | None = None,
        previous: int | None = None,
    ) -> HistorySubscription:
        """Read messages that match one of ``filters``, as they are committed.

        resume: go on after this position; previous: begin with the last N messages that the
        history still has (not both). Neither: begin with what is published from now on.
        Raises ValueError for filters that are none, for ``previous`` below 0 or beside ``resume``;
        DatabaseGenerationChanged (409; held, current, position, head) when the position is of
        another generation or ahead of the head; ResumeHistoryUnavailable (410; position, floor,
        topic) when it is older than what ``history_filters`` keep. The iterator raises the latter
        when messages after the position were pruned or are damaged.
        """
        names = [f.encode() for f in filters]
        if not names or not all(valid_filter(name) for name in names):
            msg = "filters must be at least one valid topic filter"
            raise ValueError(msg)
        if previous is not None and (previous < 0 or resume is not None):
            msg = "previous counts messages from 0, and cannot be combined with a position"
            raise ValueError(msg)
        if resume is not None:
            self._check(names, resume)
        start = self.hub.committer.last if resume is None else resume.offset
        subscription = HistorySubscription(self, names, start, previous or 0)
        self._open.add(subscription)
        return subscription

    def _check(self, names: Sequence[bytes], resume: Position) -> None:
        head = self.hub.committer.head
        if resume.generation != self.generation or resume.offset > head:
            raise DatabaseGenerationChanged(resume.generation, self.generation, resume.offset, head)
        for name in names:
            since = min(
                (since for kept, since in self._kept.items() if covers(kept, name)), default=head
            )
            if resume.offset < since:
                raise ResumeHistoryUnavailable(resume.offset, since, name)

    def closed(self, subscription: HistorySubscription) -> None:
        """A subscription ended (it tells so itself)."""
        self._open.discard(subscription)

    # ---------------------------------------------------------------- what is always logged

    async def load(self) -> None:
        """Bring the stored ``history_filters`` in line with the configured ones, at start."""
        hub = self.hub
        wanted = {f.encode() for f in hub.settings.history_filters}
        stored = await hub.store.snapshot(HISTORY_CLIENT_ID)
        if not wanted and stored is None:
            return
        acquired = await hub.committer.apply(
            Acquire(HISTORY_CLIENT_ID, _INCARNATION, HISTORY_CLIENT_ID, hub.clock.now_ms())
        )
        assert isinstance(acquired, Acquired)
        assert acquired.snapshot is not None
        consumer_id = self._consumer_id = acquired.snapshot.consumer.id
        had = {s.filter: s.from_offset for s in acquired.snapshot.subscriptions}
        gone = tuple(f for f in had if f not in wanted)
        for name in gone:
            hub.router.count(name, -1)
        if not wanted:
            await hub.committer.apply(Discard(consumer_id, _INCARNATION))
            return
        if gone:
            await hub.committer.apply(Unsubscribe(consumer_id, _INCARNATION, gone))
        head = hub.committer.last
        new = tuple(Subscription(f, 1, head) for f in sorted(wanted - had.keys()))
        for subscription in new:
            hub.router.count(subscription.filter, 1)
        if new:
            await hub.committer.apply(Subscribe(consumer_id, _INCARNATION, new))
        self._kept = {f: had.get(f, head) for f in wanted}
        for name in self._kept:
            hub.router.follow(name, 1)

    async def checkpoint(self) -> None:
        """``history_filters`` log, but hold nothing back: ``retain_for`` says how long."""
        head = self.hub.committer.head
        if self._kept and head != self._saved:
            self._saved = head
            await self.hub.committer.apply(
                Advance(self._consumer_id, _INCARNATION, cursor=head, checkpoint=True)
            )

    async def close(self) -> None:
        """End every subscription, at the end of the broker."""
        for subscription in list(self._open):
            await subscription.aclose()


class HistorySubscription:
    """Messages, in the order of the history. Use it with ``async with`` or call ``aclose``.

    generation: of the database the positions belong to.
    verified: awaitable; done when everything between the position and the head it began with was
        read (result: that head), or raises the refusal. It is read by asking for messages.
    """

    def __init__(
        self, history: History, filters: Sequence[bytes], start: int, previous: int
    ) -> None:
        hub = history.hub
        self.generation = history.generation
        self.verified: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        self._history = history
        self._hub = hub
        self._filters = tuple(dict.fromkeys(filters))
        self._replay = Replay(hub.store, [Wanted(f, 2) for f in self._filters])
        self._through = start
        self._previous = previous
        self._target = hub.committer.head
        self._buffer: deque[Entry] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        for name in self._filters:
            hub.router.count(name, 1)
            hub.router.follow(name, 1)
        self._verify()

    def progress(self) -> Position:
        """The position to resume from: everything that matches up to it was handed out.

        It also moves while nothing matches, and never passes a message that is still to come, nor
        the end of what is committed: offsets above it may be given to other messages after a crash.
        Until the first of ``previous`` messages was asked for it is 0.
        """
        if self._previous:
            return Position(self.generation, 0)
        offset = self._buffer[0].offset - 1 if self._buffer else self._through
        return Position(self.generation, min(offset, self._hub.committer.head))

    def __aiter__(self) -> Self:
        return self

    async def begin(self) -> None:
        """Read what there is to read at once, so that a position that cannot be continued is known
        before the first message is asked for. Raises as the iterator does."""
        try:
            await self._rewind()
            if self._through < self._hub.committer.head:
                await self._fill()
        except StoreError as error:
            self._fail(error)
            raise

    async def next_entry(self) -> Entry | None:
        """The next message as it is stored; None when the subscription was closed."""
        while not self._buffer:
            if self._closed:
                return None
            try:
                await self._rewind()
                await self._fill()
            except StoreError as error:
                self._fail(error)
                raise
        return self._buffer.popleft()

    def _fail(self, error: StoreError) -> None:
        self._refuse(error)
        self.close()

    async def _rewind(self) -> None:
        if self._previous:
            self._through = await self._back(self._previous)
            self._previous = 0

    async def __anext__(self) -> HistoryMessage:
        entry = await self.next_entry()
        if entry is None:
            raise StopAsyncIteration
        position = Position(self.generation, entry.offset)
        return HistoryMessage(
            entry.topic.decode(), entry.payload, entry.qos, position, entry.properties
        )

    async def _fill(self) -> None:
        """Read on, or wait for the next commit."""
        committer = self._hub.committer
        head = committer.head
        if self._through >= head:
            self._verify()
            self._waiting = committer.next_commit()
            await self._waiting
            return
        tail = committer.since(self._through) if head - self._through <= READ_ENTRIES_MAX else None
        if tail is None:
            piece = await self._replay.next(self._through)
            self._buffer.extend(e for e, qos in piece.entries if qos)
            self._through = piece.through
        else:  # of what is in memory, only what is committed
            granted = self._replay.granted
            self._buffer.extend(e for e in tail if e.offset <= head and granted(e))
            self._through = head
        self._verify()

    async def _back(self, count: int) -> int:
        """The position before the last ``count`` messages that the history still has: look further
        and further back, so that it costs about what is found."""
        state = await self._hub.store.log()
        end = min(self._through, state.head)
        reader = Replay(self._hub.store, self._replay.wanted, skips=True)
        span = max(count, READ_ENTRIES_MAX)
        while True:
            start = max(end - span, state.floor)
            last: deque[int] = deque(maxlen=count)
            at = start
            while at < end:
                piece = await reader.next(at)
                last.extend(e.offset for e, qos in piece.entries if qos and e.offset <= end)
                at = piece.through
            if len(last) == count:
                return last[0] - 1
            if start <= state.floor:
                return last[0] - 1 if last else end
            span *= 8

    def _verify(self) -> None:
        if self._through >= self._target and not self._previous and not self.verified.done():
            self.verified.set_result(Position(self.generation, self._target))

    def _refuse(self, error: StoreError) -> None:
        if not self.verified.done():
            self.verified.set_exception(error)
            self.verified.exception()  # it is raised to the reader as well; nobody need await both

    async def aclose(self) -> None:
        """End the subscription. Idempotent."""
        self.close()

    def close(self) -> None:
        """The same, at once."""
        if self._closed:
            return
        self._closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if not self.verified.done():
            self.verified.cancel()
        for name in self._filters:
            self._hub.router.follow(name, -1)
            self._hub.router.count(name, -1)
        self._history.closed(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
