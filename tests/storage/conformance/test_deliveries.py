"""Advance: cursor, claims, held messages and inbound ids of one consumer, together."""

from __future__ import annotations

from typing import Any

import pytest

from storage.api import (
    CLAIM_DELIVERIES_MAX,
    HELD,
    RECEIVED,
    RETAINED,
    SENT,
    Advance,
    Claim,
    Delivery,
)
from storage.errors import ClaimNotHeld
from tests.storage.harness import A, Database, message

ONE = Claim(1, (Delivery(1, 11, 1), Delivery(2, 12, 2), Delivery(3, 13, 1)))
TWO = Claim(2, (Delivery(4, 14, 1),))


@pytest.fixture
async def consumer_id(db: Database) -> int:
    """A consumer with five entries before it, and two claims of them."""
    consumer = await db.subscriber(b"dev", b"t")
    await db.append(*(message(payload=b"%d" % n) for n in range(5)))
    assert await db.do(Advance(consumer.id, A, cursor=4, claims=[ONE, TWO])) is None
    return consumer.id


async def advance(db: Database, consumer_id: int, **fields: Any) -> object:
    return await db.do(Advance(consumer_id, A, **fields))


async def test_claims_are_kept_with_the_cursor_that_made_them(
    db: Database, consumer_id: int
) -> None:
    snapshot = await db.snapshot()
    assert snapshot.claims == (ONE, TWO)
    assert (snapshot.consumer.cursor, snapshot.consumer.next_claim) == (4, 3)
    assert snapshot.consumer.id == consumer_id


async def test_a_delivery_comes_back_with_every_field(db: Database, consumer_id: int) -> None:
    claim = Claim(
        3,
        (
            Delivery(5, 65_535, 2, RECEIVED, 255),
            Delivery(4, 1, 1, SENT, 1),
            Delivery(1, 2, 2, HELD | SENT, 0),
            Delivery(2, 300, 2, HELD | RECEIVED, 7),
            Delivery((1 << 62) + 1, 256, 1),
        ),
    )
    held = [(1, message(b"r")), (2, message(b"r"))]
    assert await advance(db, consumer_id, claims=[claim], held=held) is None
    assert (await db.snapshot()).claims[-1] == claim


async def test_a_claim_holds_as_many_deliveries_as_it_may(db: Database, consumer_id: int) -> None:
    deliveries = tuple(
        Delivery(10_000 - n * 3, 1000 + n, 1 + n % 2, attempts=n)
        for n in range(CLAIM_DELIVERIES_MAX)
    )
    await advance(db, consumer_id, claims=[Claim(3, deliveries)])
    assert (await db.snapshot()).claims[-1] == Claim(3, deliveries)
    await advance(db, consumer_id, claims=[Claim(3, deliveries[100:])])
    assert (await db.snapshot()).claims[-1] == Claim(3, deliveries[100:])


async def test_many_claims_come_back_in_the_order_they_were_made(
    db: Database, consumer_id: int
) -> None:
    made = [Claim(n, (Delivery(n, 1000 + n, 1),)) for n in range(3, 300)]
    await advance(db, consumer_id, claims=made[:100])
    await advance(db, consumer_id, claims=made[100:])
    assert list((await db.snapshot()).claims) == [ONE, TWO, *made]


async def test_a_replaced_claim_holds_what_is_left_of_it(db: Database, consumer_id: int) -> None:
    left = Claim(1, (Delivery(2, 12, 2, RECEIVED), Delivery(3, 13, 1, attempts=1)))
    assert await advance(db, consumer_id, claims=[left]) is None
    snapshot = await db.snapshot()
    assert snapshot.claims == (left, TWO)
    assert snapshot.consumer.next_claim == 3


@pytest.mark.case("HK-11")
async def test_the_same_claim_applied_twice_is_as_once(db: Database, consumer_id: int) -> None:
    before = await db.snapshot()
    assert await advance(db, consumer_id, cursor=4, claims=[ONE, TWO]) is None
    assert await db.snapshot() == before


