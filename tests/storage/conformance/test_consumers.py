"""Consumers: who owns the record, what it holds, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from storage.api import (
    UNCLAIMED,
    Acquire,
    Acquired,
    Advance,
    Bind,
    Claim,
    Consumer,
    Delivery,
    Detach,
    Discard,
    Expire,
    Expired,
    Retain,
    StoreWill,
    Subscribe,
    Subscription,
    Will,
)
from storage.errors import Fenced, NotOwner
from tests.storage.harness import NOW_MS, A, B, C, Database, counts, in_order, message, wills

if TYPE_CHECKING:
    from storage.api import Op


async def fill(db: Database, consumer: Consumer) -> None:
    """Give a consumer one of everything a record can hold."""
    ops: list[Op] = [
        Subscribe(
            consumer.id,
            consumer.incarnation,
            (Subscription(b"a/#", 1, 0), Subscription(b"b", 2, 1), Subscription(b"c", 0, 0)),
        ),
        Advance(
            consumer.id,
            consumer.incarnation,
            cursor=1,
            claims=[Claim(1, (Delivery(1, 1, 1),)), Claim(2, (Delivery(1, 2, 2, 0x80),))],
            held=[(1, message(b"r"))],
            received=[7, 65_535],
            next_packet_id=3,
        ),
    ]
    assert await db.write(*ops) == [None, None]


async def expired(db: Database, now_ms: int, *, limit: int = 10) -> set[bytes]:
    """Expire, and the client ids that are gone."""
    outcome = await db.do(Expire(now_ms, limit))
    assert all(isinstance(gone, Expired) for gone in outcome)
    return {gone.client_id for gone in outcome}


# --------------------------------------------------------------------------------- Acquire


async def test_acquire_makes_a_record_at_the_head(db: Database) -> None:
    await db.append(message(), message())
    acquired = await db.do(Acquire(b"dev", A, b"ann", NOW_MS, expiry_s=60, version=5))
    assert isinstance(acquired, Acquired)
    log = await db.store.log()
    assert not acquired.existed
    assert acquired.log == log
    assert acquired.snapshot is not None
    consumer = acquired.snapshot.consumer
    assert consumer == Consumer(
        id=consumer.id,
        client_id=b"dev",
        user=b"ann",
        incarnation=A,
        generation=log.generation,
        cursor=2,
        next_packet_id=0,  # nobody may have been told of it yet
        expiry_s=60,
        created_ms=NOW_MS,
        version=5,
        qos0_after=2,
    )
    assert consumer.id > 0
    assert acquired.snapshot == await db.snapshot()
    assert await db.store.consumers() == [consumer]


async def test_acquire_of_a_record_that_is_there_gives_all_of_it_to_the_new_owner(
    db: Database,
) -> None:
    await db.append(message(b"a/1"))
    consumer = (await db.acquire(expiry_s=60)).consumer
    await fill(db, consumer)
    before = await db.snapshot()
    later = NOW_MS + 5
    acquired = await db.do(Acquire(b"dev", B, b"", later, expiry_s=None, version=5))
    assert isinstance(acquired, Acquired)
    assert acquired.existed
    assert acquired.snapshot is not None
    after = in_order(acquired.snapshot)
    assert after == await db.snapshot()
    assert acquired.dropped == ()
    assert (after.subscriptions, after.claims) == (before.subscriptions, before.claims)
    assert (after.held, after.inbound) == (before.held, before.inbound)
    assert (after.consumer.incarnation, after.consumer.version) == (B, 5)
    assert after.consumer.expiry_s is None
    assert after.consumer.id == consumer.id
    assert after.consumer.created_ms == NOW_MS
    assert after.consumer.cursor == 1


async def test_acquire_attaches_a_record_that_was_detached(db: Database) -> None:
    consumer = (await db.acquire(expiry_s=1)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS))
    snapshot = await db.acquire(incarnation=B, expiry_s=1)
    assert snapshot.consumer.detached_ms == 0
    assert await expired(db, NOW_MS + 10_000_000) == set()


async def test_a_clean_acquire_starts_with_nothing(db: Database) -> None:
    await db.append(message(b"a/1"), message())
    old = (await db.acquire()).consumer
    await fill(db, old)
    acquired = await db.do(Acquire(b"dev", B, b"", NOW_MS + 1, clean=True))
    assert isinstance(acquired, Acquired)
    assert not acquired.existed
    assert sorted(acquired.dropped) == [b"a/#", b"b"], "that of QoS 0 did not count"
    assert acquired.snapshot is not None
    assert acquired.snapshot == await db.snapshot()
    consumer = acquired.snapshot.consumer
    assert (consumer.cursor, consumer.created_ms, consumer.incarnation) == (2, NOW_MS + 1, B)
    assert (consumer.next_claim, consumer.next_held, consumer.next_packet_id) == (1, 1, 0)
    assert acquired.snapshot.subscriptions == ()
    assert acquired.snapshot.claims == ()
    assert acquired.snapshot.held == {}
    assert acquired.snapshot.inbound == frozenset()
    assert consumer.id != old.id, "an id is never used again"
    assert counts(await db.reopen()) == {}


async def test_a_clean_acquire_without_create_leaves_nothing(db: Database) -> None:
    await fill(db, (await db.acquire()).consumer)
    acquired = await db.do(Acquire(b"dev", B, b"", NOW_MS, clean=True, create=False))
    assert isinstance(acquired, Acquired)
    assert (acquired.existed, acquired.snapshot) == (False, None)
    assert acquired.log == await db.store.log()
    assert sorted(acquired.dropped) == [b"a/#", b"b"]
    assert await db.store.snapshot(b"dev") is None
    assert await db.store.consumers() == []
    assert counts(await db.reopen()) == {}


async def test_acquire_without_create_makes_no_record(db: Database) -> None:
    acquired = await db.do(Acquire(b"dev", A, b"", NOW_MS, create=False))
    assert acquired == Acquired(existed=False, snapshot=None, log=await db.store.log())
    assert await db.store.snapshot(b"dev") is None


async def test_acquire_without_create_takes_a_record_that_is_there(db: Database) -> None:
    await db.acquire()
    acquired = await db.do(Acquire(b"dev", B, b"", NOW_MS, create=False))
    assert isinstance(acquired, Acquired)
    assert acquired.existed
    assert (await db.snapshot()).consumer.incarnation == B


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("user", [b"bob", b"", b"Ann", b"ann "])
async def test_acquire_by_another_user_is_refused_and_changes_nothing(
    db: Database, user: bytes, *, clean: bool
) -> None:
    consumer = (await db.acquire(user=b"ann")).consumer
    await fill(db, consumer)
    before = await db.dump()
    outcome = await db.do(Acquire(b"dev", B, user, NOW_MS, clean=clean, expiry_s=1, version=5))
    assert outcome == NotOwner(consumer.id)
    assert await db.dump() == before


async def test_an_anonymous_record_is_not_for_a_user_with_a_name(db: Database) -> None:
    consumer = (await db.acquire(user=b"")).consumer
    assert await db.do(Acquire(b"dev", B, b"ann", NOW_MS)) == NotOwner(consumer.id)
    assert (await db.snapshot()).consumer.incarnation == A


@pytest.mark.parametrize("clean", [False, True])
async def test_a_record_that_nobody_has_claimed_belongs_to_the_first_who_comes(
    db: Database, *, clean: bool
) -> None:
    consumer = (await db.acquire(user=UNCLAIMED)).consumer
    assert consumer.user == UNCLAIMED
    await fill(db, consumer)
    acquired = await db.do(Acquire(b"dev", B, b"ann", NOW_MS, clean=clean))
    assert isinstance(acquired, Acquired)
    assert acquired.existed is not clean
    snapshot = await db.snapshot()
    assert snapshot.consumer.user == b"ann"
    assert len(snapshot.subscriptions) == (0 if clean else 3)
    for user in (b"bob", b"", UNCLAIMED):
        assert await db.do(Acquire(b"dev", C, user, NOW_MS)) == NotOwner(snapshot.consumer.id)
    await db.reopen()
    assert (await db.acquire(user=b"ann")).consumer.user == b"ann"


async def test_an_anonymous_user_may_claim_what_nobody_has_claimed(db: Database) -> None:
    await db.acquire(user=UNCLAIMED)
    consumer = (await db.acquire(user=b"")).consumer
    assert await db.do(Acquire(b"dev", B, UNCLAIMED, NOW_MS)) == NotOwner(consumer.id)


@pytest.mark.case("HK-11")
async def test_acquire_again_under_the_same_incarnation_changes_nothing(db: Database) -> None:
    consumer = (await db.acquire()).consumer
    await fill(db, consumer)
    before = await db.snapshot()
    assert in_order(await db.acquire()) == before


async def test_ids_are_never_used_again(db: Database) -> None:
    seen = set()
    for client_id in (b"a", b"b", b"a", b"c"):
        consumer = (await db.acquire(client_id)).consumer
        assert consumer.id not in seen
        seen.add(consumer.id)
        await db.do(Discard(consumer.id, A))
        await db.reopen()


# ------------------------------------------------------------------------------------ Bind


async def test_bind_sets_the_position_and_keeps_the_rest(db: Database) -> None:
    await db.append(message(b"a/1"), message(b"a/2"))
    consumer = (await db.acquire()).consumer
    await fill(db, consumer)
    before = await db.snapshot()
    for cursor in (2, 0):
        assert await db.do(Bind(consumer.id, A, cursor)) is None
        after = await db.snapshot()
        assert after.consumer.cursor == cursor
        assert after.consumer.generation == (await db.store.log()).generation
        assert (after.claims, after.subscriptions) == (before.claims, before.subscriptions)


# --------------------------------------------------------------------------------- Discard


async def test_discard_deletes_the_consumer_and_nothing_of_others(db: Database) -> None:
    await db.append(message(b"a/1"))
    gone, kept = (await db.acquire(b"gone")).consumer, (await db.acquire(b"kept", B)).consumer
    await fill(db, gone)
    await fill(db, kept)
    await db.write(
        Retain(message(b"r")),
        StoreWill(Will(b"gone", A, b"", message(b"w"))),
    )
    before = await db.snapshot(b"kept")
    assert await db.do(Discard(gone.id, A)) is None
    assert await db.store.snapshot(b"gone") is None
    assert await db.store.consumers() == [kept_now := (await db.snapshot(b"kept")).consumer]
    assert await db.snapshot(b"kept") == before
    opened = await db.reopen()
    assert counts(opened) == {b"a/#": 1, b"b": 1}
    assert set(wills(opened)) == {A}, "a will is not the consumer's"
    assert kept_now.client_id == b"kept"
    assert len(await db.history()) == 1


async def test_discard_twice_is_fenced(db: Database) -> None:
    consumer = (await db.acquire()).consumer
    await db.do(Discard(consumer.id, A))
    assert await db.do(Discard(consumer.id, A)) == Fenced(consumer.id)


async def test_a_record_made_after_a_discard_has_nothing_of_the_old_one(db: Database) -> None:
    old = (await db.acquire()).consumer
    await fill(db, old)
    await db.do(Discard(old.id, A))
    new = await db.acquire(incarnation=A)
    assert (new.subscriptions, new.claims, new.held, new.inbound) == ((), (), {}, frozenset())
    assert await db.do(Advance(old.id, A, received=[1])) == Fenced(old.id)


# -------------------------------------------------------------------------- Detach, Expire


async def test_detach_says_when_and_keeps_the_rest(db: Database) -> None:
    await db.append(message(b"a/1"))
    consumer = (await db.acquire(expiry_s=60)).consumer
    await fill(db, consumer)
    before = await db.snapshot()
    assert await db.do(Detach(consumer.id, A, NOW_MS + 7)) is None
    after = await db.snapshot()
    assert after.consumer.detached_ms == NOW_MS + 7
    assert after.consumer.expiry_s == 60
    assert after.consumer.incarnation == A
    assert (after.claims, after.subscriptions) == (before.claims, before.subscriptions)
    assert (after.held, after.inbound) == (before.held, before.inbound)


@pytest.mark.parametrize("expiry_s", [0, 5, 4_294_967_295, None])
async def test_detach_may_set_a_new_expiry(db: Database, expiry_s: int | None) -> None:
    consumer = (await db.acquire(expiry_s=60)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS, expiry_s=expiry_s, keep_expiry=False))
    assert (await db.snapshot()).consumer.expiry_s == expiry_s


async def test_who_leaves_says_what_it_was_given_with_qos_0(db: Database) -> None:
    await db.append_each(*(message(b"a", qos=0) for _ in range(5)))
    consumer = (await db.acquire()).consumer
    assert consumer.qos0_after == 5  # it is new
    await db.do(Detach(consumer.id, A, NOW_MS, qos0_after=3))
    assert (await db.acquire()).consumer.qos0_after == 3
    await db.do(Detach(consumer.id, A, NOW_MS))
    assert (await db.acquire()).consumer.qos0_after == 3


async def test_of_an_owner_that_did_not_say_it_is_not_known_what_it_was_given_with_qos_0(
    db: Database,
) -> None:
    consumer = (await db.acquire()).consumer
    await db.do(Detach(consumer.id, A, NOW_MS, qos0_after=0))
    await db.acquire()
    await db.append_each(*(message(b"a", qos=0) for _ in range(2)))
    assert (await db.acquire(b"dev", B)).consumer.qos0_after == 2  # it was taken over
    await db.append(message(b"a", qos=0))
    await db.reopen()
    assert (await db.snapshot()).consumer.qos0_after == 3  # it died
    await db.append(message(b"a", qos=0))
    await db.reopen()
    assert (await db.snapshot()).consumer.qos0_after == 3  # it was away


@pytest.mark.case("HK-11")
async def test_detach_twice_is_as_once(db: Database) -> None:
    consumer = (await db.acquire(expiry_s=60)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS))
    before = await db.dump()
    assert await db.do(Detach(consumer.id, A, NOW_MS)) is None
    assert await db.dump() == before


@pytest.mark.case("HK-15")
async def test_an_expired_consumer_goes_with_everything_it_has(db: Database) -> None:
    await db.append(message(b"a/1"))
    empty = await db.dump()
    consumer = (await db.acquire(expiry_s=60)).consumer
    await fill(db, consumer)
    await db.do(Detach(consumer.id, A, NOW_MS))
    assert await expired(db, NOW_MS + 60_000) == {b"dev"}
    assert await db.dump() == empty
    assert await db.do(Advance(consumer.id, A, received=[1])) == Fenced(consumer.id)
    acquired = await db.do(Acquire(b"dev", B, b"other", NOW_MS))
    assert isinstance(acquired, Acquired)
    assert not acquired.existed


@pytest.mark.case("HK-15")
async def test_a_record_that_expired_is_gone_before_it_is_swept(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await db.do(Detach(consumer.id, A, NOW_MS, expiry_s=60, keep_expiry=False))
    early = await db.do(Acquire(b"dev", B, b"", NOW_MS + 59_999, expiry_s=60))
    assert early.existed
    await db.do(Detach(consumer.id, B, NOW_MS))
    late = await db.do(Acquire(b"dev", A, b"somebody else", NOW_MS + 60_000))
    assert not late.existed
    assert late.dropped == (b"t",)
    assert late.snapshot.consumer.id != consumer.id
    assert late.snapshot.subscriptions == ()


@pytest.mark.case("HK-14")
async def test_the_deadline_counts_from_detach_and_holds_over_a_restart(db: Database) -> None:
    consumer = (await db.acquire(expiry_s=60)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS))
    await db.reopen(NOW_MS + 50_000)
    assert (await db.snapshot()).consumer.detached_ms == NOW_MS
    assert await expired(db, NOW_MS + 59_999) == set()
    await db.reopen(NOW_MS + 59_999)
    assert await expired(db, NOW_MS + 60_000) == {b"dev"}


@pytest.mark.case("HK-14")
async def test_an_owner_that_died_with_the_broker_is_detached_when_it_opens_again(
    db: Database,
) -> None:
    await db.acquire(expiry_s=60)
    await db.reopen(NOW_MS + 5000)
    assert (await db.snapshot()).consumer.detached_ms == NOW_MS + 5000
    assert await expired(db, NOW_MS + 64_999) == set()
    assert await expired(db, NOW_MS + 65_000) == {b"dev"}


async def test_expire_says_which_durable_filters_went(db: Database) -> None:
    for name in (b"one", b"two"):
        consumer = (await db.acquire(name, expiry_s=0)).consumer
        await fill(db, consumer)
        await db.do(Detach(consumer.id, A, NOW_MS))
    outcome = await db.do(Expire(NOW_MS, 10))
    assert {gone.client_id: sorted(gone.filters) for gone in outcome} == {
        b"one": [b"a/#", b"b"],
        b"two": [b"a/#", b"b"],
    }


async def test_a_session_expiry_of_zero_is_over_when_it_is_detached(db: Database) -> None:
    consumer = (await db.acquire(expiry_s=0)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS))
    assert await expired(db, NOW_MS - 1) == set()
    assert await expired(db, NOW_MS) == {b"dev"}


async def test_the_longest_expiry_of_mqtt_does_not_overflow(db: Database) -> None:
    consumer = (await db.acquire(expiry_s=4_294_967_295)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS))
    deadline_ms = NOW_MS + 4_294_967_295 * 1000
    assert await expired(db, deadline_ms - 1) == set()
    assert await expired(db, deadline_ms) == {b"dev"}


async def test_neither_an_attached_owner_nor_one_without_expiry_ever_expires(
    db: Database,
) -> None:
    forever = (await db.acquire(b"forever", expiry_s=None)).consumer
    await db.do(Detach(forever.id, A, NOW_MS))
    await db.acquire(b"attached", expiry_s=0)
    assert await expired(db, 1 << 60) == set()


async def test_a_new_expiry_replaces_the_deadline(db: Database) -> None:
    names = (b"longer", b"shorter", b"forever", b"never-was")
    ids = [(await db.acquire(name, expiry_s=60)).consumer.id for name in names]
    for consumer_id, expiry_s in zip(ids, (100, 10, None, 0), strict=True):
        await db.do(Detach(consumer_id, A, NOW_MS))
        op = Detach(consumer_id, A, NOW_MS, expiry_s=expiry_s, keep_expiry=False)
        await db.do(op)
    assert await expired(db, NOW_MS + 9_999) == {b"never-was"}
    assert await expired(db, NOW_MS + 60_000) == {b"shorter"}
    assert await expired(db, NOW_MS + 1_000_000) == {b"longer"}
    assert (await db.snapshot(b"forever")).consumer.expiry_s is None


async def test_expire_deletes_no_more_than_its_limit(db: Database) -> None:
    names = {b"c%d" % n for n in range(7)}
    for name in names:
        consumer = (await db.acquire(name, expiry_s=1)).consumer
        await db.do(Detach(consumer.id, A, NOW_MS))
    gone: set[bytes] = set()
    for expected in (3, 3, 1, 0):
        names_gone = await expired(db, NOW_MS + 1000, limit=3)
        assert len(names_gone) == expected
        gone |= names_gone
        left = {consumer.client_id for consumer in await db.store.consumers()}
        assert left == names - gone


# ----------------------------------------------------------------------------------- reads


async def test_a_snapshot_of_nobody_is_none(db: Database) -> None:
    assert await db.store.snapshot(b"nobody") is None


async def test_reading_a_snapshot_does_not_take_the_consumer_over(db: Database) -> None:
    consumer = (await db.acquire(expiry_s=3)).consumer
    await db.do(Detach(consumer.id, A, NOW_MS))
    before = await db.snapshot()
    assert await db.snapshot() == before
    assert before.consumer.detached_ms == NOW_MS


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_consumers_come_a_page_at_a_time_each_once(db: Database, limit: int) -> None:
    names = {b"c%d" % n for n in range(7)}
    for name in names:
        await db.acquire(name, C)
    consumers, _ = await db.pages(limit)
    assert len(consumers) == 7
    assert {consumer.client_id for consumer in consumers} == names
    assert consumers == (await db.pages(100))[0], "the order is stable"
