"""``check`` finds what is wrong: one row of a sound database is spoiled at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from storage.api import HELD, Acquire, Advance, Claim, Delivery, Detach, Retain, StoreWill, Will
from storage.check import check
from storage.errors import RecordDamaged
from storage.kv import U64, U64_U16, U64_U64, Space
from storage.meta import read_ends
from storage.outbox.rows import Row
from storage.records import encode_claim
from tests.storage.harness import NOW_MS, A, B, message
from tests.storage.outbox import fill_outbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.kv import WriteTxn
    from tests.storage.engine.raw import Files

    Spoil: TypeAlias = Callable[[WriteTxn], object]


async def sound(files: Files) -> None:
    """A database with something in every space."""
    db = files.database()
    await db.open()
    consumer = await db.subscriber(b"dev", b"a/#", b"b")
    for _ in range(3):
        await db.append(message(b"a/1"), message(b"b"))
    await db.prune(through=2)
    claim = Claim(1, (Delivery(3, 1, 1), Delivery(1, 2, 1, HELD)))
    await db.write(
        Advance(consumer.id, A, cursor=4, claims=[claim], held=[(1, message())], received=[9]),
        Retain(message(b"r")),
        StoreWill(Will(b"dev", A, b"", message(b"w"))),
    )
    await db.append(message(b"c"))
    await fill_outbox(db, b"dev")
    sleeper = await db.acquire(b"sleeper", B, expiry_s=100)
    await db.do(Detach(sleeper.consumer.id, B, NOW_MS))
    assert await db.store.check() == []
    await db.store.close()


def drop(space: Space, *, last: bool = False) -> Spoil:
    """Delete the first or the last row of a space."""

    def work(txn: WriteTxn) -> None:
        (key, _), *_ = list(txn.scan(space, reverse=last))
        txn.delete(space, key)

    return work


def put(space: Space, key: bytes, value: bytes = b"") -> Spoil:
    return lambda txn: txn.put(space, key, value)


def claim(claim: Claim) -> Spoil:
    """In the place of the first consumer's."""
    return put(Space.CLAIM, U64_U64.pack(1, claim.number), encode_claim(1, claim))


def flip(space: Space, at: int) -> Spoil:
    """Flip a bit in the first row of a space."""

    def work(txn: WriteTxn) -> None:
        (key, value), *_ = list(txn.scan(space))
        spoiled = bytearray(value)
        spoiled[at] ^= 1
        txn.put(space, key, bytes(spoiled))

    return work


def row(message_id: int, **changes: Any) -> Spoil:
    """Change a row of the outbox and nothing that leads to it."""

    def work(txn: WriteTxn) -> None:
        raw = txn.get(Space.OUTBOX, U64.pack(message_id))
        spoiled = Row.unpack(message_id, raw or b"")._replace(**changes)
        txn.put(Space.OUTBOX, U64.pack(message_id), spoiled.pack())

    return work


