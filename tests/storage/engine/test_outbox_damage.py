"""A message that cannot be read holds up nobody, and is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from storage.errors import MessageDamaged
from storage.kv import U64, Space
from storage.outbox import (
    ClaimNext,
    Enqueue,
    ExpireMessages,
    Failure,
    Reap,
    Settle,
    State,
    Verdict,
)
from tests.storage.harness import NOW_MS, Database, message
from tests.storage.outbox import HOOK, ONE, Outbox

if TYPE_CHECKING:
    from tests.storage.engine.raw import Files


async def damaged(files: Files, space: Space, message_id: int, **claim: Any) -> Database:
    """Three messages, of which one is spoiled."""
    db = files.database()
    await db.open()
    await Outbox(db).some(3, body=message(expires_ms=NOW_MS + 1000))
    if claim:
        await db.do(ClaimNext(HOOK, ONE, NOW_MS, NOW_MS + 1, limit=3))
    await db.store.close()
    files.flip(space, U64.pack(message_id), -2)
    db = files.database()
    await db.open()
    return db


async def test_a_body_that_cannot_be_read_is_a_dead_letter_at_once(files: Files) -> None:
    db = await damaged(files, Space.OUTBOX_BODY, 1)
    claimed = await Outbox(db).claim()
    assert ([one.id for one in claimed.messages], claimed.unreadable) == ([2, 3], (1,))
    (dead,) = await db.store.outbox.dead_letters(HOOK)
    assert (dead.id, dead.state, dead.failure) == (1, State.DEAD, Failure.UNREADABLE)
    assert (dead.message, dead.attempts) == (None, 0)
    with pytest.raises(MessageDamaged):
        await db.store.outbox.show(1)
    await db.store.close()


async def test_a_row_that_is_damaged_leaves_the_line_and_check_tells(files: Files) -> None:
    db = await damaged(files, Space.OUTBOX, 1)
    claimed = await Outbox(db).claim()
    assert [one.id for one in claimed.messages] == [2, 3]
    assert "message 1 of the outbox is damaged" in await db.store.check()
    with pytest.raises(MessageDamaged):
        await db.store.outbox.show(1)
    await db.store.close()


async def test_sweeps_pass_a_row_that_is_damaged(files: Files) -> None:
    db = await damaged(files, Space.OUTBOX, 2, is_claimed=True)
    credential = (2, ONE, 1)
    settle = Settle(credential, NOW_MS, Verdict.DONE)  # type: ignore[arg-type]
    assert await db.do(settle) == MessageDamaged(2)
    assert (await db.do(Reap(NOW_MS + 1, 10))).waiting == (1, 3)
    assert await db.do(ExpireMessages(NOW_MS + 1000, 10)) == (1, 3)
    await db.store.close()


async def test_a_key_of_a_message_that_is_damaged_goes_on(files: Files) -> None:
    db = files.database()
    await db.open()
    first = await Outbox(db).enqueue(key=b"k", supersede_key=b"s")
    await db.store.close()
    files.flip(Space.OUTBOX, U64.pack(first.id), -2)
    db = files.database()
    await db.open()
    again = await db.do(Enqueue(HOOK, message(), NOW_MS, key=b"k", supersede_key=b"s"))
    assert (again.id, again.is_new) == (2, True)
    assert (await Outbox(db).enqueue(key=b"k")).id == 2
    await db.store.close()
