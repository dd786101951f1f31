"""The judge of the demo's second act: each promise can be broken, and is then told."""

from __future__ import annotations

import pytest

from broker_ext.demo.hooks import HookFacts, Request, judge_hooks

NAMES = ["1", "2", "3", "poison"]
GOOD = [
    Request("e1", "1", 1, 204, 100, is_signed=True),
    Request("e2", "2", 1, 429, 1000, is_signed=True),
    Request("e2", "2", 2, 204, 3010, is_signed=True),
    Request("e3", "3", 1, 204, 3020, is_signed=True),
    Request("e4", "poison", 1, 422, 3100, is_signed=True),
    Request("e4", "poison", 1, 204, 3500, is_signed=True),
]


def judged(
    requests: list[Request] = GOOD,
    *,
    published: list[str] = NAMES,
    acknowledged: list[str] = NAMES,
    waited: int = 2,
    dead_letters: int = 1,
) -> HookFacts:
    return judge_hooks(
        published,
        acknowledged,
        requests,
        poison="poison",
        waited=waited,
        dead_letters=dead_letters,
        returned_ms=900,
        busy_ms=2000,
    )


def test_a_good_act_breaks_no_promise() -> None:
    facts = judged()
    assert facts.reasons() == []
    assert (facts.delivered, facts.throttled, facts.reissued) == (4, 1, 1)
    assert facts.back_ms == 3020 - 900


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (judged([r for r in GOOD if r.alert != "3"]), "1 alerts acknowledged and lost"),
        (judged([*GOOD, GOOD[0]]), "1 alerts delivered again"),
        (
            judged([*GOOD[:2], GOOD[2]._replace(at_ms=2500), *GOOD[3:]]),
            "1 requests before Retry-After was over",
        ),
        (
            judged([GOOD[0]._replace(is_signed=False), *GOOD[1:]]),
            "1 requests that were not signed",
        ),
        (judged(acknowledged=NAMES[1:]), "1 alerts never acknowledged"),
        (judged([r for r in GOOD if r.status != 429]), "the receiver never asked to wait"),
        (judged(waited=0), "nothing waited while the receiver was down"),
        (judged(dead_letters=0), "0 dead letters instead of 1"),
        (
            judged([*GOOD[:5], GOOD[4], GOOD[5]]),
            "the dead letter was not rejected once and delivered when reissued",
        ),
    ],
)
def test_a_broken_promise_is_told(facts: HookFacts, reason: str) -> None:
    assert reason in facts.reasons()


def test_what_never_came_back_has_no_time() -> None:
    assert judged(GOOD[:2]).back_ms is None
