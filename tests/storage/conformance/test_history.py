"""History: what is appended, and how it is read."""

from __future__ import annotations

import pytest

from storage.api import RETAINED, Entry
from storage.errors import EntryGone
from tests.storage.harness import Database, everything, matching, message


async def test_a_new_history_is_empty(db: Database) -> None:
    log = await db.store.log()
    assert (log.head, log.floor, log.boot) == (0, 0, 1)
    assert await db.read() == ([], 0, 0, None)


async def test_offsets_run_on_from_one_batch_to_the_next(db: Database) -> None:
    await db.append(message(payload=b"1"), message(payload=b"2"))
    await db.append(message(payload=b"3"))
    assert [(e.offset, e.payload) for e in await db.history()] == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert (await db.store.log()).head == 3


@pytest.mark.parametrize("offset", [0, 2, 4, 5], ids=["zero", "again", "gap", "far"])
async def test_an_entry_that_leaves_a_gap_or_comes_again_is_a_bug(
    db: Database, offset: int
) -> None:
    await db.append(message(), message())
    with pytest.raises(AssertionError):
        await db.write(entries=[message()._replace(offset=offset)])
    assert (await db.store.log()).head == 2


async def test_a_gap_inside_a_batch_is_a_bug_and_appends_nothing(db: Database) -> None:
    with pytest.raises(AssertionError):
        await db.write(entries=[message()._replace(offset=n) for n in (1, 2, 4)])
    assert await db.history() == []


async def test_entries_come_back_with_every_field(db: Database) -> None:
    appended = await db.append(
        message(b"a/b", b"\x00\xff\x00", qos=1),
        message(b"a", b"p", qos=2, flags=RETAINED, origin=b"publisher"),
        message(b"/", b"p", expires_ms=1 << 44),
        message(b"a//b/", b"p", properties=bytes(range(256))),
        message("ü/☃".encode(), b"p", qos=2, origin="gerät".encode(), expires_ms=1),
        message(b"all", b"p", qos=2, flags=RETAINED, origin=b"o", expires_ms=7, properties=b"\x01"),
    )
    assert await db.history() == appended
    assert await db.store.fetch([1, 2, 3, 4, 5, 6]) == appended
    await db.reopen()
    assert await db.history() == appended


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_536, 262_144, 1 << 20])
async def test_a_payload_of_any_size_comes_back_as_it_was(db: Database, size: int) -> None:
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    appended = await db.append(
        message(payload=b"before"), message(payload=payload), message(payload=b"after")
    )
    assert await db.history() == appended
    assert await db.store.fetch([2]) == [appended[1]]
    await db.reopen()
    assert await db.store.fetch([3, 2, 1]) == appended[::-1]


async def test_a_batch_of_thousands_is_one_history(db: Database) -> None:
    appended = await db.append(*(message(b"t/%d" % (n % 7), b"%d" % n) for n in range(3000)))
    assert await db.history() == appended
    assert await db.read_all(0, matching(b"t/3"), filters=[b"t/3"]) == appended[3::7]


async def test_many_small_batches_are_one_history(db: Database) -> None:
    appended = await db.append_each(*(message(b"t/%d" % (n % 3), b"%d" % n) for n in range(200)))
    assert await db.history() == appended
    assert await db.read_all(30, matching(b"t/1")) == appended[31::3]


# ------------------------------------------------------------------------------------ read


async def test_read_gives_what_comes_after_a_position(db: Database) -> None:
    appended = await db.append(*(message(payload=b"%d" % n) for n in range(5)))
    assert [entry for entry, _ in (await db.read(2)).entries] == appended[2:]
    assert (await db.read(5)).entries == []
    assert (await db.read(5)).through == 5


async def test_read_takes_what_is_accepted_with_the_qos_it_is_accepted_at(db: Database) -> None:
    first, _, third = await db.append(message(b"a"), message(b"b"), message(b"c"))
    qos = {b"a": 1, b"b": 0, b"c": 2}
    chunk = await db.read(accept=lambda topic: qos[topic])
    assert chunk.entries == [(first, 1), (third, 2)]


async def test_read_that_accepts_nothing_has_still_read_to_the_head(db: Database) -> None:
    await db.append(*(message() for _ in range(20)))
    assert await db.read(3, lambda _: 0) == ([], 20, 20, None)


async def test_read_takes_at_most_the_entries_it_was_asked_for(db: Database) -> None:
    appended = await db.append(*(message(payload=b"%d" % n) for n in range(10)))
    chunk = await db.read(entries_max=4)
    assert [entry for entry, _ in chunk.entries] == appended[:4]
    assert 4 <= chunk.through < 5
    assert chunk.head == 10
    for entries_max in (1, 3, 9, 10, 11):
        assert await db.read_all(0, everything, entries_max=entries_max) == appended


async def test_read_ends_a_chunk_when_it_has_enough_bytes(db: Database) -> None:
    appended = await db.append(*(message(payload=bytes(1000)) for _ in range(50)))
    chunk = await db.read(bytes_max=10_000)
    assert 1 <= len(chunk.entries) <= 10
    assert chunk.through < 50
    assert await db.read_all(0, everything, bytes_max=10_000) == appended


