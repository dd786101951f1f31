"""A batch: whole or not at all, in order, visible only after its commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from storage.api import (
    Acquire,
    Acquired,
    Advance,
    Batch,
    Claim,
    Delivery,
    Detach,
    Discard,
    DropWill,
    Prune,
    Retain,
    StoreWill,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from storage.errors import ClaimNotHeld, Fenced
from tests.storage.harness import NOW_MS, A, B, Database, message

if TYPE_CHECKING:
    from storage.api import Entry, Op, Outcome

POISON = Retain(cast("Entry", None))
"""An operation that no backend can carry out: a bug of the caller."""


async def test_an_empty_batch_has_no_outcomes(db: Database) -> None:
    assert await db.write() == []


async def test_done_is_called_after_submit_has_returned(db: Database) -> None:
    called = asyncio.Event()
    db.store.submit(Batch(ops=[DropWill(A)]), lambda _: called.set())
    assert not called.is_set()
    await called.wait()


async def test_done_is_called_once_and_in_the_event_loop(db: Database) -> None:
    loop = asyncio.get_running_loop()
    results: list[object] = []

    def done(result: list[Outcome] | BaseException) -> None:
        assert asyncio.get_running_loop() is loop
        results.append(result)

    db.store.submit(Batch(ops=[DropWill(A)]), done)
    await db.write()
    await db.write()
    assert results == [[False]]


async def test_batches_are_applied_and_answered_in_the_order_they_were_submitted(
    db: Database,
) -> None:
    answered: list[int] = []
    for number in range(1, 21):
        batch = Batch([message(payload=b"%d" % number)._replace(offset=number)], [DropWill(A)])
        db.store.submit(batch, lambda _, number=number: answered.append(number))  # type: ignore[misc]
    await db.write()
    assert answered == list(range(1, 21))
    assert [entry.payload for entry in await db.history()] == [b"%d" % n for n in answered]


async def test_what_was_submitted_is_visible_when_it_is_answered(db: Database) -> None:
    entry = message()._replace(offset=1)
    seen: list[Entry] = []
    read = asyncio.Event()

    async def look() -> None:
        seen.extend(await db.history())
        read.set()

    tasks = []
    db.store.submit(Batch([entry], []), lambda _: tasks.append(asyncio.ensure_future(look())))
    await read.wait()
    assert seen == [entry]


async def test_a_read_never_sees_half_a_batch(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    head = 0
    for _ in range(20):
        entries = [message()._replace(offset=head + n) for n in (1, 2, 3)]
        head += 3
        write = asyncio.ensure_future(
            db.write(Advance(consumer.id, A, cursor=head), entries=entries)
        )
        snapshot, log = await db.snapshot(), await db.store.log()
        assert log.head % 3 == 0
        assert snapshot.consumer.cursor <= log.head
        await write
        assert (await db.snapshot()).consumer.cursor == (await db.store.log()).head == head


async def test_entries_are_appended_before_the_operations_apply(db: Database) -> None:
    entries = [message()._replace(offset=1), message()._replace(offset=2)]
    (acquired,) = await db.write(Acquire(b"dev", A, b"", NOW_MS), entries=entries)
    assert isinstance(acquired, Acquired)
    assert acquired.log.head == 2
    assert acquired.snapshot is not None
    assert acquired.snapshot.consumer.cursor == 2


async def test_operations_apply_in_order_and_see_each_other(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    take_over = Acquire(b"dev", B, b"", NOW_MS)
    outcomes = await db.write(
        Unsubscribe(consumer.id, A, (b"t",)),
        Unsubscribe(consumer.id, A, (b"t",)),
        take_over,
        Unsubscribe(consumer.id, A, (b"t",)),
        Discard(consumer.id, B),
        Discard(consumer.id, B),
    )
    assert outcomes[:2] == [(True,), (False,)]
    assert isinstance(outcomes[2], Acquired)
    assert outcomes[3:] == [Fenced(consumer.id), None, Fenced(consumer.id)]


async def test_a_refused_operation_does_not_fail_its_batch(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    outcomes = await db.write(
        Advance(consumer.id, B, received=[1]),
        Advance(consumer.id, A, settled=[9], received=[2]),
        Advance(consumer.id, A, received=[3]),
        entries=[message()._replace(offset=1)],
    )
    assert outcomes == [Fenced(consumer.id), ClaimNotHeld(consumer.id, 9), None]
    assert (await db.snapshot()).inbound == {3}
    assert len(await db.history()) == 1


async def test_an_exception_in_the_middle_leaves_nothing(db: Database) -> None:
    kept, gone, idle = [await db.subscriber(name, b"t/#") for name in (b"kept", b"gone", b"idle")]
    entries = await db.append_each(message(b"t/1"), message(b"t/2"))
    claim = Claim(1, (Delivery(1, 1, 1), Delivery(2, 2, 1)))
    await db.do(
        Advance(kept.id, A, claims=[claim], held=[(1, message(b"r"))], received=[1], cursor=2)
    )
    await db.write(Retain(message(b"r")), StoreWill(Will(b"kept", A, b"", message(b"w"))))
    await db.do(Detach(idle.id, A, NOW_MS))
    before = await db.dump()
    everything: list[Op] = [
        Acquire(b"new", B, b"", NOW_MS),
        Acquire(b"idle", B, b"", NOW_MS),
        Acquire(b"kept", A, b"", NOW_MS, expiry_s=9),
        Advance(
            kept.id,
            A,
            cursor=1,
            claims=[Claim(1, claim.deliveries[1:]), Claim(2, (Delivery(2, 3, 1),))],
            held=[(2, message(b"r"))],
            unheld=[1],
            received=[2],
            released=[1],
            next_packet_id=9,
            checkpoint=True,
        ),
        Subscribe(kept.id, A, (Subscription(b"more", 1, 0), Subscription(b"t/#", 0, 0))),
        Unsubscribe(gone.id, A, (b"t/#",)),
        Discard(gone.id, A),
        Retain(message(b"r", b"")),
        Retain(message(b"r2")),
        StoreWill(Will(b"new", B, b"", message(b"w"))),
        DropWill(A),
        Prune(1, NOW_MS + 1, 100, 0),
    ]
    with pytest.raises(Exception, match=r".*"):
        await db.write(*everything, POISON, entries=[message(b"new")._replace(offset=3)])
    assert await db.dump() == before
    # and not because none of it can be done
    outcomes = await db.write(*everything, entries=[message(b"new")._replace(offset=3)])
    assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [entry.offset for entry in await db.history()] == [2, 3]
    assert entries[1] in await db.history()


async def test_a_batch_that_fails_does_not_take_its_neighbours_along(db: Database) -> None:
    results: list[object] = []
    consumer = await db.subscriber(b"dev", b"t")
    for number in range(1, 6):
        ops: list[Op] = [Advance(consumer.id, A, received=[number])]
        if number == 3:
            ops.append(POISON)
        db.store.submit(Batch(ops=ops), results.append)
    await db.write()
    assert [isinstance(result, BaseException) for result in results] == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert (await db.snapshot()).inbound == {1, 2, 4, 5}


async def test_close_finishes_what_was_submitted(db: Database) -> None:
    results: list[object] = []
    for number in range(1, 11):
        db.store.submit(Batch([message()._replace(offset=number)], [DropWill(A)]), results.append)
    await db.store.close()
    assert results == [[False]] * 10
    await db.reopen()
    assert len(await db.history()) == 10


async def test_close_may_be_called_again(db: Database) -> None:
    await db.append(message())
    await db.store.close()
    await db.store.close()
    await db.reopen()
    assert len(await db.history()) == 1
