"""Topic names and filters, as trees of levels [MQTT-4.7].

All names are UTF-8 bytes and are compared as bytes [MQTT-4.7.3-4]. '+' matches one level, an empty
one too; '#' matches any number of levels, none too; a topic that begins with '$' is not matched by
a filter that begins with a wildcard [MQTT-4.7.2-1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FilterTree", "TopicTree", "covers", "matcher", "matches"]

T = TypeVar("T")
MATCHER_CACHE_MAX = 4096
"""Topics a session's matcher remembers; then it forgets all and starts again."""


def matches(topic_filter: bytes, topic: bytes) -> bool:
    """Whether a topic name matches a topic filter."""
    return _levels_match(topic_filter.split(b"/"), topic.split(b"/"))


def _levels_match(filter_levels: Sequence[bytes], levels: Sequence[bytes]) -> bool:
    if levels[0][:1] == b"$" and filter_levels[0] in (b"+", b"#"):
        return False
    count = len(levels)
    for i, level in enumerate(filter_levels):
        if level == b"#":
            return True
        if i >= count or (level != b"+" and level != levels[i]):
            return False
    return len(filter_levels) == count


def covers(wide: bytes, narrow: bytes) -> bool:
    """Whether every topic that matches the filter ``narrow`` matches ``wide`` too."""
    wide_levels, narrow_levels = wide.split(b"/"), narrow.split(b"/")
    if narrow_levels[0][:1] == b"$" and wide_levels[0] in {b"+", b"#"}:
        return False
    for i, level in enumerate(wide_levels):
        if level == b"#":
            return True
        if i >= len(narrow_levels) or narrow_levels[i] == b"#":
            return False
        if level != b"+" and level != narrow_levels[i]:
            return False
    # 'a/#' matches 'a' as well, which 'a/+' and 'a' alone do not cover
    return len(wide_levels) == len(narrow_levels)


def matcher(grants: Sequence[tuple[bytes, int]]) -> Callable[[bytes], int]:
    """A function from topic to the highest QoS of the filters that match it, 0 = none.

    grants: (filter, QoS), QoS 1 or 2. The function is pure but for a cache of its own, and safe to
    call in another thread.
    """
    exact: dict[bytes, int] = {}
    wild: list[tuple[list[bytes], int]] = []
    for topic_filter, qos in grants:
        levels = topic_filter.split(b"/")
        if levels[-1] == b"#" or b"+" in levels:
            wild.append((levels, qos))
        else:
            exact[topic_filter] = qos
    if not wild:
        return lambda topic: exact.get(topic, 0)
    cache: dict[bytes, int] = {}

    def accept(topic: bytes) -> int:
        qos = cache.get(topic)
        if qos is None:
            qos = exact.get(topic, 0)
            levels = topic.split(b"/")
            for filter_levels, granted in wild:
                if granted > qos and _levels_match(filter_levels, levels):
                    qos = granted
            if len(cache) >= MATCHER_CACHE_MAX:
                cache.clear()
            cache[topic] = qos
        return qos

    return accept


class _Node(Generic[T]):
    """One level of filters. hash: what stands at '<this>/#'; here: what ends at this level."""

    __slots__ = ("children", "hash", "here")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node[T]] | None = None
        self.here: T | None = None
        self.hash: T | None = None


def _is_wild(topic_filter: bytes) -> bool:
    return b"+" in topic_filter or b"#" in topic_filter


