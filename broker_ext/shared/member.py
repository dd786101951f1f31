"""A session as a member of groups: what the groups have handed to it (``broker_ext.shared.group``).

Packet ids and places in the window are the session's own, lent to a delivery of a group until it is
settled or goes back; so they clash with nothing, and the client sees one session.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from broker_ext.options import PLAIN
from broker_ext.outbound import SETTLED
from broker_ext.wire import PACKET_ID, PUBREL_HEAD
from storage.api import RECEIVED, RETAINED

if TYPE_CHECKING:
    from broker_ext.outbound import Flight
    from broker_ext.session import Session
    from broker_ext.shared.group import Group
    from broker_ext.shared.handed import Handed
    from storage.api import Delivery, Entry

__all__ = ["Member"]


class Member:
    """One connection of a session that is, or was, a member of groups."""

    __slots__ = (
        "_counts_attempts",
        "_suspects",
        "consumer_id",
        "ended",
        "flights",
        "groups",
        "is_first",
        "ready",
        "session",
    )

    def __init__(self, session: Session) -> None:
        self.session = session
        self.consumer_id = session.consumer_id
        self.groups: dict[Group, None] = {}
        self.flights: dict[int, Handed] = {}
        self.ready: deque[Handed] = deque()
        self.ended = False
        self.is_first = False
        self._suspects = 0
        self._counts_attempts = session.hub.settings.max_delivery_attempts > 0

    def __repr__(self) -> str:
        return f"<member {self.session.client_id!r}>"

    # ---------------------------------------------------------------------------- places

    @property
    def is_open(self) -> bool:
        """Whether it may be written to."""
        return not (self.ended or self.session.sealed or self.session.peer.congested)

    @property
    def goes_alone(self) -> bool:
        """Whether it has something that is sent alone: nothing else is sent meanwhile."""
        return self._suspects > 0

    @property
    def places(self) -> int:
        """How many deliveries it has room for now. When the session has something of its own to
        send as well, each side has half of the window. What goes alone leaves no room."""
        if not self.is_open or self._suspects:
            return 0
        free = self.session.places - len(self.ready)
        return min(free, self._half - len(self.flights)) if self.session.waits else free

    @property
    def own_window(self) -> int:
        """How many places the session's own deliveries may take, likewise."""
        if self._suspects:
            return 0
        window = self.session.window
        if not any(group.backlog.waits for group in self.groups):
            return window
        return window - max(0, self._half - len(self.flights))

    @property
    def _half(self) -> int:
        return self.session.window // 2 or int(self.is_first)  # of a window of 1, in turn

    def lend(self, flight: Handed) -> None:
        """Give a delivery a packet id and a place; there must be one."""
        self.session.lend(flight)
        self.session.take_place()
        flight.counted = True
        self._add(flight)

    def _add(self, flight: Handed) -> None:
        self.flights[flight.packet_id] = flight
        self._suspects += flight.is_suspect

    def resume(self, flight: Handed, delivery: Delivery | Handed) -> bool:
        """Take back what was with an earlier connection, with its packet id. False: the id is not
        free any more."""
        flight.packet_id, flight.qos, flight.state = (
            delivery.packet_id,
            delivery.qos,
            delivery.state,
        )
        if not self.session.lend(flight, flight.packet_id):
            return False
        flight.member = self
        flight.dup = True
        flight.sent = False
        flight.counted = False
        flight.undurable = False
        self._add(flight)
        if flight.state & RECEIVED:
            flight.sent = True
            self._count(flight)
            self._pubrel(flight.packet_id)
        else:
            self.session.hub.figures.redelivered += 1
            self.ready.append(flight)
        return True

    def _count(self, flight: Handed) -> None:
        if not flight.counted:
            self.session.take_place()
            flight.counted = True

    def release(self, flight: Handed) -> None:
        """The packet id and the place are the session's again."""
        del self.flights[flight.packet_id]
        self._suspects -= flight.is_suspect
        self.session.give_back(flight.packet_id, place=flight.counted)
        flight.counted = False
        flight.member = None

    def unsent(self, group: Group) -> list[Handed]:
        """What the client cannot have had."""
        return [f for f in self.flights.values() if f.group is group and not f.begun]

    # --------------------------------------------------------------------------- sending

    def deliver(self, flight: Handed) -> None:
        """Its claim is committed (P2)."""
        self.ready.append(flight)
        self._send()

    def publish(self, group: Group, entry: Entry) -> None:
        """Send a message with QoS 0."""
        joined = group.members.get(self)
        options = joined.options if joined is not None else PLAIN
        session = self.session
        if session.is_undeliverable(entry, 0, options.identifiers):
            return
        session.hub.figures.delivered += 1
        retain = options.retain and entry.flags & RETAINED != 0
        session.peer.publish(entry, 0, 0, dup=False, retain=retain, identifiers=options.identifiers)

    def turn_over(self) -> None:
        """There may be room."""
        self.is_first = not self.is_first
        if self.ready:
            self._send()
        for group in list(self.groups):
            group.backlog.room()

    def _send(self) -> None:
        ready, session = self.ready, self.session
        while ready and self.is_open:
            flight = ready[0]
            if flight.member is not self or flight.state & (RECEIVED | SETTLED):
                ready.popleft()
                continue
            if flight.entry is None:
                group = flight.group
                group.fetching.ask(*(f for f in ready if f.entry is None and f.group is group))
                return
            if not flight.counted and session.places <= 0:
                return
            if self._counts_attempts and self._must_wait:
                return
            ready.popleft()
            self._count(flight)
            self._publish(flight, flight.entry)

    @property
    def _must_wait(self) -> bool:
        """Whether nothing is sent until what is under way is acknowledged: what was under way when
        a connection broke goes one at a time, so that no other message takes the blame."""
        return self.session.awaits if self._suspects else self.session.sends_alone

    def _publish(self, flight: Handed, entry: Entry) -> None:
        joined = flight.group.members.get(self)
        options = joined.options if joined is not None else PLAIN
        session = self.session
        if entry.expires_ms and not flight.dup and session.hub.is_over(entry):
            self._settle(flight)
            return
        if session.is_too_large(entry, flight.qos, options.identifiers):  # it took larger ones
            flight.group.bury(entry, flight.attempts)
            self._settle(flight)
            return
        flight.sent = True
        if self._counts_attempts:
            session.sends(flight)
        session.hub.figures.delivered += 1
        session.peer.publish(
            entry,
            flight.qos,
            flight.packet_id,
            dup=flight.dup,
            retain=options.retain and entry.flags & RETAINED != 0,
            identifiers=options.identifiers,
        )
        if flight.offset > 0:
            flight.entry = None  # it is in the history

    def _pubrel(self, packet_id: int) -> None:
        self.session.peer.write(PUBREL_HEAD + PACKET_ID[packet_id])

    # ------------------------------------------------------------------ acknowledgements

    def puback(self, packet_id: int) -> bool:
        """PUBACK, whatever its reason [MQTT-4.8.2-6]. False: the id is not lent to a group."""
        flight = self.flights.get(packet_id)
        if flight is None:
            return False
        if flight.qos == 1 and flight.begun:
            self._settle(flight)
        return True

    def pubrec(self, packet_id: int) -> bool:
        """PUBREC."""
        flight = self.flights.get(packet_id)
        if flight is None:
            return False
        if flight.qos != 2 or not flight.begun:
            self._pubrel(packet_id)
        elif flight.state & RECEIVED:
            if not flight.undurable:
                self._pubrel(packet_id)
        else:
            flight.state |= RECEIVED
            if flight.is_suspect:
                flight.is_suspect = False
                self._suspects -= 1
            flight.sent = True
            self._count(flight)
            flight.entry = None
            if flight.group.received(flight):
                self._pubrel(packet_id)
        return True

    def refused(self, packet_id: int) -> bool:
        """PUBREC with a reason why not: nobody else gets it either [MQTT-4.8.2-6]."""
        flight = self.flights.get(packet_id)
        if flight is None:
            return False
        if flight.qos == 2 and flight.begun and not flight.state & RECEIVED:
            self._settle(flight)
        return True

    def pubcomp(self, packet_id: int) -> bool:
        """PUBCOMP."""
        flight = self.flights.get(packet_id)
        if flight is None:
            return False
        if flight.state & RECEIVED and not flight.undurable:
            self._settle(flight)
        return True

    def saved(self, flight: Handed) -> None:
        """PUBREC is committed: PUBREL."""
        flight.undurable = False
        self._pubrel(flight.packet_id)

    def _settle(self, flight: Handed) -> None:
        self.release(flight)
        flight.group.settle(flight)

    # ------------------------------------------------------------------------------- end

    def end(self, first: Flight | None, *, for_good: bool, broke: bool) -> None:
        """The connection is over; for_good: its session, too. Everything goes back. Idempotent.

        broke: and what was under way may be why; first: of that, what was sent first, if it is one
        of a group.
        """
        if self.ended:
            return
        self.ended = True
        flights = list(self.flights.values())
        self.ready.clear()
        groups = dict.fromkeys([*self.groups, *(f.group for f in flights)])
        for flight in flights:
            self.release(flight)
            if broke and flight.sent and not flight.state & RECEIVED:
                flight.is_suspect = True
                if flight is first:
                    flight.group.blame(flight)
            flight.group.left(flight, 0 if for_good else self.consumer_id)
        for group in groups:
            group.leave(self)
