"""What the demo shows: a live display on a terminal, plain lines elsewhere, facts at the end."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker_ext.demo.clock import now_ms

if TYPE_CHECKING:
    from broker_ext.demo.facts import Facts, Tally
    from broker_ext.demo.hooks import HookFacts
    from broker_ext.demo.script import Outcome, Stage

__all__ = ["Lines", "LiveScreen", "Nothing", "Screen", "as_json", "facts_table"]


class Screen(Protocol):
    """Where the progress of a run is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def phase(self, text: str) -> None:
        """Say what happens from now on."""

    def refresh(self, stage: Stage) -> None:
        """Show the counts as they are; called many times a second while the run waits."""


class Nothing:
    """No progress: --json prints facts alone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, text: str) -> None:
        """Say nothing."""

    def refresh(self, stage: Stage) -> None:
        """Show nothing."""


class Lines:
    """One line per phase, with the time and the counts at its beginning."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_ms = now_ms()
        self._counts = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, text: str) -> None:
        """Print the line."""
        seconds = (now_ms() - self._began_ms) / 1000
        self._console.print(
            f"{seconds:5.1f} s  {text}{self._counts}", highlight=False, soft_wrap=True
        )

    def refresh(self, stage: Stage) -> None:
        """Keep the counts for the next line."""
        fleet, gateway = stage.fleet, stage.gateway
        self._counts = (
            f"  [published {fleet.published}, acknowledged {fleet.acknowledged}, "
            f"delivered {gateway.delivered}]"
        ).replace("[", "\\[")


class LiveScreen:
    """The phases so far, and below them who is connected and how far the readings have come."""

    def __init__(self, console: Console) -> None:
        self._began_ms = now_ms()
        self._phases: list[tuple[float, str]] = []
        self._stage: Stage | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=12)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stage = None  # what stays on the screen is the story, not how everybody went home
        self._live.stop()

    def phase(self, text: str) -> None:
        """Add the phase to the list."""
        self._phases.append(((now_ms() - self._began_ms) / 1000, text))

    def refresh(self, stage: Stage) -> None:
        """Take the stage; the display's own thread draws it."""
        self._stage = stage

    def _render(self) -> Group:
        lines = [
            Text.assemble(
                (f"{seconds:5.1f} s  ", "dim"),
                (text, "bold" if number == len(self._phases) else ""),
            )
            for number, (seconds, text) in enumerate(self._phases, start=1)
        ]
        return Group(*lines, *([self._counts(self._stage)] if self._stage else []))

    def _counts(self, stage: Stage) -> Table:
        fleet, gateway, pid = stage.fleet, stage.gateway, stage.broker.pid
        published = max(1, fleet.published)
        table = Table.grid(padding=(0, 2))
        table.add_row("broker", Text(f"pid {pid}", "green") if pid else Text("down", "bold red"))
        table.add_row("sensors", f"{fleet.connected} connected")
        table.add_row(
            "gateway",
            Text("connected", "green") if gateway.connected else Text("away", "yellow"),
        )
        for name, count in (
            ("published", fleet.published),
            ("acknowledged", fleet.acknowledged),
            ("delivered", gateway.delivered),
        ):
            bar = ProgressBar(total=published, completed=min(count, published), width=40)
            table.add_row(name, f"{count:>9,}", bar)
        return table


ROWS = (
    ("published", "published", False),
    ("acknowledged to the sensors", "acknowledged", False),
    ("delivered to the gateway", "delivered", False),
    ("lost: acknowledged, never delivered", "lost", True),
    ("duplicated after acknowledgement", "duplicated", True),
    ("out of order", "out_of_order", True),
    ("never acknowledged", "unacknowledged", True),
    ("sent again before its PUBACK (allowed)", "sent_again", False),
    ("delivered again, PUBACK cut off (allowed)", "redelivered", False),
)
"""label, field of Tally, whether anything but 0 breaks a promise"""


