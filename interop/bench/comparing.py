"""All brokers in one run: the turns, the table, and the ratios that are aimed at."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from interop.bench.brokers import fresh
from interop.bench.client import Lost
from interop.bench.disk import sync_ms
from interop.bench.packets import BadStream
from interop.bench.processes import Failed
from interop.bench.scenarios import scenarios
from interop.bench.starting import start
from interop.bench.table import median, number, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interop.bench.brokers import Kind
    from interop.bench.scenarios import Figures, Sizes

__all__ = ["Runs", "compare", "goals", "is_chosen", "overview", "tell"]

Runs: TypeAlias = "dict[str, dict[str, list[Figures]]]"
"""Broker -> scenario -> the figures of each repetition; those that failed are left out."""


def tell(text: str) -> None:
    """Show how far it is, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def is_chosen(name: str, chosen: Sequence[str]) -> bool:
    """Whether one of the words is in the name; without any, everything is chosen."""
    return not chosen or any(word in name for word in chosen)


def compare(kinds: Sequence[Kind], sizes: Sizes, repeat: int, chosen: Sequence[str]) -> Runs:
    """Run the scenarios that are chosen: each repetition of each goes through all brokers."""
    runs: Runs = {kind.name: defaultdict(list) for kind in kinds}
    for scenario in scenarios(sizes):
        if not is_chosen(scenario.name, chosen):
            continue
        for _ in range(repeat):
            for kind in kinds:
                began = time.monotonic()
                try:
                    with fresh(kind) as broker:
                        figures = {"sync ms": sync_ms(), **scenario.run(broker, sizes)}
                except (BadStream, Failed, Lost, OSError) as error:
                    tell(f"{kind.name}: {scenario.name} failed: {error}")
                    continue
                runs[kind.name][scenario.name].append(figures)
                _tell_figures(kind, scenario.name, began, figures)
    if is_chosen("start", chosen):
        for kind in kinds:
            began = time.monotonic()
            for figures in start(kind, sizes, repeat) if kind.store else ():
                runs[kind.name]["start"].append({"sync ms": sync_ms(), **figures})
                _tell_figures(kind, "start", began, figures)
    return runs


def _tell_figures(kind: Kind, scenario: str, began: float, figures: Figures) -> None:
    words = ", ".join(f"{key} {number(value)}" for key, value in figures.items())
    tell(f"{kind.name:18} {scenario:11} {time.monotonic() - began:5.1f} s  {words}")


def _of(runs: Runs, broker: str, figure: str) -> float | None:
    """The median of a figure over its repetitions."""
    return median(figures.get(figure) for times in runs[broker].values() for figures in times)


# --------------------------------------------------------------------------------- overview


def overview(kinds: Sequence[Kind], sizes: Sizes, runs: Runs) -> str:
    """The one table: a row for each figure, a column for each broker.

    The last column is the disk's: what a sync took before this was measured. A row that had a
    slower disk than another cannot be compared with it.
    """
    names = [kind.name for kind in kinds]
    sessions, messages = sizes.start
    storm, each = sizes.storm
    rows: list[list[str]] = []

    def row(label: str, figure: str, cpu: str | None = None) -> None:
        values = [(_of(runs, name, figure), cpu and _of(runs, name, cpu)) for name in names]
        if any(value is not None for value, _ in values):
            beside = [f"  [{number(c)} µs]" if isinstance(c, float) else "" for _, c in values]
            cells = [number(v) + b for (v, _), b in zip(values, beside, strict=True)]
            rows.append([label, *cells, number(_sync(runs, figure))])

    for n in sizes.sessions:
        row(f"ingest QoS 1, {n:,} sleeping sessions, acked/s", f"ingest {n}", f"ingest {n} cpu")
    row("live QoS 1, publisher to acknowledged delivery, /s", "live 1", "live 1 cpu")
    row("live QoS 2, /s", "live 2", "live 2 cpu")
    row("live at 200/s: latency p50, ms", "latency p50")
    row("live at 200/s: latency p99, ms", "latency p99")
    row(f"drain of {sizes.backlog:,} queued, /s", "drain", "drain cpu")
    row(f"storm, {storm} sessions with {each} messages each, s", "storm", "storm cpu")
    row("memory of a sleeping session, bytes (RSS)", "session bytes")
    row("the same without mapped pages of files", "session bytes anonymous")
    row("memory of a message queued for a session, bytes", "message bytes")
    row("start, nothing stored, s", "start empty")
    behind = f"{sessions:,} sessions, {messages:,} messages"
    row(f"start, {behind}, s", "start")
    row("memory of each of these sessions, bytes (no mapped pages)", "start session bytes")
    row("one of them comes back: to its last message, ms", "start back")
    row("(data of this start was written in, s)", "start fill")
    for figure, label in (
        ("lost", "acknowledged and not delivered, of all of these"),
        ("again", "delivered again although acknowledged or under way"),
    ):
        sums = [_sum(runs, name, figure) for name in names]
        rows.append([label, *map(number, sums), ""])
    head = ["medians; in brackets: CPU of the broker for each message", *names, "a sync, ms"]
    return table(head, rows)


