"""Sealed rows on disk: nothing can be read, moved, changed or put in their place."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from storage.api import (
    HELD,
    Acquire,
    Acquired,
    Advance,
    Claim,
    Delivery,
    Prune,
    Retain,
    StoreWill,
    Will,
)
from storage.errors import (
    EntryDamaged,
    RecordDamaged,
    SealKeyMissing,
    SealKeyWrong,
    StoreCorrupt,
)
from storage.files import open_database
from storage.keyring import Keyring
from storage.kv import U64, U64_U64, Space
from storage.meta import read_identity
from storage.names import key_of
from storage.sealing import Seals, is_sealed, key_ids, unlock
from tests.operations.stores import Files, content, populate
from tests.sealing.conftest import BOTH, NEW, OLD, OTHER
from tests.storage.harness import A, matching, message

if TYPE_CHECKING:
    from storage.kv import ReadTxn

SECRET = b"the-secret-payload"
TOPIC = b"plans/of-the/secret-topic"


def raw_bytes(files: Files) -> bytes:
    """Everything in the data directory."""
    return b"".join(path.read_bytes() for path in files.data.rglob("*") if path.is_file())


async def everything_once(files: Files) -> None:
    """A message in each place where one may be; then most of it is deleted again."""
    store = files.store()
    await store.open()
    dev = await store.subscriber(b"dev", TOPIC, b"plans/#")
    for size in (1, 300, 5000):
        secret = message(TOPIC, SECRET * size, properties=b"\x26\x00\x01k\x00\x07" + b"secret!")
        await store.append(secret, secret)
        await store.do(
            Advance(
                dev.id,
                A,
                cursor=(await store.store.log()).head,
                claims=[Claim(1, (Delivery(1, 10, 1, HELD),))] if size == 1 else (),
                held=[(1, secret)],
                checkpoint=True,
            )
        )
        await store.do(Retain(secret))
        await store.do(StoreWill(Will(b"dev", A, b"", secret)))
    await store.do(Prune(through=2, before_ms=0, blocks_max=100))
    assert SECRET not in raw_bytes(files)  # while it is open, with its write-ahead log
    await store.stop()


async def test_no_payload_is_anywhere_in_the_files(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    await everything_once(files)
    raw = raw_bytes(files)
    assert SECRET not in raw
    assert b"secret!" not in raw
    assert (TOPIC in raw) == (not topics)
    assert (b"plans/" in raw) == (not topics)
    for key in (OLD.secret, OLD.secret.hex().encode()):
        assert key not in raw


async def test_without_keys_the_files_have_it_in_clear(files: Files) -> None:
    """The search above finds what it looks for."""
    files.keyring = None
    await everything_once_unsealed(files)
    assert SECRET in raw_bytes(files)


async def everything_once_unsealed(files: Files) -> None:
    store = files.store()
    await store.open()
    await store.append(message(TOPIC, SECRET))
    await store.stop()


async def test_everything_comes_back(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    plain = Files(files.path / "plain", files.kind)
    before = await populate(plain)
    sealed = await populate(files)
    assert content(sealed) == replace(
        content(before),
        consumers={
            client_id: replace(
                snapshot,
                consumer=replace(
                    snapshot.consumer, generation=sealed.consumers[client_id].consumer.generation
                ),
            )
            for client_id, snapshot in before.consumers.items()
        },
        retained=sealed.retained,
    )
    assert sorted(sealed.retained) == sorted(before.retained)


# ----------------------------------------------------------------------------------- starting


async def test_a_sealed_database_is_not_opened_without_its_key(files: Files) -> None:
    await populate(files)
    before = raw_bytes(files)
    for keyring, error in (
        (None, SealKeyMissing),
        (Keyring([NEW]), SealKeyMissing),
        (Keyring([OTHER]), SealKeyWrong),
    ):
        files.keyring = keyring
        store = files.store()
        with pytest.raises(error) as caught:
            await store.open()
        assert caught.value.key_id == "2025"  # type: ignore[attr-defined]
        assert "'2025'" in str(caught.value)
    assert raw_bytes(files) == before or files.kind == "lmdb"  # its reader table may differ
    files.keyring = Keyring([OLD])
    await files.dump()


async def test_a_database_from_before_sealing_stays_readable(files: Files, *, topics: bool) -> None:
    keyring, files.keyring = files.keyring, None
    before = await populate(files)
    files.keyring, files.seal_topics = keyring, topics
    after = await files.dump()
    assert content(replace(after, retained=sorted(after.retained))) == content(
        replace(before, retained=sorted(before.retained))
    )
    store = files.store()
    await store.open()
    await store.append(message(b"a/1", SECRET))
    await store.do(Retain(message(b"state", SECRET)))  # takes the place of one that is not sealed
    retained = await store.store.retained()
    assert sorted(m.topic for m in retained) == sorted(m.topic for m in before.retained)
    assert SECRET in {m.payload for m in retained}
    await store.do(Retain(message(b"state", b"")))
    assert len(await store.store.retained()) == len(before.retained) - 1
    assert (await store.history())[-1].payload == SECRET
    await store.stop()
    assert SECRET not in raw_bytes(files)


async def test_topics_stay_sealed_once_they_are(files: Files) -> None:
    files.seal_topics = True
    await populate(files)
    files.seal_topics = False
    store = files.store()
    await store.open()
    await store.append(*[message(TOPIC, b"x")] * 3)
    await store.do(Retain(message(TOPIC, b"x")))
    await store.stop()
    assert TOPIC not in raw_bytes(files)


# ------------------------------------------------------------------------- what does not open


def rows(files: Files, space: Space) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}

    def work(txn: ReadTxn) -> None:
        found.update(txn.scan(space))

    files.read(work)
    return found


def put(files: Files, space: Space, key: bytes, value: bytes) -> None:
    files.write(lambda txn: txn.put(space, key, value))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "amqtt_durable.security"]


async def test_a_block_that_was_moved_does_not_open(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    store = files.store()
    await store.open()
    await store.append_each(message(b"t", b"one"), message(b"t", b"two"), message(b"u", b"three"))
    await store.stop()
    blocks = rows(files, Space.HISTORY)
    put(files, Space.HISTORY, U64.pack(2), blocks[U64.pack(1)])
    store = files.store()
    await store.open()
    with pytest.raises(EntryDamaged) as caught:
        await store.read()
    assert caught.value.offset == 2
    with pytest.raises(EntryDamaged):
        await store.store.fetch([2])
    assert [e.payload for e in await store.store.fetch([1, 3])] == [b"one", b"three"]
    assert await store.store.check() == ["the block of 2 is damaged"]
    assert len(told(caplog)) == 1, "it is told once"
    await store.store.close()


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 20, 30, -1])
async def test_a_flipped_bit_damages_the_block(
    files: Files, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    store = files.store()
    await store.open()
    await store.append_each(message(b"t", b"one"), message(b"t", b"two"))
    await store.stop()
    files.flip_block(2, at)
    store = files.store()
    await store.open()
    with pytest.raises(EntryDamaged):
        await store.store.fetch([2])
    assert [e.payload for e in await store.store.fetch([1])] == [b"one"]
    assert await store.store.check() == ["the block of 2 is damaged"]
    assert len(told(caplog)) == 1
    await store.store.close()


async def test_a_retained_message_opens_only_under_its_topic(
    files: Files, caplog: pytest.LogCaptureFixture, *, topics: bool
) -> None:
    files.seal_topics = topics
    store = files.store()
    await store.open()
    await store.write(Retain(message(b"a", b"1")), Retain(message(b"b", b"2")))
    await store.stop()
    (first, value), (second, _) = sorted(rows(files, Space.RETAINED).items())
    assert (first == key_of(b"a")) == (not topics)
    put(files, Space.RETAINED, second, value)
    store = files.store()
    await store.open()
    assert len(await store.store.retained()) == 1
    assert await store.store.check() == ["retained message 1 is damaged"]
    assert len(told(caplog)) == 1
    await store.store.close()


async def test_a_will_opens_only_under_its_incarnation(files: Files) -> None:
    store = files.store()
    await store.open()
    await store.do(StoreWill(Will(b"dev", A, b"", message(b"w", b"gone"))))
    await store.stop()
    ((incarnation, value),) = rows(files, Space.WILL).items()
    put(files, Space.WILL, bytes(16), value)
    store = files.store()
    opened = await store.open()
    assert [will.incarnation for will in opened.wills] == [incarnation]
    assert await store.store.check() == ["will 0 is damaged"]
    await store.store.close()


async def test_a_held_message_opens_only_for_its_consumer(files: Files) -> None:
    store = files.store()
    await store.open()
    for client_id in (b"one", b"two"):
        consumer = (await store.acquire(client_id)).consumer
        held = [(1, message(b"kept", client_id))]
        claims = [Claim(1, (Delivery(1, 10, 1, HELD),))]
        assert await store.do(Advance(consumer.id, A, claims=claims, held=held)) is None
    await store.stop()
    held_rows = rows(files, Space.HELD)
    put(files, Space.HELD, U64_U64.pack(2, 1), held_rows[U64_U64.pack(1, 1)])
    store = files.store()
    await store.open()
    outcome = await store.do(Acquire(b"two", A, b"", 1))
    assert isinstance(outcome, RecordDamaged)
    assert isinstance(await store.do(Acquire(b"one", A, b"", 1)), Acquired)
    await store.store.close()


async def test_a_row_of_another_database_does_not_open(files: Files) -> None:
    for data in ("other", files.kind):
        store = files.store(data=files.path / data)
        await store.open()
        await store.append(message(b"t", data.encode()))
        await store.stop()
    other = Files(files.path, files.kind)
    database = open_database(files.path / "other" / files.database.name, files.kind)
    value = database.read(lambda txn: txn.get(Space.HISTORY, U64.pack(1)))
    database.close()
    assert value is not None
    put(other, Space.HISTORY, U64.pack(1), value)
    store = files.store()
    await store.open()
    with pytest.raises(EntryDamaged):
        await store.store.fetch([1])
    await store.store.close()


async def test_a_row_that_is_not_sealed_is_not_taken_for_one_of_ours(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """Who can write to the file cannot put a message of his own into a sealed database."""
    plain = Files(files.path / "plain", files.kind)
    for some in (plain, files):
        store = some.store()
        await store.open()
        await store.append(message(b"t", b"forged"))
        await store.stop()
    put(files, Space.HISTORY, U64.pack(1), rows(plain, Space.HISTORY)[U64.pack(1)])
    store = files.store()
    await store.open()
    with pytest.raises(EntryDamaged):
        await store.store.fetch([1])
    assert len(told(caplog)) == 1
    await store.store.close()


async def test_what_is_logged_has_no_payload_and_no_key(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await everything_once(files)
    files.flip_block(3, 40)
    store = files.store()
    await store.open()
    with pytest.raises(EntryDamaged) as caught:
        await store.read()
    await store.store.close()
    text = caplog.text + str(caught.value) + repr(store.store)
    assert "secret-payload" not in text
    assert OLD.secret.hex() not in text


def test_a_reader_takes_a_database_as_it_is(files: Files) -> None:
    """``unlock`` for those who only look: nothing is written, whatever keys they have."""
    database = open_database(files.path / files.database.name, files.kind, create=True)
    try:
        assert unlock(database, "00" * 16, BOTH, path="x", is_readonly=True) is None
        assert database.read(key_ids) == []
    finally:
        database.close()


async def test_every_value_of_a_sealed_space_is_sealed(files: Files, *, topics: bool) -> None:
    files.seal_topics = topics
    await populate(files)
    spaces = [Space.HISTORY, Space.HELD, Space.RETAINED, Space.WILL]
    names = [Space.TOPIC_NAME, Space.FILTER, Space.SUBSCRIPTION]

    def work(txn: ReadTxn) -> None:
        read_identity(txn)
        for space in spaces + names * topics:
            values = [value for _, value in txn.scan(space)]
            assert values
            assert all(map(is_sealed, values))

    files.read(work)


def test_a_value_opens_only_in_its_space_under_its_key_in_its_database(files: Files) -> None:
    database = open_database(files.path / files.database.name, files.kind, create=True)
    try:
        here = unlock(database, "00" * 16, BOTH, path="x", is_new=True)
        assert here is not None
        other = Seals("11" * 16, here._ciphers, here.current, here._state)
    finally:
        database.close()
    sealed = here.seal(Space.WILL, b"k" * 16, b"value")
    assert here.try_open(Space.WILL, b"k" * 16, sealed) == b"value"
    assert here.try_open(Space.HELD, b"k" * 16, sealed) is None
    assert here.try_open(Space.WILL, b"K" * 16, sealed) is None
    assert other.try_open(Space.WILL, b"k" * 16, sealed) is None
    for at in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[at] ^= 1
        assert here.try_open(Space.WILL, b"k" * 16, bytes(flipped)) is None
        assert here.try_open(Space.WILL, b"k" * 16, sealed[:at]) is None


async def test_a_topic_whose_name_does_not_open_hides_no_message(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads by wildcard looks through the whole history then."""
    monkeypatch.setattr("storage.history.TAIL_BLOCKS_MAX", 3)
    monkeypatch.setattr("storage.topics.TAIL_BLOCKS_MAX", 3)
    files.seal_topics = True
    store = files.store()
    await store.open()
    await store.append_each(*[message(b"rare/1" if n == 2 else b"t") for n in range(30)])
    await store.stop()
    for number in (1, 2):
        files.flip(Space.TOPIC_NAME, U64.pack(number), 40)
    store = files.store()
    await store.open()
    found = await store.read_all(0, matching(b"rare/#"), filters=[b"rare/#"])
    assert [entry.offset for entry in found] == [3]
    found = await store.read_all(0, matching(b"rare/1"), filters=[b"rare/1"])
    assert [entry.offset for entry in found] == [3]
    await store.store.close()