def ends(**values: int) -> Spoil:
    def work(txn: WriteTxn) -> None:
        found = read_ends(txn)
        for name, value in values.items():
            setattr(found, name, value)
        found.write(txn)

    return work


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (drop(Space.META), "the database cannot be told: its ends is missing"),
        (drop(Space.HISTORY), "history begins with 5, above the floor 2"),
        (drop(Space.HISTORY, last=True), "history ends with 6, the head is 7"),
        (ends(head=8), "history ends with 7, the head is 8"),
        (ends(floor=4), "the block of 3 is below the floor 4"),
        (ends(coarse=9), "coarse 9, floor 2 and head 7 are out of order"),
        (ends(blocks=9), "there are 3 blocks, 9 are counted"),
        (ends(marks=9), "there are 2 marks, 2 in order, 9 counted"),
        (ends(indexed=99), "the index goes to 99, the head is 7"),
        (ends(next_topic=1), "topic 1 is to be given again"),
        (ends(next_consumer=1), "consumer 1: its id is to be given again"),
        (flip(Space.HISTORY, -1), "entry 4 is damaged"),
        (flip(Space.HISTORY, 25), "the block of 3 is damaged"),
        (flip(Space.HISTORY, 20), "the table of the block of 3 is damaged"),
        (drop(Space.TOPIC_INDEX), "the index of topic 1 does not name the block of 3"),
        (put(Space.TOPIC_INDEX, U64_U64.pack(2, 5)), "the index by topic names 5 blocks for 4"),
        (put(Space.TOPIC_INDEX, U64_U64.pack(2, 1)), "the index names the block of 1, which was"),
        (drop(Space.TOPIC), "topic 1 is not found by its name"),
        (put(Space.TOPIC, b"x", U64.pack(1)), "3 topics are found by name, 2 by id"),
        (drop(Space.TOPIC_NAME), "topic 1 has a mark and no name"),
        (put(Space.MARK, U64.pack(1), U64.pack(99)), "topic 1 is gone through 99"),
        (drop(Space.MARK_ORDER), "the mark of topic 1 is not in order"),
        (drop(Space.CLIENT), "it is not found by its client id"),
        (put(Space.CLIENT, b"x", U64.pack(1)), "3 rows of kind client, consumers have 2"),
        (drop(Space.CONSUMER), "rows of kind claim, consumers have 0"),
        (flip(Space.CONSUMER, 40), "what is stored for consumer 1 is damaged"),
        (drop(Space.SUBSCRIPTION), "it has 1 durable subscriptions, 2 are counted"),
        (flip(Space.SUBSCRIPTION, 4), "what is stored for consumer 1 is damaged"),
        (drop(Space.FILTER), "1 filters are counted, consumers have 2"),
        (put(Space.FILTER, b"b", U64.pack(7) + b"b"), "filters are counted, consumers have 2"),
        (flip(Space.CLAIM, 3), "what is stored for consumer 1 is damaged"),
        (claim(Claim(1, (Delivery(3, 1, 1),), 2)), "claim 1 is with a member, and it is no group"),
        (claim(Claim(1, (Delivery(3, 0, 1),))), "a packet id of claim 1 cannot be"),
        (claim(Claim(1, (Delivery(3, 1, 1), Delivery(4, 1, 1)))), "two deliveries have one packet"),
        (put(Space.CLAIM, U64_U64.pack(9, 1)), "2 rows of kind claim, consumers have 1"),
        (drop(Space.HELD), "the held message 1 of a delivery is not there"),
        (flip(Space.HELD, -1), "what is stored for consumer 1 is damaged"),
        (put(Space.INBOUND, U64_U16.pack(1, 0)), "an inbound packet id cannot be"),
        (drop(Space.POSITION), "its row of kind position at"),
        (put(Space.POSITION, U64_U64.pack(1, 9)), "2 rows of kind position, consumers have 1"),
        (drop(Space.EXPIRY), "its row of kind expiry at"),
        (drop(Space.ATTACHED), "its owner is attached, and it is not listed"),
        (put(Space.ATTACHED, U64.pack(2)), "2 rows of kind attached, consumers have 1"),
        (flip(Space.RETAINED, -1), "retained message 0 is damaged"),
        (flip(Space.WILL, -9), "will 0 is damaged"),
        (flip(Space.OUTBOX, 9), "message 1 of the outbox is damaged"),
        (drop(Space.OUTBOX), "the figures of the outbox are not those of its messages"),
        (row(1, has_body=1), "message 1 of the outbox: it has ended and has a body"),
        (row(2, has_body=0), "message 2 of the outbox: it is to be sent and has no body"),
        (row(2, until_ms=0), "message 2 of the outbox: it is claimed, and its times say"),
        (row(2, claim=0), "message 2 of the outbox: it is claimed under no claim"),
        (row(2, claim=9), "message 2 of the outbox: its claim is to be given again"),
        (row(3, key=b"k" * 16), "message 3 of the outbox: it was reissued and has a key"),
        (row(4, due_ms=NOW_MS + 1), "message 4 of the outbox: its row of kind outbox_due is"),
        (flip(Space.OUTBOX_BODY, -1), "message 2 of the outbox: its body is damaged"),
        (drop(Space.OUTBOX_BODY), "message 2 of the outbox: its body is damaged"),
        (put(Space.OUTBOX_BODY, U64.pack(9), b"x"), "5 rows of kind outbox_body, messages have 4"),
        (drop(Space.OUTBOX_DUE), "its row of kind outbox_due is missing"),
        (put(Space.OUTBOX_DUE, bytes(24)), "3 rows of kind outbox_due, messages have 2"),
        (drop(Space.OUTBOX_LEASE), "its row of kind outbox_lease is missing"),
        (drop(Space.OUTBOX_ENDED), "its row of kind outbox_ended is missing"),
        (drop(Space.OUTBOX_KEY), "its row of kind outbox_key is missing"),
        (put(Space.OUTBOX_QUEUE, b"x"), "a row of kind outbox_queue is none"),
        (
            put(Space.OUTBOX_QUEUE, b"nx", U64.pack(9)),
            "has the number 0000000000000009, and no fig",
        ),
        (drop(Space.OUTBOX_QUEUE), "the number of queue 1 is to be given again"),
        (flip(Space.OUTBOX_QUEUE, 5), "the database cannot be told: the ends of its outbox"),
        (drop(Space.OUTBOX_QUEUE, last=True), "has the number 0000000000000002, and no figures"),
        (flip(Space.AUDIT, 5), "audit record 1 is damaged"),
    ],
)
async def test_a_spoiled_row_is_told(
    files: Files, spoil: Spoil, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sound(files)
    files.alter(spoil)
    if sentence.startswith("the database"):  # it cannot be opened
        found = files.alter(check)
    else:
        # the opening would put some of it right
        monkeypatch.setattr("storage.consumers.detach_all", lambda *_: None)
        db = files.database()
        await db.open()
        found = await db.store.check()
        await db.store.close()
    assert any(sentence in wrong for wrong in found), found
    assert not any("\\x" in wrong or "b'" in wrong for wrong in found)


async def test_a_damaged_record_is_neither_resumed_nor_replaced(files: Files) -> None:
    await sound(files)
    files.alter(flip(Space.CONSUMER, 40))
    db = files.database()
    await db.open()
    for clean in (False, True):
        outcome = await db.do(Acquire(b"dev", B, b"", NOW_MS, clean=clean))
        assert outcome == RecordDamaged(1)
    assert (await db.acquire(b"another")).consumer.id == 3
    assert [consumer.client_id for consumer in await db.store.consumers()] == [
        b"another",
        b"sleeper",
    ]
    await db.store.close()