class FilterTree(Generic[T]):
    """Topic filter -> value, and all values whose filter matches a topic.

    Costs memory for each distinct filter, and time for each level of the topic that is looked up,
    if there are wildcards: a fleet whose sessions have a topic each has none, and is a dict.
    """

    __slots__ = ("_exact", "_make", "_root", "_wild")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._exact: dict[bytes, T] = {}
        self._root: _Node[T] = _Node()
        self._wild = 0

    @property
    def size(self) -> int:
        """How many filters there are."""
        return len(self._exact) + self._wild

    def at(self, topic_filter: bytes) -> T:
        """The value of a filter, made if it is not there."""
        if not _is_wild(topic_filter):
            found = self._exact.get(topic_filter)
            if found is None:
                found = self._exact[topic_filter] = self._make()
            return found
        node = self._root
        levels = topic_filter.split(b"/")
        last = levels.pop() if levels[-1] == b"#" else None
        for level in levels:
            if node.children is None:
                node.children = {}
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        value = node.here if last is None else node.hash
        if value is None:
            value = self._make()
            self._wild += 1
            if last is None:
                node.here = value
            else:
                node.hash = value
        return value

    def find(self, topic_filter: bytes) -> T | None:
        """The value of a filter, None if it is not there."""
        if not _is_wild(topic_filter):
            return self._exact.get(topic_filter)
        node: _Node[T] | None = self._root
        levels = topic_filter.split(b"/")
        last = levels.pop() if levels[-1] == b"#" else None
        for level in levels:
            node = node.children.get(level) if node is not None and node.children else None
        if node is None:
            return None
        return node.here if last is None else node.hash

    def remove(self, topic_filter: bytes) -> None:
        """Take a filter out, with the levels that nothing else needs."""
        if not _is_wild(topic_filter):
            self._exact.pop(topic_filter, None)
            return
        path: list[tuple[_Node[T], bytes]] = []
        node = self._root
        levels = topic_filter.split(b"/")
        last = levels.pop() if levels[-1] == b"#" else None
        for level in levels:
            child = node.children.get(level) if node.children else None
            if child is None:
                return
            path.append((node, level))
            node = child
        if last is None:
            self._wild -= node.here is not None
            node.here = None
        else:
            self._wild -= node.hash is not None
            node.hash = None
        while path and node.here is None and node.hash is None and not node.children:
            node, level = path.pop()
            assert node.children is not None
            del node.children[level]
            if not node.children:
                node.children = None

    def match(self, topic: bytes) -> list[T]:
        """The values of all filters that match a topic name."""
        found = self._match_wild(topic) if self._wild else []
        exact = self._exact.get(topic)
        if exact is not None:
            found.append(exact)
        return found

    def _match_wild(self, topic: bytes) -> list[T]:
        out: list[T] = []
        nodes = [self._root]
        special = topic[:1] == b"$"
        for level in topic.split(b"/"):
            following: list[_Node[T]] = []
            for node in nodes:
                if node.hash is not None and not special:
                    out.append(node.hash)
                children = node.children
                if children is None:
                    continue
                child = children.get(level)
                if child is not None:
                    following.append(child)
                if not special:
                    child = children.get(b"+")
                    if child is not None:
                        following.append(child)
            special = False
            nodes = following
            if not nodes:
                return out
        for node in nodes:
            if node.here is not None:
                out.append(node.here)
            if node.hash is not None:
                out.append(node.hash)  # 'a/#' matches 'a' too
        return out


class TopicTree(Generic[T]):
    """Topic name -> value, and all topics that match a filter."""

    __slots__ = ("_by_first", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, T] = {}
        self._by_first: dict[bytes, dict[bytes, None]] = {}

    def put(self, topic: bytes, value: T) -> None:
        """Set the value of a topic."""
        if topic not in self.values:
            self._by_first.setdefault(topic.split(b"/", 1)[0], {})[topic] = None
        self.values[topic] = value

    def drop(self, topic: bytes) -> None:
        """Remove a topic, if it is there."""
        if self.values.pop(topic, None) is None:
            return
        first = topic.split(b"/", 1)[0]
        topics = self._by_first[first]
        del topics[topic]
        if not topics:
            del self._by_first[first]

    def match(self, topic_filter: bytes) -> Iterator[bytes]:
        """The topics that match a filter, in the order they came."""
        levels = topic_filter.split(b"/")
        if levels[-1] != b"#" and b"+" not in levels:
            if topic_filter in self.values:
                yield topic_filter
            return
        if levels[0] in (b"+", b"#"):
            topics: Sequence[bytes] = list(self.values)
        else:
            topics = list(self._by_first.get(levels[0], ()))
        for topic in topics:
            if _levels_match(levels, topic.split(b"/")):
                yield topic