async def test_a_settled_claim_is_gone_and_its_number_is_not_used_again(
    db: Database, consumer_id: int
) -> None:
    assert await advance(db, consumer_id, settled=[2]) is None
    assert (await db.snapshot()).claims == (ONE,)
    assert await advance(db, consumer_id, settled=[1]) is None
    await db.reopen()
    snapshot = await db.snapshot()
    assert (snapshot.claims, snapshot.consumer.next_claim) == ((), 3)


async def test_a_new_claim_may_leave_numbers_out_and_they_are_never_made(
    db: Database, consumer_id: int
) -> None:
    assert await advance(db, consumer_id, claims=[Claim(9, (Delivery(5, 1, 1),))]) is None
    assert (await db.snapshot()).consumer.next_claim == 10
    late = Claim(7, (Delivery(5, 2, 1),))
    assert await advance(db, consumer_id, claims=[late]) == ClaimNotHeld(consumer_id, 7)


async def test_settling_and_claiming_go_together(db: Database, consumer_id: int) -> None:
    three, left = Claim(3, (Delivery(5, 15, 1),)), Claim(1, ONE.deliveries[1:])
    assert await advance(db, consumer_id, cursor=5, claims=[left, three], settled=[2]) is None
    snapshot = await db.snapshot()
    assert snapshot.claims == (left, three)
    assert snapshot.consumer.cursor == 5


# ---------------------------------------------------------------------------- ClaimNotHeld


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"settled": [2]}, 2),
        ({"settled": [1, 2]}, 2),
        ({"settled": [3]}, 3),
        ({"settled": [99]}, 99),
        ({"settled": [0]}, 0),
        ({"claims": [TWO]}, 2),
        ({"claims": [Claim(1, ()), TWO]}, 2),
        ({"claims": [Claim(3, (Delivery(5, 15, 1),)), TWO]}, 2),
        ({"claims": [Claim(3, (Delivery(5, 15, 1),))], "settled": [2]}, 2),
        ({"claims": [Claim(3, (Delivery(5, 15, 1),))], "settled": [3]}, 3),
        ({"claims": [Claim(0, (Delivery(5, 15, 1),))]}, 0),
    ],
    ids=[
        "settled already",
        "one of two settled already",
        "never made",
        "never made, far",
        "zero",
        "replacing a settled one",
        "second of two replaced",
        "beside a new one",
        "settled beside a new one",
        "made in the same write",
        "a new one that is numbered zero",
    ],
)
async def test_a_claim_that_is_not_held_refuses_the_whole_operation(
    db: Database, consumer_id: int, fields: dict[str, Any], number: int
) -> None:
    await advance(db, consumer_id, settled=[2], held=[(1, message(b"r"))], received=[1])
    before = await db.dump()
    outcome = await advance(
        db,
        consumer_id,
        **fields,
        cursor=5,
        held=[(2, message(b"r"))],
        unheld=[1],
        received=[2],
        released=[1],
        next_packet_id=99,
        checkpoint=True,
    )
    assert outcome == ClaimNotHeld(consumer_id, number)
    assert await db.dump() == before


async def test_a_claim_settled_earlier_in_the_batch_is_not_held_any_more(
    db: Database, consumer_id: int
) -> None:
    settle = Advance(consumer_id, A, settled=[1])
    assert await db.write(settle, settle) == [None, ClaimNotHeld(consumer_id, 1)]


async def test_a_claim_made_earlier_in_the_batch_is_held(db: Database, consumer_id: int) -> None:
    three = Claim(3, (Delivery(5, 15, 1),))
    outcomes = await db.write(
        Advance(consumer_id, A, cursor=5, claims=[three]), Advance(consumer_id, A, settled=[3])
    )
    assert outcomes == [None, None]
    assert (await db.snapshot()).claims == (ONE, TWO)


