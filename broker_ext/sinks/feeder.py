"""The history behind a sink's cursor, moved into its outbox.

Rule 1. The cursor moves and the messages it passed are enqueued in one operation, fenced by the
        sink's incarnation: both happen or neither, so nothing is fed twice and nothing is missed.
Rule 2. At most ``outstanding`` messages (and OUTSTANDING_BYTES_MAX) that are not ended are in the
        outbox. A sink that is down costs a cursor.
Rule 3. The range is read as a session reads it (broker_ext.replay): checked in each chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from broker_ext.replay import READ_ENTRIES_MAX, Replay
from storage.api import Advance, Bind
from storage.outbox import Enqueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from broker_ext.figures import SinkFigures
    from broker_ext.hub import Hub
    from broker_ext.replay import Wanted
    from broker_ext.sinks.settings import SinkSettings
    from storage.api import Entry

__all__ = ["OUTSTANDING_BYTES_MAX", "Feeder"]

OUTSTANDING_BYTES_MAX: Final = 16 << 20
FEED_MAX: Final = 256
"""Messages in one operation: a commit beside it waits for at most this much."""
LOOK_S: Final = 1.0
"""How often a full outbox is counted again: what was expired or purged elsewhere makes room too."""


class Feeder:
    """Feeds one sink, from ``cursor`` on.

    unbound: the position is of another generation; it is bound to this one when everything the
    history had has been read (as a session's is). on_fed: called after each commit.
    """

    def __init__(
        self,
        hub: Hub,
        settings: SinkSettings,
        *,
        consumer_id: int,
        incarnation: bytes,
        wanted: Sequence[Wanted],
        cursor: int,
        figures: SinkFigures,
        on_fed: Callable[[], None],
        unbound: bool = False,
    ) -> None:
        self.cursor = cursor
        self._hub = hub
        self._queue = settings.name.encode()
        self._consumer_id = consumer_id
        self._incarnation = incarnation
        self._replay = Replay(hub.store, wanted, skips=hub.settings.on_history_pruned == "skip")
        self._outstanding = settings.outstanding
        self._attempts_max = len(settings.retry) + 1
        self._figures = figures
        self._on_fed = on_fed
        self._unbound = unbound
        self._target = hub.committer.head
        self._live = settings.outstanding  # not counted yet
        self._live_bytes = 0
        self._saved = cursor
        self._feeding = False
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Feed for ever. Raises ResumeHistoryUnavailable (410), Fenced, and StoreUnavailable when
        the store cannot be read or written: then it may be run again."""
        while True:
            room = await self._wait_for_room()
            if self._unbound and self.cursor >= self._target:
                await self._bind()
            committer = self._hub.committer
            if self.cursor >= committer.head:
                await committer.next_commit()
                continue
            entries, through = await self._read()
            if len(entries) > room:
                entries = entries[:room]
                through = entries[-1].offset
            if entries:
                await self._feed(entries, through)
            self.cursor = through

    async def _read(self) -> tuple[list[Entry], int]:
        """The next entries that are wanted, and how far they were looked for."""
        committer = self._hub.committer
        head = committer.head
        tail = committer.since(self.cursor) if head - self.cursor <= READ_ENTRIES_MAX else None
        if tail is not None:  # of what is in memory, only what is committed
            granted = self._replay.granted
            return [e for e in tail if e.offset <= head and granted(e)], head
        piece = await self._replay.next(self.cursor)
        if piece.lost is not None:
            self._figures.gaps += 1
            self._hub.tell_gap(self._queue, self.cursor, piece.lost.pruned_through)
        return [entry for entry, qos in piece.entries if qos], piece.through

    async def _feed(self, entries: Sequence[Entry], through: int) -> None:
        now_ms = self._hub.clock.now_ms()
        self._feeding = True
        try:
            await self._hub.committer.apply(
                Advance(
                    self._consumer_id,
                    self._incarnation,
                    cursor=through,
                    enqueue=[
                        Enqueue(self._queue, entry, now_ms, attempts_max=self._attempts_max)
                        for entry in entries
                    ],
                )
            )
        finally:
            self._feeding = False
        self._figures.fed += len(entries)
        self._live += len(entries)
        self._live_bytes += sum(len(entry.payload) for entry in entries)
        self._on_fed()

    async def _bind(self) -> None:
        await self._hub.committer.apply(Bind(self._consumer_id, self._incarnation, self.cursor))
        self._unbound = False

    # ------------------------------------------------------------------------------ room

    def ended(self, payload_bytes: int) -> None:
        """A message of this sink will not be sent again."""
        self._live = max(self._live - 1, 0)
        self._live_bytes = max(self._live_bytes - payload_bytes, 0)
        self._room.set()

    async def _wait_for_room(self) -> int:
        """How many messages may be fed, 1 or more."""
        while True:
            room = self._outstanding - self._live
            if room >= min(self._outstanding // 4 + 1, FEED_MAX) and (
                self._live_bytes < OUTSTANDING_BYTES_MAX
            ):
                return min(room, FEED_MAX)
            self._room.clear()
            live = await self._count()
            if live < self._live:
                self._live = live
                if not live:
                    self._live_bytes = 0
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._room.wait()

    async def _count(self) -> int:
        for backlog in await self._hub.store.outbox.backlog():
            if backlog.queue == self._queue:
                return backlog.waiting + backlog.claimed
        return 0

    # ----------------------------------------------------------------------- checkpoints

    async def checkpoint(self) -> None:
        """Save the position of a sink to which nothing came, and let retention know it."""
        if self.cursor == self._saved or self._unbound or self._feeding:
            return  # behind a feed it would move the cursor back
        cursor = self.cursor
        await self._hub.committer.apply(
            Advance(self._consumer_id, self._incarnation, cursor=cursor, checkpoint=True)
        )
        self._saved = cursor
