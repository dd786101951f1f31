"""Fences: an incarnation that is not on the record changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from storage.api import (
    Acquire,
    Advance,
    Bind,
    Claim,
    Delivery,
    Detach,
    Discard,
    DropWill,
    Op,
    StoreWill,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from storage.errors import Fenced
from tests.storage.harness import NOW_MS, A, B, C, Database, message

Make: TypeAlias = Callable[[int, bytes], Op]

FENCED: dict[str, Make] = {
    "Advance": lambda who, inc: Advance(
        who,
        inc,
        cursor=1,
        claims=[Claim(1, ()), Claim(2, (Delivery(2, 2, 1),))],
        held=[(2, message(b"r"))],
        unheld=[1],
        received=[2],
        released=[1],
        next_packet_id=9,
        checkpoint=True,
    ),
    "Advance with nothing": Advance,
    "Advance that settles": lambda who, inc: Advance(who, inc, settled=[1]),
    "Advance that settles what is not held": lambda who, inc: Advance(who, inc, settled=[77]),
    "Subscribe": lambda who, inc: Subscribe(
        who, inc, (Subscription(b"new", 1, 0), Subscription(b"t", 0, 0))
    ),
    "Subscribe to nothing": lambda who, inc: Subscribe(who, inc, ()),
    "Unsubscribe": lambda who, inc: Unsubscribe(who, inc, (b"t", b"never")),
    "Bind": lambda who, inc: Bind(who, inc, 0),
    "Detach": lambda who, inc: Detach(who, inc, NOW_MS + 9, expiry_s=1, keep_expiry=False),
    "Discard": Discard,
}


@pytest.fixture(params=FENCED)
def make(request: pytest.FixtureRequest) -> Make:
    """One of the fenced operations."""
    return FENCED[request.param]


async def someone(db: Database, incarnation: bytes = A) -> int:
    """A consumer that has something of everything."""
    consumer = await db.subscriber(b"dev", b"t", incarnation=incarnation)
    await db.append(message(), message(), message())
    op = Advance(
        consumer.id,
        incarnation,
        cursor=2,
        claims=[Claim(1, (Delivery(1, 1, 1), Delivery(1, 2, 1, 0x80)))],
        held=[(1, message(b"r"))],
        received=[1],
    )
    assert await db.do(op) is None
    return consumer.id


@pytest.mark.case("HK-18")
@pytest.mark.parametrize("detached", [False, True], ids=["attached", "detached"])
async def test_an_older_incarnation_changes_nothing(
    db: Database, make: Make, *, detached: bool
) -> None:
    consumer_id = await someone(db)
    await db.acquire(incarnation=B, expiry_s=60)
    if detached:
        await db.do(Detach(consumer_id, B, NOW_MS))
    dumped = await db.dump()
    before = await db.snapshot()
    assert await db.do(make(consumer_id, A)) == Fenced(consumer_id)
    assert await db.snapshot() == before
    assert await db.dump() == dumped


@pytest.mark.case("HK-11")
async def test_an_old_event_after_a_newer_owner_is_refused(db: Database, make: Make) -> None:
    consumer_id = await someone(db)
    await db.write(make(consumer_id, C), Acquire(b"dev", B, b"", NOW_MS))
    before = await db.snapshot()
    assert await db.do(make(consumer_id, A)) == Fenced(consumer_id)
    assert await db.snapshot() == before


async def test_a_takeover_in_the_same_batch_fences_what_comes_after_it(
    db: Database, make: Make
) -> None:
    consumer_id = await someone(db)
    take_over, give_back = Acquire(b"dev", B, b"", NOW_MS), Acquire(b"dev", A, b"", NOW_MS)
    await db.write(take_over, give_back)
    before = await db.snapshot()
    outcomes = await db.write(take_over, make(consumer_id, A), give_back)
    assert outcomes[1] == Fenced(consumer_id)
    assert await db.snapshot() == before


async def test_a_consumer_that_never_was_is_fenced(db: Database, make: Make) -> None:
    consumer_id = await someone(db)
    before = await db.dump()
    for nobody in (consumer_id + 1, 1 << 40, 0):
        assert await db.do(make(nobody, A)) == Fenced(nobody)
    assert await db.dump() == before


async def test_a_consumer_that_was_discarded_is_fenced(db: Database, make: Make) -> None:
    consumer_id = await someone(db)
    await db.do(Discard(consumer_id, A))
    before = await db.dump()
    assert await db.do(make(consumer_id, A)) == Fenced(consumer_id)
    assert await db.dump() == before


async def test_a_clean_start_fences_the_owner_before_it(db: Database, make: Make) -> None:
    consumer_id = await someone(db)
    await db.acquire(incarnation=B, clean=True)
    before = await db.dump()
    assert await db.do(make(consumer_id, A)) == Fenced(consumer_id)
    assert await db.dump() == before


async def test_the_incarnation_of_another_consumer_is_no_credential(
    db: Database, make: Make
) -> None:
    consumer_id = await someone(db)
    await db.acquire(b"other", B)
    before = await db.dump()
    assert await db.do(make(consumer_id, B)) == Fenced(consumer_id)
    assert await db.dump() == before


async def test_fences_hold_over_a_restart(db: Database, make: Make) -> None:
    consumer_id = await someone(db)
    await db.acquire(incarnation=B)
    before = await db.dump()
    await db.reopen()
    assert await db.do(make(consumer_id, A)) == Fenced(consumer_id)
    assert await db.dump() == before


@pytest.mark.case("HK-18")
async def test_the_late_end_of_an_old_connection_leaves_the_new_one_alone(db: Database) -> None:
    consumer_id = await someone(db)
    await db.do(StoreWill(Will(b"dev", A, b"", message(b"w"))))
    await db.acquire(incarnation=B, expiry_s=60)
    await db.do(StoreWill(Will(b"dev", B, b"", message(b"w"))))
    before = await db.snapshot()
    outcomes = await db.write(
        Advance(consumer_id, A, cursor=0, settled=[1], checkpoint=True),
        Detach(consumer_id, A, NOW_MS, expiry_s=0, keep_expiry=False),
        DropWill(A),
    )
    assert outcomes == [Fenced(consumer_id), Fenced(consumer_id), True]
    assert await db.snapshot() == before
    assert [will.incarnation for will in (await db.reopen()).wills] == [B]
