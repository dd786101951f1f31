"""Names come from strangers: up to 65,535 bytes of any Unicode, different in a single byte."""

from __future__ import annotations

import unicodedata

import pytest

from storage.api import (
    NAME_BYTES_MAX,
    Acquire,
    Detach,
    Expire,
    Retain,
    StoreWill,
    Unsubscribe,
    Will,
)
from storage.errors import NotOwner
from tests.storage.harness import NOW_MS, A, B, Database, counts, matching, message, wills

LONG = b"n" * NAME_BYTES_MAX

ALIKE: dict[str, tuple[bytes, ...]] = {
    "case": (b"Device", b"device", b"DEVICE"),
    "normalisation": tuple(
        unicodedata.normalize(form, "Ångström").encode() for form in ("NFC", "NFD")
    ),
    "width and look": (b"K", "\u212a".encode(), b"k", "\uff2b".encode()),
    "spaces": (b"a", b" a", b"a ", b"a\t", "a\u00a0".encode(), "\u200ba".encode()),
    "controls": (b"a\x01b", b"a\x02b", b"a\x7fb", "a\u0085b".encode()),
    "last byte of the longest": (LONG, LONG[:-1] + b"m", LONG[:-1]),
    "first byte of the longest": (LONG, b"m" + LONG[1:]),
    "around 400": tuple(b"n" * n for n in (399, 400, 401, 402, 432, 433)),
    "around 511": tuple(b"n" * n for n in (510, 511, 512, 513)),
    "beyond 511": tuple(b"n" * 600 + end for end in (b"", b"a", b"b", b"aa", b"\xc3\xa9")),
    "scripts": tuple(
        text.encode() for text in ("設備", "جهاز", "מכשיר", "🛰️", "ﷺ", "𐍈", "\u0130", "\u0131")
    ),
    "quotes": (b"'", b"''", b'"', b"\\", b"%", b"_", b"*", b"?", b"[a]", b"--", b";"),
    "numbers": (b"1", b"01", b"1.0", b"1e0", b"0x1", b"\xc2\xb9"),
    "prefixes": (b"a", b"aa", b"aaa", b"a/", b"a//", b"/a"),
}


@pytest.fixture(params=ALIKE)
def names(request: pytest.FixtureRequest) -> tuple[bytes, ...]:
    """Names that somebody might take for each other."""
    return ALIKE[request.param]


async def test_client_ids_that_look_alike_are_different_consumers(
    db: Database, names: tuple[bytes, ...]
) -> None:
    ids = {}
    for name in names:
        acquired = await db.do(Acquire(name, A, name[::-1], NOW_MS, expiry_s=0))
        assert not acquired.existed
        ids[name] = acquired.snapshot.consumer.id
    assert len(set(ids.values())) == len(names)
    await db.reopen()
    for name in names:
        consumer = (await db.snapshot(name)).consumer
        assert (consumer.id, consumer.client_id, consumer.user) == (ids[name], name, name[::-1])
    for limit in (1, 3, 1000):
        consumers, _ = await db.pages(limit)
        assert sorted(consumer.client_id for consumer in consumers) == sorted(names)
    await db.do(Acquire(names[0], B, names[0][::-1], NOW_MS, clean=True, create=False))
    assert await db.store.snapshot(names[0]) is None
    for name in names[1:]:
        assert (await db.snapshot(name)).consumer.id == ids[name]
    gone = await db.do(Expire(NOW_MS, 1000))
    assert {expired.client_id for expired in gone} == set(names[1:])


async def test_users_that_look_alike_do_not_own_each_others_sessions(
    db: Database, names: tuple[bytes, ...]
) -> None:
    owner = names[0]
    consumer = (await db.acquire(user=owner)).consumer
    for name in names[1:]:
        assert await db.do(Acquire(b"dev", B, name, NOW_MS)) == NotOwner(consumer.id)
    assert (await db.acquire(user=owner)).consumer.user == owner


async def test_filters_that_look_alike_are_different_filters(
    db: Database, names: tuple[bytes, ...]
) -> None:
    await db.subscriber(b"all", *names)
    one = await db.subscriber(b"one", names[0])
    assert counts(await db.reopen()) == dict.fromkeys(names, 1) | {names[0]: 2}
    assert {sub.filter for sub in (await db.snapshot(b"all")).subscriptions} == set(names)
    gone = await db.do(Unsubscribe(one.id, A, names))
    assert gone == (True, *(False for _ in names[1:]))
    assert counts(await db.reopen()) == dict.fromkeys(names, 1)


async def test_topics_that_look_alike_are_different_topics(
    db: Database, names: tuple[bytes, ...]
) -> None:
    appended = [await db.append(message(name), message(name, origin=name)) for name in names]
    await db.reopen()
    for name, entries in zip(names, appended, strict=True):
        assert await db.read_all(0, matching(name), filters=[name]) == entries
        assert await db.read_all(0, matching(name)) == entries
    assert await db.history() == [entry for entries in appended for entry in entries]


async def test_topics_that_look_alike_are_lost_one_by_one(
    db: Database, names: tuple[bytes, ...]
) -> None:
    consumers = [await db.subscriber(b"c%d" % n, name) for n, name in enumerate(names)]
    await db.append_each(*(message(name) for name in names))
    await db.prune(through=1)
    assert len(consumers) == len(names)
    for number, name in enumerate(names):
        loss = (await db.snapshot(b"c%d" % number)).loss
        assert loss == ((name, 1) if number == 0 else None)


async def test_retained_messages_of_topics_that_look_alike_are_kept_apart(
    db: Database, names: tuple[bytes, ...]
) -> None:
    messages = {name: message(name, b"%d" % n) for n, name in enumerate(names)}
    await db.write(*(Retain(entry) for entry in messages.values()))
    await db.reopen()
    for limit in (1, 2, 1000):
        _, retained = await db.pages(limit)
        assert {entry.topic: entry for entry in retained} == messages
        assert len(retained) == len(names)
    await db.do(Retain(message(names[0], b"")))
    assert {entry.topic for entry in await db.store.retained()} == set(names[1:])


async def test_names_in_a_will_come_back(db: Database, names: tuple[bytes, ...]) -> None:
    left = {
        bytes([n]) * 16: Will(name, bytes([n]) * 16, name, message(name, origin=name))
        for n, name in enumerate(names)
    }
    await db.write(*(StoreWill(will) for will in left.values()))
    assert wills(await db.reopen()) == left


async def test_the_longest_names_all_at_once(db: Database) -> None:
    consumer = (await db.acquire(LONG, user=LONG)).consumer
    await db.subscriber(b"other", LONG)
    appended = await db.append(message(LONG, b"", origin=LONG, properties=LONG))
    assert await db.read_all(0, matching(LONG), filters=[LONG]) == appended
    await db.do(Detach(consumer.id, A, NOW_MS))
    await db.reopen()
    assert (await db.snapshot(LONG)).consumer.user == LONG
    assert await db.history() == appended
