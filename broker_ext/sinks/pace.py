"""When a destination that fails is tried again: the pace of one sink. Pure.

A message that fails waits for its own next attempt (storage.outbox.schedule); this is about the
destination, so that one that is down costs no attempts of the messages behind it.

Rule 1. A destination that asks for a time (Retry-After) is left alone until then.
Rule 2. One that cannot be reached, or that throttles without naming a time, is left alone for 1 s,
        then 2 s, 4 s, ... at most 60 s. So is one that fails PATIENCE times in a row in a way that
        tells nothing (5xx, a time-out, a connection that breaks).
Rule 3. After a pause one message goes first. If the destination takes it, or rejects it, it is up
        and all go on; else the next pause begins.
Rule 4. Sends that were under way when a pause began do not make it longer.
"""

from __future__ import annotations

from typing import Final

from storage.outbox import Failure

__all__ = ["PATIENCE", "PAUSE_MS", "Pace"]

PAUSE_MS: Final = (1_000, 60_000)
PATIENCE: Final = 5


class Pace:
    """One destination. Times are ``now_ms`` of the clock."""

    __slots__ = ("_failures", "_pauses", "round", "until_ms")

    def __init__(self) -> None:
        self.round = 0
        """Of the sends that begin now; a pause begins the next one."""
        self.until_ms = 0
        self._pauses = 0
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """It has not taken anything since the last pause began."""
        return self._pauses > 0

    def room(self, window: int, now_ms: int) -> int:
        """How many sends may be under way."""
        if now_ms < self.until_ms:
            return 0
        return min(window, 1) if self._pauses else window

    def told(
        self, failure: Failure, begun_in: int, now_ms: int, retry_at_ms: int | None = None
    ) -> bool:
        """What a send that began in round ``begun_in`` came to. True: a pause begins with it."""
        if failure in {Failure.NONE, Failure.REJECTED}:
            self._failures = 0
            if begun_in == self.round:
                self._pauses = 0
            return False
        if failure not in {Failure.THROTTLED, Failure.UNAVAILABLE, Failure.INDETERMINATE}:
            return False  # it says nothing about the destination
        asked = retry_at_ms is not None and retry_at_ms > now_ms
        if begun_in != self.round:
            if asked and retry_at_ms is not None:
                self.until_ms = max(self.until_ms, retry_at_ms)
            return False
        self._failures += 1
        is_unclear = failure is Failure.INDETERMINATE and not asked and not self._pauses
        if is_unclear and self._failures < PATIENCE:
            return False
        self.round += 1
        self._failures = 0
        self._pauses += 1
        if asked and retry_at_ms is not None:
            self.until_ms = retry_at_ms
        else:
            shortest, longest = PAUSE_MS
            self.until_ms = now_ms + min(shortest << min(self._pauses - 1, 16), longest)
        return True
