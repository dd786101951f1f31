"""Groups: consumers whose deliveries are with members, which are consumers too."""

from __future__ import annotations

import pytest

from storage.api import (
    GROUP,
    RECEIVED,
    UNRECORDED,
    Acquire,
    Acquired,
    Advance,
    Claim,
    Delivery,
    Detach,
    Discard,
    Expire,
    Expired,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from tests.storage.harness import NOW_MS, A, B, Database, counts, message

SHARED = b"$share/g/t"


@pytest.fixture
async def group_id(db: Database) -> int:
    """A group of ``t`` with three entries before it."""
    group = await db.subscriber(GROUP + b"g/t", b"t", qos=2)
    await db.append_each(message(), message(), message())
    return group.id


async def member(db: Database, client_id: bytes = b"dev", *, expiry_s: int | None = None) -> int:
    snapshot = await db.acquire(client_id, B, expiry_s=expiry_s)
    number = snapshot.consumer.id
    await db.do(Subscribe(number, B, (Subscription(SHARED, 1, 0),)))
    return number


async def claims(db: Database) -> tuple[Claim, ...]:
    return (await db.snapshot(GROUP + b"g/t")).claims


async def test_a_claim_says_whom_it_is_with(db: Database, group_id: int) -> None:
    one, two = await member(db), await member(db, b"other")
    made = (
        Claim(1, (Delivery(1, 7, 1), Delivery(2, 8, 2, RECEIVED, 3)), one),
        Claim(2, (Delivery(3, 7, 2),), two),
        Claim(3, (Delivery(4, 0, 2), Delivery(5, 0, 2)), UNRECORDED),
        Claim(4, (Delivery(6, 0, 1), Delivery(7, 0, 1)), 0),
    )
    await db.do(Advance(group_id, A, cursor=7, claims=made))
    await db.reopen()
    assert await claims(db) == made


async def test_a_delivery_goes_from_one_member_to_another_in_one_write(
    db: Database, group_id: int
) -> None:
    one, two = await member(db), await member(db, b"other")
    first, second = Delivery(1, 7, 1), Delivery(2, 8, 1)
    await db.do(Advance(group_id, A, cursor=2, claims=[Claim(1, (first, second), one)]))
    handed = Claim(2, (Delivery(1, 7, 1, attempts=1),), two)
    await db.do(Advance(group_id, A, claims=[Claim(1, (second,), one), handed]))
    assert await claims(db) == (Claim(1, (second,), one), handed)


async def test_members_whose_record_is_gone_are_told(db: Database, group_id: int) -> None:
    one, two = await member(db), await member(db, b"other")
    made = [
        Claim(1, (Delivery(1, 7, 1),), one),
        Claim(2, (Delivery(2, 7, 1),), two),
        Claim(3, (Delivery(3, 0, 1),), UNRECORDED),
        Claim(4, (Delivery(4, 0, 1),)),
    ]
    await db.do(Advance(group_id, A, cursor=4, claims=made))
    assert (await db.snapshot(GROUP + b"g/t")).gone == frozenset()
    await db.do(Discard(one, B))
    assert (await db.snapshot(GROUP + b"g/t")).gone == {one}
    acquired = await db.do(Acquire(GROUP + b"g/t", B, b"", NOW_MS))
    assert isinstance(acquired, Acquired)
    assert acquired.snapshot is not None
    assert acquired.snapshot.gone == {one}


async def test_a_record_that_is_made_anew_is_another_member(db: Database, group_id: int) -> None:
    old = await member(db)
    await db.do(Advance(group_id, A, cursor=1, claims=[Claim(1, (Delivery(1, 7, 1),), old)]))
    await db.acquire(b"dev", A, clean=True)
    assert (await db.snapshot(GROUP + b"g/t")).gone == {old}


async def test_what_matches_a_shared_filter_is_needed_by_the_group_alone(
    db: Database, group_id: int
) -> None:
    number = await member(db)
    await db.do(Advance(group_id, A, cursor=3, checkpoint=True))
    pruned = await db.prune(before_ms=NOW_MS + 1)
    assert pruned.floor == 3
    assert (await db.snapshot(b"dev")).loss is None
    await db.do(Detach(number, B, NOW_MS))
    assert (await db.snapshot(b"dev")).loss is None


async def test_the_group_holds_back_what_it_needs(db: Database, group_id: int) -> None:
    await member(db)
    claim = Claim(1, (Delivery(2, 0, 1),), UNRECORDED)
    await db.do(Advance(group_id, A, cursor=3, claims=[claim], checkpoint=True))
    assert (await db.prune(before_ms=NOW_MS + 1)).floor == 1
    await db.do(Advance(group_id, A, settled=[1], checkpoint=True))
    assert (await db.prune(before_ms=NOW_MS + 1)).floor == 3


async def test_a_group_that_lost_something_is_told(db: Database, group_id: int) -> None:
    del group_id
    await db.prune(through=2)
    loss = (await db.snapshot(GROUP + b"g/t")).loss
    assert loss is not None
    assert (loss.topic, loss.pruned_through) == (b"t", 2)


async def test_members_are_counted_under_the_whole_filter(db: Database, group_id: int) -> None:
    del group_id
    one = await member(db)
    await member(db, b"other")
    assert counts(await db.reopen()) == {b"t": 1, SHARED: 2}
    await db.acquire(b"dev", B)
    assert await db.do(Unsubscribe(one, B, (SHARED,))) == (True,)
    assert counts(await db.reopen()) == {b"t": 1, SHARED: 1}


async def test_a_record_that_ends_is_told_by_its_number(db: Database, group_id: int) -> None:
    del group_id
    one = await member(db, expiry_s=1)
    acquired = await db.do(Acquire(b"dev", A, b"", NOW_MS, clean=True, expiry_s=1))
    assert isinstance(acquired, Acquired)
    assert (acquired.dropped, acquired.dropped_id) == ((SHARED,), one)
    assert acquired.snapshot is not None
    two = acquired.snapshot.consumer.id
    await db.do(Detach(two, A, NOW_MS))
    assert await db.do(Expire(NOW_MS + 1000, 10)) == (Expired(b"dev", (), two),)
