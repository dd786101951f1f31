"""The outbox alone: what enqueuing, claiming and settling cost, with one and with four workers.

Through the handles that plugins and sinks have (storage.roles), each role on its own connection of
SQLite. Three passes over as many messages: claim all of them, settle all of them, and then both as
a worker does it: claim a batch, settle each of it, claim the next.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from interop.bench.comparing import tell
from interop.bench.disk import sync_ms
from interop.bench.filling import opened
from interop.bench.table import median, number, table
from storage.api import Batch, Entry
from storage.clock import SystemClock
from storage.outbox import Enqueue
from storage.roles import Handles, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from storage.api import Store
    from storage.outbox import Message

__all__ = ["FULL", "TINY", "run"]

FULL: Final = 20_000
TINY: Final = 300
"""Messages."""
WORKERS: Final = (1, 4)
BATCH: Final = 64
"""Messages in one claim."""
ENQUEUED_AT_ONCE: Final = 128
HOOK: Final = b"hook"
BODY: Final = Entry(0, b"bench/topic", b"x" * 100, 1)


class Setting(NamedTuple):
    """A row."""

    store: str
    workers: int

    @property
    def name(self) -> str:
        """As it is written to a file."""
        return f"{self.store} {self.workers}"


class Figures(NamedTuple):
    """Messages a second. cpu_us: of this process, all threads, for a message that is claimed and
    settled. sync_ms: of the disk, before."""

    enqueued_per_s: float
    claimed_per_s: float
    settled_per_s: float
    worked_per_s: float
    cpu_us: float
    sync_ms: float


def run(
    stores: Sequence[str], repeat: int, messages: int
) -> tuple[list[str], dict[str, list[dict[str, float]]]]:
    """Measure each setting, in turns. Gives the table and every figure."""
    settings = [Setting(store, workers) for workers in WORKERS for store in stores]
    runs: dict[Setting, list[Figures]] = {setting: [] for setting in settings}
    for _ in range(repeat):
        for setting in settings:
            with tempfile.TemporaryDirectory(prefix="bench-") as directory:
                figures = asyncio.run(_measure(setting, Path(directory), messages))
            runs[setting].append(figures)
            tell(f"{setting.name:10} {' '.join(map(number, figures))}")
    head = ["store", "workers", "enqueued/s", "claimed/s", "settled/s"]
    head += ["claimed and settled/s", "CPU µs", "a sync, ms"]
    rows = [
        [setting.store, str(setting.workers)]
        + [number(median(values) or 0.0) for values in zip(*runs[setting], strict=True)]
        for setting in settings
    ]
    every = {s.name: [figures._asdict() for figures in runs[s]] for s in settings}
    return [table(head, rows)], every


async def _measure(setting: Setting, directory: Path, messages: int) -> Figures:
    before_ms = sync_ms()
    store = await opened(setting.store, directory, durability="fsync")
    handles = Handles(store, SystemClock())
    try:
        workers = [handles.worker(HOOK) for _ in range(setting.workers)]
        enqueued = await _timed(lambda: _enqueue(store, messages))
        held: list[tuple[Worker, Message]] = []
        claimed = await _timed(lambda: _each(workers, lambda worker: _claim(worker, held)))
        settled = await _timed(lambda: _settle(held))
        await _enqueue(store, messages)
        cpu = time.process_time()
        worked = await _timed(lambda: _each(workers, _work))
        cpu_us = (time.process_time() - cpu) * 1e6 / messages
        (figures,) = await handles.operator().backlog()
        assert figures.done == 2 * messages, "a message was left"
    finally:
        await handles.drain()
        handles.close()
        await store.close()
    rates = (messages / seconds for seconds in (enqueued, claimed, settled, worked))
    return Figures(*rates, cpu_us, before_ms)


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    await work()
    return time.monotonic() - began


async def _enqueue(store: Store, messages: int) -> None:
    """As a feeder does it: many in one transaction."""
    loop = asyncio.get_running_loop()
    clock = SystemClock()
    for start in range(0, messages, ENQUEUED_AT_ONCE):
        count = min(ENQUEUED_AT_ONCE, messages - start)
        now_ms = clock.now_ms()
        done: asyncio.Future[object] = loop.create_future()
        store.submit(Batch([], [Enqueue(HOOK, BODY, now_ms)] * count, now_ms), done.set_result)
        assert isinstance(await done, list), "enqueued"


async def _each(workers: Sequence[Worker], work: Callable[[Worker], Awaitable[None]]) -> None:
    await asyncio.gather(*map(work, workers))


async def _claim(worker: Worker, held: list[tuple[Worker, Message]]) -> None:
    while messages := (await worker.claim(limit=BATCH)).messages:
        held += [(worker, message) for message in messages]


async def _settle(held: Sequence[tuple[Worker, Message]]) -> None:
    for start in range(0, len(held), BATCH * 4):
        some = held[start : start + BATCH * 4]
        assert all(await asyncio.gather(*(worker.done(message) for worker, message in some)))


async def _work(worker: Worker) -> None:
    while messages := (await worker.claim(limit=BATCH)).messages:
        assert all(await asyncio.gather(*map(worker.done, messages)))
