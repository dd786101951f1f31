"""The outbox, operation by operation."""

from __future__ import annotations

from typing import Any

import pytest

from storage.api import Advance, Op
from storage.errors import ClaimNotHeld, Fenced, ReissueRefused
from storage.outbox import (
    ATTEMPTS_MAX,
    RETRY_DELAYS_MS,
    SESSIONS,
    AuditRecord,
    Backlog,
    Claimed,
    ClaimNext,
    DeadLetter,
    Enqueue,
    Enqueued,
    ExpireMessages,
    Extend,
    Failure,
    Purge,
    Purged,
    Reap,
    Reaped,
    Reissue,
    Reissued,
    Release,
    Settle,
    State,
    Verdict,
)
from tests.storage.harness import NOW_MS, A, B, Database, message
from tests.storage.outbox import HOOK, LEASE_MS, ONE, TWO, Outbox


@pytest.fixture
def outbox(db: Database) -> Outbox:
    """Of each backend."""
    return Outbox(db)


def ids(claimed: Claimed) -> list[int]:
    return [one.id for one in claimed.messages]


# ------------------------------------------------------------------------------- enqueuing


async def test_a_message_comes_back_as_it_was_enqueued(outbox: Outbox) -> None:
    body = message(
        b"a/b",
        b"\xff\x00",
        qos=2,
        flags=4,
        origin=b"dev",
        expires_ms=NOW_MS + 9,
        properties=b"\x01\x00",
    )
    enqueued = await outbox.enqueue(body._replace(offset=7), destination=b"d\xff")
    assert enqueued == Enqueued(1, is_new=True)
    shown = await outbox.show(1)
    assert shown.message == body
    assert (shown.id, shown.queue, shown.state, shown.offset) == (1, HOOK, State.WAITING, 7)
    assert (shown.destination, shown.attempts, shown.attempts_max) == (b"d\xff", 0, ATTEMPTS_MAX)
    assert (shown.created_ms, shown.due_ms, shown.until_ms, shown.ended_ms) == (
        NOW_MS,
        NOW_MS,
        0,
        0,
    )
    assert await outbox.figures() == Backlog(HOOK, waiting=1, oldest_due_ms=NOW_MS)


async def test_a_key_that_is_known_enqueues_nothing_whatever_became_of_it(outbox: Outbox) -> None:
    first = await outbox.enqueue(key=b"k")
    for verdict in (None, Verdict.RETRY, Verdict.DEAD):
        before = await outbox.stored()
        assert await outbox.enqueue(message(payload=b"other"), key=b"k") == (first.id, False, 0)
        if verdict is not Verdict.DEAD:
            assert await outbox.stored() == before
        outbox.now_ms += 10
        one = await outbox.claim_one() if verdict is not Verdict.DEAD else None
        if one is not None:
            await outbox.settle(one, verdict or Verdict.RETRY)
    assert (await outbox.enqueue(key=b"k")).id == first.id
    other = await outbox.enqueue(key=b"k", queue=b"other")
    assert other == Enqueued(first.id + 1, is_new=True)


async def test_a_key_is_free_again_when_its_message_is_purged(outbox: Outbox) -> None:
    first = await outbox.enqueue(key=b"k")
    await outbox.settle(await outbox.claim_one())
    assert await outbox.db.do(Purge(NOW_MS + 1, 0, 10)) == Purged(1, 0, more=False)
    again = await outbox.enqueue(key=b"k")
    assert again.is_new
    assert again.id > first.id


async def test_not_before_is_not_due_before(outbox: Outbox) -> None:
    await outbox.enqueue(not_before_ms=NOW_MS + 10)
    await outbox.enqueue(not_before_ms=NOW_MS - 10)
    assert ids(await outbox.claim()) == [2]
    assert (await outbox.figures()).oldest_due_ms == NOW_MS + 10
    outbox.now_ms += 9
    assert ids(await outbox.claim()) == []
    outbox.now_ms += 1
    assert ids(await outbox.claim()) == [1]


async def test_a_newer_message_supersedes_those_that_wait(outbox: Outbox) -> None:
    first = await outbox.enqueue(supersede_key=b"room")
    await outbox.enqueue(supersede_key=b"hall")
    await outbox.enqueue(supersede_key=b"room", queue=b"other")
    newer = await outbox.enqueue(supersede_key=b"room")
    assert newer.superseded == first.id
    gone = await outbox.show(first.id)
    assert (gone.state, gone.message, gone.ended_ms) == (State.SUPERSEDED, None, NOW_MS)
    assert ids(await outbox.claim()) == [2, newer.id]
    assert await outbox.figures() == Backlog(HOOK, claimed=2, superseded=1)


