"""The deliveries of one session as a pure machine: every order of events is a few calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker_ext.outbound import (
    AHEAD_BYTES_MAX,
    PACKET_IDS,
    ROW_FLIGHTS_MAX,
    Collected,
    Flight,
    Outbound,
)
from storage.api import (
    CLAIM_DELIVERIES_MAX,
    HELD,
    RECEIVED,
    SENT,
    Claim,
    Consumer,
    Delivery,
    Entry,
    Snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def entry(offset: int, payload: bytes = b"x") -> Entry:
    return Entry(offset, b"t", payload, 2)


def snapshot(
    *claims: Claim, next_packet_id: int = 1, held: dict[int, Entry] | None = None
) -> Snapshot:
    consumer = Consumer(
        1,
        b"dev",
        b"",
        b"A" * 16,
        "g" * 32,
        100,
        next_claim=max((c.number + 1 for c in claims), default=1),
        next_held=max(held or (0,)) + 1,
        next_packet_id=next_packet_id,
    )
    return Snapshot(consumer, (), claims, held or {}, frozenset())


def commit(out: Outbound, collected: Collected | None = None) -> Collected:
    """What a session does when its write is committed."""
    if collected is None:
        collected = out.collect()
    out.committed(collected)
    out.ready.extend(collected.flights)
    return collected


def send_all(out: Outbound) -> list[Flight]:
    """What a session does when it may write: skip what needs no sending, stop at the window."""
    sent = []
    while (flight := out.next_ready()) is not None and out.sent < out.window:
        if flight.entry is None:
            flight.entry = entry(flight.offset)
        out.take()
        sent.append(flight)
    return sent


def ids(flights: Iterable[Flight]) -> list[int]:
    return [flight.packet_id for flight in flights]


# ---------------------------------------------------------------------- claim, commit, send


def test_a_delivery_is_ready_only_when_its_claim_is_committed() -> None:
    out = Outbound(10, 10)
    out.claim(entry(1), 1)
    assert out.next_ready() is None
    collected = out.collect()
    assert collected.claims == [Claim(1, (Delivery(1, 1, 1),))]
    assert out.next_ready() is None
    commit(out, collected)
    assert [f.offset for f in send_all(out)] == [1]


def test_deliveries_leave_in_the_order_they_were_claimed() -> None:
    out = Outbound(100, 0)
    for offset in (3, 4, 8):
        out.claim(entry(offset), 1)
    first = out.collect()
    for offset in (9, 11):
        out.claim(entry(offset), 2)
    second = out.collect()
    commit(out, first)
    commit(out, second)
    assert [(f.offset, f.packet_id) for f in send_all(out)] == [
        (3, 1),
        (4, 2),
        (8, 3),
        (9, 4),
        (11, 5),
    ]


def test_the_window_bounds_what_is_sent_and_ahead_what_is_claimed() -> None:
    out = Outbound(2, 3)
    for offset in range(1, 6):
        assert out.room
        out.claim(entry(offset), 1)
    assert not out.room
    commit(out)
    assert ids(send_all(out)) == [1, 2]
    assert out.puback(1)
    assert out.room
    assert ids(send_all(out)) == [3]
    assert out.puback(3)  # out of order
    assert out.puback(2)
    assert ids(send_all(out)) == [4, 5]


def test_payload_bytes_that_wait_are_bounded() -> None:
    out = Outbound(10_000, 0)
    claimed = 0
    while out.room:
        claimed += 1
        out.claim(entry(claimed, bytes(100_000)), 1)
    assert out.unsent_bytes < AHEAD_BYTES_MAX + 100_000
    assert not out.low
    commit(out)
    assert len(send_all(out)) == claimed
    assert out.unsent_bytes == 0
    assert out.room
    assert out.low


def test_a_message_larger_than_all_that_may_wait_still_gets_through() -> None:
    out = Outbound(10, 10)
    out.claim(entry(1, bytes(AHEAD_BYTES_MAX * 2)), 1)
    assert not out.room
    commit(out)
    assert ids(send_all(out)) == [1]
    assert out.room


def test_a_claim_row_is_bounded() -> None:
    out = Outbound(PACKET_IDS, 0)
    for offset in range(1, 3 * ROW_FLIGHTS_MAX):
        out.claim(entry(offset), 1)
    claims = out.collect().claims
    assert [claim.number for claim in claims] == [1, 2, 3]
    assert all(len(c.deliveries) <= ROW_FLIGHTS_MAX <= CLAIM_DELIVERIES_MAX for c in claims)


# --------------------------------------------------------------------------- packet ids


@pytest.mark.case("HK-22")
def test_the_counter_wraps_past_packet_ids_that_are_in_flight() -> None:
    left = Claim(1, (Delivery(1, 65535, 1), Delivery(2, 1, 2), Delivery(3, 2, 2, RECEIVED)))
    out = Outbound(PACKET_IDS, 0)
    out.restore(snapshot(left, next_packet_id=65534))
    for offset in (4, 5, 6):
        out.claim(entry(offset), 1)
    assert [d.packet_id for c in out.collect().claims for d in c.deliveries] == [65534, 3, 4]


@pytest.mark.case("HK-22")
def test_with_every_packet_id_in_use_the_queue_waits() -> None:
    out = Outbound(PACKET_IDS, 1000)
    offset = 0
    while out.room:
        offset += 1
        out.claim(entry(offset), 1)
    assert offset == len(out.flights) == PACKET_IDS
    commit(out)
    assert len(send_all(out)) == PACKET_IDS
    assert out.puback(777)
    assert out.room
    out.claim(entry(offset + 1), 1)
    assert not out.room
    assert commit(out).flights[0].packet_id == 777


def test_a_packet_id_is_not_given_again_before_its_delivery_is_settled() -> None:
    out = Outbound(3, 0)
    out.next_packet_id = 65535
    used = []
    for offset in range(1, 10):
        out.claim(entry(offset), 2)
        commit(out)
        (flight,) = send_all(out)
        used.append(flight.packet_id)
        out.pubrec(flight.packet_id)
        commit(out)
        out.pubcomp(flight.packet_id)
    assert used == [65535, *range(1, 9)]


def test_what_is_lent_has_an_id_of_its_own_and_a_place_until_it_is_given_back() -> None:
    out = Outbound(2, 4)
    out.claim(entry(1), 1)
    lent, again = (Flight(9, 0, 1, SENT, None) for _ in range(2))
    assert out.lend(lent, 0)
    assert lent.packet_id == 2
    assert not out.lend(again, 2)  # one that comes back for its id, which is in use
    assert out.lend(again, 7)
    out.claim(entry(2), 1)
    assert sorted(out.flights) == [1, 2, 3, 7]
    assert [d.packet_id for c in out.collect().claims for d in c.deliveries] == [1, 3]
    out.sent += 1
    out.give_back(2, place=True)
    out.give_back(7, place=False)
    assert (sorted(out.flights), out.sent) == ([1, 3], 0)


# ------------------------------------------------------------------------------ settling


def sent(qos: int, count: int = 1) -> Outbound:
    """``count`` deliveries, sent: offsets and packet ids 1, 2, ..."""
    out = Outbound(100, 100)
    for offset in range(1, count + 1):
        out.claim(entry(offset), qos)
    commit(out)
    send_all(out)
    return out


def test_a_row_is_written_again_while_partly_settled_and_deleted_when_it_is_empty() -> None:
    out = sent(1, 3)
    out.puback(2)
    collected = commit(out)
    assert collected.claims == [Claim(1, (Delivery(1, 1, 1), Delivery(3, 3, 1)))]
    assert collected.settled == []
    out.puback(1)
    out.puback(3)
    collected = commit(out)
    assert (collected.claims, collected.settled) == ([], [1])
    assert not out.pending
    assert not out.collect()


def test_late_and_unknown_acknowledgements_do_nothing() -> None:
    out = sent(1, 2)
    assert out.puback(1)
    commit(out)
    assert not out.puback(1)  # again
    assert not out.puback(99)
    assert not out.pubcomp(2)  # QoS 1 ends with PUBACK
    assert out.pubrec(2) is None
    assert not out.pending
    assert list(out.flights) == [2]

    out = sent(2)
    assert not out.puback(1)  # QoS 2 does not end with PUBACK
    assert not out.pubcomp(1)  # nor with PUBCOMP before PUBREC
    assert not out.pending


def test_an_acknowledgement_of_what_was_not_sent_yet_does_nothing() -> None:
    out = Outbound(1, 10)
    for offset in (1, 2, 3):
        out.claim(entry(offset), 1)
    assert not out.puback(1)
    commit(out)
    assert not out.puback(1)
    send_all(out)
    assert not out.puback(2)
    assert ids(out.flights.values()) == [1, 2, 3]


def test_qos_2_goes_from_pubrec_to_pubcomp_and_pubrel_waits_for_the_commit() -> None:
    out = sent(2)
    assert out.pubrec(1) is True
    collected = out.collect()
    assert collected.claims == [Claim(1, (Delivery(1, 1, 2, RECEIVED),))]
    assert collected.released == [1]
    commit(out, collected)
    assert out.pubcomp(1)
    assert commit(out).settled == [1]
    assert out.sent == 0


def test_a_repeated_pubrec_is_not_answered_before_the_first_one_is_committed() -> None:
    out = sent(2)
    assert out.pubrec(1) is True
    assert out.pubrec(1) is False
    collected = out.collect()
    assert out.pubrec(1) is False, "the write is under way, not committed"
    assert collected.released == [1]
    commit(out, collected)
    assert out.pubrec(1) is None, "now it is answered at once"
    assert not out.pending


def test_a_pubcomp_before_its_pubrel_was_sent_does_nothing() -> None:
    out = sent(2)
    out.pubrec(1)
    assert not out.pubcomp(1)
    collected = out.collect()
    assert not out.pubcomp(1), "the id would be free while its PUBREL is still to be sent"
    commit(out, collected)
    assert out.pubcomp(1)


def test_an_unknown_pubrec_is_answered_so_that_the_client_can_finish() -> None:
    out = Outbound(10, 10)
    assert out.pubrec(5) is None
    assert not out.pubcomp(5)


# ------------------------------------------------------------------------------- restore


def test_what_an_earlier_connection_left_goes_first_with_its_ids_and_dup() -> None:
    out = Outbound(10, 10)
    due = out.restore(
        snapshot(
            Claim(3, (Delivery(7, 12, 1), Delivery(8, 13, 2, RECEIVED), Delivery(9, 14, 2))),
            Claim(4, (Delivery(11, 3, 1, SENT, 254), Delivery(12, 4, 1, SENT, 255))),
            next_packet_id=15,
        )
    )
    assert due == [13]
    out.claim(entry(20), 1)
    commit(out)
    flights = send_all(out)
    assert [(f.offset, f.packet_id, f.dup) for f in flights] == [
        (7, 12, True),
        (9, 14, True),
        (11, 3, True),
        (12, 4, True),
        (20, 15, False),
    ]
    assert [f.attempts for f in flights] == [0, 0, 254, 255, 0]
    assert out.sent == 6  # PUBREL is due: that one fills the window, too


def test_a_held_message_is_restored_with_its_copy() -> None:
    message = Entry(0, b"t", b"retained", 1)
    out = Outbound(10, 10)
    out.hold(message, 1)
    collected = commit(out)
    assert collected.held == [(1, message)]
    assert collected.claims == [Claim(1, (Delivery(1, 1, 1, SENT | HELD),))]
    again = Outbound(10, 10)
    again.restore(snapshot(*collected.claims, held={1: message}))
    (flight,) = send_all(again)
    assert flight.entry == message
    assert again.puback(1)
    collected = commit(again)
    assert (collected.settled, collected.unheld) == ([1], [1])
    again.hold(message, 1)
    assert commit(again).held[0][0] == 2, "a number is not used again"


@pytest.mark.parametrize("qos", [1, 2])
def test_an_acknowledgement_of_what_an_earlier_connection_sent_counts_before_it_is_sent_again(
    qos: int,
) -> None:
    """A bridge repeats its PUBREC when it comes back; then the PUBLISH would be a second copy."""
    out = Outbound(10, 10)
    out.restore(snapshot(Claim(1, (Delivery(1, 5, qos), Delivery(2, 6, qos)))))
    if qos == 1:
        assert out.puback(5)
        assert commit(out).claims == [Claim(1, (Delivery(2, 6, 1),))]
    else:
        assert out.pubrec(5) is True
        assert commit(out).released == [5]
    assert ids(send_all(out)) == [6]
    if qos == 2:
        assert out.pubcomp(5)
    assert out.sent == 1


def test_a_settled_delivery_frees_its_id_even_while_it_stands_in_line() -> None:
    out = Outbound(10, 0)
    out.restore(snapshot(Claim(1, (Delivery(1, 1, 1),)), next_packet_id=1))
    assert out.puback(1)
    out.claim(entry(9), 1)
    commit(out)
    (flight,) = send_all(out)
    assert (flight.offset, flight.packet_id) == (9, 1)
    assert out.puback(1)
    assert commit(out).settled == [2]


# ------------------------------------------------------------------------ release_unsent


@pytest.mark.case("HK-12")
def test_what_was_claimed_ahead_and_never_sent_goes_back_to_the_queue() -> None:
    out = Outbound(2, 10)
    for offset in (4, 6, 7, 9):
        out.claim(entry(offset), 1)
    commit(out)
    assert ids(send_all(out)) == [1, 2]
    out.claim(entry(12), 1)  # not even written
    assert out.release_unsent() == 6
    collected = out.collect()
    assert collected.claims == [Claim(1, (Delivery(4, 1, 1), Delivery(6, 2, 1)))]
    assert not collected.flights


def test_a_claim_that_is_on_its_way_to_the_disk_is_deleted_behind_itself() -> None:
    out = Outbound(10, 10)
    out.claim(entry(4), 1)
    collected = out.collect()
    assert out.release_unsent() == 3
    assert out.collect().settled == [collected.claims[0].number]


def test_nothing_is_released_that_an_earlier_connection_left_or_that_is_held() -> None:
    out = Outbound(1, 10)
    out.restore(snapshot(Claim(1, (Delivery(1, 1, 1), Delivery(2, 2, 1)))))
    send_all(out)
    out.hold(Entry(0, b"t", b"retained", 1), 1)
    commit(out)
    out.hold(Entry(0, b"t", b"retained too", 1), 1)
    assert out.release_unsent() is None
    collected = out.collect()
    assert [claim.number for claim in collected.claims] == [3]
    assert len(collected.held) == 1
    assert len(out.flights) == 4


# ------------------------------------------------------------------------ random histories


class DeliveryMachine(RuleBasedStateMachine):
    """One session over a store that applies what it collects; connections come, go and crash.

    The client of the model settles what it gets, in any order, late, again, or not at all. What
    it keeps: the packet ids of QoS 2 messages it has taken and not finished.
    """

    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[int, Claim] = {}
        self.held: dict[int, Entry] = {}
        self.cursor = 0
        self.next_claim = 1
        self.next_held = 1
        self.next_packet_id = 1
        self.head = 0
        self.flying: list[tuple[Collected, int, int]] = []
        self.wire: list[Flight] = []
        self.taken: dict[int, int] = {}  # offset -> copies a client's application took
        self.half: dict[int, int] = {}  # QoS 2: packet id -> offset, PUBREC sent
        self.last_sent = 0
        self.connect()

    def connect(self) -> None:
        self.out = Outbound(3, 4)
        self.at = self.cursor
        due = self.out.restore(
            Snapshot(
                Consumer(
                    1,
                    b"dev",
                    b"",
                    b"A" * 16,
                    "g" * 32,
                    self.cursor,
                    self.next_claim,
                    self.next_held,
                    self.next_packet_id,
                ),
                (),
                tuple(self.claims[number] for number in sorted(self.claims)),
                dict(self.held),
                frozenset(),
            )
        )
        self.wire = []
        self.flying = []
        self.last_sent = 0
        self.restored = list(self.out.flights)
        self.got_pubrel = set(due)

    def apply(self, collected: Collected, cursor: int, next_packet_id: int) -> None:
        """One Advance, with the checks of the store."""
        for number in (*(c.number for c in collected.claims), *collected.settled):
            assert number in self.claims or number >= self.next_claim, "ClaimNotHeld"
        for claim in collected.claims:
            assert claim.deliveries
            self.claims[claim.number] = claim
            self.next_claim = max(self.next_claim, claim.number + 1)
        for number in collected.settled:
            self.claims.pop(number)
        for number, message in collected.held:
            self.held[number] = message
            self.next_held = max(self.next_held, number + 1)
        for number in collected.unheld:
            del self.held[number]
        self.cursor = cursor
        if collected.flights:
            self.next_packet_id = next_packet_id

    # -------------------------------------------------------------------------- the broker

    @rule(count=st.integers(1, 9))
    def publish(self, count: int) -> None:
        self.head += count

    @precondition(lambda self: self.out.room and self.at < self.head)
    @rule(qos=st.sampled_from([1, 2]))
    def claim(self, qos: int) -> None:
        self.at += 1
        self.out.claim(entry(self.at), qos)

    @precondition(lambda self: self.out.room)
    @rule()
    def hold(self) -> None:
        self.out.hold(Entry(0, b"t", b"r", 1), 1)

    @rule()
    def collect(self) -> None:
        self.flying.append((self.out.collect(), self.at, self.out.next_packet_id))

    @precondition(lambda self: self.flying)
    @rule()
    def committed(self) -> None:
        collected, cursor, next_packet_id = self.flying.pop(0)
        self.apply(collected, cursor, next_packet_id)
        commit(self.out, collected)
        self.got_pubrel.update(collected.released)

    @rule()
    def send(self) -> None:
        for flight in send_all(self.out):
            stored = [d for c in self.claims.values() for d in c.deliveries]
            assert any(
                (d.packet_id, d.offset) == (flight.packet_id, flight.offset) for d in stored
            ), "sent before its claim was committed (P2)"
            if not flight.state & HELD:
                assert flight.offset > self.last_sent, "out of order"
                self.last_sent = flight.offset
            assert not flight.dup or flight.packet_id in self.restored
            self.wire.append(flight)

    @rule()
    def disconnect(self) -> None:
        back = self.out.release_unsent()
        if back is not None:
            self.at = min(back, self.at)
        for collected, cursor, next_packet_id in self.flying:
            self.apply(collected, cursor, next_packet_id)
        self.apply(self.out.collect(), self.at, self.out.next_packet_id)
        self.connect()

    @rule(landed=st.integers(0, 3))
    def crash(self, landed: int) -> None:
        for collected, cursor, next_packet_id in self.flying[:landed]:
            self.apply(collected, cursor, next_packet_id)
        self.connect()

    # -------------------------------------------------------------------------- the client

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 20))
    def client_takes(self, which: int) -> None:
        flight = self.wire[which % len(self.wire)]
        if flight.state & HELD:
            self.out.puback(flight.packet_id)
        elif flight.qos == 1:
            if self.out.puback(flight.packet_id):
                self.taken[flight.offset] = 1
        elif flight.packet_id not in self.half and flight.offset not in self.taken:
            self.half[flight.packet_id] = flight.offset
            self.taken[flight.offset] = 1
            self.out.pubrec(flight.packet_id)
        elif self.half.get(flight.packet_id) == flight.offset:
            self.out.pubrec(flight.packet_id)  # a copy with DUP, or a repetition

    @precondition(lambda self: self.half)
    @rule(which=st.integers(0, 20))
    def client_repeats_its_pubrec(self, which: int) -> None:
        packet_id = sorted(self.half)[which % len(self.half)]
        if self.out.pubrec(packet_id) is None:
            self.got_pubrel.add(packet_id)

    @precondition(lambda self: self.got_pubrel)
    @rule()
    def client_completes(self) -> None:
        packet_id = self.got_pubrel.pop()
        if packet_id in self.half:
            stored = [d for c in self.claims.values() for d in c.deliveries]
            assert all(d.state & RECEIVED for d in stored if d.packet_id == packet_id), (
                "PUBREL before 'received' was committed (P5)"
            )
            del self.half[packet_id]
        self.out.pubcomp(packet_id)

    @rule(packet_id=st.integers(1, 20))
    def a_stray_acknowledgement(self, packet_id: int) -> None:
        if packet_id not in self.out.flights:
            assert not self.out.puback(packet_id)
            assert not self.out.pubcomp(packet_id)

    # ------------------------------------------------------------------------- invariants

    @invariant()
    def packet_ids_are_unique_and_nothing_is_lost(self) -> None:
        stored = [d for c in self.claims.values() for d in c.deliveries]
        assert len({d.packet_id for d in stored}) == len(stored)
        unsettled = {d.offset for d in stored if not d.state & HELD}
        for offset in range(1, self.cursor + 1):
            assert offset in unsettled or offset in self.taken, "neither stored nor taken"
        assert {d.offset for d in stored if d.state & HELD} == set(self.held)

    @invariant()
    def the_window_holds(self) -> None:
        assert 0 <= self.out.sent <= max(self.out.window, len(self.restored))
        assert self.out.sent == sum(flight.sent for flight in self.out.flights.values())
        assert self.out.unsent_bytes >= 0

    @initialize()
    def begin(self) -> None:
        self.head = 3


def test_random_histories_of_deliveries(long: bool) -> None:
    run_state_machine_as_test(
        DeliveryMachine,
        settings=settings(max_examples=5000 if long else 80, stateful_step_count=60, deadline=None),
    )
