"""A refusal is an answer: whatever is damaged, an operation that is refused changed nothing, and
the rest of its batch is committed with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from storage.api import (
    HELD,
    Acquire,
    Advance,
    Bind,
    Claim,
    Delivery,
    Detach,
    Discard,
    Expire,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.durable import DurableStore
from storage.errors import StoreRefusal
from storage.kv import Space
from storage.records import decode_subscription
from tests.storage.harness import NOW_MS, A, B, message

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.api import Op
    from storage.kv import ReadTxn
    from tests.storage.engine.raw import Files
    from tests.storage.harness import Database

Rows = dict[Space, dict[bytes, bytes]]

DAMAGED: Final = (Space.CONSUMER, Space.SUBSCRIPTION, Space.CLAIM, Space.HELD)
"""Each has rows of a consumer with a checksum."""

LATER_MS: Final = NOW_MS + 3_600_000

OPERATIONS: Final[dict[str, Callable[[int], Op]]] = {
    "acquire": lambda _: Acquire(b"dev", B, b"", NOW_MS, expiry_s=5),
    "acquire when it is over": lambda _: Acquire(b"dev", B, b"", LATER_MS),
    "acquire clean": lambda _: Acquire(b"dev", B, b"", NOW_MS, clean=True),
    "advance": lambda i: Advance(i, A, cursor=3, settled=(2,)),
    "advance with a checkpoint": lambda i: Advance(
        i, A, cursor=3, settled=(2,), unheld=(1,), received=(8,), checkpoint=True
    ),
    "advance with a lower cursor": lambda i: Advance(i, A, cursor=0, received=(8,)),
    "subscribe": lambda i: Subscribe(i, A, (Subscription(b"new", 1, 3), Subscription(b"a", 2, 3))),
    "unsubscribe": lambda i: Unsubscribe(i, A, (b"b", b"a")),
    "bind": lambda i: Bind(i, A, 3),
    "detach": lambda i: Detach(i, A, NOW_MS, 7),
    "discard": lambda i: Discard(i, A),
    "expire": lambda _: Expire(LATER_MS, 10),
}


async def rows(db: Database) -> Rows:
    """Every row of the database."""

    def work(txn: ReadTxn) -> Rows:
        return {space: dict(txn.scan(space)) for space in Space}

    assert isinstance(db.store, DurableStore)
    return await db.store._read(work)


async def populated(db: Database) -> int:
    """Three consumers at rest that expire, ``dev`` in the middle with something in every space; its
    number."""
    await db.open()
    numbers = []
    for client_id in (b"before", b"dev", b"behind"):
        consumer = (await db.acquire(client_id, expiry_s=60)).consumer
        subs = (Subscription(b"a", 1, 0), Subscription(b"b", 2, 0))
        await db.do(Subscribe(consumer.id, A, subs))
        numbers.append(consumer.id)
    await db.append(message(b"a"), message(b"b"), message(b"a"))
    claims = (
        Claim(1, (Delivery(1, 1, 1), Delivery(2, 2, 2))),
        Claim(2, (Delivery(1, 3, 1, HELD),)),
    )
    held = ((1, message(b"r")),)
    number = numbers[1]
    await db.do(Advance(number, A, cursor=2, claims=claims, held=held, received=(7,)))
    for one in numbers:
        await db.do(Detach(one, A, NOW_MS, 60))
    return number


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda space: space.name.lower())
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_what_is_refused_because_something_is_damaged_changed_nothing(
    files: Files, operation: str, damaged: Space
) -> None:
    db = files.database()
    number = await populated(db)
    of_dev = [key for key in (await rows(db))[damaged] if key[:8] == number.to_bytes(8, "big")]
    await db.store.close()
    files.flip(damaged, of_dev[0], -1)
    db = files.database()
    await db.open()
    before = await rows(db)
    outcome, other = await db.write(
        OPERATIONS[operation](number), Acquire(b"another", A, b"", NOW_MS)
    )
    assert not isinstance(other, StoreRefusal)
    await db.do(Discard(other.snapshot.consumer.id, A))  # type: ignore[union-attr]
    after = await rows(db)
    for both in (before, after):
        del both[Space.META]
    if isinstance(outcome, StoreRefusal):
        assert after == before
    else:
        assert after != before or operation == "expire"
    await db.store.close()


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda space: space.name.lower())
async def test_a_session_that_is_damaged_holds_up_the_expiry_of_no_other(
    files: Files, damaged: Space
) -> None:
    db = files.database()
    number = await populated(db)
    of_dev = [key for key in (await rows(db))[damaged] if key[:8] == number.to_bytes(8, "big")]
    await db.store.close()
    files.flip(damaged, of_dev[0], -1)
    db = files.database()
    await db.open()
    gone = [one.client_id for one in await db.do(Expire(LATER_MS, 10))]
    assert set(gone) >= {b"before", b"behind"}
    assert await db.do(Expire(LATER_MS, 10)) == ()
    await db.store.close()


async def test_a_subscription_costs_the_same_however_many_there_are(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = files.database()
    await db.open()
    consumer = await db.subscriber(b"dev", *(b"f/%d" % n for n in range(100)))
    looked_at: list[int] = []

    def decode(consumer_id: int, raw: bytes) -> Subscription:
        looked_at.append(consumer_id)
        return decode_subscription(consumer_id, raw)

    monkeypatch.setattr("storage.consumers.decode_subscription", decode)
    for wanted in (
        Subscription(b"new", 1, 0),
        Subscription(b"new", 2, 5),
        Subscription(b"f/1", 2, 5),
    ):
        looked_at.clear()
        await db.do(Subscribe(consumer.id, A, (wanted,)))
        assert len(looked_at) <= 1
    await db.append(message(b"f/1"))
    await db.move(consumer, 1)
    for n in range(90):
        looked_at.clear()
        assert await db.do(Unsubscribe(consumer.id, A, (b"f/%d" % n,))) == (True,)
        assert len(looked_at) <= 3
    await db.stop()
