"""Reading what can be read of a database that is damaged.

A space is walked from its beginning until a row cannot be read, then from its end down to the same
place; what lies between is a *gap*. Damage of a row's value (a checksum) is not found here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from storage.kv import U64, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.kv import Database, ReadTxn

__all__ = ["Gap", "Salvage"]

T = TypeVar("T")

PAGE_ROWS: Final = 1000
PAGE_BYTES: Final = 4 << 20
"""Rows that are in memory at a time."""


class Gap(NamedTuple):
    """Rows between two keys that cannot be read. before: None = to the end of the space."""

    space: Space
    after: bytes
    before: bytes | None


class Salvage:
    """A source of a repair; None = one of which nothing can be read.

    gaps: found so far, by walks that came to their end.
    """

    def __init__(self, database: Database | None) -> None:
        self._database = database
        self.gaps: list[Gap] = []

    def read(self, work: Callable[[ReadTxn], T]) -> T | None:
        """What ``work`` gives, None if something that it needs cannot be read."""
        if self._database is None:
            return None
        try:
            return self._database.read(work)
        except Exception:  # noqa: BLE001 - a damaged file raises what it likes; None says it
            return None

    def get(self, space: Space, key: bytes) -> bytes | None:
        """A value; None also if it cannot be read."""
        return self.read(lambda txn: txn.get(space, key))

    def rows(self, space: Space) -> Iterator[tuple[bytes, bytes]]:
        """Every row of a space that can be read, in key order."""
        after = b""
        while True:
            page, is_broken = self._page(space, _following(space, after), None)
            yield from page
            after = page[-1][0] if page else after
            if is_broken:
                break
            if not page:
                return
        beyond: list[bytes] = []
        while True:
            stop = beyond[-1] if beyond else None
            page, is_broken = self._page(space, _following(space, after), stop, reverse=True)
            beyond += [key for key, _ in page]
            if is_broken or not page:
                break
        self.gaps.append(Gap(space, after, beyond[-1] if beyond else None))
        for key in reversed(beyond):
            value = self.get(space, key)
            if value is not None:
                yield key, value

    def _page(
        self, space: Space, start: bytes, stop: bytes | None, *, reverse: bool = False
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Rows, at least one if there is one; and whether the one after them cannot be read."""
        page: list[tuple[bytes, bytes]] = []

        def work(txn: ReadTxn) -> bool:
            page.clear()
            size = 0
            for row in txn.scan(space, start, stop, reverse=reverse):
                page.append(row)
                size += len(row[1])
                if len(page) == PAGE_ROWS or size > PAGE_BYTES:
                    break
            return False

        is_broken = self.read(work) is None
        return page, is_broken


def _following(space: Space, key: bytes) -> bytes:
    """The lowest key after ``key``; keys of the history are numbers."""
    if not key:
        return b""
    if space is Space.HISTORY:
        return U64.pack(min(int.from_bytes(key, "big") + 1, (1 << 63) - 1))
    return key + b"\x00"
