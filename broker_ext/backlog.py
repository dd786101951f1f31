"""What a durable session has not been offered yet: its place in the history, and catching up.

Where it stands is one of

    live      every entry up to the last one that was assigned an offset has been offered to it
    lagging   entries after ``cursor`` have not: they are taken from the committer's tail, or read
    held      a subscription change is being saved: lagging, and not looking

What was published with QoS 0 while it was away (``queue_qos0``) is read on the way, until it is
live for the first time; from then on it is there to be handed such messages as they come. Where one
became the other is written with ``Detach``, so that each comes at most once [MQTT-4.3.1-1]; of a
session that dies instead it is not known, and nothing of it is delivered again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from weakref import ref

from broker_ext.replay import READ_ENTRIES_MAX
from storage.errors import ResumeHistoryUnavailable, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker_ext.durable import DurableSession
    from broker_ext.replay import Replay
    from storage.api import Entry, Loss, Snapshot

__all__ = ["Backlog"]

TAIL_WALK_MAX: Final = 512
"""Stretches of the committer's memory (storage.recent) that a session that is behind looks through
itself; when it is further behind, the store's planner finds what it missed at less cost."""


class Backlog:
    """Of one connection of a durable session.

    cursor: while it is not live, what matches at or below it was offered. catches_up: it has not
    been live yet, and reads what was published with QoS 0. verified: it has been live. passes_over:
    a change is being saved behind which ``pass_over_qos0`` is called.
    """

    __slots__ = (
        "_committer",
        "_epoch",
        "_holds",
        "_hub",
        "_newest",
        "_qos0_after",
        "_ref",
        "_replay",
        "_skipped",
        "_unbound",
        "catches_up",
        "cursor",
        "live",
        "passes_over",
        "reading",
        "verified",
    )

    def __init__(self, session: DurableSession, snapshot: Snapshot, *, unbound: bool) -> None:
        hub = session.hub
        self._ref = ref(session)  # no ring: what is over is freed at once
        self._hub = hub
        self._committer = hub.committer
        self._newest = hub.router.rules.newest
        self._unbound = unbound
        self._qos0_after = snapshot.consumer.qos0_after
        self._replay: Replay | None = None
        self._skipped = 0
        self._holds = 0
        self._epoch = 0
        self.cursor = snapshot.consumer.cursor
        self.live = False
        self.passes_over = False
        self.catches_up = hub.settings.queue_qos0
        self.verified = False
        self.reading: asyncio.Task[None] | None = None

    @property
    def _session(self) -> DurableSession:
        session = self._ref()
        assert session is not None, "nobody else calls"
        return session

    # -------------------------------------------------------------------------- its place

    @property
    def at(self) -> int:
        """The certificate: what matches at or below it was offered, and claimed if wanted."""
        return self._committer.last if self.live else self.cursor

    @property
    def qos0_through(self) -> int:
        """What it was given with QoS 0, or may have been: nothing up to there is given again."""
        is_known = self.catches_up and not self.passes_over
        return self._qos0_after if is_known else self._committer.last

    def pass_over_qos0(self) -> None:
        """Of what was published with QoS 0 up to now, some was passed on at once to a subscription
        of QoS 0, and matches one of more from now on. Nobody can tell later which, so none of it
        is read: at most once."""
        self._qos0_after = self._committer.last

    def begin(self, entry: Entry) -> None:
        """There is no room for an entry, or topic plugins must be asked: it waits, and whatever
        comes after it."""
        self.live = False
        self.cursor = entry.offset - 1
        if self._hub.router.guarded:
            self.pump()

    def go_back(self, cursor: int) -> None:
        """What was claimed behind this and never sent is given back."""
        self.cursor = cursor if self.live else min(cursor, self.cursor)
        self.live = False

    def hold(self) -> None:
        """Stop dispatching while a subscription change is being saved."""
        if self.live:
            self.live = False
            self.cursor = self._committer.last
        self._holds += 1
        self._epoch += 1

    def unhold(self) -> None:
        """It is saved, or is not to be: go on with the subscriptions as they are now."""
        self._holds -= 1
        self._epoch += 1
        self._replay = None
        if self._ref() is not None:  # it may be a change that nobody waits for any more
            self.pump()

    @property
    def replay(self) -> Replay:
        """The reader of the session's durable filters, as they are now."""
        if self._replay is None:
            self._replay = self._session.replay()
        return self._replay

    # ------------------------------------------------------------------------- catching up

    @property
    def _stands(self) -> bool:
        """Nothing is to be looked for."""
        return self.live or self._session.sealed or self._holds > 0

    def pump_if_low(self) -> None:
        """``pump``, if there is room for more than a few."""
        if not self.live and self._session.out.low:
            self.pump()

    def pump(self) -> None:
        """Claim what the cursor has not reached, as far as there is room."""
        if self._stands or self.reading is not None:
            return
        if self.catches_up and self._session.peer.congested:
            return  # there may be something to send at once
        if not self._hub.router.guarded:
            if self.cursor >= self._committer.last:  # nothing to look through: no need of a replay
                self._reached()
                return
            near = self._near()
            if near is not None:
                self._claim_near(near)
                return
        self.reading = asyncio.ensure_future(self._read())
        self.reading.add_done_callback(self._session.task_done)

    def _near(self) -> Iterable[Entry] | None:
        """What is wanted after the cursor, if it is in memory and a short walk, or not committed
        yet."""
        replay = self.replay
        return self._committer.wanted_since(
            self.cursor, replay.topics, replay.accepts, stretches_max=TAIL_WALK_MAX
        )

    def _claim_near(self, near: Iterable[Entry]) -> bool:
        granted = self.replay.granted
        return self._claim_all(((e, granted(e)) for e in near), self._committer.last)

    def _claim_all(self, entries: Iterable[tuple[Entry, int]], through: int) -> bool:
        """Claim what is wanted of ``entries``, in order; move the cursor. False: no more room."""
        session, hub = self._session, self._hub
        out = session.out
        options = self.replay.options
        newest = self._newest
        for entry, qos in entries:
            if not entry.qos:
                if self.catches_up and not self._give(entry):
                    self.cursor = entry.offset - 1
                    return False
            elif qos and not (entry.expires_ms and hub.is_over(entry)):
                if newest is not None and hub.is_superseded(entry):
                    continue
                if not out.room:
                    self.cursor = entry.offset - 1
                    return False
                if not out.claiming:
                    session.join(lazy=False)  # at once, even if an acknowledgement joined lazily
                out.claim(entry, qos, options(entry))
        self.cursor = through
        if through == self._committer.last and not self._hub.router.guarded:
            self._reached()
        return True

    def _give(self, entry: Entry) -> bool:
        """Send what was published with QoS 0 while its client was away, if it is wanted. False:
        not now, the connection is full."""
        session = self._session
        if entry.offset <= self._qos0_after or not self.replay.wants(entry):
            return True
        if self._hub.is_superseded(entry):
            return True
        if session.peer.congested:
            return False
        self._qos0_after = entry.offset
        self._hub.figures.queued_qos0 += 1
        session.deliver(entry, 0, self.replay.options(entry))
        return True

    def _reached(self) -> None:
        """Everything up to the end of the history was offered."""
        self.live = True
        self.catches_up = False
        if self.verified:
            return
        self.verified = True
        self._hub.figures.verified += 1
        if self._unbound:  # of another generation: only now is the position worth the new one
            self._unbound = False
            self._session.bind()

    async def _read(self) -> None:
        """Read the history behind the cursor, a chunk at a time, until the tail is reached."""
        session = self._session
        epoch = self._epoch
        try:
            while not self._stands and session.out.room:
                if not await self._read_chunk():
                    break  # not return: a change that was saved meanwhile left the rest to us
        except ResumeHistoryUnavailable as error:
            if epoch == self._epoch:
                session.lose(error)
        except StoreError as error:
            session.unavailable(error)
        finally:
            self.reading = None
        self.pump_if_low()

    async def _read_chunk(self) -> bool:
        """Returns whether to go on."""
        epoch = self._epoch
        guarded = self._hub.router.guarded
        replay = self.replay
        near = None if guarded else self._near()
        if near is not None:
            return self._claim_near(near)
        tail = self._committer.tail(self.cursor, TAIL_WALK_MAX) if guarded else None
        if tail is not None:
            if not tail:
                self._reached()
                return False
            wanted = [(e, replay.granted(e)) for e in tail[:READ_ENTRIES_MAX]]
            through = wanted[-1][0].offset
        else:
            piece = await replay.next(self.cursor)
            if piece.lost is not None:
                self._skip(piece.lost)
            wanted, through = piece.entries, piece.through
        if self._newest is not None:
            await self._newest.look_up(self._hub.store, wanted)
        if guarded:
            wanted = [(e, q) for e, q in wanted if (q or not e.qos) and await self._permitted(e)]
        if self._session.sealed or self._holds or epoch != self._epoch:
            return False
        return self._claim_all(wanted, through)

    async def _permitted(self, entry: Entry) -> bool:
        may_receive = self._session.may_receive
        return may_receive is None or await may_receive(entry.topic)

    def _skip(self, lost: Loss) -> None:
        """What is gone, where it is configured to be skipped: said once for each gap, and
        counted."""
        if lost.pruned_through > self._skipped:
            self._skipped = lost.pruned_through
            self._hub.tell_gap(self._session.client_id, self.cursor, lost.pruned_through)
