"""How long, and from which seed, interleavings are explored."""

from __future__ import annotations

import os

import pytest

SCHEDULES = 150
"""For each scenario; 47 scenarios run 7,050 schedules in 20 to 40 s."""
LONG = 100


@pytest.fixture(scope="session")
def schedules(long: bool) -> int:
    """Schedules for each scenario: ``--long``, or AMQTT_DURABLE_LONG=1, runs 100 times as many."""
    return SCHEDULES * (LONG if long or os.environ.get("AMQTT_DURABLE_LONG") == "1" else 1)


@pytest.fixture(scope="session")
def seed() -> int:
    """AMQTT_DURABLE_SEED; a failure names the seed, and prints its schedule."""
    return int(os.environ.get("AMQTT_DURABLE_SEED", "1"))
