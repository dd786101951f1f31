"""What a read costs, and what damage does to it: told to who may miss something, to nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from storage import history
from storage.api import Advance, Claim, Delivery
from storage.blocks import Block, Damage
from storage.errors import EntryDamaged
from storage.kv import U64, Space
from storage.meta import read_ends
from storage.topics import TAIL_BLOCKS_MAX, Matches
from tests.storage.harness import A, Database, matching, message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.api import Entry
    from storage.durable import DurableStore
    from storage.kv import ReadTxn, WriteTxn
    from tests.storage.engine.raw import Files

BLOCKS = TAIL_BLOCKS_MAX * 10


class Counting:
    """A ReadTxn that counts blocks of history and steps in all spaces."""

    hides_names = False

    def __init__(self, txn: ReadTxn) -> None:
        self._txn = txn
        self.blocks = 0
        self.steps = 0

    def get(self, space: Space, key: bytes) -> bytes | None:
        self.blocks += space is Space.HISTORY
        self.steps += 1
        return self._txn.get(space, key)

    def scan(self, space: Space, *args: Any, **kwargs: Any) -> Iterator[tuple[bytes, bytes]]:
        for row in self._txn.scan(space, *args, **kwargs):
            self.blocks += space is Space.HISTORY
            self.steps += 1
            yield row


async def filled(files: Files) -> Database:
    """Blocks of ten entries: nine of busy topics, and one in a hundred of them of a rare one."""
    db = files.database()
    await db.open()
    for block in range(BLOCKS):
        busy = [message(b"busy/%d" % (n % 3), b"%d" % block) for n in range(9)]
        rare = [message(b"rare/1", b"%d" % block)] if block % 100 == 7 else []
        await db.append(*busy, *rare)
    return db


def cost(files: Files, after: int, *filters: bytes) -> tuple[list[Entry], Counting]:
    """A whole read of a closed database, and what it did."""

    def work(txn: WriteTxn) -> tuple[list[Entry], Counting]:
        counting = Counting(txn)
        accept = matching(*filters)
        chunk = history.read(
            counting, after, accept, filters=filters, entries_max=10**6, bytes_max=10**9
        )
        assert chunk.through == chunk.head
        return [entry for entry, _ in chunk.entries], counting

    return files.alter(work)


@pytest.mark.parametrize("topic_filter", [b"rare/1", b"rare/+", b"rare/#"])
async def test_a_rare_topic_costs_its_own_blocks_and_the_tail(
    files: Files, topic_filter: bytes
) -> None:
    db = await filled(files)
    await db.stop()
    entries, counting = cost(files, 0, topic_filter)
    assert [int(entry.payload) for entry in entries] == list(range(7, BLOCKS, 100))
    assert counting.blocks <= len(entries) + TAIL_BLOCKS_MAX + 3
    assert counting.steps < BLOCKS / 3


async def test_a_reader_that_missed_little_pays_little_whatever_is_stored(files: Files) -> None:
    db = await filled(files)
    head = (await db.store.log()).head
    await db.stop()
    _, counting = cost(files, head - 5, b"#")
    assert counting.steps < 10
    _, counting = cost(files, head - 5, b"rare/1")
    assert counting.steps < 10


async def test_a_reader_of_everything_scans(files: Files) -> None:
    db = await filled(files)
    await db.stop()
    entries, counting = cost(files, 0, b"busy/#", b"rare/#")
    assert counting.blocks <= BLOCKS + 3
    assert len(entries) == BLOCKS * 9 + len(range(7, BLOCKS, 100))


async def test_the_plan_by_topic_begins_and_ends_anywhere(files: Files) -> None:
    db = await filled(files)
    entries = [entry for entry in await db.history() if entry.topic == b"rare/1"]
    accept = matching(b"rare/1")
    for after in (0, entries[0].offset - 1, entries[0].offset, entries[2].offset + 1):
        expected = [entry for entry in entries if entry.offset > after]
        assert await db.read_all(after, accept, filters=[b"rare/1"]) == expected
        assert await db.read_all(after, accept, filters=[b"rare/1"], entries_max=1) == expected
    await db.reopen()
    assert await db.read_all(0, accept, filters=[b"rare/1", b"none"]) == entries
    await db.stop()


async def test_what_matches_is_remembered_and_new_topics_are_found(files: Files) -> None:
    db = await filled(files)
    matches = Matches()

    async def looked(look_max: int = 1000) -> tuple[list[int] | None, int]:
        """Ids that match rare/+, and what it took."""

        def work(txn: ReadTxn) -> tuple[list[int] | None, int]:
            counting = Counting(txn)
            next_topic = read_ends(txn).next_topic
            ids = matches.of(counting, next_topic, [b"rare/+"], matching(b"rare/+"), look_max)
            return (None if ids is None else list(ids)), counting.steps

        return await cast("DurableStore", db.store)._read(work)

    first, steps = await looked()
    assert first is not None
    assert len(first) == 1
    assert steps >= 1
    assert await looked() == (first, 0)
    for n in range(TAIL_BLOCKS_MAX + 1):
        await db.append(message(b"rare/%d" % (n % 5)), message(b"other/%d" % n))
    second, _ = await looked()
    assert second is not None
    assert second[:1] == first
    assert len(second) == 5
    assert await looked() == (second, 0)
    matches = Matches()
    assert await looked(look_max=2) == (None, 3)
    assert await looked(look_max=3) == (None, 0), "it is not tried again for little more"
    assert (await looked(look_max=10))[0] is not None
    await db.stop()


async def test_a_batch_that_fails_after_it_indexed_the_tail_leaves_the_tail(files: Files) -> None:
    db = files.database()
    await db.open()
    consumer = await db.subscriber(b"dev", b"t/#")
    too_many = Claim(1, tuple(Delivery(n, n, 1) for n in range(1, 300)))
    poison = Advance(consumer.id, A, claims=[too_many])
    for n in range(TAIL_BLOCKS_MAX * 2 + 3):
        offset = (await db.store.log()).head + 1
        entry = message(b"t/%d" % (n % 5))._replace(offset=offset)
        with pytest.raises(AssertionError):
            await db.write(poison, entries=[entry])
        await db.write(entries=[entry])
    read = await db.read_all(0, matching(b"t/3"), filters=[b"t/3"])
    assert [entry.offset for entry in read] == list(range(4, TAIL_BLOCKS_MAX * 2 + 4, 5))
    await db.stop()


# ---------------------------------------------------------------------------------- damage


async def two_topics(files: Files) -> None:
    """Blocks 1-3, 4-6 of a, b, a each, in a database whose index is up to date but for block 7."""
    db = files.database()
    await db.open()
    for _ in range(2):
        await db.append(message(b"a", b"aa"), message(b"b", b"bb"), message(b"a", b"cc"))
    await db.prune(through=0, blocks_max=0)
    await db.append(message(b"c", b"dd"))
    await db.store.close()


async def damaged(db: Database, *topics: bytes) -> int:
    """Where a read of topics is refused; 0 = it is not."""
    try:
        await db.read_all(0, matching(*topics), filters=topics)
    except EntryDamaged as error:
        return error.offset
    return 0


async def test_a_damaged_body_is_told_to_readers_of_its_topic_only(files: Files) -> None:
    await two_topics(files)
    files.flip_block(4, -3)  # in "bb", the payload of 5
    db = files.database()
    await db.open()
    assert await damaged(db, b"a") == 0
    assert await damaged(db, b"b") == 5
    assert await damaged(db, b"#") == 5
    with pytest.raises(EntryDamaged):
        await db.store.fetch([4, 5])
    assert [entry.payload for entry in await db.store.fetch([4, 6])] == [b"aa", b"cc"]
    assert await db.store.check() == ["entry 5 is damaged"]
    await db.store.close()


async def test_a_damaged_message_with_qos_0_was_promised_to_nobody(files: Files) -> None:
    db = files.database()
    await db.open()
    await db.append(message(b"a", b"aa"), message(b"a", b"bb", qos=0), message(b"a", b"cc"))
    await db.store.close()
    files.flip_block(1, -3)  # in "bb"
    await db.open()
    assert [entry.payload for entry in await db.read_all(0, matching(b"a"))] == [b"aa", b"cc"]
    assert await db.store.check() == ["entry 2 is damaged"]
    await db.store.close()


async def test_a_damaged_table_is_told_to_readers_of_any_topic_in_the_block(files: Files) -> None:
    await two_topics(files)
    files.flip_block(4, -6 - 1 - 13)  # the origin of 5
    db = files.database()
    await db.open()
    assert await damaged(db, b"a") == await damaged(db, b"b") == 5
    assert await damaged(db, b"c") == 0
    assert [entry.payload for entry in await db.store.fetch([4, 6])] == [b"aa", b"cc"]
    await db.store.close()


async def test_of_a_damaged_block_the_index_knows_the_topics(files: Files) -> None:
    await two_topics(files)
    files.flip_block(4, 5)  # stored_ms
    db = files.database()
    await db.open()
    assert await damaged(db, b"a") == await damaged(db, b"b") == 4
    assert await damaged(db, b"c") == 0
    assert len((await db.read(4 + 2)).entries) == 1
    with pytest.raises(EntryDamaged):
        await db.store.fetch([6])
    await db.store.close()


async def test_a_damaged_block_that_is_not_indexed_yet_may_be_anybodys(files: Files) -> None:
    await two_topics(files)
    files.flip_block(7, 5)
    db = files.database()
    await db.open()
    for topic in (b"a", b"c", b"none"):
        assert await damaged(db, topic) == 7
    await db.prune(blocks_max=0)  # indexes it, under no topic
    for _ in range(TAIL_BLOCKS_MAX + 2):
        await db.append(message(b"d"))
    assert await damaged(db, b"none") == 7
    pruned = await db.prune(through=7)
    assert pruned.floor == 7
    assert await damaged(db, b"none") == 0
    chunk = await db.read(6, matching(b"none"))
    assert chunk.loss is not None, "it may have been of this topic"
    await db.store.close()


async def test_a_missing_block_is_damage(files: Files) -> None:
    await two_topics(files)
    files.alter(lambda txn: txn.delete(Space.HISTORY, U64.pack(4)))
    db = files.database()
    await db.open()
    assert await damaged(db, b"a") == 4
    with pytest.raises(EntryDamaged):
        await db.store.fetch([5])
    assert "entries 4 to 6 are missing" in await db.store.check()
    await db.store.close()


async def test_a_block_under_another_offset_is_damaged(files: Files) -> None:
    await two_topics(files)

    def swap(txn: WriteTxn) -> None:
        one, four = txn.get(Space.HISTORY, U64.pack(1)), txn.get(Space.HISTORY, U64.pack(4))
        assert one is not None
        assert four is not None
        txn.put(Space.HISTORY, U64.pack(1), four)
        txn.put(Space.HISTORY, U64.pack(4), one)

    files.alter(swap)
    db = files.database()
    await db.open()
    assert await damaged(db, b"a") == 1
    await db.store.close()


async def test_a_prune_of_a_damaged_block_marks_the_topics_that_the_index_knows(
    files: Files,
) -> None:
    await two_topics(files)
    files.flip_block(1, 5)
    db = files.database()
    await db.open()
    assert (await db.prune(through=3)).floor == 3
    for topic in (b"a", b"b"):
        chunk = await db.read(0, matching(topic))
        assert chunk.loss is not None
        assert chunk.loss.topic == topic
    assert (await db.read(0, matching(b"c"))).loss is None
    await db.stop()


def test_a_block_of_nothing_is_damage() -> None:
    with pytest.raises(Damage):
        Block(1, b"")
