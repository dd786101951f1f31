"""Reading the history behind a cursor for one set of filters, checked as it goes.

Every chunk is read in one transaction with the marks it is checked against, because pruning goes on
beside it. A chunk that is returned is complete: everything that matches up to ``through`` is in it.
What was pruned before it could be read, what fails its checksum or cannot be decoded is refused
(410), never skipped. Sessions and ``history.subscribe`` read through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from broker_ext.options import NO_LOCAL, PLAIN, joined, options_of
from broker_ext.topics import MATCHER_CACHE_MAX, matcher, matches
from storage.errors import EntryDamaged, ResumeHistoryUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker_ext.options import Options
    from storage.api import Entry, Loss, Store

__all__ = ["READ_BYTES_MAX", "READ_ENTRIES_MAX", "Piece", "Replay", "Wanted"]

READ_ENTRIES_MAX: Final = 512
READ_BYTES_MAX: Final = 256 << 10
"""One chunk: what a session that lags keeps in memory."""


class Wanted(NamedTuple):
    """A filter. qos: granted; nothing at or below ``from_offset`` is wanted. One of QoS 0 does not
    read the history, but has a say in how what others read is delivered. options, identifier: of a
    Subscription.
    """

    filter: bytes
    qos: int
    from_offset: int = 0
    options: int = 0
    identifier: int = 0


class Piece(NamedTuple):
    """entries: (entry, QoS to deliver with) in offset order. through: everything up to here was
    read, decoded and looked at. lost: what was pruned, where losses are skipped."""

    entries: list[tuple[Entry, int]]
    through: int
    lost: Loss | None = None


class Replay:
    """One reader's filters. Immutable but for a cache; made anew when the filters change.

    skips: losses are reported in the piece instead of refused (``on_history_pruned: skip``).
    reader: its client id, for No Local.
    """

    def __init__(
        self, store: Store, wanted: Iterable[Wanted], *, skips: bool = False, reader: bytes = b""
    ) -> None:
        self.store = store
        self._all = tuple(wanted)
        self.wanted = tuple(w for w in self._all if w.qos)
        self.skips = skips
        self.reader = reader
        self.accepts = matcher([(w.filter, w.qos) for w in self.wanted])
        """Topic -> the highest QoS of the filters that match it, 0 = none."""
        is_exact = not any(b"+" in w.filter or b"#" in w.filter for w in self.wanted)
        self.topics = tuple({w.filter for w in self.wanted}) if is_exact else None
        """All that ``accepts`` takes, None = not known."""
        self._newest_from = max((w.from_offset for w in self._all), default=0)
        self._is_plain = not any(w.options or w.identifier for w in self._all)
        self._found: dict[tuple[bytes, bool], tuple[int, Options]] = {}

    def granted(self, entry: Entry) -> int:
        """The QoS an entry is to be delivered with, 0 = not at all (P10)."""
        if not self._is_plain:
            return min(self._look(entry)[0], entry.qos)
        qos = self.accepts(entry.topic)
        if qos and entry.offset <= self._newest_from:
            qos = self._find(entry)[0]
        return min(qos, entry.qos)

    def wants(self, entry: Entry) -> bool:
        """Whether an entry with QoS 0 is to be delivered to who missed it."""
        if not self._is_plain or entry.offset <= self._newest_from:
            return self._look(entry)[0] > 0
        return self.accepts(entry.topic) > 0

    def options(self, entry: Entry) -> Options:
        """How an entry that is granted is to be delivered."""
        return PLAIN if self._is_plain else self._look(entry)[1]

    def _look(self, entry: Entry) -> tuple[int, Options]:
        if entry.offset <= self._newest_from:
            return self._find(entry)
        key = (entry.topic, entry.origin == self.reader)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= MATCHER_CACHE_MAX:
                self._found.clear()
            found = self._found[key] = self._find(entry)
        return found

    def _find(self, entry: Entry) -> tuple[int, Options]:
        """Of all the filters that match: the highest QoS, and what they ask for."""
        own = entry.origin == self.reader
        found = [
            w
            for w in self._all
            if w.from_offset < entry.offset
            and not (own and w.options & NO_LOCAL)
            and matches(w.filter, entry.topic)
        ]
        qos = max((w.qos for w in found), default=0)
        return qos, joined(options_of(w.options, w.identifier) for w in found)

    def missed(self, topic: bytes, offset: int) -> bool:
        """Whether a pruned entry would have been received. A topic that is forgotten counts as
        matching: the safe side."""
        if not self.wanted:
            return False
        if topic == b"":
            return any(w.from_offset < offset for w in self.wanted)
        return any(w.from_offset < offset and matches(w.filter, topic) for w in self.wanted)

    async def next(self, after: int) -> Piece:
        """The next chunk behind ``after``.

        Raises ResumeHistoryUnavailable (410) when something that matches is pruned or damaged,
        StoreUnavailable when the disk does not answer.
        """
        try:
            chunk = await self.store.read(
                after,
                self.accepts,
                filters=[w.filter for w in self.wanted],
                entries_max=READ_ENTRIES_MAX,
                bytes_max=READ_BYTES_MAX,
                missed=self.missed,
            )
        except EntryDamaged as error:
            raise ResumeHistoryUnavailable(after, error.offset, error.topic) from error
        if chunk.loss is not None and not self.skips:
            raise ResumeHistoryUnavailable(after, chunk.loss.pruned_through, chunk.loss.topic)
        return Piece([(e, self.granted(e)) for e, _ in chunk.entries], chunk.through, chunk.loss)
