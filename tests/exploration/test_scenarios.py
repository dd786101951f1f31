"""Promises P3, P4, P7, P8 and P9 under every interleaving that there is time for."""

from __future__ import annotations

import os

import pytest

from tests.exploration.explore import Scenario, explore, replay
from tests.exploration.scenarios import SCENARIOS


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda s: s.name)
def test_no_interleaving_breaks_a_promise(scenario: Scenario, schedules: int, seed: int) -> None:
    found = explore(scenario, schedules, seed)
    assert not found.violation, found.violation


@pytest.mark.skipif("AMQTT_DURABLE_REPLAY" not in os.environ, reason="nothing to replay")
def test_replay() -> None:
    """AMQTT_DURABLE_REPLAY="connects_in_line 7=1 12=2": one schedule, as a failure printed it."""
    name, _, schedule = os.environ["AMQTT_DURABLE_REPLAY"].partition(" ")
    found = replay(SCENARIOS[name], schedule)
    assert not found.violation, found.violation