@pytest.mark.parametrize("is_settled_first", [False, True])
async def test_a_claimed_message_is_superseded_unless_it_was_settled_before(
    outbox: Outbox, *, is_settled_first: bool
) -> None:
    await outbox.enqueue(supersede_key=b"room")
    one = await outbox.claim_one()
    settle = Settle(one.credential, NOW_MS, Verdict.DONE)
    newer = Enqueue(HOOK, message(), NOW_MS, supersede_key=b"room")
    ops: list[Op] = [settle, newer] if is_settled_first else [newer, settle]
    outcomes = await outbox.db.write(*ops)
    if is_settled_first:
        assert outcomes == [State.DONE, Enqueued(2, is_new=True, superseded=0)]
    else:
        refused = ClaimNotHeld(0, one.claim, one.id, "superseded")
        assert outcomes == [Enqueued(2, is_new=True, superseded=1), refused]
    assert ids(await outbox.claim(TWO)) == [2]


# --------------------------------------------------------------------------------- claiming


async def test_claims_go_by_due_time_then_id(outbox: Outbox) -> None:
    for ahead_ms in (3, 1, 2, 1):
        await outbox.enqueue(not_before_ms=NOW_MS + ahead_ms)
    outbox.now_ms += 10
    assert ids(await outbox.claim(limit=3)) == [2, 4, 3]
    assert ids(await outbox.claim()) == [1]


async def test_claims_are_disjoint_between_workers_and_queues(outbox: Outbox) -> None:
    await outbox.some(5)
    await outbox.some(2, queue=b"hoo")
    taken = [await outbox.claim(worker, limit=2) for worker in (ONE, TWO, ONE, TWO)]
    assert [ids(one) for one in taken] == [[1, 2], [3, 4], [5], []]
    assert [one.more for one in taken] == [True, True, False, False]
    assert ids(await outbox.claim(queue=b"hoo")) == [6, 7]
    assert await outbox.claim(queue=b"never") == Claimed(())


async def test_each_claim_has_a_number_of_its_own_for_ever(outbox: Outbox) -> None:
    await outbox.some(3)
    numbers = [(await outbox.claim_one(limit=1)).claim for _ in range(2)]
    await outbox.claim(queue=b"never")
    await outbox.db.reopen()
    numbers.append((await outbox.claim_one()).claim)
    assert numbers == [1, 2, 3]


async def test_a_claim_is_bounded_in_bytes_but_takes_one(outbox: Outbox) -> None:
    for size in (100, 10, 10):
        await outbox.enqueue(message(payload=bytes(size)))
    first = await outbox.claim(bytes_max=50)
    assert (ids(first), first.more) == ([1], True)
    second = await outbox.claim(bytes_max=15)
    assert (ids(second), second.more) == ([2], True)


async def test_what_lapsed_is_claimed_alone(outbox: Outbox) -> None:
    await outbox.some(2)
    await outbox.claim(until_ms=NOW_MS + 1)
    await outbox.db.do(Reap(NOW_MS + 1, 10, (1,)))
    outbox.now_ms += 2
    await outbox.some(2)
    taken = [await outbox.claim() for _ in range(4)]
    assert [ids(one) for one in taken] == [[1], [2], [3, 4], []]
    assert [one.more for one in taken] == [True, True, False, False]
    await outbox.settle(taken[0].messages[0], Verdict.RETRY, due_ms=outbox.now_ms)
    await outbox.db.do(Release(taken[2].messages[0].credential, outbox.now_ms))
    assert ids(await outbox.claim()) == [1, 3]


async def test_what_expired_is_not_claimed(outbox: Outbox) -> None:
    await outbox.enqueue(message(expires_ms=NOW_MS + 5))
    await outbox.enqueue(message(expires_ms=NOW_MS + 6))
    outbox.now_ms += 5
    claimed = await outbox.claim()
    assert (ids(claimed), claimed.expired) == ([2], (1,))
    gone = await outbox.show(1)
    assert (gone.state, gone.failure, gone.message) == (State.EXPIRED, Failure.EXPIRED, None)
    assert gone.attempts == 0


