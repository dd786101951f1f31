"""Check, backup, migration, repair and rekey of a sealed directory, with its keys and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from storage.api import Retain
from storage.backup import back_up, restore
from storage.errors import SealKeyMissing, SealKeyWrong, StoreUnusable
from storage.inspection import inspect, repair
from storage.keyring import Key, Keyring
from storage.kv import U64, Space
from storage.outbox import ClaimNext, Enqueue, Failure, Settle, Verdict
from storage.rewriting import migrate, rekey
from tests.operations.stores import Files, content, populate
from tests.sealing.conftest import BOTH, NEW, OLD, OTHER
from tests.sealing.test_rekey import ids, in_order, sealed_with
from tests.sealing.test_rows import SECRET, TOPIC, everything_once_unsealed, raw_bytes
from tests.storage.harness import NOW_MS, message

if TYPE_CHECKING:
    from storage.kv import WriteTxn
    from tests.storage.harness import Dump


def same(one: Dump, other: Dump) -> bool:
    return in_order(one) == in_order(other)


async def test_check_without_keys_says_what_it_did_not_see(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    await populate(files)
    seen = inspect(files.data, files.keyring)
    assert (seen.violations, seen.unseen, seen.key_ids) == ([], 0, ["2025"])
    blind = inspect(files.data)
    assert blind.violations == []
    assert blind.unseen > 100
    assert seen.figures is not None
    assert blind.figures is not None
    assert seen.figures.entries == 100
    assert blind.figures.blocks == seen.figures.blocks
    assert blind.figures.sessions == seen.figures.sessions
    assert blind.figures.subscriptions == seen.figures.subscriptions
    with pytest.raises(SealKeyWrong):
        inspect(files.data, Keyring([OTHER]))


async def test_check_finds_a_flipped_bit_with_the_key_only(files: Files) -> None:
    await populate(files)
    files.flip_block(3, 40)
    assert inspect(files.data).violations == []
    assert inspect(files.data, files.keyring).violations == ["the block of 3 is damaged"]


async def test_check_without_keys_finds_what_is_not_sealed(files: Files) -> None:
    await populate(files)
    files.write(lambda txn: txn.put(Space.CLIENT, b"nobody", bytes(8)))
    assert inspect(files.data).violations == ["6 rows of kind client, consumers have 5"]


async def test_backup_and_restore_need_no_key(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    before = await populate(files)
    manifest, violations = back_up(files.data, files.path / "blind", now_ms=5)
    assert (manifest.violations, violations) == (0, [])
    _, violations = back_up(files.data, files.path / "seen", now_ms=5, keyring=files.keyring)
    assert violations == []
    for name in ("blind", "seen"):
        restore(files.path / name, files.path / "restored", keep_in=files.path / f"kept-{name}")
        assert same(await files.dump(data=files.path / "restored"), before)
    files.keyring = None
    with pytest.raises(SealKeyMissing):
        await files.dump(data=files.path / "restored")


@pytest.mark.parametrize("with_keys", [True, False])
async def test_a_migration_moves_sealed_rows_as_they_are(
    files: Files, *, topics: bool, with_keys: bool
) -> None:
    files.seal_topics = topics
    before = await populate(files)
    migrate(
        files.data,
        source=files.kind,
        target=files.other,
        keep_in=files.path / "kept",
        keyring=files.keyring if with_keys else None,
    )
    assert same(await files.dump(files.other), before)


async def test_a_repair_needs_the_keys_and_leaves_out_what_does_not_open(
    files: Files, *, topics: bool
) -> None:
    files.seal_topics = topics
    await populate(files)
    for first in (3, 10, 90):
        files.flip_block(first, 40)
    # found without a key, so that there is something to repair
    files.write(lambda txn: txn.put(Space.CLIENT, b"nobody", bytes(8)))
    with pytest.raises(StoreUnusable, match="needs its keys"):
        repair(files.data, keep_in=files.path / "kept")
    found, done, _ = repair(files.data, keep_in=files.path / "kept", keyring=files.keyring)
    assert len([v for v in found.violations if "is damaged" in v]) == 3
    assert done is not None
    assert done.lost_entries == 3
    assert inspect(files.data, files.keyring).violations == []
    store = files.store()
    await store.open()
    history = await store.history()
    assert [e.payload for e in history if e.payload] == [
        b"m%d" % n for n in range(1, 101) if n not in (3, 10, 90)
    ]
    await store.stop()
    assert b"m50" not in raw_bytes(files)


# ---------------------------------------------------------------------------------- rekey


async def test_a_directory_is_rekeyed_without_a_broker(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    before = await populate(files)
    done = rekey(files.data, BOTH)
    assert (done.key_id, done.unreadable) == ("2026", 0)
    assert sealed_with(files, topics=topics) == {2}
    assert ids(files) == ["2026"]
    files.keyring = Keyring([NEW])
    opened = await files.opened()
    assert opened.minted == "", "nobody has to start again"
    assert same(await files.dump(), before)
    assert rekey(files.data, Keyring([NEW])).written == 0


async def test_a_rekey_without_a_broker_leaves_nothing_in_clear(files: Files) -> None:
    """Whatever was deleted, replaced or written before: the new file has none of it."""
    keyring, files.keyring = files.keyring, None
    await everything_once_unsealed(files)
    before = await populate(files)
    store = files.store()
    await store.open()
    for n in range(50):
        await store.append(message(TOPIC, SECRET * (n * 10)))
        await store.do(Retain(message(TOPIC, SECRET * (n * 10) + b".")))
    await store.do(Retain(message(TOPIC, b"")))
    await store.stop()
    assert SECRET in raw_bytes(files)
    done = rekey(files.data, Keyring([OLD]), seal_topics=True)
    assert done.written > 100
    raw = raw_bytes(files)
    assert SECRET not in raw
    assert TOPIC not in raw
    assert b"other/+/x" not in raw
    files.keyring = keyring
    after = await files.dump()
    assert set(after.consumers) == set(before.consumers)
    assert len(after.history) == len(before.history) + 50


async def test_a_rekey_needs_every_key_and_changes_nothing_without(files: Files) -> None:
    await populate(files)
    for keyring, error in ((Keyring([NEW]), SealKeyMissing), (Keyring([NEW, OTHER]), SealKeyWrong)):
        with pytest.raises(error):
            rekey(files.data, keyring)
    await files.dump()


@pytest.mark.parametrize("step", ["copy", "write", "place"])
async def test_a_rekey_that_dies_leaves_the_old_store(
    files: Files, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = await populate(files)

    class Died(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Died

    name = {"copy": "_Copied.all", "write": "finish", "place": "put_in_place"}[step]
    monkeypatch.setattr(f"storage.rewriting.{name}", die)
    with pytest.raises(Died):
        rekey(files.data, BOTH)
    monkeypatch.undo()
    files.keyring = BOTH
    assert same(await files.dump(), before)
    assert rekey(files.data, BOTH).key_id == "2026"


async def test_a_key_that_was_never_used_up_is_still_told(files: Files) -> None:
    """A rekey to a third key, before the second one was everywhere."""
    before = await populate(files)
    files.keyring = BOTH
    store = files.store()
    await store.open()
    await store.append(message(b"a/1", b"new"))
    await store.stop()
    third = Key("2027", b"3" * 32)
    with pytest.raises(SealKeyMissing):
        rekey(files.data, Keyring([third, NEW]))
    rekey(files.data, Keyring([third, NEW, OLD]))
    files.keyring = Keyring([third])
    after = await files.dump()
    assert after.history[:-1] == before.history
    assert content(after).consumers == content(before).consumers


# --------------------------------------------------------------------------------- outbox


async def test_a_body_in_the_outbox_is_sealed_and_erased_when_it_is_done(files: Files) -> None:
    store = files.store()
    await store.open()
    await store.do(Enqueue(b"hook", message(TOPIC, SECRET), NOW_MS))
    await store.do(Enqueue(b"hook", message(TOPIC, SECRET * 2), NOW_MS))
    assert SECRET not in raw_bytes(files)
    claimed = await store.do(ClaimNext(b"hook", b"w" * 16, NOW_MS, until_ms=NOW_MS + 9, limit=9))
    assert [m.message.payload for m in claimed.messages] == [SECRET, SECRET * 2]
    first, second = claimed.messages
    await store.do(Settle(first.credential, NOW_MS, Verdict.DONE))
    await store.do(Settle(second.credential, NOW_MS, Verdict.DEAD, Failure.REJECTED, erase=True))
    shown = await store.store.outbox.show(first.id)
    assert shown is not None
    assert shown.message is None
    await store.stop()
    assert SECRET not in raw_bytes(files)
    bodies: list[bytes] = []
    files.read(lambda txn: bodies.extend(raw for _, raw in txn.scan(Space.OUTBOX_BODY)))
    assert bodies == []


async def test_a_body_that_does_not_open_is_unreadable(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    store = files.store()
    await store.open()
    for payload in (b"one", b"two", b"three"):
        await store.do(Enqueue(b"hook", message(b"t", payload), NOW_MS))
    await store.stop()

    def swap(txn: WriteTxn) -> None:
        body = txn.get(Space.OUTBOX_BODY, U64.pack(2)) or b""
        txn.put(Space.OUTBOX_BODY, U64.pack(1), body)

    files.write(swap)
    store = files.store()
    await store.open()
    claimed = await store.do(ClaimNext(b"hook", b"w" * 16, NOW_MS, until_ms=NOW_MS + 9, limit=9))
    assert [m.message.payload for m in claimed.messages] == [b"two", b"three"]
    assert claimed.unreadable == (1,)
    told = [r for r in caplog.records if r.name == "amqtt_durable.security"]
    assert len(told) == 1
    await store.store.close()
