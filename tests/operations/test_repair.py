"""`check` finds damage, `check --repair` sets it aside, and who lost something is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import pytest

from storage.blocks import GRAVESTONE
from storage.errors import EntryGone, StoreUnusable
from storage.inspection import inspect, repair
from storage.kv import U64, U64_U64, Space
from storage.names import key_of
from storage.outbox import ClaimNext, Enqueue, Failure, State
from tests.operations.stores import ENTRIES, LONG, populate
from tests.storage.harness import NOW_MS, matching, message

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.kv import ReadTxn, WriteTxn
    from storage.repair import Repaired
    from tests.operations.stores import Files

NOBODY: frozenset[bytes] = frozenset()


class Case(NamedTuple):
    """What is damaged; who is told 410, who is left out; offsets that are gone."""

    damage: Callable[[Files], None]
    told: frozenset[bytes] = NOBODY
    removed: frozenset[bytes] = NOBODY
    gone: frozenset[int] = frozenset()


def consumer(files: Files, client_id: bytes) -> bytes:
    """The packed id of a consumer."""
    found = files.read(lambda txn: txn.get(Space.CLIENT, key_of(client_id)))
    assert isinstance(found, bytes)
    return found


def first_key(files: Files, space: Space, start: bytes = b"") -> bytes:
    """The first key of a space from ``start`` on."""

    def work(txn: ReadTxn) -> bytes:
        return next(key for key, _ in txn.scan(space, start))

    found = files.read(work)
    assert isinstance(found, bytes)
    return found


def drop(*rows: tuple[Space, bytes]) -> Callable[[Files], None]:
    """Rows that are missing."""

    def damage(files: Files) -> None:
        def work(txn: WriteTxn) -> None:
            for row in rows:
                assert txn.delete(*row)

        files.write(work)

    return damage


def empty(space: Space) -> Callable[[Files], None]:
    """A space whose rows are all missing."""

    def damage(files: Files) -> None:
        def work(txn: WriteTxn) -> None:
            keys = [key for key, _ in txn.scan(space)]
            assert keys
            for key in keys:
                txn.delete(space, key)

        files.write(work)

    return damage


def flip(first: int, at: int) -> Callable[[Files], None]:
    return lambda files: files.flip_block(first, at)


def flip_own(space: Space, client_id: bytes) -> Callable[[Files], None]:
    """A bit of the first row that a consumer has in a space."""

    def damage(files: Files) -> None:
        files.flip(space, first_key(files, space, consumer(files, client_id)), 5)

    return damage


def blocks(*offsets: int) -> list[tuple[Space, bytes]]:
    return [(Space.HISTORY, U64.pack(offset)) for offset in offsets]


def put(space: Space, key: bytes, value: bytes) -> Callable[[Files], None]:
    return lambda files: files.write(lambda txn: txn.put(space, key, value))


BEHIND = frozenset({b"behind"})
FLYING = frozenset({b"flying"})
NOT_DONE = frozenset({b"behind", b"flying", b"never"})
"""All that are below the newest blocks: nothing tells whose entries these were."""

CASES = {
    # entry n has topic n % 5 of (a/1, b, c, a/2, LONG): 10 is a/1, 11 is b, 12 is c
    "the body of an entry that one has not had": Case(flip(10, -1), BEHIND, gone=frozenset({10})),
    "the body of an entry that everybody had": Case(flip(12, -1), gone=frozenset({12})),
    "the body of an entry of a long topic": Case(flip(14, -1), BEHIND, gone=frozenset({14})),
    "the body of an entry under way": Case(flip(91, -1), FLYING, gone=frozenset({91})),
    "the body of an entry that was received": Case(flip(86, -1), FLYING, gone=frozenset({86})),
    "a block that is indexed": Case(flip(10, 3), BEHIND, gone=frozenset({10})),
    "a block that is indexed and that everybody had": Case(flip(12, 3), gone=frozenset({12})),
    "a block that is not indexed": Case(flip(99, 3), NOT_DONE, gone=frozenset({99})),
    "the names of a block": Case(flip(13, 27), BEHIND, gone=frozenset({13})),
    "a missing block": Case(drop(*blocks(12)), gone=frozenset({12})),
    "missing blocks": Case(drop(*blocks(10, 11, 12)), BEHIND, gone=frozenset({10, 11, 12})),
    "the oldest blocks": Case(drop(*blocks(1, 2)), gone=frozenset({1, 2})),
    "the newest block": Case(drop(*blocks(ENTRIES)), NOT_DONE, gone=frozenset({ENTRIES})),
    "a record": Case(flip_own(Space.CONSUMER, b"behind"), removed=BEHIND),
    "a subscription": Case(flip_own(Space.SUBSCRIPTION, b"behind"), removed=BEHIND),
    "a claim": Case(flip_own(Space.CLAIM, b"flying"), removed=FLYING),
    "a held message": Case(flip_own(Space.HELD, b"flying"), removed=FLYING),
    "all held messages": Case(empty(Space.HELD), removed=FLYING),
    "all names of clients": Case(empty(Space.CLIENT)),
    "all positions": Case(empty(Space.POSITION)),
    "all counts of filters": Case(empty(Space.FILTER)),
    "the index by topic": Case(empty(Space.TOPIC_INDEX)),
    "all topics by name": Case(empty(Space.TOPIC)),
    "an id of nobody": Case(put(Space.ATTACHED, U64.pack(99), b"")),
    "a claim of nobody": Case(put(Space.CLAIM, U64_U64.pack(99, 1), b"\x01")),
    "an inbound id that cannot be": Case(
        lambda files: files.write(
            lambda txn: txn.put(Space.INBOUND, consumer_of(txn, b"done") + b"\x00\x00", b"")
        )
    ),
}


def consumer_of(txn: ReadTxn, client_id: bytes) -> bytes:
    return txn.get(Space.CLIENT, key_of(client_id)) or b""


def removed(done: Repaired) -> set[bytes]:
    return {reset.client_id for reset in done.resets if reset.is_removed}


def told(done: Repaired) -> set[bytes]:
    return {reset.client_id for reset in done.resets if not reset.is_removed}


@pytest.mark.parametrize("name", CASES)
async def test_a_repair_leaves_out_what_is_damaged_and_tells_exactly_who_lost_it(
    files: Files, name: str
) -> None:
    case = CASES[name]
    before = await populate(files)
    case.damage(files)
    assert inspect(files.data).violations

    found, done, kept = repair(files.data, keep_in=files.path / "damaged")

    assert done is not None
    assert found.violations
    assert kept is not None
    assert (kept / files.database.name).exists()
    assert removed(done) == case.removed
    assert told(done) == case.told
    assert inspect(files.data).violations == []
    store = files.store()
    opened = await store.open()
    assert opened.minted == ""
    assert opened.log.generation == before.log[1]
    assert opened.log.head == ENTRIES
    for client_id, snapshot in before.consumers.items():
        after = await store.store.snapshot(client_id)
        if client_id in case.removed:
            assert after is None
            continue
        assert after is not None
        assert (after.consumer, after.claims) == (snapshot.consumer, snapshot.claims)
        assert (after.held, after.inbound) == (snapshot.held, snapshot.inbound)
        assert set(after.subscriptions) == set(snapshot.subscriptions)
        assert (after.loss is not None) == (client_id in case.told)
    assert await store.messages() == before.messages
    assert await store.store.outbox.backlog() == before.figures
    left = [entry for entry in await store.history() if entry.topic != GRAVESTONE]
    assert left == [entry for entry in before.history if entry.offset not in case.gone]
    for offset in case.gone:
        with pytest.raises(EntryGone):
            await store.store.fetch([offset])
    await store.stop()


async def test_the_loss_of_a_repair_is_told_to_positions_that_the_store_does_not_know(
    files: Files,
) -> None:
    await populate(files)
    files.flip_block(10, -1)
    repair(files.data, keep_in=files.path / "damaged")
    store = files.store()
    await store.open()
    lost = await store.read(9, matching(b"a/#"), filters=[b"a/#"])
    assert lost.loss is not None
    assert lost.loss.pruned_through == 10
    assert (await store.read(10, matching(b"a/#"), filters=[b"a/#"])).loss is None
    assert (await store.read(0, matching(b"b"), filters=[b"b"])).loss is None
    assert (await store.read(0, matching(b"b"))).loss is None
    await store.stop()


async def test_pruning_goes_on_over_what_a_repair_left(files: Files) -> None:
    await populate(files)
    files.flip_block(10, -1)
    files.write(lambda txn: txn.delete(Space.HISTORY, U64.pack(20)))
    repair(files.data, keep_in=files.path / "damaged")
    store = files.store()
    await store.open()
    for through in (5, 15, 30, ENTRIES):
        pruned = await store.prune(through=through, marks_max=3)
        assert pruned.floor == through
        assert await store.store.check() == []
    await store.append(message(b"a/1"))
    await store.stop()


async def test_one_entry_of_a_block_is_damaged_and_its_neighbours_stay(files: Files) -> None:
    store = files.store()
    await store.open()
    await store.subscriber(b"on-a", b"a")
    await store.subscriber(b"on-b", b"b")
    await store.append(message(b"a", b"A" * 10), message(b"b", b"B" * 10), message(b"a", b"C" * 10))
    before = await store.dump()
    await store.stop()
    files.flip_block(1, -15)  # in the body of the second
    _, done, _ = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert told(done) == {b"on-b"}
    after = await files.dump()
    assert [entry.offset for entry in after.history] == [1, 2, 3]
    assert [after.history[0], after.history[2]] == [before.history[0], before.history[2]]
    assert after.history[1].topic == GRAVESTONE


async def test_a_damaged_table_takes_only_the_entries_it_damages(files: Files) -> None:
    store = files.store()
    await store.open()
    await store.subscriber(b"on-a", b"a")
    await store.append(message(b"a", b"A" * 10), message(b"a", b"B" * 10), message(b"a", b"C" * 10))
    await store.stop()
    files.flip_block(1, -30 - 13 * 2 + 4)  # the crc of the second row
    _, done, _ = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert told(done) == {b"on-a"}
    assert [entry.payload[:1] for entry in (await files.dump()).history] == [b"A", b"", b"C"]


@pytest.mark.parametrize("row", [b"identity", b"ends", b"format"])
async def test_meta_that_is_damaged_makes_a_new_generation_and_loses_nothing(
    files: Files, row: bytes
) -> None:
    before = await populate(files)
    files.flip(Space.META, row, 1)
    assert inspect(files.data).violations
    _, done, _ = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert removed(done) | told(done) == set()
    after = await files.dump()
    assert after.log[0] == before.log[0]
    if row != b"format":
        assert after.log[1] != before.log[1]
    assert after.log[2] == before.log[2]
    assert (after.history, after.consumers) == (before.history, before.consumers)
    assert (after.retained, after.wills) == (before.retained, before.wills)


def zero_length(files: Files) -> None:
    files.database.write_bytes(b"")


def garbage(files: Files) -> None:
    files.database.write_bytes(bytes(range(256)) * 512)


def halved(files: Files) -> None:
    """Shorter than what was written by more than free pages can explain."""
    size = files.database.stat().st_size
    with files.database.open("r+b") as file:
        file.truncate(4096 if files.kind == "lmdb" else size // 2)


@pytest.mark.parametrize("damage", [zero_length, garbage], ids=lambda d: d.__name__)
async def test_a_file_that_cannot_be_opened_is_set_aside_and_offsets_go_on(
    files: Files, damage: Callable[[Files], None]
) -> None:
    before = await populate(files)
    damage(files)
    (violation,) = inspect(files.data).violations
    assert files.database.name in violation
    spoilt = files.database.read_bytes()
    _, done, kept = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert kept is not None
    assert (kept / files.database.name).read_bytes() == spoilt
    assert json.loads((kept / "repair.json").read_text())["violations"] == [violation]
    after = await files.dump()
    assert after.consumers == {}
    assert after.log[0] == before.log[0]
    assert after.log[1] != before.log[1]
    assert after.log[2:] == (ENTRIES, ENTRIES)  # head and floor: no offset is given again


async def test_a_file_that_was_cut_is_repaired_to_something_sound(files: Files) -> None:
    before = await populate(files)
    halved(files)
    try:
        assert inspect(files.data).violations
    except StoreUnusable as error:  # it cannot even be opened, which says as much
        pytest.fail(str(error))
    _, done, _ = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert inspect(files.data).violations == []
    after = await files.dump()
    assert after.log[2] >= before.log[2]
    for client_id, snapshot in before.consumers.items():
        left = after.consumers.get(client_id)
        if left is None or client_id in told(done) or after.log[1] != before.log[1]:
            continue  # gone, or told
        assert left.claims == snapshot.claims
        assert left.subscriptions == snapshot.subscriptions
        assert left.loss is None


async def test_a_missing_retained_message_and_will_are_told_and_the_rest_stays(
    files: Files,
) -> None:
    before = await populate(files)
    files.flip(Space.RETAINED, key_of(b"state"), 30)
    files.flip(Space.WILL, b"A" * 16, 4)
    assert len(inspect(files.data).violations) == 2
    _, done, _ = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert any("'state'" in sentence for sentence in done.done)
    after = await files.dump()
    assert [entry.topic for entry in after.retained] == [LONG]
    assert after.wills == {}
    assert after.consumers == before.consumers


OUTBOX: dict[str, tuple[Callable[[Files], None], int, str]] = {
    # what is damaged, the message that is lost by it, what is told
    "a message": (
        lambda files: files.flip(Space.OUTBOX, U64.pack(2), 20),
        2,
        "message 2 of the outbox is damaged, left out",
    ),
    "a body that waits": (
        lambda files: files.flip(Space.OUTBOX_BODY, U64.pack(4), -1),
        4,
        "the body of message 4 of the outbox is gone",
    ),
    "a body of a dead letter": (
        drop((Space.OUTBOX_BODY, U64.pack(6))),
        6,
        "the body of message 6 of the outbox is gone",
    ),
    "an audit record": (
        lambda files: files.flip(Space.AUDIT, U64.pack(1), 3),
        0,
        "audit record 1 is damaged, left out",
    ),
    "figures": (
        lambda files: files.flip(Space.OUTBOX_QUEUE, b"q" + U64.pack(1), 5),
        0,
        "the figures of queue 1 of the outbox are damaged",
    ),
    "numbers": (
        lambda files: files.flip(Space.OUTBOX_QUEUE, b"e", 5),
        0,
        "the ends of the outbox are damaged: no number is given again",
    ),
    "what is due": (empty(Space.OUTBOX_DUE), 0, ""),
    "leases": (empty(Space.OUTBOX_LEASE), 0, ""),
    "what has ended": (empty(Space.OUTBOX_ENDED), 0, ""),
    "keys": (empty(Space.OUTBOX_KEY), 0, ""),
    "names of queues": (drop((Space.OUTBOX_QUEUE, b"nhook")), 0, ""),
    "a row of nobody": (put(Space.OUTBOX_LEASE, U64_U64.pack(1, 99), b""), 0, ""),
    "a body of nobody": (put(Space.OUTBOX_BODY, U64.pack(99), b"x"), 0, ""),
}


@pytest.mark.parametrize("name", OUTBOX)
async def test_a_repair_keeps_what_is_sound_of_the_outbox_and_says_what_is_lost(
    files: Files, name: str
) -> None:
    damage, lost, sentence = OUTBOX[name]
    before = await populate(files)
    damage(files)
    assert inspect(files.data).violations
    _, done, _ = repair(files.data, keep_in=files.path / "damaged")
    assert done is not None
    assert sentence in ["", *done.done]
    after = await files.dump()
    assert after.consumers == before.consumers
    assert after.audit == ([] if "audit" in name else before.audit)
    kept = {one.id: one for one in after.messages}
    for one in before.messages:
        if one.id != lost:
            assert kept[one.id] == one
        elif "body" in name:
            unreadable = one.state is State.WAITING
            failure = Failure.UNREADABLE if unreadable else one.failure
            found = kept[one.id]
            assert (found.state, found.message, found.failure) == (State.DEAD, None, failure)
        else:
            assert one.id not in kept
    store = files.store()
    await store.open()
    enqueued = await store.do(Enqueue(b"hook", message(), NOW_MS))
    assert enqueued.id == 7
    assert (await store.do(ClaimNext(b"hook", b"x" * 16, NOW_MS, NOW_MS + 1))).messages[0].claim > 1
    await store.stop()


async def test_a_sound_store_is_not_touched(files: Files) -> None:
    await populate(files)
    inode = files.database.stat().st_ino
    found, done, kept = repair(files.data, keep_in=files.path / "damaged")
    assert (found.violations, done, kept) == ([], None, None)
    assert files.database.stat().st_ino == inode
    assert not (files.path / "damaged").exists()


async def test_a_check_counts_what_there_is(files: Files) -> None:
    await populate(files)
    found = inspect(files.data)
    assert found.mints == ""
    figures = found.figures
    assert figures is not None
    assert (figures.head, figures.floor, figures.entries) == (ENTRIES, 0, ENTRIES)
    assert (figures.sessions, figures.groups) == (4, 1)
    assert (figures.subscriptions, figures.filters) == (8, 7)
    assert (figures.deliveries, figures.held, figures.inbound) == (6, 1, 2)
    assert (figures.retained, figures.wills) == (2, 1)
    assert (figures.outbox_messages, figures.outbox_waiting, figures.outbox_claimed) == (6, 2, 1)
    assert (figures.outbox_dead, figures.audit) == (1, 1)
    assert figures.file_bytes == files.database.stat().st_size
