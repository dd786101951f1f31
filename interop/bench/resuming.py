"""What coming back costs, and what pruning costs beside traffic.

Coming back: histories of three sizes, in which each topic has 100 entries. One session wants a
single topic, another wants it through a wildcard at the front of its filter, a third everything.
What the first one waits for must not depend on the size of the history, and the last one must be
served at the speed of a scan.

Pruning: a publisher and a subscriber at full speed. Either nothing may be deleted, or everything
that the subscriber has; and, with a large history behind them, while its only reader stays, or is
deleted as the traffic begins.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from interop.bench.brokers import Broker, kind_of_store
from interop.bench.client import Link, receive
from interop.bench.comparing import is_chosen, tell
from interop.bench.disk import sync_ms
from interop.bench.filling import fill, head_and_floor
from interop.bench.packets import Shape
from interop.bench.scenarios import Figures, Sizes, live_for, percentile
from interop.bench.table import median, number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FULL_S", "TINY_S", "run"]

FULL_S: Final = 6.0
TINY_S: Final = 1.5
EACH: Final = 100
"""Entries of each topic: what a session of one topic has missed."""
READERS: Final = {"one": "plant/{:06d}/level", "front": "+/{:06d}/level", "all": "plant/#"}

Every: TypeAlias = "dict[str, list[Figures]]"
"""Name of a measurement -> the figures of each repetition."""


def run(
    stores: Sequence[str], *, sizes: Sequence[int], repeat: int, seconds: float, chosen: list[str]
) -> tuple[list[str], Every]:
    """Measure both. Gives the tables and every figure. chosen: words of `resume`, `prune`."""
    every: Every = {}
    texts = []
    if is_chosen("resume", chosen):
        for store in stores:
            for size in sizes:
                _come_back(store, size, repeat, every)
        texts += [_curves(store, sizes, every) for store in stores]
    if is_chosen("prune", chosen):
        for store in stores:
            _prune(store, sizes[-1], repeat, seconds, every)
        texts.append(_pruning(stores, sizes[-1], every))
    return texts, every


def _note(every: Every, name: str, figures: Figures) -> None:
    every.setdefault(name, []).append(figures)
    tell(f"{name:28} " + ", ".join(f"{key} {number(value)}" for key, value in figures.items()))


def _median(every: Every, name: str, figure: str) -> float | None:
    return median(figures.get(figure) for figures in every[name])


# ------------------------------------------------------------------------------ coming back


def _past(store: str, directory: Path, size: int, sessions: Sequence[tuple[str, str]]) -> float:
    """Write a history of so many entries; the seconds it took."""
    topics = max(1, size // EACH)
    shapes = [Shape(b"plant/%06d/level" % i, 1, 100) for i in range(topics)]
    began = time.monotonic()
    fill(
        store,
        directory / "data",
        sessions=sessions,
        messages=size,
        shape_of=lambda number: shapes[number % topics],
    )
    return time.monotonic() - began


def _come_back(store: str, size: int, repeat: int, every: Every) -> None:
    topics = max(1, size // EACH)
    names = [
        (f"{reader}{turn}", topic_filter.format((topics // 2 + turn) % topics))
        for reader, topic_filter in READERS.items()
        for turn in range(repeat)
    ]
    shape = Shape(b"plant/000000/level", 1, 100)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        fill_s = _past(store, directory, size, names)
        broker = Broker(kind_of_store(store), directory)
        try:
            for turn in range(repeat):
                for reader in READERS:
                    expect = size if reader == "all" else min(EACH, size)
                    link = Link(broker.port, f"{reader}{turn}")
                    received = receive(link, shape, expect=expect, seconds=300, quiet_s=5)
                    link.leave()
                    took_s = received.last - link.began
                    figures: Figures = {
                        "ms": took_s * 1e3,
                        "per_s": len(received.sequences) / took_s,
                        "lost": expect - len(received.sequences),
                        "again": received.again,
                        "fill_s": fill_s,
                    }
                    _note(every, f"{store} {size} {reader}", figures)
        finally:
            broker.kill()


def _curves(store: str, sizes: Sequence[int], every: Every) -> str:
    rows: list[list[str]] = []
    for label, reader, figure in (
        ("missed 100 of one topic: all received, ms", "one", "ms"),
        ("the same through +/…/level, ms", "front", "ms"),
        ("missed everything: all received, ms", "all", "ms"),
        ("missed everything: messages/s", "all", "per_s"),
        ("(written in, s)", "all", "fill_s"),
    ):
        values = [_median(every, f"{store} {size} {reader}", figure) for size in sizes]
        rows.append([label, *map(number, values)])
    for figure, label in (("lost", "not received"), ("again", "received twice")):
        sums = [
            sum(f[figure] for reader in READERS for f in every[f"{store} {size} {reader}"])
            for size in sizes
        ]
        rows.append([label, *map(number, sums)])
    head = [f"{store}: entries in the history, 100 to a topic", *(f"{s:,}" for s in sizes)]
    return table(head, rows)


# ----------------------------------------------------------------------------------- pruning

_KEEP: Final[dict[str, Any]] = {"checkpoint_interval": 0.5, "retain_for": 3600.0}
_FOLLOW: Final[dict[str, Any]] = {"checkpoint_interval": 0.5, "retain_for": 0.0}
_CASES: Final = {
    "kept": ("nothing may be deleted", _KEEP, False, False),
    "followed": ("what the subscriber has is deleted", _FOLLOW, False, False),
    "held": ("{:,} old entries, still needed", _FOLLOW, True, False),
    "released": ("{:,} old entries, needed no more", _FOLLOW, True, True),
}
"""name -> (label, options of the broker, with a history, whose reader is deleted)."""


def _prune(store: str, size: int, repeat: int, seconds: float, every: Every) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        past = Path(name)
        _past(store, past, size, [("holder", "plant/#")])
        for _ in range(repeat):
            for case, (_, options, has_past, is_released) in _CASES.items():
                with tempfile.TemporaryDirectory(prefix="bench-") as other:
                    directory = Path(other)
                    if has_past:
                        shutil.copytree(past / "data", directory / "data")
                    figures = _traffic(store, directory, options, is_released, seconds)
                _note(every, f"{store} {case}", figures)


def _traffic(
    store: str, directory: Path, options: dict[str, Any], is_released: bool, seconds: float
) -> Figures:
    """Full traffic on a data directory; the only reader of its past is deleted on the way."""
    before_ms = sync_ms()
    broker = Broker(kind_of_store(store), directory, options)
    try:
        release = threading.Timer(seconds / 10, partial(_release, broker.port))
        started = release.start if is_released else (lambda: None)
        published, received, cpu_s = live_for(broker, Sizes(), seconds, started)
        if is_released:
            release.join()
        broker.stop()
    finally:
        broker.kill()
    head, floor = head_and_floor(store, directory / "data")
    return {
        "sync ms": before_ms,
        "per_s": len(received.sequences) / max(received.last - published.began, 1e-9),
        "cpu_us": cpu_s * 1e6 / max(len(received.sequences), 1),
        "ack p50": percentile(published.latencies_s, 50) * 1e3,
        "ack p99": percentile(published.latencies_s, 99) * 1e3,
        "ack max": percentile(published.latencies_s, 100) * 1e3,
        "pruned": floor,
        "head": head,
        "lost": published.acked - len(received.sequences),
        "again": received.again,
    }


def _release(port: int) -> None:
    """Delete the session that needs the past: a clean session with its client id."""
    Link(port, "holder", clean=True).leave()


def _pruning(stores: Sequence[str], size: int, every: Every) -> str:
    head = [
        "QoS 1 from a publisher to a subscriber",
        "messages/s",
        "CPU µs",
        "ack p50 ms",
        "p99",
        "max",
        "pruned",
        "of",
        "lost",
        "again",
        "a sync, ms",
    ]
    columns = ["per_s", "cpu_us", "ack p50", "ack p99", "ack max", "pruned", "head"]
    rows = []
    for store in stores:
        for case, (label, *_) in _CASES.items():
            name = f"{store} {case}"
            cells = [number(_median(every, name, column)) for column in columns]
            cells += [number(sum(f[figure] for f in every[name])) for figure in ("lost", "again")]
            cells.append(number(_median(every, name, "sync ms")))
            rows.append([f"{store}: {label.format(size)}", *cells])
    return table(head, rows)
