"""A group of subscribers that share what matches one filter: $share/GROUP/filter.

It is a consumer of its own (DESIGN.md, Shared subscriptions): it follows the history as a session
does, but what it claims is *with* one of its members. A delivery of it goes

    claimed for a member -> committed -> sent -> [received, QoS 2] -> settled
            ^------- goes back: its member left before it had it -----'

Rule 1. A message is claimed only for a member that has a free place in its window. When nobody has,
        the cursor stays: a slow member holds its window and nothing else.
Rule 2. What went back comes before anything new, in its order.
Rule 3. What a client may have had with QoS 2 is for nobody else [MQTT-4.8.2-4, MQTT-4.8.2-5].
Rule 4. Everything is written as one ``Advance`` of the group's record per batch (P3, P4). A packet
        id that goes back to its session is in no row any more when that can use it again.

Without a durable member nothing is stored: its messages come from memory and have offsets below 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
from bisect import insort
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.member import Handed
from broker_ext.options import PLAIN, Options
from broker_ext.outbound import SETTLED
from broker_ext.replay import READ_ENTRIES_MAX, Replay, Wanted
from broker_ext.session import publish_bytes
from broker_ext.topics import matches
from storage.api import (
    GROUP,
    RECEIVED,
    SENT,
    UNRECORDED,
    Acquire,
    Acquired,
    Advance,
    Bind,
    Claim,
    Delivery,
    Detach,
    Discard,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.errors import (
    EntryDamaged,
    EntryGone,
    Fenced,
    ResumeHistoryUnavailable,
    StoreError,
)
from storage.outbox import DeadLetter, Failure

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from broker_ext.hub import Hub
    from broker_ext.member import Member
    from broker_ext.shared import Shared
    from storage.api import Entry, Outcome, Snapshot

__all__ = ["Group", "Holder", "Joined", "Row"]

log = logging.getLogger("amqtt_durable.shared")

QOS: Final = 2
"""Of the group's own subscription: each member has its own."""
ID_BYTES: Final = 16
ROW_MAX: Final = 128
"""Deliveries in a claim row."""
LOOK_MAX: Final = 16
"""Members that are looked at for one message, in turn; more only if none of these has room."""
TAIL_WALK_MAX: Final = 512
FETCH_MAX: Final = 128

_OFFSET: Final = attrgetter("offset")


class Joined(NamedTuple):
    """What a member asked for."""

    qos: int
    options: Options


class Row:
    """A claim: deliveries that are with one member, as they are stored."""

    __slots__ = ("deliveries", "is_dirty", "is_written", "member", "number")

    def __init__(self, number: int, member: int) -> None:
        self.number = number
        self.member = member
        self.deliveries: dict[Handed, Delivery] = {}
        self.is_dirty = False
        self.is_written = False

    @property
    def keeps_ids(self) -> bool:
        """Whether it is with somebody who can come back."""
        return self.member not in {0, UNRECORDED}

    def claim(self) -> Claim:
        """What is to be stored."""
        return Claim(self.number, tuple(self.deliveries.values()), self.member)


class Holder:
    """The member that a topic stays with (``shared_order: topic``)."""

    __slots__ = ("member", "topic", "unsettled")

    def __init__(self, topic: bytes, member: Member) -> None:
        self.topic = topic
        self.member = member
        self.unsettled = 0


