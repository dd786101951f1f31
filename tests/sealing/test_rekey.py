"""Rotation: everything is sealed with the new key beside traffic, and the old one is not needed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from storage.api import Retain, StoreWill, Will
from storage.durable import DurableStore
from storage.errors import SealKeyMissing, SealKeyWrong
from storage.keyring import Keyring
from storage.kv import Space
from storage.lmdb_store import _LmdbDatabase
from storage.sealing import NAMED, SEALED_NAMES, SEALED_ROWS, is_sealed, key_ids
from storage.sqlite_store import _SqliteDatabase
from tests.operations.stores import Files, content, populate
from tests.sealing.conftest import BOTH, NEW, OLD, OTHER
from tests.storage.harness import A, Database, Dump, message

if TYPE_CHECKING:
    from storage.kv import ReadTxn
    from storage.rekey import Resealing


def sealing(store: Database) -> DurableStore:
    assert isinstance(store.store, DurableStore)
    return store.store


async def to_the_end(store: Database) -> list[Resealing]:
    steps = [await sealing(store).reseal()]
    while not steps[-1].is_done:
        steps.append(await sealing(store).reseal())
    return steps


def in_order(dump: Dump) -> Dump:
    """Retained messages in topic order, whatever the store's."""
    return content(replace(dump, retained=sorted(dump.retained)))


def sealed_with(files: Files, *, topics: bool) -> set[int]:
    """Numbers of the keys of all rows that must be sealed; 0 = not sealed, or a name in a key."""
    found: set[int] = set()

    def work(txn: ReadTxn) -> None:
        for space in SEALED_ROWS | (SEALED_NAMES if topics else frozenset()):
            for _, raw in txn.scan(space):
                found.add(int.from_bytes(raw[2:4], "big") if is_sealed(raw) else 0)
        for space in NAMED if topics else ():
            for key, _ in txn.scan(space):
                name = key[8:] if space is Space.SUBSCRIPTION else key
                if name[:1] != b"\xff":
                    found.add(0)

    files.read(work)
    return found


def ids(files: Files) -> list[str]:
    found: list[str] = []
    files.read(lambda txn: found.extend(key_ids(txn)))
    return found


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.rekey.STEP_ROWS", 7)


