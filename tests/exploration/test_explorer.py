"""The explorer itself: it is deterministic, it replays, and it walks through what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.exploration.choices import Delays, Option, Usual, Wandering, systematic
from tests.exploration.explore import explore, replay
from tests.exploration.mutations import MUTATIONS
from tests.exploration.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.exploration.choices import Chooser


def test_the_same_seed_is_the_same_run() -> None:
    scenario = SCENARIOS["takeover_while_messages_flow"]
    for seed in range(5):
        first, second = scenario.make(Wandering(seed)), scenario.make(Wandering(seed))
        first.run()
        second.run()
        assert first.trace == second.trace
        assert first.taken == second.taken


def test_a_violation_is_replayed_by_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = next(m for m in MUTATIONS if "not held while" in m.name)
    mutation.patch(monkeypatch)
    scenario = SCENARIOS[mutation.scenario]
    found = explore(scenario, 500, 1).violation
    schedule = next(line for line in found.splitlines() if line.startswith("schedule: "))
    again = replay(scenario, schedule.removeprefix("schedule: ")).violation
    assert again.splitlines()[1:] == found.splitlines()[1:]


def _orders(run: Callable[[Chooser, list[str]], None], delays_max: int) -> set[str]:
    seen: set[str] = set()

    def one(chooser: Delays) -> None:
        done: list[str] = []
        run(chooser, done)
        seen.add("".join(done))

    for _ in systematic(one, delays_max=delays_max, schedules_max=1000):
        pass
    return seen


def _three_actors(chooser: Chooser, done: list[str]) -> None:
    """a, b and c each have two things to do."""
    left = {"a": 2, "b": 2, "c": 2}
    while options := [
        Option(actor, actor, lambda actor=actor: done.append(actor))  # type: ignore[misc]
        for actor, n in left.items()
        if n
    ]:
        option = options[chooser.choose(options) if len(options) > 1 else 0]
        option.do()
        left[option.actor] -= 1


def test_one_delay_makes_an_actor_as_late_as_can_be() -> None:
    assert _orders(_three_actors, 0) == {"aabbcc"}
    once = _orders(_three_actors, 1)
    assert {"bbccaa", "abbcca", "ccaabb"} <= once
    assert len(_orders(_three_actors, 2)) > len(once)


def test_usual_takes_what_comes_first() -> None:
    done: list[str] = []
    _three_actors(Usual(), done)
    assert "".join(done) == "aabbcc"
