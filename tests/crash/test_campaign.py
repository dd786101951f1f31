"""Clients that misbehave within the rules, a broker that is killed at every step: nothing broken.

Short: 7 deaths for each store, besides those in an opening, and 4 for each that is sealed and whose
keys are rotated meanwhile, and for each whose disk is full now and then. ``--long``: 200.
AMQTT_DURABLE_CRASH_SEED repeats a run's decisions; ``python -m tests.crash --seed N --store S
--kills K`` does too, and tells of each death.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.crash.campaign import Kind, run
from tests.crash.points import POINTS, arm

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 7
KILLS_FEW = 4
KILLS_LONG = 200


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
async def test_no_promise_is_broken_however_often_the_broker_is_killed(
    store: Kind, tmp_path: Path, *, long: bool
) -> None:
    await campaign(store, tmp_path, KILLS_LONG if long else KILLS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
async def test_no_promise_is_broken_though_keys_are_rotated_meanwhile(
    store: Kind, tmp_path: Path, *, long: bool
) -> None:
    await campaign(store, tmp_path, KILLS_LONG if long else KILLS_FEW, is_sealed=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
async def test_no_promise_is_broken_though_the_disk_is_full_now_and_then(
    store: Kind, tmp_path: Path, *, long: bool
) -> None:
    await campaign(store, tmp_path, KILLS_LONG if long else KILLS_FEW, is_short=True)


async def campaign(
    store: Kind, folder: Path, kills: int, *, is_sealed: bool = False, is_short: bool = False
) -> None:
    seed = int(os.environ.get("AMQTT_DURABLE_CRASH_SEED") or random.SystemRandom().randrange(2**32))
    options = " --sealed" * is_sealed + " --full" * is_short
    replay = f"python -m tests.crash --store {store} --seed {seed} --kills {kills}{options}"
    print(replay)  # noqa: T201 - pytest shows it when the test fails
    verdict = await run(folder, store, seed, kills, is_sealed=is_sealed, is_short=is_short)
    told = "\n".join([replay, str(dict(verdict.counts)), *verdict.examples])
    assert verdict.total == 0, told
    assert verdict.counts["deaths"] >= kills, told
    assert verdict.counts["owed"] > 10 * kills, f"too little happened to judge by: {told}"


def test_a_crash_point_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError):
        arm("commit.sometimes", 1)
    assert all(point.most > 0 for point in POINTS.values())