def facts_table(outcome: Outcome, title: str) -> Group:
    """Give the table of facts, with the verdict below it."""
    facts = outcome.facts
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("counted")
    for name in ("QoS 1", "QoS 2", "total"):
        table.add_column(name, justify="right")
    for label, field, is_promise in ROWS:
        numbers = [getattr(tally, field) for tally in (*_by_qos(facts), facts.total)]
        table.add_row(label, *(_number(number, is_promise=is_promise) for number in numbers))
    table.add_section()
    for label, value in _single_facts(outcome):
        table.add_row(label, "", "", value)
    if outcome.hooks is not None:
        table.add_section()
        for label, value in _hook_facts(outcome.hooks):
            table.add_row(label, "", "", value)
    reasons = outcome.reasons()
    verdict = Text.assemble(
        ("BROKEN: ", "bold red") if reasons else ("KEPT: ", "bold green"),
        ", ".join(reasons) or "nothing acknowledged was lost, duplicated or out of order.",
    )
    return Group(table, verdict)


def as_json(outcome: Outcome, run: dict[str, Any]) -> str:
    """Give the facts as one JSON object. run: what the run was asked to do."""
    facts = outcome.facts
    reasons = outcome.reasons()
    hooks = outcome.hooks
    return json.dumps(
        {
            "ok": not reasons,
            "reasons": reasons,
            "run": run,
            "qos1": _counts(facts.by_qos[1]),
            "qos2": _counts(facts.by_qos[2]),
            "total": _counts(facts.total),
            "altered": facts.altered,
            "wrong_qos": facts.wrong_qos,
            "session_present": facts.session_present,
            "sensor_returns": facts.sensor_returns,
            "sensor_sessions_missing": facts.sensor_sessions_missing,
            "backlog": facts.drain.backlog,
            "drain_ms": facts.drain.duration_ms,
            "drain_per_second": facts.drain.per_second,
            "acknowledged_per_second": facts.acknowledged_per_second,
            "restart_ms": outcome.restart_ms,
            "duration_ms": outcome.duration_ms,
            "webhook": dataclasses.asdict(hooks) if hooks is not None else None,
        },
        indent=2,
    )


def _by_qos(facts: Facts) -> tuple[Tally, Tally]:
    return facts.by_qos[1], facts.by_qos[2]


def _counts(tally: Tally) -> dict[str, int]:
    return dataclasses.asdict(tally) | {"unacknowledged": tally.unacknowledged}


def _number(number: int, *, is_promise: bool) -> Text:
    style = ("bold red" if number else "green") if is_promise else ""
    return Text(f"{number:,}", style)


def _hook_facts(facts: HookFacts) -> list[tuple[str, Text]]:
    """Act two."""
    back = "never" if facts.back_ms is None else f"{facts.back_ms:,} ms"
    return [
        ("webhook: alerts acknowledged", Text(f"{facts.acknowledged:,}")),
        ("webhook: alerts delivered", Text(f"{facts.delivered:,}")),
        ("webhook: lost", _number(facts.lost, is_promise=True)),
        ("webhook: delivered again", _number(facts.delivered_again, is_promise=True)),
        ("webhook: waited while the receiver was down", Text(f"{facts.waited:,}")),
        ("webhook: all delivered after its return", Text(back)),
        ("webhook: sent before Retry-After was over", _number(facts.too_early, is_promise=True)),
        ("webhook: not signed", _number(facts.unsigned, is_promise=True)),
        ("webhook: dead letters, reissued", Text(f"{facts.dead_letters}, {facts.reissued}")),
    ]


def _single_facts(outcome: Outcome) -> list[tuple[str, Text]]:
    facts = outcome.facts
    drain = facts.drain
    present = facts.sensor_returns - facts.sensor_sessions_missing
    return [
        ("altered or unknown messages", _number(facts.altered, is_promise=True)),
        ("delivered at another QoS", _number(facts.wrong_qos, is_promise=True)),
        (
            "session present, gateway",
            Text("1", "green") if facts.session_present else Text("0", "bold red"),
        ),
        (
            "session present, returning sensors",
            Text(
                f"{present} of {facts.sensor_returns}",
                "bold red" if facts.sensor_sessions_missing else "green",
            ),
        ),
        ("backlog when the gateway came back", Text(f"{drain.backlog:,}")),
        (
            "time to drain it",
            Text("never") if drain.duration_ms is None else Text(f"{drain.duration_ms:,} ms"),
        ),
        ("messages/s while draining", Text(f"{drain.per_second:,}" if drain.per_second else "-")),
        ("messages/s acknowledged over the run", Text(f"{facts.acknowledged_per_second:,}")),
        ("broker up again after SIGKILL", Text(f"{outcome.restart_ms:,} ms")),
    ]
