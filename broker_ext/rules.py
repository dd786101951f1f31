"""What the configuration says of topics: how long a message of a backlog is worth delivering, and
whether only the newest one is (``filters``).

A rule is of the topic, whoever subscribed to it with what filter. Of several that match, the
shortest time counts, and one ``keep: latest`` is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_ext.topics import matcher, matches
from broker_ext.wire import valid_filter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from storage.api import Entry, Store

__all__ = ["FilterRule", "Newest", "Rules", "filter_rules"]

NEWEST_MAX: Final = 100_000
"""Topics whose newest message is known; a client can invent a topic per message (P12)."""
EXPIRE_AFTER_S_MAX: Final = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class FilterRule:
    """expire_after_ms: 0 = never. keep_latest: who was away, or is behind, gets the newest only."""

    filter: bytes
    expire_after_ms: int = 0
    keep_latest: bool = False


def filter_rules(filters: Mapping[str, Any]) -> tuple[FilterRule, ...]:
    """Read ``filters`` of the configuration. Raises ValueError."""
    return tuple(_rule(str(name), options) for name, options in filters.items())


def _rule(name: str, options: object) -> FilterRule:
    if not valid_filter(name.encode()) or name.startswith("$share/"):
        msg = f"filters has {name!r}, which is no topic filter [MQTT-4.7.1]"
        raise ValueError(msg)
    if not isinstance(options, dict) or not options or options.keys() - {"expire_after", "keep"}:
        msg = f"filters: {name!r} takes expire_after (seconds) and keep (latest), nothing else"
        raise ValueError(msg)
    seconds = options.get("expire_after", 0)
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not math.isfinite(seconds)
        or ("expire_after" in options and not 0.001 <= seconds <= EXPIRE_AFTER_S_MAX)
    ):
        msg = f"filters: expire_after of {name!r} is {seconds}; it must be seconds, above 0"
        raise ValueError(msg)
    if options.get("keep", "latest") != "latest":
        msg = f"filters: keep of {name!r} is {options['keep']!r}; it must be latest"
        raise ValueError(msg)
    return FilterRule(name.encode(), int(seconds * 1000), "keep" in options)


class Newest:
    """Where the newest message of each topic is that has ``keep: latest``.

    What is not known is not superseded: it is delivered. ``note`` is called for whatever is logged,
    so what is known is never too high; a newest one that is too low makes one message more.
    """

    __slots__ = ("_applies", "_offsets")

    def __init__(self, filters: Iterable[bytes]) -> None:
        self._applies = matcher([(topic_filter, 1) for topic_filter in filters])
        self._offsets: dict[bytes, int] = {}

    def note(self, topic: bytes, offset: int) -> None:
        """A message was given its offset, or was found in the store."""
        offsets = self._offsets
        if len(offsets) >= NEWEST_MAX and topic not in offsets:
            offsets.clear()
        if offset > offsets.get(topic, 0):
            offsets[topic] = offset

    def supersedes(self, entry: Entry) -> bool:
        """Whether a newer message of its topic is in the history, for whoever is to have this one.

        It is as durable: its offset was given before, so it is in no later commit than what passes
        over this one.
        """
        return self._offsets.get(entry.topic, 0) > entry.offset

    async def look_up(self, store: Store, entries: Iterable[tuple[Entry, int]]) -> None:
        """Find out what is not known of these entries' topics: after a start it is nothing."""
        offsets = self._offsets
        topics = {entry.topic for entry, qos in entries if qos and entry.topic not in offsets}
        wanted = [topic for topic in topics if self._applies(topic)]
        if wanted:
            for topic, offset in zip(wanted, await store.newest(wanted), strict=True):
                self.note(topic, offset)


class Rules:
    """All of them. newest: None = there is no ``keep: latest``."""

    __slots__ = ("_latest", "_rules", "newest")

    def __init__(self, rules: Sequence[FilterRule] = ()) -> None:
        self._rules = tuple(rules)
        self._latest = tuple(rule.filter for rule in rules if rule.keep_latest)
        self.newest = Newest(self._latest) if self._latest else None

    def expire_after_ms(self, topic: bytes) -> int:
        """How long a message of this topic is worth delivering, 0 = for ever."""
        times = (
            rule.expire_after_ms
            for rule in self._rules
            if rule.expire_after_ms and matches(rule.filter, topic)
        )
        return min(times, default=0)

    def keeps_latest(self, topic: bytes) -> bool:
        """Whether only the newest message of this topic is worth delivering later."""
        return any(matches(topic_filter, topic) for topic_filter in self._latest)