def _sync(runs: Runs, figure: str) -> float | None:
    """What a sync of the disk took while this figure was measured, of all brokers."""
    return median(
        figures["sync ms"]
        for scenarios_ in runs.values()
        for times in scenarios_.values()
        for figures in times
        if figure in figures
    )


def _sum(runs: Runs, broker: str, figure: str) -> float | None:
    there = [f[figure] for times in runs[broker].values() for f in times if figure in f]
    return sum(there) if there else None


# ------------------------------------------------------------------------------------ goals


class _Goal(NamedTuple):
    """label, figure: of ours. over: the figure of ours that it is divided by.

    ram, durable: what is aimed at, as a ratio to Mosquitto in RAM and to durable Mosquitto.
    limit: what is aimed at, as a figure; it is an upper bound, unless ``over`` is given.
    """

    label: str
    figure: str
    over: str = ""
    ram: float | None = None
    durable: float | None = None
    limit: float | None = None


def _goals(sizes: Sizes) -> list[_Goal]:
    """What was measured of durable Mosquitto beside Mosquitto in RAM makes the ratios to the
    latter: where twice the durable one is aimed at, that is so much of the one in RAM."""
    one, most = f"ingest {sizes.sessions[1]}", f"ingest {sizes.sessions[-1]}"
    return [
        _Goal("ingest, 1 sleeping session", one, ram=0.56, durable=1.5),
        _Goal("ingest, most sleeping sessions", most, ram=119, durable=300),
        _Goal("ingest, most sleeping sessions ÷ with 1", most, over=one, limit=0.8),
        _Goal("live QoS 1", "live 1", ram=0.68, durable=2),
        _Goal("live QoS 2", "live 2", ram=0.71, durable=2),
        _Goal("drain", "drain", ram=0.18, durable=3),
        _Goal("latency p50 at 200/s, ms", "latency p50", limit=1),
        _Goal("latency p99 at 200/s, ms", "latency p99", limit=3),
        _Goal("storm, s", "storm", limit=0.3),
        _Goal("memory of a sleeping session, bytes", "session bytes", limit=200),
        _Goal("memory of a queued message, bytes", "message bytes", limit=1),
        _Goal("start with everything behind it, s", "start", limit=1),
    ]


RAM: Final = "mosquitto"
DURABLE: Final = "mosquitto sqlite"


def goals(kinds: Sequence[Kind], sizes: Sizes, runs: Runs) -> str:
    """The second table: what is aimed at and what this run came to, as ratios where they are."""
    ours = [kind.name for kind in kinds if kind.store]
    rows: list[list[str]] = []
    for goal in _goals(sizes):
        if goal.limit is not None:
            sign = "≥" if goal.over else "≤"
            values = [_ratio(runs, name, goal.figure, name, goal.over) for name in ours]
            rows += _row(goal.label, f"{sign} {number(goal.limit)}", values)
        for other, wanted in ((RAM, goal.ram), (DURABLE, goal.durable)):
            if wanted is not None and other in runs:
                values = [_ratio(runs, name, goal.figure, other, goal.figure) for name in ours]
                rows += _row(f"{goal.label} ÷ {other}", f"≥ {number(wanted)}", values)
    return table(["goals, of this run", "aimed at", *ours], rows)


def _row(label: str, aim: str, values: Sequence[float | None]) -> Iterable[list[str]]:
    if any(value is not None for value in values):
        yield [label, aim, *map(number, values)]


def _ratio(runs: Runs, name: str, figure: str, other: str, over: str) -> float | None:
    value = _of(runs, name, figure)
    if not over or value is None:
        return value
    divisor = _of(runs, other, over)
    return value / divisor if divisor else None
