"""The claims of a group, as they are stored. Pure: no socket, no clock, no store.

A row is what is *with* one member. Handing on takes a delivery out of one row and puts it into
another, in one write; a row that nothing is left of is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.outbound import SETTLED
from broker_ext.shared.handed import Handed
from storage.api import RECEIVED, SENT, UNRECORDED, Claim, Delivery

if TYPE_CHECKING:
    from broker_ext.shared.group import Group
    from storage.outbox import DeadLetter

__all__ = ["Collected", "Row", "Rows"]

ROW_MAX: Final = 128
"""Deliveries in a claim row."""


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


class Collected(NamedTuple):
    """What ``Rows.collect`` hands to one write, and its ``handed`` and ``received`` are told when
    that is committed. handed: each with the turn that it was in."""

    claims: list[Claim]
    settled: list[int]
    letters: list[DeadLetter]
    handed: list[tuple[Handed, int]]
    received: list[Handed]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.claims or self.settled or self.letters or self.handed)


class Rows:
    """All claims of one group. stored: how many deliveries are in them."""

    __slots__ = (
        "_claiming",
        "_dirty",
        "_letters",
        "_next",
        "_open",
        "_receiving",
        "_vacating",
        "stored",
    )

    def __init__(self) -> None:
        self.stored = 0
        self._next = 1
        self._claiming: dict[Handed, None] = {}
        self._vacating: list[Handed] = []
        self._receiving: list[Handed] = []
        self._letters: list[DeadLetter] = []
        self._dirty: list[Row] = []
        self._open: dict[int, Row] = {}

    # -------------------------------------------------------------------- an earlier run

    def begin_at(self, next_claim: int) -> None:
        """The record is ours: numbers below were given."""
        self._next = next_claim

    def restored(self, group: Group, claim: Claim) -> Row:
        """A row that the last run left."""
        row = Row(claim.number, claim.member)
        row.is_written = True
        for delivery in claim.deliveries:
            flight = Handed(group, delivery.offset, None, delivery.qos)
            flight.state = delivery.state
            flight.attempts = delivery.attempts
            flight.stored = row
            row.deliveries[flight] = delivery
            self.stored += 1
        return row

    # --------------------------------------------------------------- what is to be written

    def claim(self, flight: Handed) -> None:
        """It is with its member now, once that is committed."""
        self._claiming[flight] = None

    def unclaim(self, flight: Handed) -> None:
        """Not with that one after all."""
        self._claiming.pop(flight, None)

    def vacate(self, flight: Handed) -> None:
        """It is with nobody, and its packet id is its session's again: nobody who comes back may
        find it in a row any more."""
        self._vacating.append(flight)

    def is_vacated(self, flight: Handed) -> bool:
        """Whether that is to be written."""
        return flight in self._vacating

    def receive(self, flight: Handed) -> bool:
        """PUBREC came. False: it is in no row."""
        row = flight.stored
        if row is None:
            return False
        row.deliveries[flight] = row.deliveries[flight]._replace(state=RECEIVED)
        self._touch(row)
        self._receiving.append(flight)
        return True

    def blame(self, flight: Handed) -> bool:
        """It was under way when a connection broke, once more. False: it is in no row."""
        row = flight.stored
        if row is None:
            return False
        row.deliveries[flight] = row.deliveries[flight]._replace(attempts=flight.attempts)
        self._touch(row)
        return True

    def settle(self, flight: Handed) -> bool:
        """It is over. False: it is in no row."""
        self._claiming.pop(flight, None)
        if flight.stored is None:
            return False
        self._remove(flight)
        flight.stored = None
        self.stored -= 1
        return True

    def bury(self, letter: DeadLetter) -> None:
        """A dead letter, in the same write."""
        self._letters.append(letter)

    @property
    def has_letters(self) -> bool:
        """Whether a dead letter is not written yet."""
        return bool(self._letters)

    def forget(self) -> None:
        """The record is deleted, and the rows with it."""
        self._dirty.clear()
        self._vacating.clear()

    def collect(self) -> Collected:
        """Everything that is not written yet."""
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
        received, self._receiving = self._receiving, []
        letters, self._letters = self._letters, []
        self._open = {}
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
        return Collected(claims, settled, letters, handed, received)

    # ------------------------------------------------------------------------------ rows

    def _put(self, flight: Handed, member: int) -> None:
        """Move a delivery to a row of those that are with this member."""
        row = self._open.get(member)
        if row is None or len(row.deliveries) >= ROW_MAX:
            row = self._open[member] = Row(self._next, member)
            self._next += 1
        if flight.stored is None:
            self.stored += 1
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

    def _remove(self, flight: Handed) -> None:
        row = flight.stored
        assert row is not None
        del row.deliveries[flight]
        self._touch(row)

    def _touch(self, row: Row) -> None:
        if not row.is_dirty:
            row.is_dirty = True
            self._dirty.append(row)
