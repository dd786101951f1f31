"""The store alone, without a broker: what a commit costs, and what it carries.

One batch is under way at a time, as the broker's committer does it. ``append + Advance`` is what a
live QoS 1 session writes: entries, the claims of their deliveries, and the claims that were settled
meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

from interop.bench.comparing import tell
from interop.bench.disk import sync_ms
from interop.bench.filling import apply, opened
from interop.bench.table import median, number, table
from storage.api import (
    UNCLAIMED,
    Acquire,
    Acquired,
    Advance,
    Batch,
    Claim,
    Delivery,
    Entry,
    Subscribe,
    Subscription,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.api import Op, Store

__all__ = ["FULL_S", "TINY_S", "run"]

FULL_S: Final = 2.0
TINY_S: Final = 0.05
BATCH_SIZES: Final = (1, 8, 100, 512)
CLAIM_DELIVERIES: Final = 128
TOPIC: Final = b"bench/topic"
PAYLOAD: Final = b"x" * 100


class Setting(NamedTuple):
    """A row. advances: a consumer is moved on with every batch."""

    store: str
    durability: str
    advances: bool
    entries: int

    @property
    def name(self) -> str:
        """As it is written to a file."""
        return " ".join(map(str, self))


class Figures(NamedTuple):
    """cpu_us: of this process, all threads, for each batch. sync_ms: of the disk, before."""

    commits_per_s: float
    entries_per_s: float
    cpu_us: float
    sync_ms: float


def run(
    stores: Sequence[str], repeat: int, seconds: float
) -> tuple[list[str], dict[str, list[dict[str, float]]]]:
    """Measure each setting, in turns. Gives the table and every figure."""
    settings = [
        Setting(store, durability, advances, entries)
        for durability in ("fsync", "os")
        for advances in (False, True)
        for entries in BATCH_SIZES
        for store in stores
    ]
    runs: dict[Setting, list[Figures]] = {setting: [] for setting in settings}
    for _ in range(repeat):
        for setting in settings:
            with tempfile.TemporaryDirectory(prefix="bench-") as directory:
                figures = asyncio.run(_measure(setting, Path(directory), seconds))
            runs[setting].append(figures)
            tell(f"{setting.name:28} {' '.join(map(number, figures))}")
    head = ["a batch of", "entries"]
    for store in stores:
        head += [f"{store} commits/s", "entries/s", "CPU µs/batch", "CPU µs/entry", "a sync, ms"]
    rows = []
    for setting in settings[:: len(stores)]:
        what = "append + Advance" if setting.advances else "append"
        row = [f"{what}, {setting.durability}", str(setting.entries)]
        for store in stores:
            of_store = runs[setting._replace(store=store)]
            medians = [median(values) or 0.0 for values in zip(*of_store, strict=True)]
            row += map(number, (*medians[:3], medians[2] / setting.entries, medians[3]))
        rows.append(row)
    every = {s.name: [figures._asdict() for figures in runs[s]] for s in settings}
    return [table(head, rows)], every


async def _measure(setting: Setting, directory: Path, seconds: float) -> Figures:
    durability = cast("Literal['fsync', 'os']", setting.durability)
    before_ms = sync_ms()
    store = await opened(setting.store, directory, durability=durability)
    try:
        incarnation = os.urandom(16)
        consumer_id = await _consumer(store, incarnation)
        session = _Session(consumer_id, incarnation)
        offset = commits = 0
        stop = time.monotonic() + seconds / 4  # not measured: caches fill
        for measured in (False, True):
            began, cpu = time.monotonic(), time.process_time()
            commits = 0
            while time.monotonic() < stop:
                first = offset + 1
                offset += setting.entries
                batch = Batch([_entry(at) for at in range(first, offset + 1)], [], 1)
                if setting.advances:
                    batch.ops.append(session.advance(first, offset))
                await apply(store, batch)
                commits += 1
            if not measured:
                stop = time.monotonic() + seconds
        took_s, cpu = time.monotonic() - began, time.process_time() - cpu
    finally:
        await store.close()
    commits = max(commits, 1)
    return Figures(
        commits / took_s, commits * setting.entries / took_s, cpu * 1e6 / commits, before_ms
    )


def _entry(offset: int) -> Entry:
    return Entry(offset, TOPIC, PAYLOAD, 1, 0, b"publisher")


async def _consumer(store: Store, incarnation: bytes) -> int:
    """A consumer that wants everything."""
    acquire = Acquire(b"session", incarnation, UNCLAIMED, 1)
    (acquired,) = await apply(store, Batch([], [acquire], 1))
    assert isinstance(acquired, Acquired)
    assert acquired.snapshot is not None
    number_ = acquired.snapshot.consumer.id
    wanted = Subscription(b"#", 1, 0)
    await apply(store, Batch([], [Subscribe(number_, incarnation, (wanted,))], 1))
    return number_


class _Session:
    """A consumer that has settled what the batch before has claimed."""

    def __init__(self, consumer_id: int, incarnation: bytes) -> None:
        self._consumer_id = consumer_id
        self._incarnation = incarnation
        self._next = 1
        self._settled: list[int] = []

    def advance(self, first: int, last: int) -> Op:
        claims = []
        for start in range(first, last + 1, CLAIM_DELIVERIES):
            offsets = range(start, min(start + CLAIM_DELIVERIES, last + 1))
            deliveries = tuple(Delivery(at, at % 65_535 + 1, 1) for at in offsets)
            claims.append(Claim(self._next, deliveries))
            self._next += 1
        settled, self._settled = self._settled, [claim.number for claim in claims]
        return Advance(
            self._consumer_id,
            self._incarnation,
            cursor=last,
            claims=claims,
            settled=settled,
            next_packet_id=last % 65_535 + 1,
        )
