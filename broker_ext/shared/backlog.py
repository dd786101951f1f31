"""What of a group waits for room: first what went back, then the history behind the cursor.

Where a group stands in the history is, as for a session, one of

    live      every entry up to the last one that was assigned an offset has been offered to it
    lagging   entries after ``cursor`` have not: they are taken from the committer's tail, or read

A group that nobody connected is a member of lags. Messages from memory wait with those that went
back; how many is bounded as the queue of a transient session is.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from broker_ext.replay import READ_ENTRIES_MAX, Replay, Wanted
from broker_ext.shared.handed import Handed
from storage.errors import ResumeHistoryUnavailable, StoreError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from broker_ext.shared.group import Group
    from broker_ext.shared.member import Member
    from storage.api import Entry

__all__ = ["QOS", "Backlog"]

log = logging.getLogger("amqtt_durable.shared")

QOS: Final = 2
"""Of the group's own subscription: each member has its own."""
TAIL_WALK_MAX: Final = 512

_OFFSET: Final = attrgetter("offset")


class Backlog:
    """What waits in one group. loose: with nobody, in their order. unbound: the cursor is of
    another generation, until everything behind it was offered."""

    __slots__ = (
        "_from_offset",
        "_group",
        "_last_of_memory",
        "_replay",
        "_skipped",
        "committer",
        "cursor",
        "live",
        "loose",
        "memory_bytes",
        "unbound",
        "working",
    )

    def __init__(self, group: Group) -> None:
        self._group = group
        self.committer = group.hub.committer
        self.live = False
        self.cursor = 0
        self.loose: list[Handed] = []
        self.memory_bytes = 0
        self.unbound = False
        self.working: asyncio.Task[None] | None = None
        self._from_offset = 0
        self._skipped = 0
        self._replay: Replay | None = None
        self._last_of_memory = -(1 << 62)

    @property
    def waits(self) -> bool:
        """Whether something does."""
        return bool(self.loose) or (not self.live and self._group.record.durable)

    # ----------------------------------------------------------------- its place in history

    @property
    def at(self) -> int:
        """The certificate: what matches at or below it was offered, and claimed if wanted."""
        return self.committer.last if self.live else self.cursor

    def follow(self, from_offset: int) -> None:
        """The group is durable: what matches above this offset is for it."""
        self._from_offset = from_offset
        self._replay = None

    def stand(self) -> None:
        """Nobody is here any more: what is published from now on waits."""
        if self.live:
            self.live = False
            self.cursor = self.committer.last

    def begin(self, entry: Entry) -> None:
        """Nobody may take an entry now: it waits, and whatever comes after it."""
        self.live = False
        self.cursor = entry.offset - 1
        if self._group.hub.router.guarded:
            self.pump()

    def _reached(self) -> None:
        """Everything up to the end of the history was offered."""
        self.live = True
        if self.unbound:
            self.unbound = False
            self._group.record.bind()

    # ------------------------------------------------------------------------ with nobody

    def put_back(self, flight: Handed) -> None:
        """It is with nobody, and comes before anything new."""
        flight.is_loose = True
        insort(self.loose, flight, key=_OFFSET)
        if flight.offset < 0 and flight.entry is not None:
            self.memory_bytes += len(flight.entry.payload)

    def take_out(self, flight: Handed) -> None:
        """It is with somebody, or over."""
        self.loose.remove(flight)
        flight.is_loose = False
        if flight.offset < 0 and flight.entry is not None:
            self.memory_bytes -= len(flight.entry.payload)

    def of_memory(self, entry: Entry) -> Handed:
        """The delivery of a message that is not in the history."""
        self._last_of_memory += 1
        return Handed(self._group, self._last_of_memory, entry)

    def queue(self, entry: Entry) -> None:
        """Keep a message from memory until somebody has room, if there are not too many."""
        hub = self._group.hub
        if (
            len(self.loose) >= hub.settings.max_queued_messages
            or self.memory_bytes >= hub.settings.max_queued_bytes
        ):
            hub.figures.dropped_queue += 1
            return
        self.put_back(self.of_memory(entry))

    # ------------------------------------------------------------------------ handing out

    def room(self) -> None:
        """A member may have room."""
        if self.waits:
            self.pump()

    def pump(self) -> None:
        """Hand out what waits, as far as there is room."""
        group = self._group
        if not group.members or group.hub.refusing or self.working is not None:
            return
        if not self.waits or not group.turns.has_room:
            return
        if group.hub.router.guarded:
            self._start(self._work())
            return
        if self.loose:
            self._hand_on()
        if self.loose or self.live or not self._follows or group.record.is_being_made:
            return
        tail = self._tail()
        if tail is not None:
            self._claim_tail(tail)
        else:
            self._start(self._read())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self.working = asyncio.ensure_future(work)
        self.working.add_done_callback(self._group.task_done)

    def stop(self) -> None:
        """The broker stops."""
        if self.working is not None:
            self.working.cancel()

    def _hand_on(self) -> None:
        """What went back, first; whatever newer message of its topic came since."""
        group = self._group
        while self.loose:
            flight = self.loose[0]
            entry = flight.entry
            if entry is None:
                group.fetching.ask(flight)
                return
            if group.hub.is_over(entry):
                group.settle(flight)
                continue
            member, fits = group.turns.choose(entry)
            if member is not None:
                self.take_out(flight)
                group.hand(flight, entry, member)
            elif not fits:
                group.too_large(entry, flight.attempts)
                group.settle(flight)
            else:
                return

    # ------------------------------------------------------------------------ catching up

    @property
    def replay(self) -> Replay:
        """The reader of the group's filter. A loss is skipped, and told: there is no client whose
        session could be reset."""
        if self._replay is None:
            wanted = Wanted(self._group.filter, QOS, self._from_offset)
            self._replay = Replay(self._group.hub.store, [wanted], skips=True)
        return self._replay

    def _tail(self) -> list[Entry] | None:
        return self.committer.tail(self.cursor, TAIL_WALK_MAX)

    def _claim_tail(self, tail: list[Entry]) -> bool:
        granted = self.replay.granted
        return self._claim_all([(e, granted(e)) for e in tail], self.committer.last)

    def _claim_all(self, entries: Sequence[tuple[Entry, int]], through: int) -> bool:
        """Claim what is wanted of ``entries``, in order; move the cursor. False: no more room."""
        group = self._group
        hub = group.hub
        for entry, qos in entries:
            if not qos or hub.is_over(entry) or hub.is_superseded(entry):
                continue
            member, fits = group.turns.choose(entry)
            if member is not None:
                group.hand(Handed(group, entry.offset, entry), entry, member)
            elif fits:
                self.cursor = entry.offset - 1
                return False
            else:
                group.too_large(entry)
        self.cursor = through
        if through == self.committer.last:
            self._reached()
        return True

    async def _read(self) -> None:
        """Read the history behind the cursor until the tail is reached, or nobody has room."""
        group = self._group
        try:
            while self._follows and not self.live and not self.loose and group.turns.has_room:
                tail = self._tail()
                if tail is not None:
                    if not self._claim_tail(tail):
                        break
                    continue
                wanted, through = await self._next_chunk()
                if not self._follows or self.loose:
                    break
                if not self._claim_all(wanted, through):
                    break
        except StoreError as error:
            log.warning("group %r: cannot read (%s); later", group.name, error)
            self.working = None
            return  # the checkpoint timer pumps
        finally:
            self.working = None
        self.pump()

    @property
    def _follows(self) -> bool:
        return self._group.record.durable

    async def _next_chunk(self) -> tuple[list[tuple[Entry, int]], int]:
        """The next piece of history; what is gone is told and passed over."""
        after = self.cursor
        try:
            piece = await self.replay.next(after)
        except ResumeHistoryUnavailable as error:  # damaged: it is the first that matches
            self.skip(error.floor)
            return [], error.floor
        if piece.lost is not None:
            self.skip(piece.lost.pruned_through)
        newest = self._group.hub.router.rules.newest
        if newest is not None:
            await newest.look_up(self._group.hub.store, piece.entries)
        return piece.entries, piece.through

    def skip(self, lost_through: int) -> None:
        """What is gone through here is told, once."""
        if lost_through > self._skipped:
            self._skipped = lost_through
            self._group.hub.tell_gap(self._group.name, self.cursor, lost_through)

    # ------------------------------------------------------- where topic plugins are asked

    async def _work(self) -> None:
        """The same, asking for each delivery whether its member may have it."""
        group = self._group
        try:
            while group.members and not group.hub.refusing:
                if self.loose:
                    flight = self.loose[0]
                    if flight.entry is None:
                        group.fetching.ask(flight)
                        return
                    if not await self._offer_loose(flight, flight.entry):
                        return
                elif self._follows and not self.live:
                    if not await self._offer_chunk():
                        return
                else:
                    return
        except StoreError as error:
            log.warning("group %r: cannot read (%s); later", group.name, error)
        finally:
            self.working = None

    async def _offer_loose(self, flight: Handed, entry: Entry) -> bool:
        """Returns whether to go on."""
        member, fits = (
            (None, False) if self._group.hub.is_over(entry) else await self._permitted(entry)
        )
        if not flight.is_loose:
            return True  # its member came back, or nobody is left
        if member is not None:
            self.take_out(flight)
            self._group.hand(flight, entry, member)
        elif not fits or entry.qos == 0:
            self._group.settle(flight)
        return member is not None or not fits or entry.qos == 0

    async def _offer_chunk(self) -> bool:
        """Returns whether to go on."""
        group = self._group
        hub = group.hub
        tail = self._tail()
        if tail is not None:
            granted = self.replay.granted
            wanted = [(e, granted(e)) for e in tail[:READ_ENTRIES_MAX]]
            through = wanted[-1][0].offset if wanted else self.cursor
        else:
            wanted, through = await self._next_chunk()
        for entry, qos in wanted:
            if not qos or hub.is_over(entry) or hub.is_superseded(entry):
                continue
            member, fits = await self._permitted(entry)
            if not self._follows:
                return False
            if member is not None:
                group.hand(Handed(group, entry.offset, entry), entry, member)
                self.cursor = entry.offset
            elif fits:
                self.cursor = entry.offset - 1
                return False
            if self.loose:
                self.cursor = entry.offset
                return True
        self.cursor = max(self.cursor, through)
        if self.cursor == self.committer.last:
            self._reached()
        return True

    async def _permitted(self, entry: Entry) -> tuple[Member | None, bool]:
        """Who gets a message, of those who may have it. None: nobody who may has room now; and
        whether anybody may."""
        turns = self._group.turns
        refused: list[Member] = []
        while True:
            member, fits = turns.choose(entry, refused)
            if member is None:
                return None, fits
            may_receive = member.session.may_receive
            if may_receive is None or await may_receive(entry.topic):
                if member in turns.members and turns.places(member, entry) > 0:
                    return member, True
            else:
                refused.append(member)