async def test_a_chunk_has_an_entry_however_large_it_is(db: Database) -> None:
    small, large, other = await db.append_each(
        message(b"no"), message(payload=bytes(400_000)), message(payload=bytes(400_000))
    )
    chunk = await db.read(0, matching(b"t"), bytes_max=1)
    assert chunk.entries == [(large, 1)]
    assert chunk.through == large.offset
    assert await db.read_all(0, everything, bytes_max=1) == [small, large, other]


async def test_a_chunk_has_an_entry_however_far_away_it_is(db: Database) -> None:
    await db.append(*(message(b"other", bytes(1000)) for _ in range(700)))
    (wanted,) = await db.append(message(b"t"))
    chunk = await db.read(0, matching(b"t"), entries_max=1, bytes_max=1)
    assert chunk.entries == [(wanted, 1)]


PLANS = [
    (b"a",),
    (b"a/b",),
    (b"a/b", b"a/c"),
    (b"+",),
    (b"a/+",),
    (b"+/b",),
    (b"a/#",),
    (b"#",),
    (b"+/+/+",),
    (b"a/+/c", b"b/#"),
    (b"$SYS/#",),
    (b"$SYS/+",),
    (b"a/b", b"a/+", b"#"),
    (b"nobody/#", b"nothing"),
    (b"/",),
    (b"/+",),
    (b"+/#",),
]
TOPICS = [b"a", b"b", b"a/b", b"a/c", b"a/b/c", b"b/b", b"$SYS/x", b"/", b"/a", b"a/", b"c/d/e"]


async def test_reading_by_topic_and_by_scan_give_the_same(db: Database) -> None:
    history = []
    for batch in range(200):
        topics = [TOPICS[(batch * 5 + n * n) % len(TOPICS)] for n in range(batch % 4 + 1)]
        history += await db.append(*(message(topic) for topic in topics))
    for filters in PLANS:
        accept = matching(*filters)
        for after in (0, 77, 450):
            expected = [e for e in history if e.offset > after and accept(e.topic)]
            for entries_max in (17, 1000):
                planned = await db.read_all(after, accept, filters=filters, entries_max=entries_max)
                assert planned == expected, (filters, after)
                scanned = await db.read_all(after, accept, entries_max=entries_max)
                assert scanned == expected, (filters, after)


async def test_reading_by_topic_goes_on_after_pruning_and_a_restart(db: Database) -> None:
    history = await db.append_each(*(message(TOPICS[n % len(TOPICS)]) for n in range(300)))
    for through in (3, 64, 65, 130, 299):
        await db.prune(through=through)
        await db.reopen()
        for filters in ((b"a/b",), (b"a/+", b"$SYS/x"), (b"#",)):
            accept = matching(*filters)
            for after in (0, through, 200):
                floor = max(after, through)
                expected = [e for e in history if e.offset > floor and accept(e.topic)]
                assert await db.read_all(after, accept, filters=filters) == expected
                assert await db.read_all(after, accept) == expected


async def test_a_rare_topic_is_found_among_thousands(db: Database) -> None:
    rare = []
    for batch in range(8):
        await db.append(*(message(b"often", b"%d" % n) for n in range(400)))
        if batch in (2, 6):
            rare += await db.append(message(b"rare/x"))
    for filters in ((b"rare/x",), (b"rare/+",)):
        accept = matching(*filters)
        assert await db.read_all(0, accept, filters=filters) == rare
        assert await db.read_all(0, accept, filters=filters, entries_max=1) == rare
        assert await db.read_all(rare[0].offset, accept, filters=filters) == rare[1:]
        chunk = await db.read(0, accept, filters=filters, entries_max=1)
        assert rare[0].offset <= chunk.through < rare[1].offset


async def test_read_asks_accept_for_each_topic_and_nothing_else(db: Database) -> None:
    await db.append(message(b"a"), message(b"b"), message(b"a"))
    asked = set()

    def accept(topic: bytes) -> int:
        asked.add(topic)
        return 1

    await db.read(accept=accept)
    assert asked == {b"a", b"b"}


# ----------------------------------------------------------------------------------- fetch


async def test_fetch_gives_entries_in_the_order_asked(db: Database) -> None:
    appended = await db.append_each(*(message(payload=b"%d" % n) for n in range(6)))
    for offsets in ([3], [6, 1], [2, 3, 4], [5, 5], []):
        wanted: list[Entry] = [appended[offset - 1] for offset in offsets]
        assert await db.store.fetch(offsets) == wanted


async def test_fetch_of_a_pruned_entry_says_which_one_is_gone(db: Database) -> None:
    await db.append_each(message(), message(), message())
    await db.prune(through=2)
    with pytest.raises(EntryGone) as gone:
        await db.store.fetch([3, 2])
    assert gone.value == EntryGone(2)


async def test_the_newest_entry_of_a_topic_is_found(db: Database) -> None:
    assert await db.store.newest([b"a", b"b"]) == [0, 0]
    await db.append_each(*[message(b"a" if n % 3 else b"b") for n in range(1, 101)])
    await db.append(message(b"c"), message(b"a"), message(b"c"))
    assert await db.store.newest([b"b", b"a", b"c", b"d", b"a"]) == [99, 102, 103, 0, 102]
    await db.reopen()
    assert await db.store.newest([b"b", b"a", b"c"]) == [99, 102, 103]
    await db.prune(through=99)
    assert await db.store.newest([b"b", b"a"]) == [0, 102]
    assert await db.store.newest([]) == []
