"""The newest entries, kept in memory: what a consumer that is a little behind need not read.

They lie in *stretches* of some batches each. Who comes for a few topics does not look at every
entry: a stretch knows where each topic is in it, once somebody asked. When 500 sessions come back
at once, each for its own topic, that is the difference between 500 walks and one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from storage.api import Entry

__all__ = ["STRETCH_ENTRIES_MAX", "Recent"]

STRETCH_ENTRIES_MAX: Final = 1024
STRETCH_BYTES_MAX: Final = 256 << 10
"""A batch joins the stretch before it up to here; a larger one has one of its own. What is
forgotten is forgotten by the stretch."""
_OFFSET: Final = attrgetter("offset")


class _Stretch:
    """size: bytes that count against what is kept."""

    __slots__ = ("_indexed", "_of_topic", "entries", "first", "size")

    def __init__(self, entries: list[Entry], size: int) -> None:
        self.entries = entries.copy()  # the batch is the store's
        self.first = entries[0].offset
        self.size = size
        self._of_topic: dict[bytes, list[Entry]] = {}
        self._indexed = 0

    def has_room(self, entries: list[Entry], size: int) -> bool:
        """Whether a batch may join."""
        return (
            len(self.entries) + len(entries) <= STRETCH_ENTRIES_MAX
            and self.size + size <= STRETCH_BYTES_MAX
        )

    def wanted(
        self, topics: Sequence[bytes] | None, accepts: Callable[[bytes], object]
    ) -> Sequence[Entry]:
        """Entries of these topics, or of those that ``accepts`` takes, in order."""
        of_topic = self._of_topic
        if self._indexed < len(self.entries):
            for entry in islice(self.entries, self._indexed, None):
                of_topic.setdefault(entry.topic, []).append(entry)
            self._indexed = len(self.entries)
        if topics is None or len(topics) > len(of_topic):  # whichever are fewer
            topics = [topic for topic in of_topic if accepts(topic)]
        found = [of_topic[topic] for topic in topics if topic in of_topic]
        if not found:
            return ()
        if len(found) == 1:
            return found[0]
        if len(found) == len(of_topic):
            return self.entries
        return sorted(chain.from_iterable(found), key=_OFFSET)


class Recent:
    """Batches' entries in order, committed or sent off; the open batch is the caller's."""

    def __init__(self) -> None:
        self._stretches: deque[_Stretch] = deque()
        self.size = 0

    def add(self, entries: list[Entry], size: int) -> None:
        """The next batch. size: its bytes."""
        self.size += size
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.has_room(entries, size):
            last.entries += entries
            last.size += size
        else:
            self._stretches.append(_Stretch(entries, size))

    def trim(self, size_max: int, head: int) -> None:
        """Forget the oldest above ``size_max`` bytes; not what is above ``head``."""
        stretches = self._stretches
        while self.size > size_max and stretches and stretches[0].entries[-1].offset <= head:
            self.size -= stretches.popleft().size

    def _after(self, offset: int, most: int) -> list[_Stretch] | None:
        """The stretches that have the entries after ``offset``, in order; None if some are not
        there any more, or they are more than ``most``."""
        found: list[_Stretch] = []
        for stretch in reversed(self._stretches):
            if len(found) == most:
                return None
            found.append(stretch)
            if stretch.first <= offset + 1:
                found.reverse()
                return found
        return None

    def since(self, offset: int, following: list[Entry]) -> list[Entry] | None:
        """All entries after ``offset``, then those that follow; None if some are not there."""
        if following and following[0].offset <= offset + 1:
            return following[offset + 1 - following[0].offset :]
        stretches = self._after(offset, len(self._stretches))
        if stretches is None:
            return None
        found = stretches[0].entries[offset + 1 - stretches[0].first :]
        for stretch in stretches[1:]:
            found += stretch.entries
        return found + following

    def wanted_since(
        self,
        offset: int,
        following: list[Entry],
        topics: Sequence[bytes] | None,
        accepts: Callable[[bytes], object],
        most: int,
    ) -> Iterator[Entry] | None:
        """Of those, in order, the ones of some topics. None if they lie in more than ``most``
        stretches, too.

        topics: all that ``accepts`` takes, None = not known. Not to be used after the next append.
        """
        if following and following[0].offset <= offset + 1:
            following = following[offset + 1 - following[0].offset :]
            return self._walk(offset, [], following, topics, accepts)
        stretches = self._after(offset, most)
        if stretches is None:
            return None
        return self._walk(offset, stretches, following, topics, accepts)

    @staticmethod
    def _walk(
        offset: int,
        stretches: list[_Stretch],
        following: list[Entry],
        topics: Sequence[bytes] | None,
        accepts: Callable[[bytes], object],
    ) -> Iterator[Entry]:
        for stretch in stretches:
            found = stretch.wanted(topics, accepts)
            if stretch.first <= offset:
                yield from found[bisect_right(found, offset, key=_OFFSET) :]
            else:
                yield from found
        for entry in following:
            if accepts(entry.topic):
                yield entry
