"""Data directories with a past, written through the store's own interface.

Sessions sleep; their messages are appended in blocks of 512 entries, as a broker under load does.
The first user that comes becomes the owner of a session that is made here.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final, Literal, cast

from storage import open_store
from storage.api import (
    BLOCK_ENTRIES_MAX,
    UNCLAIMED,
    Acquire,
    Acquired,
    Batch,
    Detach,
    Entry,
    Subscribe,
    Subscription,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from interop.bench.packets import Shape
    from storage.api import Op, Outcome, Store

__all__ = ["apply", "fill", "head_and_floor", "opened"]

CONSUMERS_AT_ONCE: Final = 1000
BLOCKS_AT_ONCE: Final = 16


async def apply(store: Store, batch: Batch) -> list[Outcome]:
    """Submit a batch, and wait for its outcomes. Raises what it met."""
    future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()

    def done(result: list[Outcome] | BaseException) -> None:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    store.submit(batch, done)
    outcomes = await future
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if refused:
        raise refused[0]
    return outcomes


async def opened(kind: str, directory: Path, *, durability: Literal["fsync", "os"] = "os") -> Store:
    """A store of this directory, open."""
    store = open_store(cast("Literal['lmdb', 'sqlite']", kind), directory, durability=durability)
    await store.open(now_ms=_now_ms())
    return store


def fill(
    kind: str,
    directory: Path,
    *,
    sessions: Sequence[tuple[str, str]],
    messages: int,
    shape_of: Callable[[int], Shape],
) -> None:
    """Make (client id, filter) sessions, then messages. shape_of: of the message number."""
    asyncio.run(_fill(kind, directory, sessions, messages, shape_of))


async def _fill(
    kind: str,
    directory: Path,
    sessions: Sequence[tuple[str, str]],
    messages: int,
    shape_of: Callable[[int], Shape],
) -> None:
    store = await opened(kind, directory)
    try:
        for start in range(0, len(sessions), CONSUMERS_AT_ONCE):
            await _sleep(store, sessions[start : start + CONSUMERS_AT_ONCE])
        at_once = BLOCK_ENTRIES_MAX * BLOCKS_AT_ONCE
        for first in range(0, messages, at_once):
            numbers = range(first, min(first + at_once, messages))
            entries = [_entry(number, shape_of(number)) for number in numbers]
            await apply(store, Batch(entries, [], _now_ms()))
    finally:
        await store.close()


def _entry(number: int, shape: Shape) -> Entry:
    return Entry(number + 1, shape.topic, shape.payload(number), shape.qos, 0, b"past")


async def _sleep(store: Store, sessions: Sequence[tuple[str, str]]) -> None:
    """Make sessions that sleep."""
    now_ms = _now_ms()
    incarnations = [os.urandom(16) for _ in sessions]
    acquire: list[Op] = [
        Acquire(client_id.encode(), incarnation, UNCLAIMED, now_ms)
        for (client_id, _), incarnation in zip(sessions, incarnations, strict=True)
    ]
    rest: list[Op] = []
    outcomes = await apply(store, Batch([], acquire, now_ms))
    for outcome, (_, topic_filter), incarnation in zip(
        outcomes, sessions, incarnations, strict=True
    ):
        assert isinstance(outcome, Acquired)
        assert outcome.snapshot is not None
        number = outcome.snapshot.consumer.id
        wanted = Subscription(topic_filter.encode(), 1, outcome.log.head)
        rest.append(Subscribe(number, incarnation, (wanted,)))
        rest.append(Detach(number, incarnation, now_ms))
    await apply(store, Batch([], rest, now_ms))


def head_and_floor(kind: str, directory: Path) -> tuple[int, int]:
    """How far the history of a directory goes, and what was pruned of it."""

    async def look() -> tuple[int, int]:
        store = await opened(kind, directory)
        try:
            log = await store.log()
            return log.head, log.floor
        finally:
            await store.close()

    return asyncio.run(look())


def _now_ms() -> int:
    return int(time.time() * 1000)