async def test_messages_expire_whether_they_are_due_or_not(outbox: Outbox) -> None:
    await outbox.enqueue(message(expires_ms=NOW_MS + 9), not_before_ms=NOW_MS + 1000)
    await outbox.enqueue(message(expires_ms=NOW_MS + 5), not_before_ms=NOW_MS + 1000)
    await outbox.enqueue(message(expires_ms=NOW_MS + 5))
    await outbox.claim(limit=1)  # under way: its worker looks at the deadline before it sends
    assert await outbox.db.do(ExpireMessages(NOW_MS + 4, 10)) == ()
    assert await outbox.db.do(ExpireMessages(NOW_MS + 9, 1)) == (2,)
    assert await outbox.db.do(ExpireMessages(NOW_MS + 9, 10)) == (1,)
    assert await outbox.figures() == Backlog(HOOK, claimed=1, expired=2)


async def test_figures_say_when_to_come_back(outbox: Outbox) -> None:
    assert await outbox.db.store.outbox.backlog() == []
    await outbox.some(2, not_before_ms=NOW_MS + 50)
    await outbox.enqueue(not_before_ms=NOW_MS + 20)
    assert (await outbox.figures()).oldest_due_ms == NOW_MS + 20
    outbox.now_ms += 60
    await outbox.claim()
    assert await outbox.figures() == Backlog(HOOK, claimed=3)


# --------------------------------------------------------------------------------- settling


async def test_done_keeps_the_tale_and_not_the_body(outbox: Outbox) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    outbox.now_ms += 5
    assert await outbox.settle(one) is State.DONE
    done = await outbox.show(one.id)
    assert (done.state, done.message, done.attempts, done.ended_ms) == (
        State.DONE,
        None,
        1,
        NOW_MS + 5,
    )
    assert (done.worker, done.claim, done.until_ms) == (ONE, one.claim, 0)


async def test_retry_is_due_when_it_says_and_never_in_the_past(outbox: Outbox) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    due_ms = NOW_MS + 500
    assert await outbox.settle(one, Verdict.RETRY, due_ms=due_ms) is State.WAITING
    waiting = await outbox.show(one.id)
    assert (waiting.attempts, waiting.due_ms, waiting.failure) == (1, due_ms, Failure.UNAVAILABLE)
    assert ids(await outbox.claim()) == []
    outbox.now_ms = due_ms
    one = await outbox.claim_one(TWO)
    await outbox.settle(one, Verdict.RETRY, due_ms=5)
    assert (await outbox.show(one.id)).due_ms == due_ms


async def test_the_last_attempt_that_fails_makes_a_dead_letter(outbox: Outbox) -> None:
    await outbox.enqueue(attempts_max=2)
    states = []
    for _ in range(2):
        one = await outbox.claim_one()
        states.append(await outbox.settle(one, Verdict.RETRY, Failure.THROTTLED))
    assert states == [State.WAITING, State.DEAD]
    dead = await outbox.show(one.id)
    assert (dead.attempts, dead.failure, dead.ended_ms) == (2, Failure.THROTTLED, NOW_MS)
    assert dead.message == message()
    assert await outbox.figures() == Backlog(HOOK, dead=1)


async def test_without_a_limit_it_is_tried_for_ever(outbox: Outbox) -> None:
    await outbox.enqueue(attempts_max=0)
    for _ in range(10):
        assert await outbox.settle(await outbox.claim_one(), Verdict.RETRY) is State.WAITING


@pytest.mark.parametrize("erase", [False, True])
async def test_a_dead_letter_keeps_its_body_unless_it_is_to_be_erased(
    outbox: Outbox, *, erase: bool
) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    assert await outbox.settle(one, Verdict.DEAD, Failure.UNREADABLE, erase=erase) is State.DEAD
    dead = await outbox.show(one.id)
    assert (dead.failure, dead.attempts) == (Failure.UNREADABLE, 1)
    assert dead.message == (None if erase else message())


async def test_expired_before_it_was_sent_is_no_attempt(outbox: Outbox) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    assert await outbox.settle(one, Verdict.EXPIRED, Failure.EXPIRED) is State.EXPIRED
    gone = await outbox.show(one.id)
    assert (gone.message, gone.attempts) == (None, 0)