async def test_what_is_sealed_with_a_key_that_comes_just_before_it_is_read_is_no_damage(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files.store()
    await store.open()
    loop = asyncio.get_running_loop()
    kind = _SqliteDatabase if files.kind == "sqlite" else _LmdbDatabase
    original = kind.read
    rotations = [BOTH]

    async def rotate(keyring: Keyring) -> None:
        await sealing(store).seal_with(keyring)
        await store.write(entries=[message(b"t", b"new")._replace(offset=1)])

    def read(database: Any, work: Any) -> Any:
        if rotations and threading.current_thread() is not threading.main_thread():
            asyncio.run_coroutine_threadsafe(rotate(rotations.pop()), loop).result(10)
        return original(database, work)

    monkeypatch.setattr(kind, "read", read)
    chunk = await store.read()
    assert [entry.payload for entry, _ in chunk.entries] == [b"new"]
    await store.stop()


async def test_after_a_rekey_the_old_key_is_not_needed(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    before = await populate(files)
    files.keyring = BOTH
    store = files.store()
    await store.open()
    steps = await to_the_end(store)
    await store.stop()
    assert steps[-1].key_ids == ("2026",)
    assert sum(step.unreadable for step in steps) == 0
    assert {step.space for step in steps} >= {"history", "held", "retained", "will"}
    assert max(step.looked_at for step in steps) == 7, "a step is bounded"
    assert sealed_with(files, topics=topics) == {2}
    assert ids(files) == ["2026"]
    files.keyring = Keyring([NEW])
    assert in_order(await files.dump()) == in_order(before)
    files.keyring = Keyring([OLD])
    with pytest.raises(SealKeyMissing, match="2026"):
        await files.dump()


async def test_until_it_is_over_the_old_key_is_needed(files: Files) -> None:
    await populate(files)
    files.keyring = BOTH
    store = files.store()
    await store.open()
    await sealing(store).reseal()
    await store.stop()
    files.keyring = Keyring([NEW])
    with pytest.raises(SealKeyMissing, match="2025"):
        await files.dump()


async def test_a_rekey_goes_on_after_a_crash(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    before = await populate(files)
    files.keyring = BOTH
    looked_at = []
    while True:
        store = files.store()
        await store.open()
        step = await sealing(store).reseal()
        looked_at.append(step.looked_at)
        await store.stop()
        if step.is_done:
            break
    store = files.store()
    await store.open()
    again = await to_the_end(store)
    await store.stop()
    # each row was looked at once; the hashed names of rows that are moved come again
    assert sum(looked_at) <= sum(step.looked_at for step in again)
    assert sum(step.written for step in again) == 0
    assert sealed_with(files, topics=topics) == {2}
    files.keyring = Keyring([NEW])
    assert in_order(await files.dump()) == in_order(before)


async def test_a_database_from_before_sealing_is_sealed_by_rekey(
    files: Files, *, topics: bool
) -> None:
    keyring, files.keyring = files.keyring, None
    before = await populate(files)
    files.keyring, files.seal_topics = keyring, topics
    store = files.store()
    await store.open()
    await to_the_end(store)
    await store.stop()
    assert sealed_with(files, topics=topics) == {1}
    assert in_order(await files.dump()) == in_order(before)


async def test_topics_can_be_sealed_later(files: Files) -> None:
    before = await populate(files)
    files.seal_topics = True
    store = files.store()
    await store.open()
    await to_the_end(store)
    await store.stop()
    assert sealed_with(files, topics=True) == {1}
    assert in_order(await files.dump()) == in_order(before)
    raw = b"".join(path.read_bytes() for path in files.data.iterdir() if path.suffix != ".mdb")
    assert b"other/+/x" not in raw, "secure_delete, and the write-ahead log is emptied"


async def test_a_rekey_beside_writes_and_reads_loses_nothing(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    await populate(files)
    store = files.store()
    await store.open()
    head = (await store.store.log()).head
    assert await sealing(store).seal_with(BOTH) == ["2026", "2025"]
    rekey = asyncio.ensure_future(to_the_end(store))
    wrote = 0
    while not rekey.done() or wrote < 20:
        wrote += 1
        await store.append(message(b"a/%d" % wrote, b"m%d" % wrote))
        await store.do(Retain(message(b"r/%d" % (wrote % 5), b"%d" % wrote)))
        await store.do(Retain(message(b"r/%d" % (wrote % 7), b"")))
        await store.do(StoreWill(Will(b"d", A, b"", message(b"w", b"%d" % wrote))))
        await store.subscriber(b"new%d" % wrote, b"n/%d" % wrote, b"a/#")
        assert len(await store.history()) == head + wrote
    await rekey
    await store.stop()
    assert sealed_with(files, topics=topics) == {2}
    files.keyring = Keyring([NEW])
    store = files.store()
    await store.open()
    history = await store.history()
    assert [e.payload for e in history[head:]] == [b"m%d" % n for n in range(1, wrote + 1)]
    assert {m.topic for m in await store.store.retained()} >= {b"state"}
    await store.stop()


async def test_a_ring_without_the_old_key_is_not_taken_over(files: Files) -> None:
    await populate(files)
    store = files.store()
    await store.open()
    with pytest.raises(SealKeyMissing):
        await sealing(store).seal_with(Keyring([NEW]))
    with pytest.raises(SealKeyWrong):
        await sealing(store).seal_with(Keyring([NEW, OTHER]))
    await store.append(message(b"t", b"still with the old one"))
    await store.stop()
    files.keyring = Keyring([OLD])
    await files.dump()
    assert ids(files) == ["2025"]


async def test_a_row_that_does_not_open_is_counted_and_stays_damaged(files: Files) -> None:
    await populate(files)
    files.flip_block(3, 40)
    files.keyring = BOTH
    store = files.store()
    await store.open()
    steps = await to_the_end(store)
    assert sum(step.unreadable for step in steps) == 1
    assert await store.store.check() == ["the block of 3 is damaged"]
    await store.store.close()
    files.keyring = Keyring([NEW])
    store = files.store()
    await store.open()
    assert await store.store.check() == ["the block of 3 is damaged"]
    await store.store.close()
