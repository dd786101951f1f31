"""Who decides what happens next, and how all that may happen is walked through.

A *choice point* is a moment at which more than one thing may happen. What may happen is a list of
``Option``s, the usual one first; each belongs to an actor (the event loop, the store, a client, a
plugin). A schedule is written as its deviations from the usual: ``"7=1 12=2"`` took the second
option at the eighth choice point and the third at the thirteenth.

To *delay* is to pass over an actor until nothing else can happen. That is how one write, one answer
of a plugin or one client is late by as much as can be, with a single deviation; so a few of them
reach what needs hundreds of particular choices (as Emmi, Qadeer and Rakamaric's delay bounding).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Chooser", "Delays", "Option", "Replay", "Usual", "Wandering", "systematic"]


class Option(NamedTuple):
    """Something that may happen. actor: whose doing it is. name: in words, for the schedule.
    rank: 0 = in the ordinary course of things; higher ones only happen if they are chosen."""

    actor: str
    name: str
    do: Callable[[], None]
    rank: int = 0


class Chooser(Protocol):
    def choose(self, options: Sequence[Option]) -> int:
        """The index of what happens. There are at least two options."""
        ...


class Usual:
    """Whatever comes first."""

    def choose(self, options: Sequence[Option]) -> int:
        del options
        return 0


class Replay:
    """Exactly what a recorded schedule took."""

    def __init__(self, taken: dict[int, int]) -> None:
        self._taken = taken
        self._point = -1

    @classmethod
    def read(cls, text: str) -> Replay:
        """text: ``"7=1 12=2"``."""
        pairs = (pair.split("=") for pair in text.split())
        return cls({int(point): int(index) for point, index in pairs})

    def choose(self, options: Sequence[Option]) -> int:
        self._point += 1
        return min(self._taken.get(self._point, 0), len(options) - 1)


class Delays:
    """Delay the usual actors at a few choice points, and be usual otherwise.

    at: choice point -> index of the option to take; the actors of those before it are delayed.
    widths: how many options each choice point had, for ``systematic``.
    """

    def __init__(self, at: dict[int, int]) -> None:
        self._at = at
        self._late: list[str] = []
        self.widths: list[int] = []

    def choose(self, options: Sequence[Option]) -> int:
        order = self._order(options)
        point = len(self.widths)
        self.widths.append(len(order))
        skip = self._at.get(point, 0)
        if skip >= len(order):
            skip = 0
        if not options[order[skip]].rank:
            for index in order[:skip]:
                if options[index].actor not in self._late:
                    self._late.append(options[index].actor)
        return order[skip]

    def _order(self, options: Sequence[Option]) -> list[int]:
        """In time, then those that are late, then what only happens if it is chosen."""
        late = self._late
        if late and all(o.rank or o.actor in late for o in options):
            late.clear()  # nothing else can happen: their time has come
        return sorted(
            range(len(options)), key=lambda i: (options[i].rank, options[i].actor in late, i)
        )


class Wandering:
    """Random, from a seed, in one of three manners: a coin for each choice; now and then something
    unusual; or actors with priorities that change now and then, so that some are very late."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - chance, not secrets
        self._manner = self._random.choice(("coin", "rare", "late", "late"))
        self._rate = self._random.choice((0.03, 0.1, 0.3))
        self._priorities: dict[str, float] = {}

    def choose(self, options: Sequence[Option]) -> int:
        draw = self._random
        usual = [i for i, option in enumerate(options) if option.rank == 0]
        unusual = [i for i, option in enumerate(options) if option.rank]
        if unusual and (not usual or draw.random() < self._rate / 3):
            return draw.choice(unusual)
        if self._manner == "coin":
            return draw.choice(usual)
        if self._manner == "rare":
            return draw.choice(usual) if draw.random() < self._rate else usual[0]
        priorities = self._priorities
        if draw.random() < self._rate:
            priorities[options[draw.choice(usual)].actor] = draw.random()
        return max(
            usual, key=lambda i: priorities.setdefault(options[i].actor, 0.5 + draw.random())
        )


def systematic(
    run: Callable[[Delays], None], *, delays_max: int, schedules_max: int, seed: int = 0
) -> Iterator[Delays]:
    """Walk through the schedules with no delay, then one, then two, ...

    run: run one schedule. Yields after each. Where there are more schedules than may be run, the
    rest of that number of delays is drawn by ``seed``.
    """
    frontier: list[dict[int, int]] = [{}]
    draw = random.Random(seed)  # noqa: S311 - chance, not secrets
    left = schedules_max
    for delays in range(delays_max + 1):
        following: list[dict[int, int]] = []
        if len(frontier) > left:
            frontier = draw.sample(frontier, left)
        for at in frontier:
            chooser = Delays(at)
            run(chooser)
            yield chooser
            if delays < delays_max:
                first = max(at, default=-1) + 1
                for point in range(first, len(chooser.widths)):
                    following += [{**at, point: i} for i in range(1, chooser.widths[point])]
        left -= len(frontier)
        if left <= 0:
            return
        frontier = following