async def test_a_filter_that_does_not_open_refuses_to_start(files: Files) -> None:
    """Without it the messages of a session would not be logged."""
    files.seal_topics = True
    store = files.store()
    await store.open()
    await store.subscriber(b"dev", b"t/#")
    await store.stop()
    ((key, _),) = rows(files, Space.FILTER).items()
    files.flip(Space.FILTER, key, 40)
    with pytest.raises(StoreCorrupt, match="filter"):
        await files.store().open()
    with pytest.raises(StoreCorrupt):
        await files.store().open()


async def test_many_topics_are_found_by_their_names_and_by_wildcards(files: Files) -> None:
    """The index by topic serves exact filters and, through names, wildcards."""
    files.seal_topics = True
    store = files.store()
    await store.open()
    long = b"long/" + b"x" * 65_000
    names = [b"a/%d/b" % n for n in range(300)] + [long]
    for at in range(0, 301, 3):
        await store.append(*[message(name, name[:20]) for name in names[at : at + 3]])
    for topic_filter, count in ((b"a/7/b", 1), (b"a/+/b", 300), (b"long/#", 1), (long, 1)):
        found = await store.read_all(0, matching(topic_filter), filters=[topic_filter])
        assert len(found) == count
    await store.stop()
    assert b"long/xxx" not in raw_bytes(files)


async def test_what_is_deleted_is_overwritten_in_sqlite(files: Files) -> None:
    """The ciphertext of what was settled is gone from the file, not only from the tree. A free page
    of LMDB keeps it until the page is used again."""
    store = files.store()
    await store.open()
    await store.do(Retain(message(b"t", SECRET * 200)))
    await store.append(message(b"t", SECRET * 2000))
    await store.stop()
    sealed = [*rows(files, Space.RETAINED).values(), *rows(files, Space.HISTORY).values()]
    assert all(raw[-64:] in raw_bytes(files) for raw in sealed)
    store = files.store()
    await store.open()
    await store.do(Retain(message(b"t", b"")))
    await store.do(Prune(through=1, before_ms=0, blocks_max=10))
    await store.stop()
    assert [*rows(files, Space.RETAINED), *rows(files, Space.HISTORY)] == []
    if files.kind == "sqlite":
        assert not any(raw[-64:] in raw_bytes(files) for raw in sealed)
