"""Subscriptions of a consumer, and the filters that all consumers share."""

from __future__ import annotations

import pytest

from storage.api import Detach, Discard, Expire, Subscribe, Subscription, Unsubscribe
from tests.storage.harness import NOW_MS, A, B, Database, counts


async def subscribe(db: Database, consumer_id: int, *subscriptions: Subscription) -> None:
    assert await db.do(Subscribe(consumer_id, A, subscriptions)) is None


async def filters(db: Database) -> dict[bytes, int]:
    return counts(await db.reopen())


@pytest.fixture
async def consumer_id(db: Database) -> int:
    """A consumer without subscriptions."""
    return (await db.acquire()).consumer.id


async def test_subscriptions_come_back_with_every_field(db: Database, consumer_id: int) -> None:
    wanted = (
        Subscription(b"#", 2, 0, options=0x3C, identifier=268_435_455),
        Subscription(b"a/+", 1, 1 << 40),
        Subscription("ä/☃".encode(), 0, 7, options=0x04, identifier=1),
    )
    await subscribe(db, consumer_id, *wanted)
    assert (await db.snapshot()).subscriptions == wanted
    await db.reopen()
    assert (await db.snapshot()).subscriptions == wanted


async def test_subscriptions_are_added_to_those_that_are_there(
    db: Database, consumer_id: int
) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", 1, 0))
    await subscribe(db, consumer_id, Subscription(b"b", 1, 3), Subscription(b"c", 0, 3))
    assert [sub.filter for sub in (await db.snapshot()).subscriptions] == [b"a", b"b", b"c"]


async def test_subscribing_again_replaces_what_was_granted(db: Database, consumer_id: int) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", 1, 5, options=8, identifier=3))
    await subscribe(db, consumer_id, Subscription(b"a", 2, 5, options=4, identifier=0))
    assert (await db.snapshot()).subscriptions == (Subscription(b"a", 2, 5, 4, 0),)


@pytest.mark.parametrize(
    ("before", "again", "after"),
    [
        ((1, 5), (1, 9), 5),
        ((1, 9), (1, 5), 5),
        ((2, 5), (1, 9), 5),
        ((1, 5), (2, 9), 5),
        ((0, 5), (1, 9), 9),
        ((0, 9), (1, 5), 5),
        ((0, 5), (0, 9), 9),
        ((1, 5), (0, 9), 5),
        ((2, 0), (0, 9), 0),
    ],
)
async def test_subscribing_again_keeps_the_lower_offset_unless_it_was_qos_0(
    db: Database, consumer_id: int, before: tuple[int, int], again: tuple[int, int], after: int
) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", *before))
    await subscribe(db, consumer_id, Subscription(b"a", *again))
    assert (await db.snapshot()).subscriptions == (Subscription(b"a", again[0], after),)


async def test_a_filter_named_twice_in_one_subscribe_is_subscribed_in_order(
    db: Database, consumer_id: int
) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", 2, 5), Subscription(b"a", 1, 9))
    assert (await db.snapshot()).subscriptions == (Subscription(b"a", 1, 5),)
    assert await filters(db) == {b"a": 1}


async def test_unsubscribing_ends_the_offset_too(db: Database, consumer_id: int) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", 1, 5))
    await db.do(Unsubscribe(consumer_id, A, (b"a",)))
    await subscribe(db, consumer_id, Subscription(b"a", 1, 9))
    assert (await db.snapshot()).subscriptions == (Subscription(b"a", 1, 9),)


async def test_unsubscribe_says_of_each_filter_whether_it_was_there(
    db: Database, consumer_id: int
) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", 1, 0), Subscription(b"b", 0, 0))
    names = (b"b", b"never", b"a", b"b")
    assert await db.do(Unsubscribe(consumer_id, A, names)) == (True, False, True, False)
    assert (await db.snapshot()).subscriptions == ()
    assert await db.do(Unsubscribe(consumer_id, A, ())) == ()


async def test_hundreds_of_subscriptions_are_each_themselves(
    db: Database, consumer_id: int
) -> None:
    wanted = tuple(Subscription(b"f/%03d" % n, n % 3, n) for n in range(500))
    await subscribe(db, consumer_id, *wanted)
    assert (await db.snapshot()).subscriptions == wanted
    assert await filters(db) == {sub.filter: 1 for sub in wanted if sub.qos}


# --------------------------------------------------------------------- counts of filters


async def test_a_filter_counts_once_for_each_consumer_that_has_it(db: Database) -> None:
    for name in (b"1", b"2", b"3"):
        await db.subscriber(name, b"shared", b"own/" + name)
    assert await filters(db) == {b"shared": 3, b"own/1": 1, b"own/2": 1, b"own/3": 1}


async def test_subscribing_again_does_not_count_again(db: Database, consumer_id: int) -> None:
    for qos in (1, 1, 2, 1):
        await subscribe(db, consumer_id, Subscription(b"a", qos, 0))
        assert await filters(db) == {b"a": 1}


async def test_a_qos_0_filter_does_not_count(db: Database, consumer_id: int) -> None:
    await subscribe(db, consumer_id, Subscription(b"a", 0, 0))
    assert await filters(db) == {}
    await subscribe(db, consumer_id, Subscription(b"a", 1, 0))
    assert await filters(db) == {b"a": 1}
    await subscribe(db, consumer_id, Subscription(b"a", 0, 0))
    assert await filters(db) == {}
    await db.do(Unsubscribe(consumer_id, A, (b"a",)))
    assert await filters(db) == {}


async def test_a_qos_0_filter_of_one_does_not_count_down_that_of_another(
    db: Database, consumer_id: int
) -> None:
    await db.subscriber(b"other", b"a")
    await subscribe(db, consumer_id, Subscription(b"a", 0, 0))
    await db.do(Unsubscribe(consumer_id, A, (b"a",)))
    assert await filters(db) == {b"a": 1}


async def test_unsubscribe_counts_down(db: Database, consumer_id: int) -> None:
    await db.subscriber(b"other", b"a")
    await subscribe(db, consumer_id, Subscription(b"a", 1, 0), Subscription(b"b", 1, 0))
    await db.do(Unsubscribe(consumer_id, A, (b"a", b"b", b"a", b"never")))
    assert await filters(db) == {b"a": 1}


async def test_the_end_of_a_consumer_counts_down(db: Database) -> None:
    discarded = await db.subscriber(b"discarded", b"a", b"b")
    expired = await db.subscriber(b"expired", b"a", b"c")
    await db.subscriber(b"cleaned", b"a", b"d")
    await db.subscriber(b"stays", b"a")
    assert await filters(db) == {b"a": 4, b"b": 1, b"c": 1, b"d": 1}
    await db.do(Discard(discarded.id, A))
    assert await filters(db) == {b"a": 3, b"c": 1, b"d": 1}
    await db.do(Detach(expired.id, A, NOW_MS, expiry_s=0, keep_expiry=False))
    (gone,) = await db.do(Expire(NOW_MS, 10))
    assert (gone.client_id, sorted(gone.filters)) == (b"expired", [b"a", b"c"])
    assert await filters(db) == {b"a": 2, b"d": 1}
    await db.acquire(b"cleaned", B, clean=True)
    assert await filters(db) == {b"a": 1}
