"""One group: its members come and go, and its deliveries between them.

What it is made of: ``turns`` says who gets a message, ``backlog`` has what waits for room,
``record`` what is stored of it. A delivery that is handed to a member is that member's to finish
(``broker_ext.shared.member``), which tells the group how it ended.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from broker_ext.options import PLAIN, Options
from broker_ext.outbound import SETTLED
from broker_ext.shared.backlog import QOS, Backlog
from broker_ext.shared.fetching import Fetching
from broker_ext.shared.handed import Handed
from broker_ext.shared.record import Record
from broker_ext.shared.turns import Joined, Turns
from storage.api import GROUP, RECEIVED, SENT
from storage.outbox import Failure

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from broker_ext.hub import Hub
    from broker_ext.shared.groups import Shared
    from broker_ext.shared.member import Member
    from broker_ext.shared.rows import Collected, Row
    from storage.api import Entry, Snapshot

__all__ = ["Group"]

log = logging.getLogger("amqtt_durable.shared")


class Group:
    """One group. name: the members' filter, $share/GROUP/filter.

    members: those that are connected. A group whose last durable member unsubscribed keeps its
    record until what was sent is settled.
    """

    client_id: ClassVar[bytes] = GROUP
    """As a receiver: nobody publishes under it."""

    __slots__ = (
        "_attempts_max",
        "backlog",
        "fetching",
        "filter",
        "hub",
        "members",
        "name",
        "record",
        "rows",
        "shared",
        "turns",
        "undeliverable",
    )

    def __init__(self, shared: Shared, hub: Hub, name: bytes, topic_filter: bytes) -> None:
        self.shared = shared
        self.hub = hub
        self.name = name
        self.filter = topic_filter
        self.turns = Turns(by_topic=hub.settings.shared_order == "topic")
        self.members = self.turns.members
        self.backlog = Backlog(self)
        self.fetching = Fetching(self)
        self.record = Record(self, shared.incarnation)
        self.rows = self.record.rows
        self.undeliverable: dict[Handed, None] = {}
        """Dead letters, once their messages were read again."""
        self._attempts_max = hub.settings.max_delivery_attempts

    def __repr__(self) -> str:
        return f"<group {self.name!r}>"

    @property
    def keeps_qos0(self) -> bool:
        """Never: nobody of it is away."""
        return False

    @property
    def catches_up(self) -> bool:
        """Likewise."""
        return False

    @property
    def durable(self) -> bool:
        """Whether it follows the history."""
        return self.record.durable

    @property
    def wanted(self) -> int:
        """How many durable sessions are members with QoS >= 1, connected or not."""
        return self.shared.counts.get(self.name, 0)

    @property
    def lag(self) -> int:
        """Entries of the history behind the cursor, wanted or not; 0 where it is not durable."""
        backlog = self.backlog
        behind = self.durable and not backlog.live
        return max(backlog.committer.head - backlog.cursor, 0) if behind else 0

    @property
    def under_way(self) -> int:
        """Deliveries that are with connected members."""
        return sum(f.group is self for member in self.members for f in member.flights.values())

    # ---------------------------------------------------------------- from first to last

    def restore(self, snapshot: Snapshot) -> None:
        """Take over what the last run left."""
        self.record.own(snapshot)
        for subscription in snapshot.subscriptions:
            if subscription.filter == self.filter:
                self.record.follow(subscription.from_offset)
        suspects: set[int] = set()
        if self._attempts_max:
            suspects = {c.member for c in snapshot.claims if any(d.attempts for d in c.deliveries)}
        for row in [self.rows.restored(self, claim) for claim in snapshot.claims]:
            for flight in list(row.deliveries):
                flight.is_suspect = row.member in suspects and not flight.state & RECEIVED
                self._restore(flight, row, is_gone=row.member in snapshot.gone)
        if not self.wanted:
            self.forsaken()

    def _restore(self, flight: Handed, row: Row, *, is_gone: bool) -> None:
        """A delivery that the last run left. is_gone: the session that it was with."""
        if self._is_undeliverable(flight):
            self._give_up(flight)
        elif row.keeps_ids and not is_gone:
            self.shared.left(row.member, flight)
            if flight.qos < QOS:
                self.backlog.put_back(flight)
        elif row.member and flight.qos == QOS:
            self.settle(flight)
        else:
            self.backlog.put_back(flight)

    def forsaken(self) -> None:
        """Nobody who could come back is a member any more; when nobody at all is, it ends."""
        if self.members or self.record.is_being_made:
            return
        for flight in self.backlog.loose[:]:
            self.settle(flight)
        self.record.give_up()
        if not self.record.consumer_id:
            self.shared.forget(self)

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
        self.record.abandon()
        for flight in self.backlog.loose:
            flight.state = SETTLED
        self.backlog.loose.clear()
        for flight in self.undeliverable:
            flight.state = SETTLED
        self.undeliverable.clear()

    def stop(self) -> None:
        """The broker stops."""
        self.backlog.stop()
        self.fetching.stop()
        self.record.leave()

    def task_done(self, task: asyncio.Task[None]) -> None:
        """Something of it that ran beside has ended."""
        if not task.cancelled() and task.exception() is not None:
            # our own bug, in one group: the checkpoint timer tries again
            log.error("group %r failed", self.name, exc_info=task.exception())

    def checkpoint(self) -> None:
        """Bring the stored position up to what was dispatched, and try again what failed."""
        if self.undeliverable:
            self.fetching.ask(*self.undeliverable)
        if self.durable:
            self.record.checkpoint()
            self.backlog.pump()

    # ------------------------------------------------------------------------ who is here

    def join(self, member: Member, qos: int, options: Options) -> None:
        """A member is connected, or asks for something else than before."""
        is_first = not self.members
        self.turns.come(member, Joined(qos, options))
        member.groups[self] = None
        if is_first:
            self.hub.router.attach(self, self.filter, QOS)
        self.backlog.pump()

    def leave(self, member: Member) -> None:
        """A member unsubscribed, or its connection is over."""
        if self.turns.go(member):
            member.groups.pop(self, None)
            for flight in member.unsent(self):
                member.release(flight)
                self.left(flight, 0)
            if not self.members:
                self.hub.router.detach(self, self.filter)
                self.backlog.stand()
                if self.durable:
                    self.record.checkpoint_with(lazy=True)
        if not self.members and not self.wanted:
            self.forsaken()
        else:
            self.backlog.pump()

    def left(self, flight: Handed, consumer_id: int) -> None:
        """Its member does not have a delivery any more. consumer_id: who may come back for it."""
        self.turns.let_go(flight)
        if self._is_undeliverable(flight):
            self._give_up(flight)
            return
        if flight.begun and flight.qos == QOS:
            if consumer_id:
                self.shared.left(consumer_id, flight)
            else:
                self.settle(flight)
            return
        begun = flight.begun
        flight.sent = flight.dup = False
        flight.state = SENT
        self.rows.unclaim(flight)
        self.backlog.put_back(flight)
        if begun and consumer_id and flight.stored is not None:
            self.shared.left(consumer_id, flight)
        elif flight.offset > 0 and (flight.stored is None or not begun):
            self._vacate(flight)

    def take_back(self, flight: Handed, member: Member) -> None:
        """A member has come back for what was with it."""
        row = flight.stored
        if flight.member is not None or flight.state == SETTLED or self.rows.is_vacated(flight):
            return
        if row is not None and row.member != member.consumer_id:
            return
        delivery = flight if row is None else row.deliveries[flight]
        was_loose = flight.is_loose
        if not member.resume(flight, delivery):
            log.warning("group %r: a packet id of %r was used again", self.name, member)
            if was_loose:
                self._vacate(flight)
            else:
                self.settle(flight)
        elif was_loose:
            self.backlog.take_out(flight)

    def _vacate(self, flight: Handed) -> None:
        self.rows.vacate(flight)
        self.record.join(lazy=True)

    # ---------------------------------------------------------------- what breaks its members

    def blame(self, flight: Handed) -> None:
        """The connection of a member broke, and this may be why: counted, whoever has it next."""
        flight.attempts = min(flight.attempts + 1, 255)
        if self.rows.blame(flight):
            self.record.join(lazy=True)

    def _is_undeliverable(self, flight: Handed) -> bool:
        """Whether it broke as many connections as one message may."""
        return 0 < self._attempts_max <= flight.attempts and not flight.state & RECEIVED

    def _give_up(self, flight: Handed) -> None:
        """Nobody gets it any more: it is a dead letter when its message was read."""
        self.undeliverable[flight] = None
        if flight.entry is not None:
            self.give_up(flight, flight.entry)
            return
        flight.sent = flight.dup = False
        self._vacate(flight)
        self.fetching.ask(flight)

    def give_up(self, flight: Handed, entry: Entry) -> None:
        """Its message was read: a dead letter, in the write that settles it."""
        self.hub.figures.undeliverable += 1
        log.warning(
            "group %r: connections of its members broke %d times while %s was under way: "
            "a dead letter",
            self.name,
            flight.attempts,
            f"entry {entry.offset}" if entry.offset else "a message from memory",
        )
        self.record.bury(entry, Failure.UNDELIVERABLE, flight.attempts)
        self.settle(flight)

    # -------------------------------------------------------------------------- handing on

    def offer(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """A logged entry, as it is appended."""
        del qos, options
        backlog = self.backlog
        if not backlog.live:
            return
        if not backlog.loose and not self.hub.router.guarded:
            member, fits = self.turns.choose(entry)
            if member is not None:
                self.hand(Handed(self, entry.offset, entry), entry, member)
                return
            if not fits:
                self.too_large(entry)
                return
        backlog.begin(entry)

    def pass_on(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """A message to deliver from memory."""
        del options
        backlog = self.backlog
        if self.record.awaits_history and entry.offset:
            return  # it comes from there
        if qos < entry.qos:
            entry = entry._replace(qos=qos)
        if self.hub.router.guarded or (qos and backlog.loose):
            backlog.queue(entry)
            backlog.pump()
            return
        member, fits = self.turns.choose(entry)
        if member is not None:
            self.hand(backlog.of_memory(entry), entry, member)
        elif not fits:
            self.too_large(entry)
        elif qos:
            backlog.queue(entry)
        else:
            self.hub.figures.dropped_qos0 += 1

    def too_large(self, entry: Entry, attempts: int = 0) -> None:
        """Nobody who is here takes a packet that large [MQTT5-3.1.2-25]."""
        self.hub.figures.too_large += 1
        self.bury(entry, attempts)

    def bury(self, entry: Entry, attempts: int) -> None:
        """A message that a client does not take is a dead letter."""
        self.record.bury(entry, Failure.TOO_LARGE, attempts)

    def hand(self, flight: Handed, entry: Entry, member: Member) -> None:
        """Claim a message for a member that has room."""
        turns = self.turns
        turns.had(member)
        flight.qos = min(entry.qos, self.members[member].qos)
        flight.turn += 1
        flight.member = member
        if flight.left_by:
            self.shared.handed_on(flight)
        if flight.offset < 0 and flight.qos and member.session.durable:
            # from before there was a record: what is under way to a durable session is stored, so
            # that holds a copy of its own (P2), and this is no matter of the group any more
            flight.member = None
            member.session.pass_on(entry, flight.qos, self.members[member].options)
            self.settle(flight)
            return
        if flight.qos:
            member.lend(flight)
            turns.hold(flight, member, entry.topic)
        if flight.offset > 0:
            self.rows.claim(flight)
            self.record.join(lazy=False)
        elif flight.qos:
            member.deliver(flight)
        else:
            member.publish(self, entry)
            flight.state = SETTLED

    def committed(self, collected: Collected) -> None:
        """What was handed is stored as with its members (P2), and what those have received (P5)."""
        for flight in collected.received:
            if flight.member is not None and flight.undurable:
                flight.member.saved(flight)
        for flight, turn in collected.handed:
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
        self.backlog.pump()

    # --------------------------------------------------------------------------- settling

    def settle(self, flight: Handed) -> None:
        """It is over; also for one that nobody has."""
        self.turns.let_go(flight)
        if flight.state == SETTLED:
            return
        if flight.is_loose:
            self.backlog.take_out(flight)
        if flight.left_by:
            self.shared.handed_on(flight)
        self.undeliverable.pop(flight, None)
        flight.state = SETTLED
        flight.entry = None
        if not self.rows.settle(flight):
            return
        self.hub.figures.settled += 1
        self.record.join(lazy=True)
        if not self.rows.stored and not self.durable:
            self.record.discard_if_settled()
            if not (self.record.consumer_id or self.members or self.wanted):
                self.shared.forget(self)

    def received(self, flight: Handed) -> bool:
        """PUBREC came: PUBREL is due when that is committed, or at once (True)."""
        if not self.rows.receive(flight):
            return True
        flight.undurable = True
        self.record.join(lazy=False)
        return False