async def test_claims_of_one_consumer_are_not_those_of_another(
    db: Database, consumer_id: int
) -> None:
    other = await db.subscriber(b"other", b"t")
    assert await db.do(Advance(other.id, A, settled=[1])) == ClaimNotHeld(other.id, 1)
    mine = Claim(1, (Delivery(5, 11, 1),))
    assert await db.do(Advance(other.id, A, claims=[mine])) is None
    assert (await db.snapshot(b"other")).claims == (mine,)
    assert await advance(db, consumer_id, settled=[1, 2]) is None
    assert (await db.snapshot(b"other")).claims == (mine,)


# ------------------------------------------------------------------------- the other fields


async def test_the_cursor_may_go_back(db: Database, consumer_id: int) -> None:
    await advance(db, consumer_id, cursor=1, settled=[1, 2])
    assert (await db.snapshot()).consumer.cursor == 1
    await advance(db, consumer_id, cursor=0)
    assert (await db.snapshot()).consumer.cursor == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpoint": True},
        {"unheld": [5]},
        {"released": [5]},
        {"cursor": 4},
    ],
    ids=str,
)
async def test_what_is_not_named_does_not_change(
    db: Database, consumer_id: int, fields: dict[str, Any]
) -> None:
    before = await db.dump()
    assert await advance(db, consumer_id, **fields) is None
    assert await db.dump() == before


@pytest.mark.parametrize("packet_id", [1, 2, 65_535])
async def test_the_next_packet_id_is_remembered(
    db: Database, consumer_id: int, packet_id: int
) -> None:
    await advance(db, consumer_id, next_packet_id=packet_id)
    await db.reopen()
    assert (await db.snapshot()).consumer.next_packet_id == packet_id


async def test_held_messages_come_and_go_by_number(db: Database, consumer_id: int) -> None:
    first = message(b"r/1", b"", qos=2, flags=RETAINED, origin=b"p", expires_ms=9, properties=b"\1")
    second, third = message(b"r/2", bytes(300_000)), message(b"r/3")
    await advance(db, consumer_id, held=[(1, first), (2, second)])
    await advance(db, consumer_id, held=[(3, third)], unheld=[2])
    snapshot = await db.snapshot()
    assert snapshot.held == {1: first, 3: third}
    assert snapshot.consumer.next_held == 4
    await advance(db, consumer_id, unheld=[1, 3])
    await db.reopen()
    snapshot = await db.snapshot()
    assert (snapshot.held, snapshot.consumer.next_held) == ({}, 4)


async def test_inbound_ids_come_and_go(db: Database, consumer_id: int) -> None:
    await advance(db, consumer_id, received=[1, 65_535, 256, 255])
    await advance(db, consumer_id, received=[1, 2], released=[65_535, 9])
    assert (await db.snapshot()).inbound == {1, 2, 255, 256}
    await advance(db, consumer_id, released=[1, 2, 255, 256])
    assert (await db.snapshot()).inbound == frozenset()


async def test_all_inbound_ids_fit(db: Database, consumer_id: int) -> None:
    await advance(db, consumer_id, received=range(1, 65_536))
    assert (await db.snapshot()).inbound == set(range(1, 65_536))
    await advance(db, consumer_id, released=range(2, 65_536))
    assert (await db.snapshot()).inbound == {1}


async def test_ids_of_one_consumer_are_not_those_of_another(db: Database, consumer_id: int) -> None:
    other = await db.subscriber(b"other", b"t")
    await db.write(
        Advance(consumer_id, A, received=[1, 2], held=[(1, message(b"mine"))]),
        Advance(other.id, A, received=[2, 3], held=[(1, message(b"other"))]),
        Advance(consumer_id, A, released=[2, 3], unheld=[1]),
    )
    mine, others = await db.snapshot(), await db.snapshot(b"other")
    assert mine.inbound == {1}
    assert mine.held == {}
    assert others.inbound == {2, 3}
    assert others.held == {1: message(b"other")}
