"""Prune: what may go, what goes, and what every consumer is told it has lost."""

from __future__ import annotations

import pytest

from storage.api import (
    Advance,
    Bind,
    Claim,
    Delivery,
    Detach,
    Discard,
    Expire,
    Loss,
    Pruned,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.errors import EntryGone, Fenced
from tests.storage.harness import NOW_MS, A, B, Database, everything, matching, message

LATER_MS = NOW_MS + 1
"""A before_ms that keeps nothing that was stored at NOW_MS."""


async def loss(db: Database, client_id: bytes) -> Loss | None:
    return (await db.snapshot(client_id)).loss


async def ten(db: Database, topic: bytes = b"t") -> None:
    """Ten entries, each in a block of its own."""
    await db.append_each(*(message(topic, b"%d" % n) for n in range(1, 11)))


# ------------------------------------------------------------------------- what nobody needs


async def test_an_empty_history_has_nothing_to_prune(db: Database) -> None:
    assert await db.prune(through=10, before_ms=LATER_MS) == Pruned(0, 0, 0, more=False)


async def test_what_nobody_subscribes_to_is_pruned(db: Database) -> None:
    await ten(db)
    pruned = await db.prune(before_ms=LATER_MS)
    assert (pruned.floor, pruned.blocks, pruned.more) == (10, 10, False)
    assert await db.history() == []


async def test_what_a_consumer_has_not_had_is_kept(db: Database) -> None:
    slow = await db.subscriber(b"slow", b"t")
    fast = await db.subscriber(b"fast", b"t")
    await ten(db)
    assert (await db.prune(before_ms=LATER_MS)).floor == 0
    await db.move(fast, 8)
    assert (await db.prune(before_ms=LATER_MS)).floor == 0
    await db.move(slow, 3)
    assert (await db.prune(before_ms=LATER_MS)).floor == 3
    await db.move(slow, 10)
    assert (await db.prune(before_ms=LATER_MS)).floor == 8
    assert [entry.offset for entry in await db.history()] == [9, 10]
    assert await loss(db, b"slow") is None
    assert await loss(db, b"fast") is None


async def test_a_consumer_that_is_away_holds_history_as_one_that_is_here(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 3)
    await db.do(Detach(consumer.id, A, NOW_MS))
    assert (await db.prune(before_ms=LATER_MS)).floor == 3
    await db.reopen()
    assert (await db.prune(before_ms=LATER_MS)).floor == 3


async def test_detach_is_a_checkpoint(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.write(Advance(consumer.id, A, cursor=7), Detach(consumer.id, A, NOW_MS))
    assert (await db.prune(before_ms=LATER_MS)).floor == 7


async def test_an_unsettled_delivery_holds_history_though_the_cursor_is_past_it(
    db: Database,
) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    claims = [
        Claim(1, (Delivery(2, 1, 1), Delivery(3, 2, 1))),
        Claim(2, (Delivery(5, 3, 1), Delivery(6, 4, 1))),
    ]
    await db.do(Advance(consumer.id, A, cursor=8, claims=claims, checkpoint=True))
    assert (await db.prune(before_ms=LATER_MS)).floor == 1
    left = Claim(1, claims[0].deliveries[1:])
    await db.do(Advance(consumer.id, A, claims=[left], checkpoint=True))
    assert (await db.prune(before_ms=LATER_MS)).floor == 2
    await db.do(Advance(consumer.id, A, settled=[1], checkpoint=True))
    assert (await db.prune(before_ms=LATER_MS)).floor == 4
    await db.do(Advance(consumer.id, A, settled=[2], checkpoint=True))
    assert (await db.prune(before_ms=LATER_MS)).floor == 8
    assert (await db.snapshot()).loss is None


async def test_a_held_message_holds_no_history(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    claim = Claim(1, (Delivery(1, 1, 1, 0x80),))
    held = [(1, message(b"r"))]
    op = Advance(consumer.id, A, cursor=9, claims=[claim], held=held, checkpoint=True)
    assert await db.do(op) is None
    assert (await db.prune(before_ms=LATER_MS)).floor == 9
    assert (await db.snapshot()).loss is None


async def test_a_cursor_that_goes_back_holds_history_at_once(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 9)
    await db.do(Advance(consumer.id, A, cursor=4))
    assert (await db.prune(before_ms=LATER_MS)).floor == 4
    assert (await db.snapshot()).loss is None


async def test_a_claim_of_older_entries_holds_history_at_once(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 9)
    await db.do(Advance(consumer.id, A, claims=[Claim(1, (Delivery(5, 1, 1),))]))
    assert (await db.prune(before_ms=LATER_MS)).floor == 4


async def test_a_position_that_is_not_checkpointed_only_holds_back(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.do(Advance(consumer.id, A, cursor=7))
    assert (await db.prune(before_ms=LATER_MS)).floor <= 7
    await db.do(Advance(consumer.id, A, checkpoint=True))
    assert (await db.prune(before_ms=LATER_MS)).floor == 7


async def test_binding_to_an_older_position_holds_history_at_once(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 10)
    await db.do(Bind(consumer.id, A, 6))
    assert (await db.prune(before_ms=LATER_MS)).floor == 6


async def test_a_new_consumer_holds_history_from_its_head_on(db: Database) -> None:
    await ten(db)
    await db.subscriber(b"new", b"t")
    await ten(db)
    assert (await db.prune(before_ms=LATER_MS)).floor == 10


async def test_taking_a_consumer_over_holds_what_it_held(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 2)
    await db.acquire(incarnation=B)
    assert (await db.prune(before_ms=LATER_MS)).floor == 2


async def test_a_refused_write_does_not_let_history_go(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 2)
    stale = Advance(consumer.id, B, cursor=10, checkpoint=True)
    assert await db.do(stale) == Fenced(consumer.id)
    assert (await db.prune(before_ms=LATER_MS)).floor == 2


@pytest.mark.parametrize("how", ["discarded", "expired", "cleaned"])
async def test_a_consumer_that_ended_holds_nothing(db: Database, how: str) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.do(Advance(consumer.id, A, cursor=5, claims=[Claim(1, (Delivery(3, 1, 1),))]))
    assert (await db.prune(before_ms=LATER_MS)).floor <= 2
    if how == "discarded":
        await db.do(Discard(consumer.id, A))
    elif how == "expired":
        await db.do(Detach(consumer.id, A, NOW_MS, expiry_s=0, keep_expiry=False))
        await db.do(Expire(NOW_MS, 10))
    else:
        await db.acquire(incarnation=B, clean=True)
    assert (await db.prune(before_ms=LATER_MS)).floor == 10


async def test_an_entry_is_pruned_whole(db: Database) -> None:
    await ten(db)
    await db.prune(through=4)
    assert [entry.offset for entry in await db.history()] == [5, 6, 7, 8, 9, 10]
    for offset in range(1, 5):
        with pytest.raises(EntryGone):
            await db.store.fetch([offset])
    for accept, filters in ((matching(b"t"), [b"t"]), (matching(b"#"), [b"#"]), (everything, [])):
        chunk = await db.read(0, accept, filters=filters)
        assert [entry.offset for entry, _ in chunk.entries] == [5, 6, 7, 8, 9, 10]


async def test_a_batch_that_is_needed_in_part_is_kept_in_the_part_that_is_needed(
    db: Database,
) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await db.append(*(message() for _ in range(5)))
    await db.append(*(message() for _ in range(5)))
    await db.move(consumer, 7)
    floor = (await db.prune(before_ms=LATER_MS)).floor
    assert 5 <= floor <= 7
    assert [entry.offset for entry in await db.history()] == list(range(floor + 1, 11))


# ------------------------------------------------------------------------ by age, by force


async def test_what_was_stored_at_or_after_a_time_is_kept(db: Database) -> None:
    for n in range(5):
        await db.append(message(), stored_ms=NOW_MS + n)
    assert (await db.prune(before_ms=NOW_MS)).floor == 0
    assert (await db.prune(before_ms=NOW_MS + 3)).floor == 3
    assert (await db.prune(before_ms=NOW_MS + 3)).floor == 3
    assert [entry.offset for entry in await db.history()] == [4, 5]


async def test_history_is_pruned_from_the_old_end_only(db: Database) -> None:
    for stored_ms in (NOW_MS + 9, NOW_MS, NOW_MS):
        await db.append(message(), stored_ms=stored_ms)
    assert (await db.prune(before_ms=NOW_MS + 5)).floor == 0


async def test_what_is_old_but_needed_is_kept_unless_it_is_forced(db: Database) -> None:
    await db.subscriber(b"dev", b"t")
    await ten(db)
    assert (await db.prune(before_ms=LATER_MS)).floor == 0
    assert (await db.prune(through=4)).floor == 4
    assert await loss(db, b"dev") == Loss(b"t", 4)


async def test_what_is_forced_goes_though_it_is_young_and_what_nobody_needs_goes_with_it(
    db: Database,
) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    assert (await db.prune(through=2, before_ms=0)).floor == 2
    await db.move(consumer, 6)
    assert (await db.prune(through=4, before_ms=LATER_MS)).floor == 6


async def test_one_call_touches_a_bounded_number_of_topics(db: Database) -> None:
    for n in range(6):
        await db.append(message(b"t/%d" % n))
    assert await db.prune(through=6, topics_max=2) == (3, 3, 3, True)
    assert await db.prune(through=6, topics_max=0) == (4, 1, 1, True)
    assert await db.prune(through=6, topics_max=2) == (6, 2, 2, False)
    for _ in range(3):
        await db.append(message(b"t/1"))
    assert await db.prune(through=9, topics_max=1) == (8, 2, 2, True)


async def test_what_is_older_than_a_time_is_forced_though_it_is_needed(db: Database) -> None:
    await db.subscriber(b"dev", b"t")
    for n in range(5):
        await db.append(message(), stored_ms=NOW_MS + n)
    assert (await db.prune(older_than_ms=NOW_MS)).floor == 0
    assert (await db.prune(older_than_ms=NOW_MS + 3, blocks_max=2)) == (2, 2, 2, True)
    assert (await db.prune(older_than_ms=NOW_MS + 3)) == (3, 1, 1, False)
    assert await loss(db, b"dev") == Loss(b"t", 3)
    assert (await db.prune(through=4, older_than_ms=NOW_MS + 1)).floor == 4
    assert (await db.prune(through=1, older_than_ms=NOW_MS + 100)).floor == 5


async def test_the_log_tells_its_bytes_which_grow_and_shrink(db: Database) -> None:
    assert (await db.store.log()).bytes == 0
    await db.append(message(payload=bytes(1000)))
    first = (await db.store.log()).bytes
    assert first >= 1000
    await db.append(message(payload=bytes(5000)))
    both = (await db.store.log()).bytes
    assert both >= first + 5000
    assert (await db.reopen()).log.bytes == both
    await db.prune(through=1)
    assert (await db.store.log()).bytes == both - first
    await db.prune(through=2)
    assert (await db.store.log()).bytes == 0


async def test_forcing_goes_no_further_than_the_head(db: Database) -> None:
    await db.subscriber(b"dev", b"t")
    await ten(db)
    assert (await db.prune(through=1000)).floor == 10
    log = await db.store.log()
    assert (log.head, log.floor) == (10, 10)
    assert await db.read() == ([], 10, 10, Loss(b"t", 10))
    (entry,) = await db.append(message())
    assert entry.offset == 11
    await db.reopen()
    assert await db.history() == [entry]


async def test_one_call_prunes_a_bounded_number_of_blocks_and_says_if_there_is_more(
    db: Database,
) -> None:
    await ten(db)
    assert await db.prune(through=7, blocks_max=3) == (3, 3, 3, True)
    assert await db.prune(through=7, blocks_max=3) == (6, 3, 3, True)
    assert await db.prune(through=7, blocks_max=3) == (7, 1, 1, False)
    assert await db.prune(before_ms=LATER_MS, blocks_max=1) == (8, 1, 1, True)
    assert await db.prune(before_ms=LATER_MS, blocks_max=2) == (10, 2, 3, False)
    assert await db.prune(before_ms=LATER_MS, blocks_max=2) == (10, 0, 0, False)


async def test_floors_only_rise(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.prune(through=6)
    await db.move(consumer, 2)
    assert (await db.prune(through=3, before_ms=LATER_MS)).floor == 6
    await db.reopen()
    assert (await db.store.log()).floor == 6
    assert (await db.prune()).floor == 6


async def test_large_entries_are_pruned_and_counted(db: Database) -> None:
    await db.append(*(message(payload=bytes(200_000)) for _ in range(5)))
    pruned = await db.prune(before_ms=LATER_MS)
    assert (pruned.floor, pruned.payload_bytes) == (5, 1_000_000)
    assert pruned.blocks >= 1


# ----------------------------------------------------------------------------------- losses


@pytest.mark.case("HK-17")
async def test_a_consumer_that_missed_a_pruned_entry_is_told_which(db: Database) -> None:
    await db.subscriber(b"dev", b"t")
    await ten(db)
    assert await loss(db, b"dev") is None
    await db.prune(through=5)
    assert await loss(db, b"dev") == Loss(b"t", 5)
    snapshot = await db.acquire(b"dev", B)
    assert snapshot.loss == Loss(b"t", 5)
    await db.reopen()
    assert await loss(db, b"dev") == Loss(b"t", 5)


@pytest.mark.case("HK-17")
async def test_a_consumer_whose_own_topics_lost_nothing_resumes(db: Database) -> None:
    for name, topic_filter in (
        (b"quiet", b"quiet"),
        (b"busy", b"busy/1"),
        (b"tree", b"busy/#"),
        (b"level", b"+"),
        (b"parent", b"busy"),
        (b"deeper", b"busy/1/+"),
        (b"all", b"#"),
        (b"system", b"$SYS/#"),
    ):
        await db.subscriber(name, topic_filter)
    await db.append_each(*(message(b"busy/1") for _ in range(3)), message(b"quiet"))
    await db.prune(through=3)
    told = {c.client_id for c in await db.store.consumers() if await loss(db, c.client_id)}
    assert told == {b"busy", b"tree", b"all"}
    assert await loss(db, b"tree") == Loss(b"busy/1", 3)


async def test_a_pruned_topic_that_begins_with_a_dollar_is_no_loss_for_a_wildcard(
    db: Database,
) -> None:
    await db.subscriber(b"all", b"#", b"+/x")
    await db.subscriber(b"system", b"$SYS/+")
    await db.append_each(message(b"$SYS/x"))
    await db.prune(through=1)
    assert await loss(db, b"all") is None
    assert await loss(db, b"system") == Loss(b"$SYS/x", 1)


async def test_what_had_expired_when_it_was_pruned_is_no_loss(db: Database) -> None:
    for client_id, topic in ((b"both", b"#"), (b"short", b"short"), (b"mixed", b"mixed")):
        await db.subscriber(client_id, topic)
    short = message(b"short", expires_ms=NOW_MS)
    await db.append(
        message(b"mixed"), short, message(b"mixed", expires_ms=NOW_MS), message(b"kept"), short
    )
    await db.prune(through=3, now_ms=NOW_MS)
    await db.prune(through=5, now_ms=NOW_MS)
    assert await loss(db, b"short") is None
    assert await loss(db, b"mixed") == Loss(b"mixed", 1)
    assert await loss(db, b"both") == Loss(b"kept", 4)
    await db.append(short, short)
    await db.prune(through=7, now_ms=NOW_MS - 1)  # these had not
    assert await loss(db, b"short") == Loss(b"short", 7)
    await db.append(*(message(b"short/%d" % n, expires_ms=NOW_MS) for n in range(50)))
    await db.prune(through=57, now_ms=NOW_MS)  # and leave no topics behind
    assert await loss(db, b"both") == Loss(b"short", 7)


async def test_what_has_qos_0_is_no_loss_when_it_is_pruned(db: Database) -> None:
    for client_id, topic in ((b"both", b"#"), (b"never", b"never"), (b"mixed", b"mixed")):
        await db.subscriber(client_id, topic)
    never, mixed = message(b"never", qos=0), message(b"mixed", qos=0)
    await db.append(message(b"mixed"), never, mixed, message(b"kept"), mixed, never)
    for now_ms in (0, NOW_MS):
        await db.prune(through=6, now_ms=now_ms)
        assert await loss(db, b"never") is None
        assert await loss(db, b"mixed") == Loss(b"mixed", 1)
        assert await loss(db, b"both") == Loss(b"kept", 4)
    await db.append(*(message(b"never/%d" % n, qos=0) for n in range(50)))
    await db.prune(through=56)  # and leave no topics behind
    assert await loss(db, b"both") == Loss(b"kept", 4)


async def test_what_was_pruned_below_the_position_is_no_loss(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    await db.move(consumer, 5)
    await db.prune(through=5)
    assert await loss(db, b"dev") is None
    await db.prune(through=6)
    assert await loss(db, b"dev") == Loss(b"t", 6)
    await db.move(consumer, 6)
    assert await loss(db, b"dev") is None


async def test_the_position_is_just_before_the_oldest_unsettled_delivery(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await ten(db)
    claims = [Claim(1, (Delivery(6, 1, 1),)), Claim(2, (Delivery(4, 2, 1), Delivery(7, 3, 1)))]
    await db.do(Advance(consumer.id, A, cursor=9, claims=claims, checkpoint=True))
    await db.prune(through=3)
    assert await loss(db, b"dev") is None
    await db.prune(through=4)
    assert await loss(db, b"dev") == Loss(b"t", 4)
    await db.do(Advance(consumer.id, A, settled=[2]))
    assert await loss(db, b"dev") is None


async def test_what_was_pruned_before_a_filter_was_subscribed_is_no_loss_for_it(
    db: Database,
) -> None:
    consumer = await db.subscriber(b"dev", b"a")
    await db.append_each(message(b"b"), message(b"b"), message(b"b"))
    await db.do(Subscribe(consumer.id, A, (Subscription(b"b", 1, 2),)))
    await db.prune(through=2)
    assert await loss(db, b"dev") is None
    await db.prune(through=3)
    assert await loss(db, b"dev") == Loss(b"b", 3)


async def test_overlapping_filters_lose_what_any_of_them_lost(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t/1", from_offset=0)
    await db.append_each(message(b"t/1"), message(b"t/2"), message(b"t/3"))
    await db.do(Subscribe(consumer.id, A, (Subscription(b"t/+", 1, 3),)))
    await db.prune(through=3)
    assert await loss(db, b"dev") == Loss(b"t/1", 1)


async def test_a_qos_0_subscription_loses_nothing(db: Database) -> None:
    await db.subscriber(b"dev", b"t", b"#", qos=0)
    await ten(db)
    await db.prune(through=5)
    assert await loss(db, b"dev") is None


async def test_the_loss_is_the_highest_one(db: Database) -> None:
    await db.subscriber(b"dev", b"#")
    await db.append_each(message(b"c"), message(b"a"), message(b"b"), message(b"a"), message(b"c"))
    for through, expected in ((1, (b"c", 1)), (3, (b"b", 3)), (4, (b"a", 4)), (5, (b"c", 5))):
        await db.prune(through=through)
        assert await loss(db, b"dev") == expected


async def test_a_loss_follows_the_subscriptions(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t", b"u")
    await ten(db)
    await db.prune(through=5)
    await db.do(Unsubscribe(consumer.id, A, (b"t",)))
    assert await loss(db, b"dev") is None
    await db.do(Subscribe(consumer.id, A, (Subscription(b"t", 1, 4),)))
    assert await loss(db, b"dev") == Loss(b"t", 5)


async def test_a_topic_that_comes_back_keeps_its_mark(db: Database) -> None:
    await db.subscriber(b"dev", b"a")
    await db.append_each(message(b"a"), message(b"b"))
    await db.prune(through=1)
    await db.append(message(b"a"))
    await db.reopen()
    assert await loss(db, b"dev") == Loss(b"a", 1)
    assert (await db.read(0, matching(b"a"), filters=[b"a"])).loss == Loss(b"a", 1)


async def test_a_chunk_tells_what_is_lost_after_its_start(db: Database) -> None:
    await db.append_each(message(b"a"), message(b"b"), message(b"a"), message(b"b"), message(b"a"))
    await db.prune(through=3)
    for topic_filter, after, expected in (
        (b"a", 0, Loss(b"a", 3)),
        (b"a", 2, Loss(b"a", 3)),
        (b"a", 3, None),
        (b"b", 1, Loss(b"b", 2)),
        (b"b", 2, None),
        (b"c", 0, None),
        (b"+", 0, Loss(b"a", 3)),
        (b"#", 2, Loss(b"a", 3)),
        (b"#", 3, None),
    ):
        accept = matching(topic_filter)
        for filters in ([topic_filter], []):
            chunk = await db.read(after, accept, filters=filters)
            assert chunk.loss == expected
            wanted = [n for n in (4, 5) if accept(b"a" if n == 5 else b"b") and n > after]
            assert [entry.offset for entry, _ in chunk.entries] == wanted
            assert (chunk.through, chunk.head) == (5, 5)


async def test_a_reader_may_say_which_pruned_entries_it_missed(db: Database) -> None:
    await db.append_each(message(b"a"), message(b"b"), message(b"a"), message(b"b"))
    await db.prune(through=3)
    for filters in ((b"a", b"b"), (b"+",)):
        for since, expected in ((1, Loss(b"a", 3)), (2, Loss(b"a", 3)), (3, None)):
            chunk = await db.read(
                0,
                matching(*filters),
                filters=filters,
                missed=lambda topic, offset, since=since: topic == b"a" and offset > since,  # type: ignore[misc]
            )
            assert chunk.loss == expected
            assert [entry.offset for entry, _ in chunk.entries] == [4]
        chunk = await db.read(0, matching(*filters), missed=lambda topic, _: topic == b"b")
        assert chunk.loss == Loss(b"b", 2)
        chunk = await db.read(2, matching(*filters), missed=lambda topic, _: topic == b"b")
        assert chunk.loss is None


async def test_a_reader_is_asked_about_topics_that_were_forgotten(db: Database) -> None:
    await db.append_each(message(b"a"), message(b"b"))
    await db.prune(through=2, marks_max=0)
    asked = []

    def missed(topic: bytes, offset: int) -> bool:
        asked.append((topic, offset))
        return False

    chunk = await db.read(0, matching(b"a"), filters=[b"a"], missed=missed)
    assert chunk.loss is None
    assert asked == [(b"", 2)]


async def test_pruning_while_a_replay_runs_is_told_in_the_next_chunk(db: Database) -> None:
    await ten(db)
    chunk = await db.read(0, matching(b"t"), filters=[b"t"], entries_max=3)
    assert (chunk.through, chunk.loss) == (3, None)
    await db.prune(through=3)
    assert (await db.read(3, matching(b"t"), filters=[b"t"], entries_max=3)).loss is None
    await db.prune(through=8)
    chunk = await db.read(3, matching(b"t"), filters=[b"t"], entries_max=3)
    assert chunk.loss == Loss(b"t", 8)


# ------------------------------------------------------------------------------ marks fold


async def test_marks_beyond_the_maximum_fold_into_the_coarse_floor(db: Database) -> None:
    await db.subscriber(b"dev", b"t/4")
    await db.subscriber(b"nothing", b"never/published")
    await db.append_each(*(message(b"t/%d" % n) for n in range(1, 7)))
    await db.prune(through=6, marks_max=6)
    assert await loss(db, b"dev") == Loss(b"t/4", 4)
    assert await loss(db, b"nothing") is None
    await db.prune(marks_max=3)  # t/1, t/2 and t/3 are forgotten
    late = await db.subscriber(b"late", b"never/published", b"t/1")
    for name in (b"dev", b"nothing"):
        found = await loss(db, name)
        assert found is not None, "the store cannot tell any more, so it says lost"
        assert found.pruned_through == (4 if name == b"dev" else 3)
    assert await loss(db, b"late") is None
    assert late.cursor == 6
    assert (await loss(db, b"dev")) == Loss(b"t/4", 4)


async def test_a_position_at_or_above_the_coarse_floor_is_judged_precisely(db: Database) -> None:
    consumers = {n: await db.subscriber(b"c%d" % n, b"t/5") for n in (2, 3, 4, 5)}
    await db.append_each(*(message(b"t/%d" % n) for n in range(1, 7)))
    for cursor, consumer in consumers.items():
        await db.move(consumer, cursor)
    await db.prune(through=6, marks_max=3)
    found = {cursor: await loss(db, b"c%d" % cursor) for cursor in consumers}
    assert found[2] is not None
    assert found[3] == found[4] == Loss(b"t/5", 5)
    assert found[5] is None


async def test_the_lowest_marks_fold_first(db: Database) -> None:
    await db.subscriber(b"dev", b"t/3", b"t/1")
    await db.append_each(*(message(b"t/%d" % n) for n in (1, 2, 3, 1)))
    await db.prune(through=4, marks_max=2)
    assert await loss(db, b"dev") == Loss(b"t/1", 4)
    for after, expected in ((2, Loss(b"t/3", 3)), (3, None)):
        assert (await db.read(after, matching(b"t/3"), filters=[b"t/3"])).loss == expected
    assert (await db.read(2, matching(b"t/2"), filters=[b"t/2"])).loss is None


async def test_a_topic_whose_mark_was_folded_keeps_its_entries(db: Database) -> None:
    await db.subscriber(b"dev", b"quiet")
    await db.append_each(*(message(b"t/%d" % n) for n in range(1, 4)))
    left = await db.append(*(message(b"t/%d" % n) for n in range(1, 4)))
    await db.prune(through=3, marks_max=0)
    found = await loss(db, b"dev")
    assert found is not None
    assert found.pruned_through == 3
    for filters in ([b"t/2"], [b"t/+"], []):
        chunk = await db.read(3, matching(b"t/2"), filters=filters)
        assert [entry for entry, _ in chunk.entries] == [left[1]]
        assert chunk.loss is None
    await db.prune(through=6, marks_max=0)
    found = await loss(db, b"dev")
    assert found is not None
    assert found.pruned_through == 6
    await db.reopen()
    assert await loss(db, b"dev") == found


async def test_marks_are_kept_through_a_restart(db: Database) -> None:
    await db.append_each(*(message(b"t/%d" % n) for n in range(1, 4)))
    await db.prune(through=2)
    await db.reopen()
    await db.prune(through=3)
    await db.reopen()
    for topic, mark in ((b"t/1", 1), (b"t/2", 2), (b"t/3", 3)):
        assert (await db.read(0, matching(topic), filters=[topic])).loss == Loss(topic, mark)


async def test_a_chunk_tells_of_the_coarse_floor_too(db: Database) -> None:
    await db.append_each(*(message(b"t/%d" % n) for n in range(1, 4)))
    await db.prune(through=3, marks_max=0)
    for after, is_lost in ((0, True), (2, True), (3, False)):
        chunk = await db.read(after, matching(b"t/1"), filters=[b"t/1"])
        assert (chunk.loss is not None) is is_lost
        if chunk.loss is not None:
            assert chunk.loss.pruned_through == 3


async def test_a_topic_that_was_forgotten_and_comes_back_is_still_lost(db: Database) -> None:
    await db.subscriber(b"dev", b"a")
    await db.append_each(message(b"a"), message(b"b"))
    await db.prune(through=2, marks_max=0)
    await db.append(message(b"a"))
    for _ in range(2):
        assert await loss(db, b"dev") is not None
        assert (await db.read(0, matching(b"a"), filters=[b"a"])).loss is not None
        await db.prune(through=3, marks_max=10)