async def test_a_release_is_no_attempt_and_keeps_the_place_in_line(outbox: Outbox) -> None:
    await outbox.enqueue(attempts_max=1)
    outbox.now_ms += 5
    await outbox.enqueue()
    one = await outbox.claim_one(limit=1)
    assert await outbox.db.do(Release(one.credential, outbox.now_ms)) is None
    again = await outbox.claim(TWO)
    assert ids(again) == [one.id, 2]
    assert again.messages[0].attempts == 0


async def test_an_extension_moves_the_lease_on_and_never_back(outbox: Outbox) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    for until_ms, expected in ((90_000, 90_000), (70_000, 90_000), (90_000, 90_000)):
        assert await outbox.db.do(Extend(one.credential, NOW_MS, NOW_MS + until_ms)) is None
        assert (await outbox.show(one.id)).until_ms == NOW_MS + expected
    outbox.now_ms += 89_999
    assert await outbox.settle(one) is State.DONE


def test_done_is_no_failure_and_everything_else_has_one() -> None:
    for verdict, failure in ((Verdict.DONE, Failure.REJECTED), (Verdict.RETRY, Failure.NONE)):
        with pytest.raises(ValueError, match="done is no failure"):
            Settle((1, ONE, 1), NOW_MS, verdict, failure)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- sweeping


async def test_a_lapsed_lease_charges_an_attempt_and_waits_its_delay(outbox: Outbox) -> None:
    await outbox.some(3)
    await outbox.claim(limit=1)
    await outbox.claim(limit=1, until_ms=NOW_MS + 10)
    assert await outbox.db.do(Reap(NOW_MS + 9, 10)) == Reaped((), (), more=False)
    assert await outbox.db.do(Reap(NOW_MS + 10, 10)) == Reaped((2,), (), more=False)
    lapsed = await outbox.show(2)
    assert (lapsed.state, lapsed.attempts, lapsed.failure) == (State.WAITING, 1, Failure.LAPSED)
    assert lapsed.due_ms == NOW_MS + 10 + RETRY_DELAYS_MS[0]


async def test_reaping_goes_by_the_end_of_the_lease_in_steps(outbox: Outbox) -> None:
    await outbox.some(4, attempts_max=1)
    for ahead_ms in (40, 10, 30, 20):
        await outbox.claim(limit=1, until_ms=NOW_MS + ahead_ms)
    assert await outbox.db.do(Reap(NOW_MS + 30, 2)) == Reaped((), (2, 4), more=True)
    assert await outbox.db.do(Reap(NOW_MS + 30, 2)) == Reaped((), (3,), more=False)


async def test_at_an_opening_every_lease_ends_and_keeps_its_place(outbox: Outbox) -> None:
    await outbox.some(4)
    await outbox.claim(limit=3, until_ms=NOW_MS + 60_000)
    at_opening = Reap(NOW_MS + 5, 2, delays_ms=(), all_leases=True)
    assert await outbox.db.do(at_opening) == Reaped((1, 2), (), more=True)
    assert await outbox.db.do(at_opening) == Reaped((3,), (), more=False)
    assert await outbox.db.do(at_opening) == Reaped((), (), more=False)
    for number in (1, 2, 3):
        ended = await outbox.show(number)
        assert (ended.attempts, ended.failure) == (1, Failure.LAPSED)
        assert ended.due_ms == NOW_MS, "before what was enqueued after it"


async def test_purge_deletes_what_ended_long_enough_ago_in_steps(outbox: Outbox) -> None:
    for verdict in (Verdict.DONE, Verdict.DEAD, Verdict.EXPIRED, Verdict.DONE, Verdict.RETRY):
        await outbox.enqueue()
        await outbox.settle(await outbox.claim_one(), verdict, due_ms=NOW_MS + 10**9)
        outbox.now_ms += 10
    assert await outbox.db.do(Purge(NOW_MS + 30, 0, 1)) == Purged(1, 0, more=True)
    assert await outbox.db.do(Purge(NOW_MS + 30, 0, 10)) == Purged(1, 0, more=False)
    assert [await outbox.db.store.outbox.show(n) is None for n in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        False,
    ]
    assert await outbox.db.do(Purge(0, NOW_MS + 10, 10)) == Purged(0, 0, more=False)
    assert await outbox.db.do(Purge(0, NOW_MS + 11, 10)) == Purged(1, 0, more=False)
    assert await outbox.figures() == Backlog(HOOK, waiting=1, done=1, oldest_due_ms=NOW_MS + 10**9)


