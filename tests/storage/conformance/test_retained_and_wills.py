"""Retained messages, by topic; wills, by incarnation."""

from __future__ import annotations

import pytest

from storage.api import RETAINED, Acquire, Discard, DropWill, Retain, StoreWill, Will
from tests.storage.harness import NOW_MS, A, B, Database, message, wills

# -------------------------------------------------------------------------------- retained


async def test_a_retained_message_comes_back_with_every_field(db: Database) -> None:
    full = message(
        b"r/1",
        b"\x00\xff",
        qos=2,
        flags=RETAINED,
        origin=b"p",
        expires_ms=1 << 44,
        properties=b"\1",
    )
    plain = message(b"r/2", bytes(300_000), qos=0)
    assert await db.write(Retain(plain), Retain(full)) == [None, None]
    assert sorted(await db.store.retained()) == [full, plain]
    await db.reopen()
    assert sorted(await db.store.retained()) == [full, plain]


async def test_a_retained_message_replaces_the_one_of_its_topic(db: Database) -> None:
    other = message(b"r/2", b"other")
    await db.write(Retain(message(b"r", b"old")), Retain(other), Retain(message(b"r", b"new")))
    assert sorted(await db.store.retained()) == [message(b"r", b"new"), other]


async def test_an_empty_payload_removes_the_retained_message(db: Database) -> None:
    other = message(b"r/2")
    await db.write(Retain(message(b"r")), Retain(other))
    assert await db.do(Retain(message(b"r", b""))) is None
    assert await db.store.retained() == [other]
    assert await db.do(Retain(message(b"r", b""))) is None
    assert await db.store.retained() == [other]


async def test_retained_messages_are_not_in_the_history(db: Database) -> None:
    await db.do(Retain(message(b"r")))
    assert (await db.store.log()).head == 0
    assert await db.history() == []


@pytest.mark.parametrize("limit", [1, 2, 5, 12, 100])
async def test_retained_messages_come_in_a_stable_order_a_page_at_a_time(
    db: Database, limit: int
) -> None:
    topics = [b"b", b"a", b"a/", b"a/b", b"A", b"aa", b"/", b"a/b/c", "ä".encode(), b"$x", b"a b"]
    await db.write(*(Retain(message(topic, topic)) for topic in topics))
    _, retained = await db.pages(limit)
    assert sorted(entry.topic for entry in retained) == sorted(topics)
    assert retained == await db.store.retained()
    assert all(entry.payload == entry.topic for entry in retained)


async def test_a_page_goes_on_after_a_topic_that_was_removed_meanwhile(db: Database) -> None:
    await db.write(*(Retain(message(topic)) for topic in (b"a", b"b", b"c")))
    _, second, third = [entry.topic for entry in await db.store.retained()]
    await db.do(Retain(message(second, b"")))
    assert [entry.topic for entry in await db.store.retained(second)] == [third]


# ----------------------------------------------------------------------------------- wills


async def test_a_will_comes_back_with_every_field(db: Database) -> None:
    plain = Will(b"dev", A, b"", message(b"w", b"", qos=0))
    full = Will(
        b"dev",
        B,
        b"ann",
        message(
            b"w", b"\x00", qos=2, flags=RETAINED, origin=b"dev", expires_ms=5, properties=b"\1"
        ),
        delay_s=4_294_967_295,
        due_ms=NOW_MS,
    )
    assert await db.write(StoreWill(plain), StoreWill(full)) == [None, None]
    assert wills(await db.reopen()) == {A: plain, B: full}


async def test_a_will_replaces_that_of_its_own_incarnation_only(db: Database) -> None:
    old, new = Will(b"dev", A, b"", message(b"old")), Will(b"dev", A, b"u", message(b"new"))
    other = Will(b"dev", B, b"", message(b"other"))
    await db.write(StoreWill(old), StoreWill(other), StoreWill(new))
    assert wills(await db.reopen()) == {A: new, B: other}


async def test_a_will_is_dropped_by_its_own_incarnation_only(db: Database) -> None:
    kept = Will(b"dev", A, b"", message(b"w"))
    await db.write(StoreWill(kept), StoreWill(Will(b"dev", B, b"", message(b"w"))))
    assert await db.do(DropWill(b"C" * 16)) is False
    assert await db.do(DropWill(B)) is True
    assert await db.do(DropWill(B)) is False
    assert wills(await db.reopen()) == {A: kept}


async def test_a_will_is_not_touched_by_what_happens_to_the_consumer(db: Database) -> None:
    will = Will(b"dev", A, b"", message(b"w"))
    await db.acquire()
    await db.do(StoreWill(will))
    await db.acquire(incarnation=B)
    assert wills(await db.reopen()) == {A: will}
    consumer = (await db.acquire(incarnation=B, clean=True)).consumer
    await db.do(Discard(consumer.id, B))
    assert wills(await db.reopen()) == {A: will}


async def test_a_will_needs_no_consumer(db: Database) -> None:
    will = Will(b"transient", A, b"", message(b"w"))
    await db.do(StoreWill(will))
    assert wills(await db.reopen()) == {A: will}
    assert wills(await db.reopen()) == {A: will}, "it stays until it is dropped"


async def test_a_will_is_published_and_dropped_in_one_batch(db: Database) -> None:
    await db.write(StoreWill(Will(b"dev", A, b"", message(b"w"))), Acquire(b"dev", A, b"", NOW_MS))
    outcomes = await db.write(DropWill(A), entries=[message(b"w")._replace(offset=1)])
    assert outcomes == [True]
    assert [entry.topic for entry in await db.history()] == [b"w"]
    assert wills(await db.reopen()) == {}
