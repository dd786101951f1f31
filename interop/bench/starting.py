"""How long the broker takes to listen, with sleeping sessions and messages behind them.

Each session has a filter and topics of its own, which is the most that a broker can have to know
of them. The data directory is filled once for each store; then the broker is started on it again
and again, and killed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from interop.bench.brokers import Broker, fresh
from interop.bench.client import Link, receive
from interop.bench.filling import fill
from interop.bench.packets import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interop.bench.brokers import Kind
    from interop.bench.scenarios import Figures, Sizes

__all__ = ["start"]


def start(kind: Kind, sizes: Sizes, repeat: int) -> Iterator[Figures]:
    """The figures of each repetition."""
    sessions, messages = sizes.start
    names = [(f"asleep{i}", f"fleet/{i:06d}/#") for i in range(sessions)]
    shapes = [Shape(b"fleet/%06d/state" % i, 1, 100) for i in range(sessions)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        began = time.monotonic()
        fill(
            kind.store,
            directory / "data",
            sessions=names,
            messages=messages,
            shape_of=lambda number: shapes[number % sessions],
        )
        fill_s = time.monotonic() - began
        for turn in range(repeat):
            with fresh(kind) as other:
                empty_s, empty = other.start_s, other.rss()[1]
            broker = Broker(kind, directory)
            try:
                yield {
                    "start": broker.start_s,
                    "start empty": empty_s,
                    "start fill": fill_s,
                    "start session bytes": (broker.rss()[1] - empty) / sessions,
                    **_back(broker, turn, shapes[turn], messages // sessions),
                }
            finally:
                broker.kill()


def _back(broker: Broker, number: int, shape: Shape, expect: int) -> Figures:
    """One of the sessions comes back: the time to its last message."""
    link = Link(broker.port, f"asleep{number}")
    received = receive(link, shape, expect=expect, seconds=20, quiet_s=5)
    link.leave()
    return {
        "start back": (received.last - link.began) * 1e3,
        "lost": expect - len(received.sequences),
        "again": received.again,
    }