async def test_purge_of_one_queue_leaves_the_others(outbox: Outbox) -> None:
    for queue in (HOOK, b"hoo", HOOK):
        await outbox.dead(queue=queue)
    purge = Purge(NOW_MS + 1, NOW_MS + 1, 10, queue=HOOK)
    assert await outbox.db.do(purge) == Purged(2, 0, more=False)
    assert (await outbox.figures(b"hoo")).dead == 1
    assert await outbox.db.do(Purge(NOW_MS + 1, NOW_MS + 1, 10, queue=b"never")) == (0, 0, False)


# -------------------------------------------------------------------------------- operating


async def test_dead_letters_are_told_in_pages_in_the_order_they_died(outbox: Outbox) -> None:
    await outbox.some(5)
    await outbox.some(1, queue=b"hoo")
    held = (await outbox.claim()).messages
    for place in (3, 1, 4, 0, 2):
        await outbox.settle(held[place], Verdict.DEAD, Failure.REJECTED)
        outbox.now_ms += place % 2
    reads = outbox.db.store.outbox
    told = []
    after = (0, 0)
    while page := await reads.dead_letters(HOOK, after, 2):
        assert len(page) <= 2
        told += page
        after = page[-1].ended_ms, page[-1].id
    assert [one.id for one in told] == [4, 2, 1, 3, 5]
    assert [(one.ended_ms, one.id) for one in told] == sorted((o.ended_ms, o.id) for o in told)
    assert all(one.message is not None for one in told)
    assert await reads.dead_letters(b"hoo") == await reads.dead_letters(b"never") == []


async def test_a_reissue_is_a_fresh_message_and_is_recorded(outbox: Outbox) -> None:
    old = await outbox.dead(key=b"k", supersede_key=b"room", destination=b"d", attempts_max=1)
    outbox.now_ms += 10
    reissued = await outbox.db.do(Reissue(old.id, outbox.now_ms, b"ann", attempts_max=4))
    assert reissued == Reissued(2, HOOK)
    fresh = await outbox.show(2)
    assert (fresh.state, fresh.message, fresh.destination) == (State.WAITING, message(), b"d")
    assert (fresh.attempts, fresh.attempts_max, fresh.reissue_of) == (0, 4, old.id)
    assert (fresh.due_ms, fresh.failure, fresh.claim) == (outbox.now_ms, Failure.NONE, 0)
    before = await outbox.show(old.id)
    assert (before.state, before.message, before.reissued_as) == (State.REISSUED, None, 2)
    assert (await outbox.enqueue(key=b"k")).id == 2
    assert (await outbox.enqueue(supersede_key=b"room")).superseded == 2
    record = AuditRecord(1, outbox.now_ms, b"ann", HOOK, old.id, 2)
    assert await outbox.db.store.outbox.audit() == [record]
    assert await outbox.db.store.outbox.audit(after=1) == []


async def test_a_reissue_is_refused_while_a_newer_one_lives(outbox: Outbox) -> None:
    old = await outbox.dead(supersede_key=b"room")
    newer = await outbox.enqueue(supersede_key=b"room")
    refused = ReissueRefused(old.id, "live", newer.id)
    before = await outbox.stored()
    assert await outbox.db.do(Reissue(old.id, NOW_MS, b"ann")) == refused
    assert await outbox.stored() == before
    one = await outbox.claim_one()
    assert await outbox.db.do(Reissue(old.id, NOW_MS, b"ann")) == refused
    await outbox.settle(one)
    assert isinstance(await outbox.db.do(Reissue(old.id, NOW_MS, b"ann")), Reissued)


async def test_only_a_dead_letter_with_a_body_is_reissued_and_once(outbox: Outbox) -> None:
    dead = await outbox.dead()
    assert isinstance(await outbox.db.do(Reissue(dead.id, NOW_MS, b"ann")), Reissued)
    await outbox.enqueue()
    erased, *_ = (await outbox.claim()).messages
    await outbox.settle(erased, Verdict.DEAD, Failure.REJECTED, erase=True)
    found = {dead.id: "reissued", erased.id: "erased", 3: "claimed", 99: "gone"}
    for message_id, state in found.items():
        before = await outbox.stored()
        refused = await outbox.db.do(Reissue(message_id, NOW_MS, b"ann"))
        assert refused == ReissueRefused(message_id, state)
        assert await outbox.stored() == before


