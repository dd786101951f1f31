"""Group commit: what shares a batch, who is told what and when, and what a failure does."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from storage.api import (
    Acquire,
    Acquired,
    Advance,
    Entry,
    Outcome,
    Retain,
    StoreWill,
    Will,
)
from storage.clock import ManualClock
from storage.committer import ENTRY_OVERHEAD_BYTES, LAZY_MS, TAIL_BYTES_MAX, Committer
from storage.errors import Fenced, StoreError, StoreFull, StoreUnavailable
from storage.memory import MemoryStore
from storage.recent import STRETCH_ENTRIES_MAX
from tests.storage.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

A = b"A" * 16


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    faulty = FaultyStore(MemoryStore())
    await faulty.open(now_ms=0)
    yield faulty
    faulty.heal()
    assert await faulty.check() == []
    await faulty.close()


@pytest.fixture
async def committer(store: FaultyStore) -> AsyncIterator[Committer]:
    committer = Committer(store, ManualClock(), head=0, bytes_max=10_000)
    yield committer
    store.heal()
    if not committer._closed:
        await committer.drain()
        committer.close()


def acquire(client_id: bytes = b"dev") -> Acquire:
    return Acquire(client_id, A, b"", 0)


def retain(topic: bytes = b"r", payload: bytes = b"x") -> Retain:
    return Retain(Entry(0, topic, payload, 1))


class Poison:
    """An operation that no store knows: a bug of ours."""


class Saver:
    """A participant that writes one thing for each batch it joined."""

    def __init__(self, committer: Committer) -> None:
        self.committer = committer
        self.collected = 0
        self.saved: list[Outcome] = []
        self.during: Callable[[], None] = lambda: None

    def collect(self) -> None:
        self.collected += 1
        self.during()
        self.committer.submit(retain(), self.saved.append)


async def committed(committer: Committer) -> None:
    """Wait until the batch that is open now is committed."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    committer.after(lambda: done.set_result(None))
    committer.submit(retain(b"committed"), lambda _: None)
    await done


# ------------------------------------------------------------------------------- batches


async def test_what_comes_in_one_turn_of_the_loop_shares_one_commit(
    store: FaultyStore, committer: Committer
) -> None:
    entries = [committer.append(b"t", b"%d" % n, 1) for n in range(5)]
    told: list[Outcome] = []
    committer.submit(acquire(), told.append)
    await committer.drain()
    assert len(store.batches) == 1
    assert store.batches[0].entries == entries
    assert [e.offset for e in entries] == [1, 2, 3, 4, 5]
    assert isinstance(told[0], Acquired)
    assert (committer.head, committer.last) == (5, 5)


async def test_what_comes_while_a_batch_is_under_way_shares_the_next_one_in_order(
    store: FaultyStore, committer: Committer
) -> None:
    gate = store.hang_submit()
    order: list[str] = []
    committer.append(b"t", b"1", 1)
    committer.submit(retain(), lambda _: order.append("first"))
    await gate.reached.wait()
    for n in range(3):
        committer.append(b"t", b"", 1)
        committer.submit(retain(), lambda _, n=n: order.append(f"second {n}"))  # type: ignore[misc]
        await asyncio.sleep(0)
    assert committer.head == 0
    assert len(store.batches) == 1
    gate.release()
    await committer.drain()
    assert order == ["first", "second 0", "second 1", "second 2"]
    assert [len(batch.entries) for batch in store.batches] == [1, 3]
    assert committer.head == committer.last == 4


async def test_after_runs_when_the_batch_is_committed_and_not_before(
    store: FaultyStore, committer: Committer
) -> None:
    gate = store.hang_submit()
    ran = asyncio.Event()
    committer.append(b"t", b"", 1)
    batch = committer.after(ran.set)
    assert batch is committer.open_batch
    await gate.reached.wait()
    assert batch is not committer.open_batch
    assert not ran.is_set()
    gate.release()
    await ran.wait()
    assert committer.head == 1


async def test_outcomes_are_told_before_what_waits_for_the_batch(committer: Committer) -> None:
    """An acknowledgement must not leave when the write it speaks for was refused."""
    order: list[object] = []
    committer.after(lambda: order.append("after"))
    committer.submit(Advance(99, A), order.append)
    await committer.drain()
    assert order == [Fenced(99), "after"]


