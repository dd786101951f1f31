"""Fenced claims: who no longer holds a message changes nothing, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

import pytest

from storage.clock import ManualClock
from storage.errors import ClaimNotHeld
from storage.kv import U64, Space
from storage.memory import MemoryStore
from storage.outbox import (
    MOVES,
    RETRY_DELAYS_MS,
    Credential,
    Event,
    Extend,
    Failure,
    Reap,
    Release,
    Settle,
    State,
    Verdict,
)
from storage.outbox.model import Kept
from storage.outbox.rows import NO_KEY, Row
from storage.roles import Handles
from tests.storage.harness import BACKENDS, NOW_MS, Database, message, scratch
from tests.storage.outbox import ACTS, HOOK, LEASE_MS, ONE, TWO, Outbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from storage.kv import WriteTxn
    from storage.outbox import Message
    from storage.roles import Worker


@pytest.fixture(params=BACKENDS)
async def db(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """A new, open database of each backend. Not sealed besides: a seal is on bodies, and claims are
    of rows; test_outbox has both."""
    with scratch() as path:
        database = Database(BACKENDS[request.param](path))
        await database.open()
        yield database
        await database.stop()


@pytest.fixture
def outbox(db: Database) -> Outbox:
    """Of each backend."""
    return Outbox(db)


@pytest.fixture(params=ACTS)
def act(request: pytest.FixtureRequest) -> Any:
    """One of the operations that state a credential."""
    return ACTS[request.param]


async def refuses(outbox: Outbox, act: Any, held: Credential, found: str) -> None:
    """Refused, and not a byte is different."""
    before = await outbox.stored()
    refused = ClaimNotHeld(0, held.claim or 0, held.message_id or 0, found)
    assert await outbox.db.do(act(held, outbox.now_ms)) == refused
    assert await outbox.stored() == before


# ---------------------------------------------------------------------------- one claim


@pytest.mark.case("HK-01")
@pytest.mark.case("HK-04")
async def test_a_claim_that_was_taken_by_another_worker_settles_nothing(
    outbox: Outbox, act: Any
) -> None:
    await outbox.some(2)
    slow, late = (await outbox.claim()).messages
    await outbox.db.do(Extend(slow.credential, NOW_MS, NOW_MS + 2 * LEASE_MS))
    outbox.now_ms += LEASE_MS
    assert (await outbox.db.do(Reap(outbox.now_ms, 10, (1,)))).waiting == (late.id,)
    outbox.now_ms += 1
    mine = await outbox.claim_one(TWO)
    assert (mine.id, mine.attempts) == (late.id, 1)
    await refuses(outbox, act, late.credential, "claimed")
    assert await outbox.show(late.id) == mine
    assert await outbox.settle(slow) is State.DONE
    assert await outbox.settle(mine) is State.DONE


async def test_a_claim_that_the_same_worker_made_anew_refuses_the_older_one(
    outbox: Outbox, act: Any
) -> None:
    await outbox.enqueue()
    old = await outbox.claim_one()
    await outbox.db.do(Release(old.credential, NOW_MS))
    new = await outbox.claim_one()
    assert (new.worker, new.id) == (old.worker, old.id)
    await refuses(outbox, act, old.credential, "claimed")
    assert await outbox.settle(new) is State.DONE


async def test_a_claim_that_lapsed_is_refused_even_if_nobody_took_it(
    outbox: Outbox, act: Any
) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    outbox.now_ms += LEASE_MS
    await refuses(outbox, act, one.credential, "lapsed")


async def test_a_claim_that_was_reaped_is_refused(outbox: Outbox, act: Any) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    await outbox.db.do(Reap(NOW_MS + LEASE_MS, 1))
    await refuses(outbox, act, one.credential, "waiting")


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.RETRY])
async def test_what_has_ended_is_refused(outbox: Outbox, act: Any, verdict: Verdict) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    state = await outbox.settle(one, verdict)
    await refuses(outbox, act, one.credential, state.name.lower())


async def test_what_was_superseded_is_refused(outbox: Outbox, act: Any) -> None:
    await outbox.enqueue(supersede_key=b"k")
    one = await outbox.claim_one()
    await outbox.enqueue(supersede_key=b"k")
    await refuses(outbox, act, one.credential, "superseded")


@pytest.mark.parametrize(
    "missing",
    [
        {"message_id": 0},
        {"message_id": None},
        {"worker": b""},
        {"worker": None},
        {"worker": bytes(16)},
        {"worker": ONE[:15]},
        {"claim": 0},
        {"claim": None},
    ],
    ids=str,
)
async def test_a_credential_with_a_part_missing_is_refused(
    outbox: Outbox, act: Any, missing: dict[str, Any]
) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    await refuses(outbox, act, one.credential._replace(**missing), "incomplete")


@pytest.mark.case("HK-04")
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"worker": TWO}, "claimed"),
        ({"claim": 77}, "claimed"),
        ({"message_id": 2}, "waiting"),
        ({"message_id": 99}, "gone"),
    ],
    ids=str,
)
async def test_each_part_of_a_credential_must_be_right(
    outbox: Outbox, act: Any, other: dict[str, Any], found: str
) -> None:
    await outbox.some(2)
    one = await outbox.claim_one(limit=1)
    await refuses(outbox, act, one.credential._replace(**other), found)


@pytest.mark.case("HK-11")
async def test_the_same_event_twice_changes_nothing_the_second_time(
    outbox: Outbox, act: Any
) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    op = act(one.credential, NOW_MS)
    await outbox.db.do(op)
    before = await outbox.stored()
    again = await outbox.db.do(op)
    assert again is None if isinstance(op, Extend) else isinstance(again, ClaimNotHeld)
    assert await outbox.stored() == before


@pytest.mark.case("HK-03")
async def test_a_late_retry_leaves_the_new_claim_its_owner_and_its_lease(outbox: Outbox) -> None:
    await outbox.enqueue()
    old = await outbox.claim_one()
    outbox.now_ms += LEASE_MS
    await outbox.db.do(Reap(outbox.now_ms, 1, (1,)))
    outbox.now_ms += 1
    new = await outbox.claim_one(TWO)
    for late in (
        Settle(old.credential, outbox.now_ms, Verdict.RETRY, Failure.UNAVAILABLE, NOW_MS),
        Release(old.credential, outbox.now_ms),
    ):
        assert isinstance(await outbox.db.do(late), ClaimNotHeld)
    kept = await outbox.show(new.id)
    assert (kept.worker, kept.claim, kept.until_ms) == (TWO, new.claim, new.until_ms)


async def test_a_lease_is_extended_for_one_acquisition_not_for_a_worker(outbox: Outbox) -> None:
    await outbox.some(2)
    first = await outbox.claim_one(limit=1)
    second = await outbox.claim_one(limit=1)
    await outbox.db.do(Extend(second.credential, NOW_MS, NOW_MS + 2 * LEASE_MS))
    assert (await outbox.show(first.id)).until_ms == NOW_MS + LEASE_MS
    assert (await outbox.db.do(Reap(NOW_MS + LEASE_MS, 10))).waiting == (first.id,)


@pytest.mark.parametrize("is_extended_first", [False, True])
async def test_of_extension_and_reap_the_first_that_commits_wins(
    outbox: Outbox, *, is_extended_first: bool
) -> None:
    """The store did not answer for longer than the lease; both were waiting for it."""
    await outbox.enqueue()
    one = await outbox.claim_one()
    extend = Extend(one.credential, NOW_MS + 1, NOW_MS + 3 * LEASE_MS)
    reap = Reap(NOW_MS + 2 * LEASE_MS, 10)
    if is_extended_first:
        extended, reaped = await outbox.db.write(extend, reap)
        assert (extended, reaped) == (None, ((), (), False))
    else:
        reaped, extended = await outbox.db.write(reap, extend)
        assert extended == ClaimNotHeld(0, one.claim, one.id, "waiting")
    outbox.now_ms += LEASE_MS
    settled = await outbox.settle(one)
    assert settled is State.DONE if is_extended_first else isinstance(settled, ClaimNotHeld)


async def test_claims_hold_over_a_restart(outbox: Outbox) -> None:
    await outbox.some(2)
    kept, lapsed = (await outbox.claim()).messages
    await outbox.db.do(Extend(kept.credential, NOW_MS, NOW_MS + 3 * LEASE_MS))
    await outbox.db.reopen(NOW_MS + 2 * LEASE_MS)
    outbox.now_ms += 2 * LEASE_MS
    assert await outbox.settle(kept) is State.DONE
    assert await outbox.settle(lapsed) == ClaimNotHeld(0, lapsed.claim, lapsed.id, "lapsed")


@pytest.mark.case("HK-13")
@pytest.mark.parametrize("years", [-1, 1])
async def test_a_clock_that_jumped_blocks_nothing_for_ever(outbox: Outbox, years: int) -> None:
    """Over a restart; within a run the clock does not jump (storage.clock)."""
    await outbox.enqueue()
    one = await outbox.claim_one()
    outbox.now_ms += years * 365 * 24 * 3600 * 1000
    seen_ms = (await outbox.db.reopen(outbox.now_ms)).seen_ms
    assert seen_ms >= NOW_MS
    outbox.now_ms = seen_ms + LEASE_MS  # the broker's clock goes on from there
    assert (await outbox.db.do(Reap(outbox.now_ms, 1, (1,)))).waiting == (one.id,)
    outbox.now_ms += 1
    assert (await outbox.claim_one(TWO)).id == one.id


@pytest.mark.case("HK-05")
async def test_a_lapsed_claim_without_an_owner_is_recovered(outbox: Outbox) -> None:
    await outbox.enqueue()
    one = await outbox.claim_one()
    await disown(outbox.db, one.id)
    assert (await outbox.show(one.id)).worker in (b"", NO_KEY)
    outbox.now_ms += LEASE_MS
    assert (await outbox.db.do(Reap(outbox.now_ms, 10, (1,)))).waiting == (one.id,)
    outbox.now_ms += 1
    assert await outbox.settle(await outbox.claim_one(TWO)) is State.DONE


async def disown(db: Database, message_id: int) -> None:
    """Take the owner out of a claimed row, past every operation."""
    store = db.store
    if isinstance(store, MemoryStore):
        kept = store._tables.outbox.messages[message_id]
        ownerless = kept.message._replace(worker=b"")
        store._tables.outbox.messages[message_id] = Kept(ownerless, b"", b"")
        return

    def work(txn: WriteTxn) -> None:
        raw = txn.get(Space.OUTBOX, U64.pack(message_id))
        assert raw is not None
        row = Row.unpack(message_id, raw)._replace(worker=NO_KEY)
        txn.put(Space.OUTBOX, U64.pack(message_id), row.pack())

    await store._in_writer(lambda database: database.write(work))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------- the table of moves


DOES: Final[dict[Event, Callable[[Outbox, Message], Awaitable[Any]]]] = {
    Event.CLAIM: lambda outbox, _: outbox.claim(TWO),
    Event.EXTEND: lambda outbox, one: outbox.db.do(
        Extend(one.credential, outbox.now_ms, outbox.now_ms + 2 * LEASE_MS)
    ),
    Event.RELEASE: lambda outbox, one: outbox.db.do(Release(one.credential, outbox.now_ms)),
    Event.DONE: lambda outbox, one: outbox.settle(one),
    Event.RETRY: lambda outbox, one: outbox.settle(one, Verdict.RETRY),
    Event.DEAD: lambda outbox, one: outbox.settle(one, Verdict.DEAD),
    Event.EXPIRE: lambda outbox, one: outbox.settle(one, Verdict.EXPIRED),
    Event.SUPERSEDE: lambda outbox, _: outbox.enqueue(supersede_key=b"k"),
}
REACHED: Final[dict[State, tuple[Event, ...]]] = {
    State.WAITING: (),
    State.CLAIMED: (Event.CLAIM,),
    State.DONE: (Event.CLAIM, Event.DONE),
    State.DEAD: (Event.CLAIM, Event.DEAD),
    State.SUPERSEDED: (Event.SUPERSEDE,),
    State.EXPIRED: (Event.CLAIM, Event.EXPIRE),
}


@pytest.mark.parametrize("state", REACHED)
@pytest.mark.parametrize("event", DOES)
async def test_a_message_moves_as_the_table_says_and_not_otherwise(
    outbox: Outbox, state: State, event: Event
) -> None:
    first = await outbox.enqueue(supersede_key=b"k")
    for done in REACHED[state]:
        await DOES[done](outbox, await outbox.show(first.id))
    before = await outbox.show(first.id)
    assert before.state is state
    await DOES[event](outbox, before)
    after = await outbox.show(first.id)
    is_settled = event not in {Event.CLAIM, Event.SUPERSEDE}
    legal = MOVES[state].get(event) if state is State.CLAIMED or not is_settled else None
    if legal is None:
        assert after == before
    else:
        assert after.state is legal


# --------------------------------------------------------------------------- two dispatchers


class Node:
    """A dispatcher: claims, sends, settles; with a clock of its own.

    sent: (message id, attempts before it), in the order they left. fate: what the receiver does
    with a message: a failure, None = it takes it, or raises; it may take its time.
    """

    def __init__(self, db: Database, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock(NOW_MS)
        self.handles = Handles(db.store, self.clock)
        self.worker = self.handles.worker(HOOK, lease_ms=LEASE_MS, chance=lambda: 0.5)
        self.sent: list[tuple[int, int]] = []
        self.fate: Callable[[Message], Awaitable[Failure | None]] = self.taken

    async def taken(self, _: Message) -> Failure | None:
        return None

    async def turn(self) -> None:
        """Whatever is due."""
        more = True
        while more:
            claimed = await self.worker.claim()
            more = claimed.more
            for one in claimed.messages:
                await self.deliver(one)

    async def deliver(self, one: Message) -> None:
        self.sent.append((one.id, one.attempts))
        try:
            failure = await self.fate(one)
        except Exception:  # noqa: BLE001 - our own bug has a class of its own
            failure = Failure.UNEXPECTED
        if failure is None:
            await self.worker.done(one)
        else:
            await self.worker.failed(one, failure)

    async def reap(self) -> None:
        await self.handles.janitor().reap(delays_ms=(1,))


LATE: Final[dict[str, Callable[[Worker, Message], Awaitable[Any]]]] = {
    "a late ack": lambda worker, one: worker.done(one),
    "a late retry": lambda worker, one: worker.failed(one, Failure.UNAVAILABLE),
    "a late rejection": lambda worker, one: worker.failed(one, Failure.REJECTED),
    "a late extend": lambda worker, one: worker.extend(one),
    "a late release": lambda worker, one: worker.release(one),
}


@pytest.mark.case("HK-01")
@pytest.mark.case("HK-02")
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(
    "taken_by", ["another node", "the same node", "nobody", "no reaper either"]
)
async def test_two_dispatchers_replay(
    db: Database, caplog: pytest.LogCaptureFixture, late: str, taken_by: str
) -> None:
    outbox = Outbox(db)
    await outbox.enqueue()
    slow, other = Node(db), Node(db)
    (one,) = (await slow.worker.claim()).messages
    for node in (slow, other):
        node.clock.advance(ms=LEASE_MS)
    if taken_by != "no reaper either":
        await other.reap()
    for node in (slow, other):
        node.clock.advance(ms=1)
    again = {"another node": other, "the same node": slow}.get(taken_by)
    mine = (await again.worker.claim()).messages if again is not None else ()
    before = await outbox.stored()
    with caplog.at_level(logging.WARNING, "amqtt_durable.outbox"):
        assert not await LATE[late](slow.worker, one)
        assert not await slow.worker.done(one)
    assert await outbox.stored() == before
    assert slow.worker.refused == 2
    told = "ack refused, claim no longer held: message 1 of b'hook'"
    assert [record.getMessage().startswith(told) for record in caplog.records] == [True]
    if again is not None:
        assert await again.worker.done(mine[0])
        assert (await outbox.show(1)).state is State.DONE


async def test_success_after_dead_is_refused(db: Database) -> None:
    outbox = Outbox(db)
    await outbox.enqueue(attempts_max=1)
    slow, other = Node(db), Node(db)
    (one,) = (await slow.worker.claim()).messages
    other.clock.advance(ms=LEASE_MS)
    await other.reap()
    before = await outbox.stored()
    assert (await outbox.show(1)).state is State.DEAD
    assert not await slow.worker.done(one)
    assert await outbox.stored() == before
    await other.handles.operator().reissue(1, b"ann")
    before = await outbox.stored()
    assert not await slow.worker.done(one)
    assert await outbox.stored() == before
    await other.turn()
    assert other.sent == [(2, 0)]


@pytest.mark.case("HK-07")
async def test_a_refused_ack_ends_nothing_but_itself(db: Database) -> None:
    outbox = Outbox(db)
    await outbox.some(3)
    node, other = Node(db), Node(db)

    async def slow_at_first(one: Message) -> Failure | None:
        if (one.id, one.attempts) == (1, 0):
            node.clock.advance(ms=LEASE_MS)
            other.clock.advance(ms=LEASE_MS)
            await other.reap()
        return None

    node.fate = slow_at_first
    await node.turn()
    assert node.worker.refused == 3
    for each in (node, other):
        each.clock.advance(ms=1)
    await node.turn()
    assert (await outbox.figures()).done == 3
    assert node.worker.refused == 3


@pytest.mark.case("HK-06")
async def test_a_cancelled_delivery_is_left_to_its_lease(db: Database) -> None:
    """Between the send and the ack: it comes once more, after the lease, and not before."""
    outbox = Outbox(db)
    await outbox.enqueue()
    node, other = Node(db), Node(db)
    reached = asyncio.Event()

    async def hangs(_: Message) -> Failure | None:
        reached.set()
        await asyncio.Event().wait()
        return None

    node.fate = hangs
    delivering = asyncio.ensure_future(node.turn())
    await reached.wait()
    delivering.cancel()
    await asyncio.gather(delivering, return_exceptions=True)
    await other.reap()
    await other.turn()
    assert other.sent == []
    for each in (node, other):
        each.clock.advance(ms=LEASE_MS)
    await other.reap()
    other.clock.advance(ms=1)
    await other.turn()
    assert node.sent + other.sent == [(1, 0), (1, 1)]
    assert (await outbox.show(1)).state is State.DONE


@pytest.mark.case("HK-09")
@pytest.mark.parametrize("kills", [False, True], ids=["raises", "kills its process"])
async def test_poison_becomes_a_dead_letter_and_the_others_go_on(
    db: Database, *, kills: bool
) -> None:
    outbox = Outbox(db)
    await outbox.enqueue(message(payload=b"poison"))
    await outbox.some(2)
    clock = ManualClock(NOW_MS)
    sent: list[tuple[int, int]] = []
    for _ in range(20):
        node = Node(db, clock)  # who was killed starts again, and is another worker
        node.sent = sent

        async def bites(one: Message) -> Failure | None:
            if one.message is not None and one.message.payload == b"poison":
                if kills:
                    raise asyncio.CancelledError
                raise RuntimeError
            return None

        node.fate = bites
        with contextlib.suppress(asyncio.CancelledError):
            await node.turn()
        clock.advance(ms=LEASE_MS + max(RETRY_DELAYS_MS) * 2)
        await node.reap()
        clock.advance(ms=1)
    dead = await outbox.show(1)
    assert (dead.state, dead.attempts) == (State.DEAD, dead.attempts_max)
    assert dead.failure is (Failure.LAPSED if kills else Failure.UNEXPECTED)
    assert [attempts for message_id, attempts in sent if message_id == 1] == list(range(6))
    assert (await outbox.figures()).done == 2


@pytest.mark.case("HK-10")
async def test_what_is_refused_again_and_again_is_tried_less_and_less_and_ends(
    db: Database,
) -> None:
    outbox = Outbox(db)
    await outbox.enqueue()
    node = Node(db)

    async def unavailable(_: Message) -> Failure | None:
        return Failure.UNAVAILABLE

    node.fate = unavailable
    at_ms = []
    for _ in range(600):
        before = len(node.sent)
        await node.turn()
        at_ms += [node.clock.now_ms() - NOW_MS] * (len(node.sent) - before)
        node.clock.advance(ms=5000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(at_ms)]
    assert gaps == list(RETRY_DELAYS_MS)
    assert (await outbox.show(1)).state is State.DEAD
