"""Webhook deliveries: from the history to the settled row, through a real HTTP receiver.

The broker's half and the sink run in this process, the receiver in another one. What is timed is
from the first publish to the commit that settles the last message; each message is fed, claimed,
signed, posted, answered and settled. Nothing is published by MQTT: that is measured elsewhere.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from broker_ext.hub import Hub
from broker_ext.settings import Settings
from broker_ext.sinks.settings import WebhookSettings
from interop.bench.comparing import tell
from interop.bench.disk import sync_ms
from interop.bench.table import median, number, table
from storage import open_store
from storage.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FULL", "TINY", "run"]

FULL: Final = 4000
TINY: Final = 100
WORKERS: Final = (1, 4, 16)
PAYLOAD: Final = b"x" * 100
POLL_S: Final = 0.001

Every: TypeAlias = "dict[str, list[float]]"


def run(stores: Sequence[str], repeat: int, messages: int) -> tuple[list[str], Every]:
    """Measure. Gives the table and every figure (deliveries/s)."""
    every: Every = {}
    with _receiver() as port, tempfile.TemporaryDirectory() as folder:
        for number_of in range(repeat):
            for store in stores:
                for workers in WORKERS:
                    path = Path(folder) / f"{store}-{workers}-{number_of}"
                    path.mkdir()
                    (path / "secret").write_bytes(b"s" * 32)
                    rate = asyncio.run(_measure(store, path, port, workers, messages))
                    name = f"{store}, {workers} workers"
                    every.setdefault(name, []).append(rate)
                    tell(f"{name}: {number(rate)} deliveries/s")
        sync = sync_ms()
    rows = [
        [str(workers), *(number(median(every[f"{store}, {workers} workers"])) for store in stores)]
        for workers in WORKERS
    ]
    head = ["webhook deliveries/s, by workers", *(f"{store}, fsync" for store in stores)]
    return [table(head, rows), f"a sync of the disk took {sync:.2f} ms"], every


async def _measure(store: Any, path: Path, port: int, workers: int, messages: int) -> float:
    sink = WebhookSettings(
        name="bench",
        filters=("bench/#",),
        url=f"http://127.0.0.1:{port}/",
        secret_file=str(path / "secret"),
        workers=workers,
    )
    hub = Hub(open_store(store, path), Settings(sinks=(sink,)), SystemClock())
    await hub.start()
    await hub.load()
    try:
        figures = hub.figures.sinks["bench"]
        begun = perf_counter()
        for count in range(messages):
            hub.router.publish(b"bench/%d" % (count % 100), PAYLOAD, 1)
        while figures.done < messages:  # noqa: ASYNC110 - a figure; it signals nobody
            await asyncio.sleep(POLL_S)
        return messages / (perf_counter() - begun)
    finally:
        await hub.stop()


@contextmanager
def _receiver() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-m", "interop.bench.hook_receiver"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()