class Group:
    """One group. name: the members' filter, $share/GROUP/filter.

    durable: it follows the history. consumer_id: of its record, 0 = it has none. A group whose last
    durable member unsubscribed keeps its record until what was sent is settled.
    """

    __slots__ = (
        "_awaits_history",
        "_checkpoint",
        "_claiming",
        "_dirty",
        "_fetching",
        "_from_offset",
        "_joined",
        "_letters",
        "_making",
        "_memory_bytes",
        "_next_claim",
        "_next_memory",
        "_open_rows",
        "_reading",
        "_receiving",
        "_replay",
        "_skipped",
        "_stored",
        "_to_fetch",
        "_topics",
        "_turn",
        "_unindexed",
        "_vacating",
        "client_id",
        "committer",
        "consumer_id",
        "cursor",
        "durable",
        "filter",
        "hub",
        "incarnation",
        "live",
        "loose",
        "members",
        "name",
        "saved_cursor",
        "shared",
        "unbound",
    )

    def __init__(self, shared: Shared, hub: Hub, name: bytes, topic_filter: bytes) -> None:
        self.shared = shared
        self.hub = hub
        self.committer = hub.committer
        self.name = name
        self.filter = topic_filter
        self.client_id = GROUP
        self.incarnation = shared.incarnation
        self.consumer_id = 0
        self.durable = False
        self.live = False
        self.cursor = 0
        self.saved_cursor = 0
        self.members: dict[Member, Joined] = {}
        self.loose: list[Handed] = []
        """With nobody, in their order."""
        self.unbound = False
        self._turn: list[Member] = []
        self._topics: dict[bytes, Holder] = {}
        self._from_offset = 0
        self._skipped = 0
        self._replay: Replay | None = None
        self._next_claim = 1
        self._next_memory = -(1 << 62)
        self._memory_bytes = 0
        self._stored = 0
        self._claiming: dict[Handed, None] = {}
        self._vacating: list[Handed] = []
        self._receiving: list[Handed] = []
        self._letters: list[DeadLetter] = []
        self._dirty: list[Row] = []
        self._open_rows: dict[int, Row] = {}
        self._joined = False
        self._checkpoint = False
        self._unindexed = False
        self._to_fetch: dict[Handed, None] = {}
        self._reading: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._making: asyncio.Future[None] | None = None
        self._awaits_history = False

    def __repr__(self) -> str:
        return f"<group {self.name!r}>"

    @property
    def wanted(self) -> int:
        """How many durable sessions are members with QoS >= 1, connected or not."""
        return self.shared.counts.get(self.name, 0)

    @property
    def lag(self) -> int:
        """Entries of the history behind the cursor, wanted or not; 0 where it is not durable."""
        behind = self.durable and not self.live
        return max(self.committer.head - self.cursor, 0) if behind else 0

    @property
    def under_way(self) -> int:
        """Deliveries that are with connected members."""
        return sum(f.group is self for member in self.members for f in member.flights.values())

    # ------------------------------------------------------------------------- the record

    async def make_durable(self) -> None:
        """Have a record that follows the history from now on. Raises StoreError."""
        while self._making is not None:
            await asyncio.wait([self._making])
        if self.durable:
            return
        self._making = asyncio.get_running_loop().create_future()
        try:
            await self._make()
        finally:
            self._making.set_result(None)
            self._making = None
            if not self.wanted:
                self.forsaken()
            self._discard_if_settled()
            self.pump()

    async def _make(self) -> None:
        apply = self.committer.apply
        if not self.consumer_id:
            # random: a client id stands in the store in clear, topics may be sealed
            self.client_id = GROUP + os.urandom(ID_BYTES).hex().encode()
            acquired = await apply(
                Acquire(self.client_id, self.incarnation, GROUP, self.hub.clock.now_ms())
            )
            assert isinstance(acquired, Acquired)
            assert acquired.snapshot is not None
            self._own(acquired.snapshot)
        head = self.cursor = self.committer.last
        self._awaits_history = True
        self.hub.router.count(self.filter, 1)  # from now on what matches is logged
        try:
            follows = Subscription(self.filter, QOS, head)
            name = Subscription(self.name, 0, head)
            await apply(Subscribe(self.consumer_id, self.incarnation, (follows, name)))
        except StoreError:
            self.hub.router.count(self.filter, -1)
            self._awaits_history = False
            for entry in self.committer.since(head) or ():
                if matches(self.filter, entry.topic):
                    self.pass_on(entry, entry.qos)
            raise
        self._awaits_history = False
        self._follow(head)
        self._checkpoint = True
        self._join(lazy=False)

    def _own(self, snapshot: Snapshot) -> None:
        consumer = snapshot.consumer
        self.client_id = consumer.client_id
        self.consumer_id = consumer.id
        self.cursor = self.saved_cursor = consumer.cursor
        self._next_claim = consumer.next_claim

    def _follow(self, from_offset: int) -> None:
        self.durable = True
        self._from_offset = from_offset
        self._replay = None
        if self.members:
            self.hub.router.attach(self, self.filter, QOS)  # as a durable receiver now

    def restore(self, snapshot: Snapshot) -> None:
        """Take over what the last run left."""
        self._own(snapshot)
        for subscription in snapshot.subscriptions:
            if subscription.filter == self.filter:
                self._follow(subscription.from_offset)
        lost: list[Handed] = []
        for claim in snapshot.claims:
            row = Row(claim.number, claim.member)
            row.is_written = True
            for delivery in claim.deliveries:
                flight = Handed(self, delivery.offset, None, delivery.qos)
                flight.state = delivery.state
                flight.attempts = delivery.attempts
                flight.stored = row
                row.deliveries[flight] = delivery
                self._stored += 1
                if row.keeps_ids and row.member not in snapshot.gone:
                    self.shared.left(row.member, flight)
                    if delivery.qos == QOS:
                        continue
                elif row.member and delivery.qos == QOS:
                    lost.append(flight)
                    continue
                self._put_back(flight)
        for flight in lost:
            self.settle(flight)
        if not self.wanted:
            self.forsaken()

    def forsaken(self) -> None:
        """Nobody who could come back is a member any more; when nobody at all is, it ends."""
        if self.members or self._making is not None:
            return
        for flight in self.loose[:]:
            self.settle(flight)
        if self.durable:
            self.durable = False
            self.hub.router.count(self.filter, -1)
            if self._stored:
                self._submit(Unsubscribe(self.consumer_id, self.incarnation, (self.filter,)))
        self._discard_if_settled()
        if not self.consumer_id:
            self.shared.forget(self)

    def _discard_if_settled(self) -> None:
        is_over = not (self.durable or self._stored or self._making)
        if self.consumer_id and is_over:
            self._submit(Discard(self.consumer_id, self.incarnation))
            self.consumer_id = 0
            self._dirty.clear()
            self._vacating.clear()

    def _submit(self, op: Discard | Unsubscribe | Detach | Bind) -> None:
        def done(outcome: Outcome) -> None:
            if isinstance(outcome, BaseException):
                log.warning("group %r: %s", self.name, outcome)

        self.committer.submit(op, done)

    def abandon(self, members: Iterable[Member]) -> None:
        """Forget everything: it is read again by another object. What ``members`` have under way is
        theirs to finish, unheard, unless it is given back to them."""
        for member in members:
            for flight in [f for f in member.flights.values() if f.group is self]:
                member.release(flight)
                flight.state = SETTLED
            member.groups.pop(self, None)
        self.members.clear()
        self.hub.router.detach(self, self.filter)
        self.durable = False
        self.consumer_id = 0
        for flight in self.loose:
            flight.state = SETTLED
        self.loose.clear()

    def stop(self) -> None:
        """The broker stops."""
        for task in (self._reading, self._fetching):
            if task is not None:
                task.cancel()
        if self.consumer_id:
            self._checkpoint = True
            self._save()
            self._submit(Detach(self.consumer_id, self.incarnation, self.hub.clock.now_ms()))
            self.consumer_id = 0  # nothing more is written

    # ------------------------------------------------------------------------ who is here

    def join(self, member: Member, qos: int, options: Options) -> None:
        """A member is connected, or asks for something else than before."""
        if member not in self.members:
            self._turn.insert(0, member)
        is_first = not self.members
        self.members[member] = Joined(qos, options)
        member.groups[self] = None
        if is_first:
            self.hub.router.attach(self, self.filter, QOS)
        self.pump()

    def leave(self, member: Member) -> None:
        """A member unsubscribed, or its connection is over."""
        if self.members.pop(member, None) is not None:
            member.groups.pop(self, None)
            self._turn.remove(member)
            for flight in member.unsent(self):
                member.release(flight)
                self.left(flight, 0)
            if not self.members:
                self.hub.router.detach(self, self.filter)
                if self.live:
                    self.live = False
                    self.cursor = self.committer.last
                if self.durable:
                    self._checkpoint = True
                    self._join(lazy=True)
        if not self.members and not self.wanted:
            self.forsaken()
        else:
            self.pump()

    def left(self, flight: Handed, consumer_id: int) -> None:
        """Its member does not have a delivery any more. consumer_id: who may come back for it."""
        self._forget_topic(flight)
        if flight.begun and flight.qos == QOS:
            if consumer_id:
                self.shared.left(consumer_id, flight)
            else:
                self.settle(flight)
            return
        begun = flight.begun
        flight.sent = flight.dup = False
        flight.state = SENT
        flight.attempts = min(flight.attempts + 1, 255)
        self._claiming.pop(flight, None)
        self._put_back(flight)
        if begun and consumer_id and flight.stored is not None:
            self.shared.left(consumer_id, flight)
        elif flight.offset > 0 and (flight.stored is None or not begun):
            self._vacating.append(flight)
            self._join(lazy=True)

    def _put_back(self, flight: Handed) -> None:
        flight.is_loose = True
        insort(self.loose, flight, key=_OFFSET)
        if flight.offset < 0 and flight.entry is not None:
            self._memory_bytes += len(flight.entry.payload)

    def take_back(self, flight: Handed, member: Member) -> None:
        """A member has come back for what was with it."""
        row = flight.stored
        if flight.member is not None or flight.state == SETTLED or flight in self._vacating:
            return
        if row is not None and row.member != member.consumer_id:
            return
        delivery = flight if row is None else row.deliveries[flight]
        was_loose = flight.is_loose
        if not member.resume(flight, delivery):
            log.warning("group %r: a packet id of %r was used again", self.name, member)
            if was_loose:
                self._vacating.append(flight)
                self._join(lazy=True)
            else:
                self.settle(flight)
        elif was_loose:
            self._take_out(flight)

    # -------------------------------------------------------------------------- handing on

    def offer(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """A logged entry, as it is appended."""
        del qos, options
        if not self.live:
            return
        if not self.loose and not self.hub.router.guarded:
            member, fits = self._choose(entry)
            if member is not None:
                self._hand(Handed(self, entry.offset, entry), entry, member)
                return
            if not fits:
                self._too_large(entry)
                return
        self.live = False
        self.cursor = entry.offset - 1
        if self.hub.router.guarded:
            self.pump()

    def pass_on(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """A message to deliver from memory."""
        del options
        if self._awaits_history and entry.offset:
            return  # it comes from there
        if qos < entry.qos:
            entry = entry._replace(qos=qos)
        if self.hub.router.guarded or (qos and self.loose):
            self._queue(entry)
            self.pump()
            return
        member, fits = self._choose(entry)
        if member is not None:
            self._hand(self._of_memory(entry), entry, member)
        elif not fits:
            self._too_large(entry)
        elif qos:
            self._queue(entry)
        else:
            self.hub.figures.dropped_qos0 += 1

    def _too_large(self, entry: Entry, attempts: int = 0) -> None:
        """Nobody who is here takes a packet that large [MQTT5-3.1.2-25]."""
        self.hub.figures.too_large += 1
        self.bury(entry, attempts)

    def bury(self, entry: Entry, attempts: int) -> None:
        """A message is a dead letter; one from memory is only counted."""
        if entry.offset and self.consumer_id:
            now_ms = self.hub.clock.now_ms()
            self._letters.append(DeadLetter(entry, Failure.TOO_LARGE, now_ms, attempts))
            self._join(lazy=True)

    def _of_memory(self, entry: Entry) -> Handed:
        self._next_memory += 1
        return Handed(self, self._next_memory, entry)

    def _queue(self, entry: Entry) -> None:
        """Keep a message until somebody has room; bounded as the queue of a transient session."""
        settings = self.hub.settings
        if (
            len(self.loose) >= settings.max_queued_messages
            or self._memory_bytes >= settings.max_queued_bytes
        ):
            self.hub.figures.dropped_queue += 1
            return
        self._put_back(self._of_memory(entry))

    def _take_out(self, flight: Handed) -> None:
        self.loose.remove(flight)
        flight.is_loose = False
        if flight.offset < 0 and flight.entry is not None:
            self._memory_bytes -= len(flight.entry.payload)

    def _choose(self, entry: Entry, refused: Sequence[Member] = ()) -> tuple[Member | None, bool]:
        """Who gets a message: the member with the most free places, in turn among equals. None: no
        one has room now; and whether anybody could take it at all."""
        best: Member | None = None
        most = 0
        fits = not self._turn
        if self.hub.settings.shared_order == "topic":
            holder = self._topics.get(entry.topic)
            if holder is not None and holder.member in self.members:
                member = holder.member
                if member not in refused and self._places(member, entry) > 0:
                    return member, True
        zero: Member | None = None
        for looked, member in enumerate(self._turn):
            if looked >= LOOK_MAX and best is not None:
                break
            if member in refused:
                continue
            places = self._places(member, entry)
            if places < 0:
                continue
            fits = True
            if min(entry.qos, self.members[member].qos) == 0:
                if places and best is None and zero is None:
                    zero = member  # it has no window to compare: its turn decides
            elif places > most:
                best, most = member, places
        return zero or best, fits

    def _places(self, member: Member, entry: Entry) -> int:
        """Free places for a message; -1 = the client takes no packet that large."""
        joined = self.members[member]
        qos = min(entry.qos, joined.qos)
        bytes_max = member.session.bytes_max
        if bytes_max and publish_bytes(entry, qos, joined.options.identifiers) > bytes_max:
            return -1
        if not qos:
            return int(member.is_open)
        return max(member.places, 0)  # one that came back may have more than its window

    def _hand(self, flight: Handed, entry: Entry, member: Member) -> None:
        """Claim a message for a member."""
        if self._turn[-1] is not member:
            self._turn.remove(member)
            self._turn.append(member)
        flight.qos = min(entry.qos, self.members[member].qos)
        flight.turn += 1
        flight.member = member
        if flight.left_by:
            self.shared.handed_on(flight)
        if flight.qos:
            member.lend(flight)
            if self.hub.settings.shared_order == "topic":
                self._note_topic(flight, entry.topic)
        if flight.offset > 0:
            self._claiming[flight] = None
            self._join(lazy=False)
        elif flight.qos:
            member.deliver(flight)
        else:
            member.publish(self, entry)
            flight.state = SETTLED

    def _note_topic(self, flight: Handed, topic: bytes) -> None:
        holder = self._topics.get(topic)
        if holder is None or holder.member is not flight.member:
            assert flight.member is not None
            holder = self._topics[topic] = Holder(topic, flight.member)
        holder.unsettled += 1
        flight.holder = holder

    def _forget_topic(self, flight: Handed) -> None:
        """A topic stays with a member for as long as that has unsettled messages of it."""
        holder, flight.holder = flight.holder, None
        if holder is not None:
            holder.unsettled -= 1
            if not holder.unsettled and self._topics.get(holder.topic) is holder:
                del self._topics[holder.topic]

    # --------------------------------------------------------------------------- settling

    def settle(self, flight: Handed) -> None:
        """It is over; also for one that nobody has."""
        self._forget_topic(flight)
        if flight.state == SETTLED:
            return
        if flight.is_loose:
            self._take_out(flight)
        if flight.left_by:
            self.shared.handed_on(flight)
        self._claiming.pop(flight, None)
        flight.state = SETTLED
        flight.entry = None
        if flight.stored is None:
            return
        self._remove(flight)
        flight.stored = None
        self._stored -= 1
        self.hub.figures.settled += 1
        self._join(lazy=True)
        if not self._stored and not self.durable:
            self._discard_if_settled()
            if not (self.consumer_id or self.members or self.wanted):
                self.shared.forget(self)

    def received(self, flight: Handed) -> bool:
        """PUBREC came: PUBREL is due when that is committed, or at once (True)."""
        row = flight.stored
        if row is None:
            return True
        row.deliveries[flight] = row.deliveries[flight]._replace(state=RECEIVED)
        self._touch(row)
        flight.undurable = True
        self._receiving.append(flight)
        self._join(lazy=False)
        return False

    def _touch(self, row: Row) -> None:
        if not row.is_dirty:
            row.is_dirty = True
            self._dirty.append(row)

    def _remove(self, flight: Handed) -> None:
        row = flight.stored
        assert row is not None
        del row.deliveries[flight]
        self._touch(row)

    # ----------------------------------------------------------------------------- saving

    def _join(self, *, lazy: bool) -> None:
        if not self.consumer_id:
            return
        if not self._joined or not lazy:
            self._joined = True
            self.committer.join(self, lazy=lazy)

    def collect(self) -> None:
        """Add what is to be written to the open batch (the committer asks)."""
        self._joined = False
        if self.consumer_id:
            self._save()

    def _save(self) -> None:
        handed = [(flight, flight.turn) for flight in self._claiming]
        self._claiming = {}
        for flight, _ in handed:
            member = flight.member
            assert member is not None
            if flight.qos:
                self._put(flight, member.consumer_id or UNRECORDED)
        vacating, self._vacating = self._vacating, []
        for flight in vacating:
            if flight.member is None and flight.state != SETTLED:
                self._put(flight, 0)
        receiving, self._receiving = self._receiving, []
        letters, self._letters = self._letters, []
        claims, settled = self._rows()
        cursor = self.committer.last if self.live else self.cursor
        checkpoint, self._checkpoint = self._checkpoint, False
        if not (claims or settled or handed or letters or checkpoint):
            return
        self.committer.submit(
            Advance(
                self.consumer_id,
                self.incarnation,
                cursor=cursor if self.durable else None,
                claims=claims,
                settled=settled,
                checkpoint=checkpoint,
                dead=letters,
            ),
            partial(self._saved, self.consumer_id, handed, receiving),
        )
        self.saved_cursor = cursor
        self._unindexed = not checkpoint

    def _put(self, flight: Handed, member: int) -> None:
        """Move a delivery to a row of those that are with this member."""
        row = self._open_rows.get(member)
        if row is None or len(row.deliveries) >= ROW_MAX:
            row = self._open_rows[member] = Row(self._next_claim, member)
            self._next_claim += 1
        if flight.stored is None:
            self._stored += 1
        else:
            self._remove(flight)
        flight.stored = row
        row.deliveries[flight] = Delivery(
            flight.offset,
            flight.packet_id if row.keeps_ids else 0,
            max(flight.qos, 1),
            SENT,
            flight.attempts,
        )
        self._touch(row)

    def _rows(self) -> tuple[list[Claim], list[int]]:
        """What is to be written, and what is to be deleted."""
        self._open_rows = {}
        dirty, self._dirty = self._dirty, []
        claims: list[Claim] = []
        settled: list[int] = []
        for row in dirty:
            row.is_dirty = False
            if row.deliveries:
                claims.append(row.claim())
                row.is_written = True
            elif row.is_written:
                settled.append(row.number)
        return claims, settled

    def _saved(
        self,
        consumer_id: int,
        handed: list[tuple[Handed, int]],
        receiving: list[Handed],
        outcome: Outcome,
    ) -> None:
        if isinstance(outcome, BaseException):
            self._refused(consumer_id, outcome)
            return
        for flight in receiving:
            if flight.member is not None and flight.undurable:
                flight.member.saved(flight)
        for flight, turn in handed:
            member = flight.member
            if member is None or flight.turn != turn or flight.state == SETTLED:
                continue
            if flight.qos:
                member.deliver(flight)
                continue
            flight.member = None
            if member in self.members and member.is_open and flight.entry is not None:
                member.publish(self, flight.entry)
                self.settle(flight)
            else:
                self.left(flight, 0)
        if not self.members and not self.wanted:
            self.forsaken()
        self.pump()

    def _refused(self, consumer_id: int, outcome: BaseException) -> None:
        """A write changed nothing: what is in memory is not what is stored. Read it again."""
        if isinstance(outcome, Fenced):
            self.hub.figures.fenced += 1
        log.error("group %r: %s; it is read again", self.name, outcome)
        if consumer_id == self.consumer_id and not self.hub.refusing:
            self.shared.reload(self)

    def checkpoint(self) -> None:
        """Bring the stored position up to what was dispatched, and try again what failed."""
        if self.durable:
            at = self.committer.last if self.live else self.cursor
            if at != self.saved_cursor or self._joined or self._unindexed:
                self._checkpoint = True
                self._join(lazy=True)
            self.pump()

    # --------------------------------------------------------------------------- pumping

    @property
    def is_behind(self) -> bool:
        """Whether something waits for room."""
        return bool(self.loose) or (self.durable and not self.live)

    def room(self) -> None:
        """A member may have room."""
        if self.is_behind:
            self.pump()

    def pump(self) -> None:
        """Hand out what waits, as far as there is room."""
        if not self.members or self.hub.refusing or self._reading is not None:
            return
        if not self.is_behind or not self._has_room():
            return
        if self.hub.router.guarded:
            self._start(self._work())
            return
        if self.loose:
            self._hand_on()
        if self.loose or not self.durable or self.live or self._making is not None:
            return
        tail = self._tail()
        if tail is not None:
            self._claim_tail(tail)
        else:
            self._start(self._read())

    def _has_room(self) -> bool:
        return any(
            member.places > 0 or (joined.qos == 0 and member.is_open)
            for member, joined in self.members.items()
        )

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._reading = asyncio.ensure_future(work)
        self._reading.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # our own bug, in one group: the checkpoint timer tries again
            log.error("group %r failed", self.name, exc_info=task.exception())

    def _hand_on(self) -> None:
        """What went back, first."""
        while self.loose:
            flight = self.loose[0]
            entry = flight.entry
            if entry is None:
                self.fetch(flight)
                return
            if self._is_over(entry):
                self.settle(flight)
                continue
            member, fits = self._choose(entry)
            if member is not None:
                self._take_out(flight)
                self._hand(flight, entry, member)
            elif not fits:
                self._too_large(entry, flight.attempts)
                self.settle(flight)
            else:
                return

    def _is_over(self, entry: Entry) -> bool:
        if 0 < entry.expires_ms <= self.hub.clock.now_ms():
            self.hub.figures.expired_messages += 1
            return True
        return False

    def _is_superseded(self, entry: Entry) -> bool:
        """Whether a newer message of its topic will come, and is all that is wanted
        (``broker_ext.rules``). What was with somebody before is handed on, whatever came since."""
        newest = self.hub.router.rules.newest
        if newest is not None and newest.supersedes(entry):
            self.hub.figures.superseded += 1
            return True
        return False

    # ------------------------------------------------------------------------ catching up

    @property
    def replay(self) -> Replay:
        """The reader of the group's filter. A loss is skipped, and told: there is no client whose
        session could be reset."""
        if self._replay is None:
            wanted = Wanted(self.filter, QOS, self._from_offset)
            self._replay = Replay(self.hub.store, [wanted], skips=True)
        return self._replay

    def _tail(self) -> list[Entry] | None:
        committer, cursor = self.committer, self.cursor
        if committer.last - cursor > TAIL_WALK_MAX and cursor < committer.head:
            return None
        return committer.since(cursor)

    def _claim_tail(self, tail: list[Entry]) -> bool:
        granted = self.replay.granted
        return self._claim_all([(e, granted(e)) for e in tail], self.committer.last)

    def _claim_all(self, entries: Sequence[tuple[Entry, int]], through: int) -> bool:
        """Claim what is wanted of ``entries``, in order; move the cursor. False: no more room."""
        for entry, qos in entries:
            if not qos or self._is_over(entry) or self._is_superseded(entry):
                continue
            member, fits = self._choose(entry)
            if member is not None:
                self._hand(Handed(self, entry.offset, entry), entry, member)
            elif fits:
                self.cursor = entry.offset - 1
                return False
            else:
                self._too_large(entry)
        self.cursor = through
        if through == self.committer.last:
            self._reached()
        return True

    def _reached(self) -> None:
        """Everything up to the end of the history was offered."""
        self.live = True
        if self.unbound:
            self.unbound = False
            self._submit(Bind(self.consumer_id, self.incarnation, self.saved_cursor))

    async def _read(self) -> None:
        """Read the history behind the cursor until the tail is reached, or nobody has room."""
        try:
            while self.durable and not self.live and not self.loose and self._has_room():
                tail = self._tail()
                if tail is not None:
                    if not self._claim_tail(tail):
                        break
                    continue
                wanted, through = await self._next_chunk()
                if not self.durable or self.loose:
                    break
                if not self._claim_all(wanted, through):
                    break
        except StoreError as error:
            log.warning("group %r: cannot read (%s); later", self.name, error)
            self._reading = None
            return  # the checkpoint timer pumps
        finally:
            self._reading = None
        self.pump()

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
        newest = self.hub.router.rules.newest
        if newest is not None:
            await newest.look_up(self.hub.store, piece.entries)
        return piece.entries, piece.through

    def skip(self, lost_through: int) -> None:
        """What is gone through here is told, once."""
        if lost_through > self._skipped:
            self._skipped = lost_through
            self.hub.tell_gap(self.name, self.cursor, lost_through)

    # ------------------------------------------------------- where topic plugins are asked

    async def _work(self) -> None:
        """The same, asking for each delivery whether its member may have it."""
        try:
            while self.members and not self.hub.refusing:
                if self.loose:
                    flight = self.loose[0]
                    if flight.entry is None:
                        self.fetch(flight)
                        return
                    if not await self._offer_loose(flight, flight.entry):
                        return
                elif self.durable and not self.live:
                    if not await self._offer_chunk():
                        return
                else:
                    return
        except StoreError as error:
            log.warning("group %r: cannot read (%s); later", self.name, error)
        finally:
            self._reading = None

    async def _offer_loose(self, flight: Handed, entry: Entry) -> bool:
        """Returns whether to go on."""
        member, fits = (None, False) if self._is_over(entry) else await self._permitted(entry)
        if not flight.is_loose:
            return True  # its member came back, or nobody is left
        if member is not None:
            self._take_out(flight)
            self._hand(flight, entry, member)
        elif not fits or entry.qos == 0:
            self.settle(flight)
        return member is not None or not fits or entry.qos == 0

    async def _offer_chunk(self) -> bool:
        """Returns whether to go on."""
        tail = self._tail()
        if tail is not None:
            granted = self.replay.granted
            wanted = [(e, granted(e)) for e in tail[:READ_ENTRIES_MAX]]
            through = wanted[-1][0].offset if wanted else self.cursor
        else:
            wanted, through = await self._next_chunk()
        for entry, qos in wanted:
            if not qos or self._is_over(entry) or self._is_superseded(entry):
                continue
            member, fits = await self._permitted(entry)
            if not self.durable:
                return False
            if member is not None:
                self._hand(Handed(self, entry.offset, entry), entry, member)
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
        refused: list[Member] = []
        while True:
            member, fits = self._choose(entry, refused)
            if member is None:
                return None, fits
            may_receive = member.session.may_receive
            if may_receive is None or await may_receive(entry.topic):
                if member in self.members and self._places(member, entry) > 0:
                    return member, True
            else:
                refused.append(member)

    # --------------------------------------------------------------------------- fetching

    def fetch(self, *flights: Handed) -> None:
        """Read the messages of deliveries that an earlier connection left."""
        self._to_fetch |= dict.fromkeys(flights)
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch())
            self._fetching.add_done_callback(self._task_done)

    async def _fetch(self) -> None:
        waiting: dict[Member, None] = {}
        try:
            while self._to_fetch:
                waiting |= dict.fromkeys(await self._fetch_some())
        except StoreError as error:
            log.warning("group %r: cannot read (%s); later", self.name, error)
            self._to_fetch.clear()
            return
        finally:
            self._fetching = None
        for member in waiting:
            member.turn_over()
        self.pump()

    async def _fetch_some(self) -> list[Member]:
        """Returns whose deliveries were read, or are lost."""
        left = [*self._to_fetch, *self.loose[:FETCH_MAX]]
        wanted = [
            flight
            for flight in dict.fromkeys(left)
            if flight.entry is None and not flight.state & (RECEIVED | SETTLED)
        ][:FETCH_MAX]
        if not wanted:
            self._to_fetch.clear()
            return []
        try:
            entries = await self.hub.store.fetch([flight.offset for flight in wanted])
        except (EntryGone, EntryDamaged) as error:
            self.hub.tell_gap(self.name, error.offset - 1, error.offset)
            waiting = [f.member for f in wanted if f.member is not None]
            for flight in wanted:
                if flight.offset == error.offset:
                    self._to_fetch.pop(flight, None)
                    self._lose(flight)
            return waiting
        for flight, entry in zip(wanted, entries, strict=True):
            self._to_fetch.pop(flight, None)
            if not flight.state & (RECEIVED | SETTLED):
                flight.entry = entry
        return [f.member for f in wanted if f.member is not None]  # it may have come back meanwhile

    def _lose(self, flight: Handed) -> None:
        """The message of a delivery is gone."""
        if flight.member is not None:
            flight.member.release(flight)
        self.settle(flight)