async def test_a_refused_operation_fails_alone(committer: Committer) -> None:
    told: list[Outcome] = []
    committer.submit(Advance(99, A), told.append)
    committer.submit(acquire(), told.append)
    await committer.drain()
    assert told[0] == Fenced(99)
    assert isinstance(told[1], Acquired)
    with pytest.raises(Fenced):
        await committer.apply(Advance(99, A))


async def test_a_completion_that_fails_does_not_keep_the_others_from_being_told(
    committer: Committer, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(_: object = None) -> None:
        raise RuntimeError("bug")

    told: list[Outcome] = []
    committer.submit(retain(), bug)
    committer.after(bug)
    committer.submit(retain(), told.append)
    await committer.drain()
    assert told == [None]
    assert caplog.text.count("a completion failed") == 2


# --------------------------------------------------------------------------- participants


async def test_a_participant_is_collected_once_for_each_batch_it_joined(
    committer: Committer, store: FaultyStore
) -> None:
    saver = Saver(committer)
    for _ in range(3):
        committer.join(saver, lazy=False)
    await committer.drain()
    assert saver.collected == 1
    assert len(saver.saved) == 1
    committer.join(saver, lazy=False)
    await committer.drain()
    assert saver.collected == 2
    assert len(store.batches) == 2


async def test_a_participant_is_collected_at_the_last_moment(
    committer: Committer, store: FaultyStore
) -> None:
    gate = store.hang_submit()
    committer.append(b"t", b"", 1)
    await gate.reached.wait()
    saver = Saver(committer)
    committer.join(saver, lazy=False)
    for _ in range(5):
        await asyncio.sleep(0)
    assert saver.collected == 0, "the store is busy: more may come"
    gate.release()
    await committer.drain()
    assert saver.collected == 1


async def test_what_is_submitted_while_a_batch_is_collected_is_in_it(
    committer: Committer, store: FaultyStore
) -> None:
    saver = Saver(committer)
    saver.during = lambda: (committer.append(b"t", b"", 1), None)[1]
    committer.join(saver, lazy=False)
    await committer.drain()
    assert len(store.batches) == 1
    assert len(store.batches[0].entries) == 1


async def test_a_participant_may_join_while_a_batch_is_collected(committer: Committer) -> None:
    first, second = Saver(committer), Saver(committer)
    first.during = lambda: committer.join(second, lazy=True)
    committer.join(first, lazy=False)
    await committer.drain()
    assert (first.collected, second.collected) == (1, 1)


async def test_a_participant_that_fails_does_not_stop_the_others(
    committer: Committer, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> None:
        raise RuntimeError("bug")

    broken, sound = Saver(committer), Saver(committer)
    broken.during = bug
    committer.join(broken, lazy=False)
    committer.join(sound, lazy=False)
    committer.append(b"t", b"", 1)
    await committer.drain()
    assert sound.saved == [None]
    assert committer.head == 1
    assert "bug" in caplog.text


async def test_lazy_work_rides_along_with_the_next_batch(
    committer: Committer, store: FaultyStore
) -> None:
    saver = Saver(committer)
    committer.join(saver, lazy=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert store.batches == []
    committer.append(b"t", b"", 1)
    await committed(committer)
    assert len(store.batches) == 1
    assert saver.collected == 1


async def test_lazy_work_goes_alone_after_a_moment(
    committer: Committer, store: FaultyStore
) -> None:
    loop = asyncio.get_running_loop()
    saved: asyncio.Future[Outcome] = loop.create_future()
    saver = Saver(committer)
    saver.saved = _Told(saved)
    began = loop.time()
    committer.join(saver, lazy=True)
    await saved
    assert loop.time() - began >= LAZY_MS / 1000 * 0.9
    assert len(store.batches) == 1


async def test_lazy_work_behind_a_batch_under_way_is_not_forgotten(
    committer: Committer, store: FaultyStore
) -> None:
    gate = store.hang_submit()
    committer.append(b"t", b"", 1)
    await gate.reached.wait()
    saver = Saver(committer)
    saved: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    saver.saved = _Told(saved)
    committer.join(saver, lazy=True)
    await asyncio.sleep(LAZY_MS / 1000 * 2)  # its timer meets a store that is busy
    gate.release()
    await saved


async def _in_quick_succession(committer: Committer, took_s: float) -> None:
    """Two messages, one after the other, by a store that takes so long."""
    for _ in range(2):
        committer.append(b"t", b"", 1)
        await committed(committer)
    committer._took_s = took_s


async def test_an_answer_goes_with_the_next_message_while_they_come_close_together(
    committer: Committer, store: FaultyStore
) -> None:
    await _in_quick_succession(committer, 60)
    saver = Saver(committer)
    committer.join(saver, lazy=True)
    committer.hurry_soon()
    await asyncio.sleep(LAZY_MS / 1000 * 2)
    assert len(store.batches) == 2
    committer.append(b"t", b"", 1)
    await committed(committer)
    assert len(store.batches) == 3
    assert saver.collected == 1


async def test_an_answer_goes_at_once_when_no_message_is_expected(
    committer: Committer, store: FaultyStore
) -> None:
    await _in_quick_succession(committer, 0)
    committer._gap_s = 60
    saver = Saver(committer)
    committer.join(saver, lazy=True)
    committer.hurry_soon()
    await asyncio.sleep(0)
    assert len(store.batches) == 3


async def test_an_answer_whose_next_message_does_not_come_goes_alone(
    committer: Committer, store: FaultyStore
) -> None:
    loop = asyncio.get_running_loop()
    await _in_quick_succession(committer, 0.05)
    saver = Saver(committer)
    saved: asyncio.Future[Outcome] = loop.create_future()
    saver.saved = _Told(saved)
    began = loop.time()
    committer.join(saver, lazy=True)
    committer.hurry_soon()
    await saved
    assert loop.time() - began >= 0.05 * 0.9
    assert len(store.batches) == 3


class _Told(list[Outcome]):
    """A list that tells a future what was put into it."""

    def __init__(self, future: asyncio.Future[Outcome]) -> None:
        super().__init__()
        self.future = future

    def append(self, outcome: Outcome) -> None:
        super().append(outcome)
        self.future.set_result(outcome)


async def test_a_batch_with_nothing_in_it_costs_no_commit(
    committer: Committer, store: FaultyStore
) -> None:
    ran: list[int] = []
    committer.after(lambda: ran.append(1))
    await committer.drain()
    assert ran == [1]
    assert store.batches == []


# ------------------------------------------------------------------------------ failures


async def test_a_batch_that_the_store_cannot_take_is_tried_again_as_it_is(
    committer: Committer, store: FaultyStore
) -> None:
    store.fail_submit(StoreFull("no space"), times=2)
    entry = committer.append(b"t", b"", 1)
    later: list[Entry] = []
    told: list[Outcome] = []
    committer.submit(retain(), told.append)
    health: list[StoreError | None] = []

    def on_health(error: StoreError | None) -> None:
        health.append(error)
        if error is not None:
            later.append(committer.append(b"t", b"later", 1))

    committer.on_health = on_health
    await committer.drain()
    assert told == [None]
    assert health == [StoreFull("no space"), None]
    assert [batch.entries for batch in store.batches] == [[entry]] * 3 + [later]
    assert later[0].offset == entry.offset + 1
    assert committer.failing_since is None


async def test_the_log_says_once_that_the_store_fails_and_once_that_it_is_over(
    committer: Committer, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        store.fail_submit(StoreFull("no space"), times=3)
        committer.append(b"t", b"", 1)
        await committer.drain()
    text = [record.getMessage() for record in caplog.records if "store" in record.name]
    assert len(text) == 4
    assert "cannot write (no space)" in text[0]
    assert "writes again" in text[1]


async def test_a_batch_that_nobody_wants_any_more_does_not_prove_that_the_store_writes(
    committer: Committer, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store.fill()
    health: list[StoreError | None] = []
    committer.on_health = health.append
    for _ in range(3):
        with pytest.raises(StoreFull):
            await committer.apply(acquire())
        await committer.drain()
    store.heal()
    assert isinstance(await committer.apply(acquire()), Acquired)
    text = [record.getMessage() for record in caplog.records if "store" in record.name]
    assert len(text) == 2
    assert "cannot write (no space)" in text[0]
    assert "writes again" in text[1]
    assert health == [StoreFull("no space"), None]


async def test_who_waits_for_an_answer_is_told_at_once_and_leaves_the_batch(
    committer: Committer, store: FaultyStore
) -> None:
    store.fail_submit(StoreUnavailable("I/O error"))
    committer.append(b"t", b"", 1)
    with pytest.raises(StoreUnavailable, match="I/O error"):
        await committer.apply(acquire())
    await committer.drain()
    assert len(store.applied) == 1
    assert store.applied[0].ops == []
    assert await store.snapshot(b"dev") is None


async def test_who_joins_the_line_behind_a_failing_batch_is_told_too(
    committer: Committer, store: FaultyStore
) -> None:
    gate = store.hang_submit()
    committer.append(b"t", b"", 1)
    await gate.reached.wait()
    behind = asyncio.ensure_future(committer.apply(acquire()))
    patient: list[Outcome] = []
    committer.submit(retain(), patient.append)
    await asyncio.sleep(0)
    gate.release(StoreUnavailable("I/O error"))
    with pytest.raises(StoreUnavailable):
        await behind
    await committer.drain()
    assert patient == [None]
    assert await store.snapshot(b"dev") is None


async def test_an_answer_waits_for_no_longer_than_one_try_while_the_store_fails(
    committer: Committer, store: FaultyStore
) -> None:
    store.fail_submit(StoreUnavailable("I/O error"), times=3)
    committer.append(b"t", b"", 1)
    with pytest.raises(StoreUnavailable):
        await committer.apply(acquire())
    with pytest.raises(StoreUnavailable):
        await committer.apply(acquire())
    assert committer.failing_since is not None
    await committer.drain()
    assert isinstance(await committer.apply(acquire()), Acquired)


async def test_a_participant_that_rode_along_is_told_when_the_retry_lands(
    committer: Committer, store: FaultyStore
) -> None:
    store.fail_submit(StoreUnavailable("I/O error"), times=2)
    saver = Saver(committer)
    committer.join(saver, lazy=False)
    await committer.drain()
    assert saver.collected == 1, "the batch is kept, not collected again"
    assert saver.saved == [None]


async def test_an_operation_that_is_poison_fails_alone(
    committer: Committer, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Outcome] = []
    ran: list[int] = []
    entries = [committer.append(b"t", b"", 1) for _ in range(3)]
    committer.submit(retain(b"a"), told.append)
    committer.submit(Poison(), told.append)  # type: ignore[arg-type]
    committer.submit(retain(b"b"), told.append)
    committer.after(lambda: ran.append(committer.head))
    await committer.drain()
    assert (told[0], told[2]) == (None, None)
    assert isinstance(told[1], TypeError)
    assert ran == [3]
    assert [e.offset for e in entries] == [1, 2, 3]
    assert (await store.log()).head == committer.head == 3
    assert [m.topic for m in await store.retained()] == [b"a", b"b"]
    assert committer.failing_since is None
    assert "unexpected" in caplog.text


async def test_a_poisoned_batch_meets_a_full_disk_too(
    committer: Committer, store: FaultyStore
) -> None:
    told: list[Outcome] = []
    committer.append(b"t", b"", 1)
    committer.submit(Poison(), told.append)  # type: ignore[arg-type]
    committer.submit(retain(b"b"), told.append)
    store.fail_submit(StoreFull("no space"), nth=2)  # the entries, by themselves
    later = committer.append(b"t", b"", 1)
    await committer.drain()
    assert isinstance(told[0], TypeError)
    assert told[1] is None
    assert committer.head == later.offset


async def test_who_waits_for_an_answer_in_a_poisoned_batch_is_told_that_the_disk_is_full(
    committer: Committer, store: FaultyStore
) -> None:
    committer.append(b"t", b"", 1)
    committer.submit(Poison(), lambda _: None)  # type: ignore[arg-type]
    answer = asyncio.ensure_future(committer.apply(acquire()))
    await asyncio.sleep(0)
    store.fail_submit(StoreFull("no space"), nth=2)  # the entries, by themselves
    with pytest.raises(StoreFull):
        await answer
    assert committer.full
    assert committer.failing_since is not None
    await committer.drain()
    assert await store.snapshot(b"dev") is None


async def test_who_waits_for_the_next_commit_is_told_of_one_that_was_taken_apart(
    committer: Committer,
) -> None:
    entry = committer.append(b"t", b"", 1)
    committer.submit(Poison(), lambda _: None)  # type: ignore[arg-type]
    await asyncio.wait_for(committer.next_commit(), 10)
    assert committer.head == entry.offset


# -------------------------------------------------------------------------- back pressure


async def test_who_feeds_is_stopped_above_the_limit_and_called_when_there_is_room(
    committer: Committer, store: FaultyStore
) -> None:
    gate = store.hang_submit()
    committer.append(b"t", bytes(6000), 1)
    await gate.reached.wait()
    assert not committer.pressure()
    committer.append(b"t", bytes(6000), 1)
    assert committer.pressure()
    room = asyncio.Event()
    committer.when_room(room.set)
    await asyncio.sleep(0)
    assert not room.is_set()
    gate.release()
    await room.wait()
    assert not committer.over
    assert not committer.pressure()


async def test_pressure_stays_until_half_of_it_is_gone(
    committer: Committer, store: FaultyStore
) -> None:
    first = store.hang_submit()
    committer.append(b"t", bytes(4000), 1)
    await first.reached.wait()
    second = store.hang_submit()
    committer.append(b"t", bytes(7000), 1)
    assert committer.pressure()
    room = asyncio.Event()
    committer.when_room(room.set)
    first.release()
    await second.reached.wait()
    assert not room.is_set(), "7,000 of 10,000 bytes are still there"
    second.release()
    await room.wait()


@pytest.mark.parametrize(
    "feed",
    [
        lambda c: c.append(b"t" * 3000, b"", 1),
        lambda c: c.append(b"t", b"", 1, 0, b"", 0, bytes(3000)),
        lambda c: c.submit(retain(b"r", bytes(3000)), lambda _: None),
        lambda c: c.submit(
            StoreWill(Will(b"c", A, b"", Entry(0, b"t", bytes(3000), 1))), lambda _: None
        ),
    ],
    ids=["topics", "properties", "retained messages", "wills"],
)
async def test_everything_that_a_client_can_make_large_counts(
    committer: Committer, store: FaultyStore, feed: Callable[[Committer], object]
) -> None:
    gate = store.hang_submit()
    committer.append(b"t", b"", 1)
    await gate.reached.wait()
    for _ in range(3):
        feed(committer)
    assert not committer.pressure()
    feed(committer)
    assert committer.pressure()
    gate.release()
    await committer.drain()
    assert not committer.pressure()
    assert committer._bytes == 0


async def test_a_batch_that_fails_still_counts(committer: Committer, store: FaultyStore) -> None:
    store.fail_submit(StoreFull("no space"), times=2)
    committer.append(b"t", bytes(6000), 1)
    committer.submit(retain(b"r", bytes(6000)), lambda _: None, retry=False)
    assert committer.pressure()
    await committer.drain()
    assert not committer.pressure()
    assert committer._bytes == 0


# ------------------------------------------------------------------------------- the tail


async def test_since_returns_everything_after_an_offset_committed_or_not(
    committer: Committer, store: FaultyStore
) -> None:
    entries = [committer.append(b"t", b"%d" % n, 1) for n in range(3)]
    await committed(committer)
    gate = store.hang_submit()
    entries += [committer.append(b"t", b"%d" % n, 1) for n in range(3, 5)]
    await gate.reached.wait()
    entries += [committer.append(b"t", b"%d" % n, 1) for n in range(5, 7)]
    for offset in range(8):
        assert committer.since(offset) == entries[offset:]
    assert committer.since(100) == []
    gate.release()


async def test_what_is_wanted_since_an_offset_is_found_by_topic_in_order(
    store: FaultyStore,
) -> None:
    committer = Committer(store, ManualClock(), head=0)
    topics = (b"a", b"b", b"c")
    entries: list[Entry] = []

    def append(count: int) -> None:
        for _ in range(count):
            entries.append(committer.append(topics[len(entries) % 3], b"", 1))

    append(STRETCH_ENTRIES_MAX - 4)
    await committed(committer)
    append(7)
    await committed(committer)
    gate = store.hang_submit()
    append(25)
    await gate.reached.wait()
    append(4)
    first = len(entries) - 36  # where the second stretch begins
    for wanted in ((b"b",), (b"c", b"a"), (b"d",), topics, None):
        accepted = topics[1:] if wanted is None else wanted
        for offset in (0, 1, 2, *range(first - 5, len(entries) + 1)):
            found = committer.wanted_since(offset, wanted, accepted.__contains__, stretches_max=2)
            assert found is not None
            assert list(found) == [e for e in entries[offset:] if e.topic in accepted]

    def is_near(offset: int, most: int) -> bool:
        return committer.wanted_since(offset, None, bool, stretches_max=most) is not None

    assert not is_near(first - 1, 1)
    assert is_near(first, 1)
    assert not is_near(committer.head - 1, 0)
    assert is_near(committer.head, 0), "what is not committed is in memory alone"
    gate.release()
    committer.close()


async def test_since_says_none_when_it_does_not_remember(store: FaultyStore) -> None:
    committer = Committer(store, ManualClock(), head=0)
    block = bytes(TAIL_BYTES_MAX // 4 - ENTRY_OVERHEAD_BYTES)
    for _ in range(8):
        committer.append(b"t", block, 1)
        await committed(committer)
    assert committer.since(0) is None
    tail = committer.since(7)
    assert tail is not None
    assert [entry.offset for entry in tail] == [8]
    assert committer._recent.size <= TAIL_BYTES_MAX
    restarted = Committer(store, ManualClock(), head=8)
    assert restarted.since(7) is None
    assert restarted.since(8) == []
    committer.close()


# -------------------------------------------------------------------------------- the end


async def test_drain_waits_for_lazy_work_and_for_a_store_that_fails(
    committer: Committer, store: FaultyStore
) -> None:
    store.fail_submit(StoreFull("no space"), times=2)
    saver = Saver(committer)
    committer.join(saver, lazy=True)
    await committer.drain()
    assert saver.saved == [None]
    await committer.drain()


async def test_drain_waits_for_what_completions_submit(
    committer: Committer, store: FaultyStore
) -> None:
    told: list[Outcome] = []
    committer.submit(retain(b"a"), lambda _: committer.submit(retain(b"b"), told.append))
    await committer.drain()
    assert told == [None]
    assert len(store.applied) == 2


async def test_drain_waits_for_a_batch_that_is_taken_apart(committer: Committer) -> None:
    told: list[Outcome] = []
    committer.submit(Poison(), told.append)  # type: ignore[arg-type]
    committer.submit(retain(), told.append)
    committer.submit(retain(), told.append)
    await committer.drain()
    assert len(told) == 3


async def test_drain_of_nothing_returns(committer: Committer) -> None:
    await committer.drain()


async def test_who_still_waits_when_it_closes_is_told(
    committer: Committer, store: FaultyStore
) -> None:
    gate = store.hang_submit()
    flying = asyncio.ensure_future(committer.apply(acquire(b"a")))
    await gate.reached.wait()
    behind = asyncio.ensure_future(committer.apply(acquire(b"b")))
    await asyncio.sleep(0)
    committer.close()
    with pytest.raises(StoreUnavailable):
        await committer.apply(acquire(b"c"))
    with pytest.raises(StoreUnavailable):
        await behind
    gate.release()
    await flying


async def test_closing_while_the_store_fails_leaves_nobody_waiting(
    committer: Committer, store: FaultyStore
) -> None:
    store.fail_submit(StoreFull("no space"), times=1000)
    failing = asyncio.Event()
    committer.on_health = lambda _: failing.set()
    committer.append(b"t", b"", 1)
    await failing.wait()
    waiting = asyncio.ensure_future(committer.apply(acquire()))
    await asyncio.sleep(0)
    committer.close()
    with pytest.raises(StoreUnavailable):
        await waiting


@pytest.mark.parametrize("retry", [False, True])
async def test_who_comes_when_it_is_closed_is_told(committer: Committer, *, retry: bool) -> None:
    committer.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await asyncio.wait_for(committer.apply(retain(), retry=retry), 5)
