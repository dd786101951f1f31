"""Zero silent gaps: every session received each matching message, or was told Session Present = 0.

Short: some dozens of lives of a broker. ``--long`` or AMQTT_DURABLE_LONG=1: thousands.
AMQTT_DURABLE_RESUME_SEED repeats a run's decisions.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.resume.campaign import Campaign, InProcess, InThisProcess, Mode
from tests.resume.judge import (
    Accepted,
    Answered,
    Copied,
    Fact,
    Published,
    Received,
    Restored,
    Subscribed,
    judge,
)
from tests.storage.engine.raw import KINDS
from tests.storage.harness import scratch

if TYPE_CHECKING:
    from tests.resume.judge import Judgement
    from tests.storage.engine.raw import Kind

A, B = b"t/1", b"t/2"
WANTS = {"one": (b"t/1",)}


def chosen_seed() -> int:
    given = os.environ.get("AMQTT_DURABLE_RESUME_SEED")
    return int(given) if given else random.SystemRandom().randrange(1 << 32)


def is_long(*, long: bool) -> bool:
    return long or bool(os.environ.get("AMQTT_DURABLE_LONG"))


def nobody_was_skipped(judgement: Judgement, seed: int) -> None:
    told = f"AMQTT_DURABLE_RESUME_SEED={seed} {dict(judgement.counts)}"
    print(told)  # noqa: T201 - pytest shows it when the test fails
    assert not judgement.wrong, "\n".join([told, *judgement.wrong[:20]])
    for figure in ("accepted", "owed", "received", "resumed", "told"):
        assert judgement.counts[figure] > 0, f"too little happened to judge by: {told}"


@pytest.mark.case("HK-16")
@pytest.mark.case("HK-17")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["reset", "resume"])
@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_is_skipped_by_a_broker_process(kind: Kind, mode: Mode, *, long: bool) -> None:
    seed = chosen_seed()
    rounds = 300 if is_long(long=long) else 5
    with scratch() as folder:
        judgement = await Campaign(InProcess(folder, kind, mode), mode, seed).run(rounds)
    nobody_was_skipped(judgement, seed)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["reset", "resume"])
@pytest.mark.parametrize("kind", ["memory", *KINDS])
async def test_nobody_is_skipped_by_a_hub_that_dies_often(
    kind: Any, mode: Mode, *, long: bool
) -> None:
    seed = chosen_seed()
    rounds = 2000 if is_long(long=long) else 15
    with scratch() as folder:
        judgement = await Campaign(InThisProcess(folder, kind, mode), mode, seed).run(rounds)
    nobody_was_skipped(judgement, seed)


# ------------------------------------------------------------------------- the judge, judged


BEGUN: list[Fact] = [Answered("one", present=False), Subscribed("one")]


def published(*numbers: int, topic: bytes = A) -> list[Fact]:
    return [fact for n in numbers for fact in (Published(n, topic), Accepted(n))]


def got(*numbers: int) -> list[Fact]:
    return [Received("one", n) for n in numbers]


TOLD = Answered("one", present=False)
RESUMED = Answered("one", present=True)


@pytest.mark.parametrize(
    "history",
    [
        [*BEGUN, *published(1, 2), *got(1, 2)],
        [*BEGUN, *published(1, 2), *got(1, 1, 2, 1)],  # again is not wrong
        [*published(1), *BEGUN, *published(2), *got(2)],  # not owed before the SUBACK
        [*BEGUN, *published(1, topic=B)],  # does not match
        [*BEGUN, Published(1, A)],  # not accepted
        [*BEGUN, Published(1, A), *got(1)],  # not accepted, and there all the same
        [*BEGUN, *published(1, 2), *got(1), RESUMED, *got(2)],
        [*BEGUN, *published(1, 2), *got(1), TOLD],
        [*BEGUN, *published(1), TOLD, *published(2), Subscribed("one"), *published(3), *got(3)],
    ],
)
def test_the_judge_finds_nothing_wrong_with(history: list[Fact]) -> None:
    assert judge(history, WANTS).wrong == []


@pytest.mark.parametrize(
    ("history", "wrong"),
    [
        ([*BEGUN, *published(1)], "one never got 1, and was not told"),
        ([*BEGUN, *published(1, 2, 3), *got(1, 3)], "one got 3 before 2"),
        ([*BEGUN, *published(1, 2), *got(2, 1)], "one got 2 before 1"),
        ([*BEGUN, *published(1), RESUMED], "one never got 1, and was not told"),
        ([*BEGUN, *published(1, 2), *got(2), TOLD], "one got 2 before 1"),  # told too late
        ([*BEGUN, *published(1), TOLD, Subscribed("one"), *published(2)], "one never got 2"),
        ([*BEGUN, *published(1, topic=B), *got(1)], "one got 1, which does not match"),
        ([*BEGUN, *got(7)], "one got 7, which nobody published"),
        ([*BEGUN, Published(1, A), RESUMED, Accepted(1)], "one never got 1"),
        (
            [*BEGUN, Copied(1), *published(1), Restored(1), RESUMED],
            "one never got 1, and was not told",
        ),
    ],
)
def test_the_judge_finds(history: list[Fact], wrong: str) -> None:
    assert wrong in "\n".join(judge(history, WANTS).wrong)


def test_the_judge_forgives_what_a_restore_took_where_sessions_resume() -> None:
    history: list[Fact] = [
        *[*BEGUN, *published(1), Copied(1), *published(2), *got(1)],
        *[Restored(1), RESUMED, *published(3), *got(3)],
    ]
    assert judge(history, WANTS, resumes=True).wrong == []
    assert judge(history, WANTS).wrong == [
        "one got 3 before 2",
        "one never got 2, and was not told",
    ]
    # what the copy has is owed all the same
    assert judge([*BEGUN, *published(1), Copied(1), Restored(1)], WANTS, resumes=True).wrong