async def test_a_reissue_does_not_die_of_the_deadline_that_is_over(outbox: Outbox) -> None:
    old = await outbox.dead(body=message(expires_ms=NOW_MS + 5))
    outbox.now_ms += 5
    fresh = await outbox.db.do(Reissue(old.id, outbox.now_ms, b"ann"))
    one = await outbox.claim_one()
    assert one.id == fresh.id
    assert one.message is not None
    assert one.message.expires_ms == 0


async def test_the_audit_is_purged_by_itself(outbox: Outbox) -> None:
    for _ in range(3):
        old = await outbox.dead()
        await outbox.db.do(Reissue(old.id, outbox.now_ms, b"ann"))
        await outbox.settle(await outbox.claim_one())
        outbox.now_ms += 10
    purge = Purge(0, 0, 1, audit_before_ms=NOW_MS + 20)
    assert await outbox.db.do(purge) == Purged(0, 1, more=True)
    assert await outbox.db.do(purge) == Purged(0, 1, more=True)
    assert await outbox.db.do(purge) == Purged(0, 0, more=False)
    assert [record.number for record in await outbox.db.store.outbox.audit()] == [3]


# ---------------------------------------------------------------- in a consumer's transaction


async def test_a_cursor_moves_and_its_range_is_enqueued_in_one_operation(
    db: Database, outbox: Outbox
) -> None:
    consumer = await db.subscriber(b"sink", b"#")
    entries = await db.append(message(b"a"), message(b"b", b"y"))
    to_send = [Enqueue(HOOK, entry, NOW_MS) for entry in entries]
    assert await db.do(Advance(consumer.id, A, cursor=2, enqueue=to_send)) is None
    assert (await db.snapshot(b"sink")).consumer.cursor == 2
    claimed = (await outbox.claim()).messages
    assert [one.message for one in claimed] == [entry._replace(offset=0) for entry in entries]
    assert [one.offset for one in claimed] == [1, 2]


@pytest.mark.parametrize(
    ("incarnation", "settled", "refusal"), [(B, [], Fenced(1)), (A, [7], ClaimNotHeld(1, 7))]
)
async def test_an_advance_that_is_refused_leaves_nothing_in_the_outbox(
    db: Database, outbox: Outbox, incarnation: bytes, settled: list[int], refusal: Any
) -> None:
    consumer = await db.subscriber(b"sink", b"#")
    (entry,) = await db.append(message())
    before = await outbox.stored(), await db.snapshot(b"sink")
    op = Advance(
        consumer.id,
        incarnation,
        cursor=1,
        settled=settled,
        enqueue=[Enqueue(HOOK, entry, NOW_MS)],
        dead=[DeadLetter(entry, Failure.TOO_LARGE, NOW_MS)],
    )
    assert await db.do(op) == refusal
    assert (await outbox.stored(), await db.snapshot(b"sink")) == before


async def test_a_session_gives_a_delivery_up_as_a_dead_letter(db: Database, outbox: Outbox) -> None:
    consumer = await db.subscriber(b"dev", b"#")
    (entry,) = await db.append(message(b"t", b"huge"))
    letters = [
        DeadLetter(entry, Failure.TOO_LARGE, NOW_MS, attempts=3),
        DeadLetter(entry, Failure.UNDELIVERABLE, NOW_MS, erase=True),
    ]
    assert await db.do(Advance(consumer.id, A, dead=letters)) is None
    kept, erased = await db.store.outbox.dead_letters(SESSIONS)
    assert (kept.destination, kept.offset, kept.failure) == (b"dev", 1, Failure.TOO_LARGE)
    assert (kept.message, kept.attempts) == (entry._replace(offset=0), 3)
    assert (erased.message, erased.failure) == (None, Failure.UNDELIVERABLE)
    assert await outbox.figures(SESSIONS) == Backlog(SESSIONS, dead=2)
    assert isinstance(await db.do(Reissue(kept.id, NOW_MS, b"ann")), Reissued)


async def test_a_claim_without_a_worker_is_refused(db: Database, outbox: Outbox) -> None:
    await outbox.enqueue()
    before = await outbox.stored()
    for worker in (b"", bytes(16), b"short", None):
        op = ClaimNext(HOOK, worker, NOW_MS, NOW_MS + LEASE_MS)  # type: ignore[arg-type]
        assert await db.do(op) == ClaimNotHeld(0, 0, found="incomplete")
    assert await outbox.stored() == before
