"""Was anybody skipped? The judge of a campaign, over what its clients saw, in their order.

A session's *era* begins with a SUBACK and ends when its client is told Session Present = 0. A
message is *owed* to it when it matches, was published after the SUBACK and was accepted (PUBACK,
PUBREC).

Rule 1. In an era that did not end, every owed message was received.
Rule 2. In any era, when a message is received, every earlier one of its topic that is owed was
        received before: whoever is told later was not skipped in silence before.
Rule 3. Nothing is received that does not match, or that was never published.
Rule 4. What a restore took away is not owed by who is told of it by the broker's log alone
        (``on_generation_change: resume``): published after the copy was made, before it was put
        back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from broker_ext.topics import matches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Accepted",
    "Answered",
    "Copied",
    "Fact",
    "Judgement",
    "Published",
    "Received",
    "Restored",
    "Subscribed",
    "judge",
]


class Published(NamedTuple):
    """A PUBLISH is about to be sent."""

    number: int
    topic: bytes


class Accepted(NamedTuple):
    """Its PUBACK or PUBREC came."""

    number: int


class Answered(NamedTuple):
    """A CONNACK with return code 0 came."""

    device: str
    present: bool


class Subscribed(NamedTuple):
    """The SUBACK for all filters of a device came."""

    device: str


class Received(NamedTuple):
    """A PUBLISH came."""

    device: str
    number: int


class Copied(NamedTuple):
    """A copy of the data directory was made, while no broker ran."""

    copy: int


class Restored(NamedTuple):
    """The copy was put in the place of the data directory."""

    copy: int


Fact: TypeAlias = Published | Accepted | Answered | Subscribed | Received | Copied | Restored


@dataclass
class Judgement:
    """wrong: sentences, empty = nobody was skipped. counts: how much there was to judge by."""

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def judge(
    history: Sequence[Fact],
    filters: Mapping[str, Sequence[bytes]],
    *,
    resumes: bool = False,
) -> Judgement:
    """Apply the rules. resumes: ``on_generation_change: resume``, so that rule 4 is in force."""
    told = Judgement()
    accepted = {fact.number for fact in history if isinstance(fact, Accepted)}
    topics = {fact.number: fact.topic for fact in history if isinstance(fact, Published)}
    lost = _lost(history) if resumes else set()
    told.counts["accepted"] = len(accepted)
    told.counts["restores"] = sum(isinstance(fact, Restored) for fact in history)
    for device, names in filters.items():
        wanted = {n for n in topics if any(matches(name, topics[n]) for name in names)}
        _Device(told, device, topics, wanted, (wanted & accepted) - lost).follow(history)
    return told


def _lost(history: Sequence[Fact]) -> set[int]:
    """What was published after a copy that was put back later."""
    copied: dict[int, int] = {}
    lost: set[int] = set()
    for at, fact in enumerate(history):
        if isinstance(fact, Copied):
            copied[fact.copy] = at
        elif isinstance(fact, Restored):
            since = history[copied[fact.copy] : at]
            lost |= {earlier.number for earlier in since if isinstance(earlier, Published)}
    return lost


@dataclass
class _Device:
    """One device through the history. due: topic -> owed in this era and not received, in order."""

    told: Judgement
    name: str
    topics: Mapping[int, bytes]
    wanted: set[int]
    countable: set[int]
    is_subscribed: bool = False
    due: dict[bytes, list[int]] = field(default_factory=dict)

    def follow(self, history: Sequence[Fact]) -> None:
        counts = self.told.counts
        for fact in history:
            match fact:
                case Answered(self.name, present):
                    counts["resumed" if present else "told"] += 1
                    if not present:
                        self.is_subscribed = False
                        self.due.clear()
                case Subscribed(self.name):
                    self.is_subscribed = True
                case Published(number, topic):
                    if self.is_subscribed and number in self.countable:
                        counts["owed"] += 1
                        self.due.setdefault(topic, []).append(number)
                case Received(self.name, number):
                    self.receive(number)
        for numbers in self.due.values():
            for number in numbers:
                self.told.wrong.append(f"{self.name} never got {number}, and was not told")

    def receive(self, number: int) -> None:
        self.told.counts["received"] += 1
        if number not in self.topics:
            self.told.wrong.append(f"{self.name} got {number}, which nobody published")
            return
        if number not in self.wanted:
            self.told.wrong.append(f"{self.name} got {number}, which does not match")
            return
        due = self.due.get(self.topics[number], [])
        if number in due:
            for skipped in due[: due.index(number)]:
                self.told.wrong.append(f"{self.name} got {number} before {skipped}")
            due.remove(number)
