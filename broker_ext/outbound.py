"""Deliveries of one session, from claim to settlement. Pure: no socket, no clock, no store.

A delivery (``Flight``) goes

    claimed -> committed (ready) -> sent -> [received, QoS 2] -> settled

Rule 1. It may be sent only after the commit that holds its claim (P2): ``commit`` makes it ready.
Rule 2. It is sent in the order it was claimed; what an earlier connection left goes first (P6).
Rule 3. Its packet id is its own until it is settled.
Rule 4. PUBREL goes out after the commit that holds "received" (P5).

Claims run ahead of the window: up to ``ahead`` deliveries are committed before the client has room
for them, so that an acknowledgement is answered with the next PUBLISH without waiting for a disk.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from broker_ext.options import PLAIN
from storage.api import HELD, RECEIVED, SENT, Claim, Delivery, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker_ext.options import Options
    from storage.api import Snapshot
    from storage.outbox import DeadLetter

__all__ = ["PACKET_IDS", "SETTLED", "Collected", "Flight", "Outbound"]

PACKET_IDS: Final = 65_535
ROW_FLIGHTS_MAX: Final = 128
"""Deliveries in a claim row; a row that is partly settled is written again."""
AHEAD_BYTES_MAX: Final = 1 << 20
"""Payload bytes a session keeps in memory for deliveries that are not sent yet."""
SETTLED: Final = 0x40
"""Flight.state in memory only."""

_ORDER: Final = attrgetter("order")


class _Row:
    """A claim: the deliveries that were acquired together."""

    __slots__ = ("dirty", "flights", "number", "unsettled")

    def __init__(self, number: int, flights: list[Flight]) -> None:
        self.number = number
        self.flights = flights
        self.unsettled = len(flights)
        self.dirty = False

    def claim(self) -> Claim:
        """What is to be stored."""
        return Claim(
            self.number,
            tuple(
                Delivery(f.offset, f.packet_id, f.qos, f.state, f.attempts)
                for f in self.flights
                if f.state != SETTLED
            ),
        )


class Flight:
    """One delivery. offset: of the entry, or number of the held message (state & HELD).

    entry: the message, until it is sent; None when it has to be read again.
    dup: an earlier connection may have sent it [MQTT-3.3.1-1], so it may be acknowledged before
    this one sends it again (a bridge repeats its PUBREC when it comes back).
    sent: this connection has sent it, or its client said that it has it.
    options: what the subscriptions that match ask for. A held message carries its own.
    order: when this connection sent it, among all that it sent; where attempts are limited.
    """

    __slots__ = (
        "attempts",
        "dup",
        "entry",
        "offset",
        "options",
        "order",
        "packet_id",
        "qos",
        "row",
        "sent",
        "state",
    )

    row: _Row

    def __init__(
        self, offset: int, packet_id: int, qos: int, state: int, entry: Entry | None
    ) -> None:
        self.offset = offset
        self.packet_id = packet_id
        self.qos = qos
        self.state = state
        self.entry = entry
        self.dup = False
        self.sent = False
        self.attempts = 0
        self.order = 0
        self.options = PLAIN


class Collected:
    """What ``Outbound.collect`` hands to one write, and gets back when it is committed."""

    __slots__ = ("claims", "dead", "flights", "held", "released", "settled", "unheld")

    def __init__(self) -> None:
        self.dead: list[DeadLetter] = []
        self.claims: list[Claim] = []
        self.settled: list[int] = []
        self.held: list[tuple[int, Entry]] = []
        self.unheld: list[int] = []
        self.flights: list[Flight] = []
        self.released: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.claims or self.settled or self.unheld)


class Outbound:
    """The deliveries of one session.

    window: how many may be sent and not settled (1..65535). ahead: how many more may be claimed.
    """

    __slots__ = (
        "_claiming",
        "_dead",
        "_dirty",
        "_held",
        "_order",
        "_receiving",
        "_undurable",
        "_unheld",
        "flights",
        "limit",
        "next_claim",
        "next_held",
        "next_packet_id",
        "ready",
        "sent",
        "unsent_bytes",
        "window",
    )

    def __init__(self, window: int, ahead: int) -> None:
        self.window = window
        self.limit = min(window + ahead, PACKET_IDS)
        self.flights: dict[int, Flight] = {}
        self.ready: deque[Flight] = deque()
        self.sent = 0
        self.unsent_bytes = 0
        self.next_claim = 1
        self.next_held = 1
        self.next_packet_id = 1
        self._order = 0
        self._claiming: list[Flight] = []
        self._dead: list[DeadLetter] = []
        self._dirty: list[_Row] = []
        self._held: list[tuple[int, Entry]] = []
        self._unheld: list[int] = []
        self._receiving: list[int] = []
        self._undurable: set[int] = set()  # "received" is not committed: no PUBREL, no PUBCOMP yet

    # -------------------------------------------------------------------------- claiming

    def restore(self, snapshot: Snapshot) -> list[int]:
        """Take over what earlier connections left. Returns the ids whose PUBREL is due."""
        self.next_claim = snapshot.consumer.next_claim
        self.next_held = snapshot.consumer.next_held
        self.next_packet_id = snapshot.consumer.next_packet_id or 1
        due: list[int] = []
        for claim in snapshot.claims:
            flights: list[Flight] = []
            for d in claim.deliveries:
                flight = Flight(d.offset, d.packet_id, d.qos, d.state, None)
                flight.dup = True
                flight.attempts = d.attempts
                if d.state & HELD:
                    flight.entry = snapshot.held.get(d.offset)
                self.flights[d.packet_id] = flight
                flights.append(flight)
                if d.state & RECEIVED:
                    due.append(d.packet_id)
                    flight.sent = True
                    self.sent += 1
                else:
                    self.ready.append(flight)
            row = _Row(claim.number, flights)
            for flight in flights:
                flight.row = row
        return due

    @property
    def claiming(self) -> bool:
        """Whether there are claims that are not written yet."""
        return bool(self._claiming)

    @property
    def room(self) -> bool:
        """Whether another delivery may be claimed."""
        return len(self.flights) < self.limit and self.unsent_bytes < AHEAD_BYTES_MAX

    @property
    def low(self) -> bool:
        """Whether it is worth while to look for more."""
        return len(self.flights) * 2 <= self.limit and self.unsent_bytes * 2 < AHEAD_BYTES_MAX

    def claim(self, entry: Entry, qos: int, options: Options = PLAIN) -> None:
        """Claim the delivery of an entry of the history. There must be ``room``."""
        flights = self.flights
        packet_id = self.next_packet_id
        while packet_id in flights:  # never an id that is in use [MQTT-2.3.1-4]
            packet_id = packet_id % PACKET_IDS + 1
        self.next_packet_id = packet_id % PACKET_IDS + 1
        flight = Flight(entry.offset, packet_id, qos, SENT, entry)
        flight.options = options
        flights[packet_id] = flight
        self._claiming.append(flight)
        self.unsent_bytes += len(entry.payload)

    def hold(self, message: Entry, qos: int) -> None:
        """Claim the delivery of a retained message, of which a copy is held until it is settled."""
        number = self.next_held
        self.next_held = number + 1
        self.claim(message, qos)
        flight = self._claiming[-1]
        flight.offset = number
        flight.state = SENT | HELD
        self._held.append((number, message))

    def lend(self, flight: Flight, packet_id: int) -> bool:
        """Give a delivery that is not in this record a packet id: this one, or a free one (0).
        False: this one is in use."""
        if not packet_id:
            packet_id = self.next_packet_id
            while packet_id in self.flights:
                packet_id = packet_id % PACKET_IDS + 1
            self.next_packet_id = packet_id % PACKET_IDS + 1
        elif packet_id in self.flights:
            return False
        flight.packet_id = packet_id
        self.flights[packet_id] = flight
        return True

    def give_back(self, packet_id: int, *, place: bool) -> None:
        """A packet id that was lent is free again; place: it counted as sent."""
        del self.flights[packet_id]
        self.sent -= place

    @property
    def pending(self) -> bool:
        """Whether there is something to write."""
        return bool(self._claiming or self._dirty)

    def collect(self) -> Collected:
        """Everything that is not written yet."""
        out = Collected()
        claiming = self._claiming
        if claiming:
            self._claiming = []
            for i in range(0, len(claiming), ROW_FLIGHTS_MAX):
                flights = claiming[i : i + ROW_FLIGHTS_MAX]
                row = _Row(self.next_claim, flights)
                self.next_claim += 1
                for flight in flights:
                    flight.row = row
                out.claims.append(row.claim())
            out.flights = claiming
            out.held, self._held = self._held, []
        if self._dirty:
            for row in self._dirty:
                row.dirty = False
                if row.unsettled:
                    out.claims.append(row.claim())
                else:
                    out.settled.append(row.number)
            self._dirty = []
            out.unheld, self._unheld = self._unheld, []
            out.released, self._receiving = self._receiving, []
            out.dead, self._dead = self._dead, []
        return out

    # --------------------------------------------------------------------------- settling

    def _touch(self, row: _Row) -> None:
        if not row.dirty:
            row.dirty = True
            self._dirty.append(row)

    def committed(self, collected: Collected) -> None:
        """What ``collect`` returned is on disk. Its ``flights`` the caller makes ready."""
        if collected.released:
            self._undurable.difference_update(collected.released)

    def _settle(self, flight: Flight) -> None:
        del self.flights[flight.packet_id]
        if flight.state & HELD:
            self._unheld.append(flight.offset)
        flight.state = SETTLED
        flight.row.unsettled -= 1
        if flight.sent:
            self.sent -= 1
        else:
            flight.entry = None  # it stands in ``ready``: ``next_ready`` passes over it
        self._touch(flight.row)

    def drop(self, flight: Flight) -> None:
        """A delivery that cannot be made, since its message is gone, counts as settled."""
        self._settle(flight)

    def drop_next(self, letter: DeadLetter | None = None) -> None:
        """The next delivery to send is settled instead of sent: no connection can have sent it, so
        its packet id is free, or it is not to be sent at all [MQTT5-3.1.2-25].

        letter: what is left of it, in the same write.
        """
        self._settle(self.take())
        if letter is not None:
            self._dead.append(letter)

    def puback(self, packet_id: int) -> bool:
        """PUBACK came. False: there is no such QoS 1 delivery under way; nothing happens."""
        flight = self.flights.get(packet_id)
        if flight is None or flight.qos != 1 or not (flight.sent or flight.dup):
            return False
        self._settle(flight)
        return True

    def pubrec(self, packet_id: int) -> bool | None:
        """PUBREC came. True: PUBREL is due after the next commit. False: after the commit that a
        first PUBREC waits for. None: it is due at once (a repetition, or an id that is not known:
        [MQTT-4.3.3-1] lets the client finish)."""
        flight = self.flights.get(packet_id)
        if flight is None or flight.qos != 2 or not (flight.sent or flight.dup):
            return None
        if flight.state & RECEIVED:
            return False if packet_id in self._undurable else None
        flight.state |= RECEIVED
        if not flight.sent:
            flight.sent = True
            flight.entry = None
            self.sent += 1
        self._receiving.append(packet_id)
        self._undurable.add(packet_id)
        self._touch(flight.row)
        return True

    def refused(self, packet_id: int) -> bool:
        """PUBREC came with a reason why not: it is settled. False: nothing of that id waits for a
        PUBREC."""
        flight = self.flights.get(packet_id)
        if flight is None or flight.qos != 2 or not (flight.sent or flight.dup):
            return False
        if flight.state & RECEIVED:
            return False
        self._settle(flight)
        return True

    def pubcomp(self, packet_id: int) -> bool:
        """PUBCOMP came. False: nothing of that id waits for it."""
        flight = self.flights.get(packet_id)
        if flight is None or not flight.state & RECEIVED or packet_id in self._undurable:
            return False
        self._settle(flight)
        return True

    # ---------------------------------------------------------------------------- sending

    def next_ready(self) -> Flight | None:
        """The next delivery to send, past those that were acknowledged while they stood in line."""
        ready = self.ready
        while ready and ready[0].state & (RECEIVED | SETTLED):
            ready.popleft()
        return ready[0] if ready else None

    def take(self) -> Flight:
        """The next delivery to send; ``ready``, the window and its entry were looked at."""
        flight = self.ready.popleft()
        flight.sent = True
        self.sent += 1
        entry = flight.entry
        assert entry is not None
        if not flight.dup:
            self.unsent_bytes -= len(entry.payload)
        return flight

    def sends(self, flight: Flight) -> None:
        """It is sent now: after everything of which this was said before."""
        self._order += 1
        flight.order = self._order

    @property
    def awaits(self) -> bool:
        """Whether something is sent that its client has not said to have."""
        return any(f.sent and not f.state & RECEIVED for f in self.flights.values())

    @property
    def has_suspects(self) -> bool:
        """Whether a delivery that an earlier connection left was the first one of a connection that
        broke."""
        return any(f.attempts for f in self.flights.values() if f.dup and not f.state & RECEIVED)

    def first_awaited(self) -> Flight | None:
        """The first delivery that this connection sent and that is not acknowledged: when it
        breaks, that may be why. It may be one of a group, to which it is lent."""
        awaited = [f for f in self.flights.values() if f.sent and not f.state & RECEIVED]
        return min(awaited, key=_ORDER, default=None)

    def blame(self, flight: Flight) -> None:
        """The connection broke, and this delivery may be why. Before ``collect``, so that it is
        written."""
        flight.attempts = min(flight.attempts + 1, 255)
        self._touch(flight.row)

    def release_unsent(self) -> int | None:
        """At the end of a connection: give back what was claimed ahead and never sent.

        Returns the cursor to go back to, None if nothing was given back. Held messages and what
        an earlier connection left stay claimed. The rows concerned are in the next ``collect``.
        """
        cursor: int | None = None
        for flight in self._unsent():
            if cursor is None or flight.offset <= cursor:
                cursor = flight.offset - 1
            del self.flights[flight.packet_id]
            flight.state = SETTLED
            flight.row.unsettled -= 1
            self._touch(flight.row)
        claiming = [f for f in self._claiming if f.state & HELD]
        for flight in self._claiming:
            if not flight.state & HELD:
                del self.flights[flight.packet_id]
                if cursor is None or flight.offset <= cursor:
                    cursor = flight.offset - 1
        self._claiming = claiming
        return cursor

    def _unsent(self) -> Iterable[Flight]:
        """Claimed rows' deliveries that no connection can have sent."""
        claiming = set(map(id, self._claiming))
        return [
            f
            for f in self.flights.values()
            if not (f.sent or f.dup or f.state & HELD or id(f) in claiming)
        ]
