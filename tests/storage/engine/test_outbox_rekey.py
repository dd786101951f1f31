"""Roles write on connections of their own while keys are rotated: the old key is done with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from storage.clock import ManualClock
from storage.durable import DurableStore
from storage.keyring import Key, Keyring
from storage.outbox import Failure
from storage.roles import Handles
from tests.storage.harness import NOW_MS, Database, OnDisk, message, scratch

if TYPE_CHECKING:
    from typing import Literal

OLD = Key("old", b"1" * 32)
NEW = Key("new", b"2" * 32)


@pytest.mark.parametrize("kind", ["sqlite", "lmdb"])
async def test_what_roles_write_while_keys_are_rotated_opens_with_the_new_one(
    kind: Literal["sqlite", "lmdb"],
) -> None:
    with scratch() as path:
        db = Database(OnDisk(kind, path, Keyring([OLD])))
        await db.open()
        store = db.store
        assert isinstance(store, DurableStore)
        handles = Handles(store, ManualClock(NOW_MS))
        stopped = asyncio.Event()

        async def work() -> None:
            producer, worker = handles.producer(b"hook"), handles.worker(b"hook")
            operator = handles.operator()
            while not stopped.is_set():
                await asyncio.gather(*(producer.enqueue(message()) for _ in range(20)))
                for one in (await worker.claim()).messages:
                    await worker.failed(one, Failure.REJECTED)
                    if one.id % 3 == 0:
                        await operator.reissue(one.id, b"ann")

        working = asyncio.ensure_future(work())
        await asyncio.sleep(0.05)
        await store.seal_with(Keyring([NEW, OLD]))
        is_done = False
        while not is_done:
            is_done = (await store.reseal()).is_done
        await asyncio.sleep(0.05)
        stopped.set()
        await working
        await handles.drain()
        await db.stop()

        again = Database(OnDisk(kind, path, Keyring([NEW])))
        await again.open()
        kept = [one for one in await again.messages() if one.message is not None]
        assert len(kept) > 20
        assert {one.message for one in kept} == {message()}
        await again.stop()
