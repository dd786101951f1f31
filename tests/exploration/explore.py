"""Run a scenario under many schedules."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.exploration.choices import Replay, Wandering, systematic
from tests.exploration.world import Violation, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.exploration.choices import Chooser

__all__ = ["Explored", "Scenario", "explore", "replay"]

DELAYS_MAX = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """name: for reports. make: a world under a chooser, ready to run."""

    name: str
    make: Callable[[Chooser], World]


@dataclass(slots=True)
class Explored:
    """schedules: how many were run. violation: the first that was found, "" = none."""

    schedules: int = 0
    violation: str = ""


def _run(scenario: Scenario, chooser: Chooser, found: Explored, how: str) -> None:
    found.schedules += 1
    try:
        scenario.make(chooser).run()
    except Violation as violation:
        found.violation = f"scenario: {scenario.name}, {how}\n{violation}"


def explore(scenario: Scenario, schedules: int, seed: int) -> Explored:
    """Half of the schedules systematically (no delay, each single delay, pairs of them), the other
    half at random from ``seed``. Stops at the first violation."""
    found = Explored()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()
    try:
        for n in range(schedules - schedules // 2):
            _run(scenario, Wandering(seed + n), found, f"seed {seed + n}")
            if found.violation:
                return found
        walk = systematic(
            lambda chooser: _run(scenario, chooser, found, "systematic"),
            delays_max=DELAYS_MAX,
            schedules_max=schedules // 2,
            seed=seed,
        )
        for _ in walk:
            if found.violation:
                return found
    finally:
        gc.unfreeze()
        logging.disable(before)
    return found


def replay(scenario: Scenario, schedule: str) -> Explored:
    """Run one schedule, as ``World.story`` wrote it."""
    found = Explored()
    _run(scenario, Replay.read(schedule), found, "replayed")
    return found
