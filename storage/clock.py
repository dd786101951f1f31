"""Time, as a value that is handed in.

Nothing else in this project reads a clock (a test sees to it). Deadlines that are stored count on
``now_ms``; time-outs within one run count on ``monotonic``.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """now_ms: milliseconds since the epoch. monotonic: seconds, never goes back."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch; does not go back within a run."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the epoch, as others see them now: what is told to them, and what they
        tell. It may jump, so nothing else counts on it."""
        ...

    def monotonic(self) -> float:
        """Seconds of an arbitrary start; never goes back."""
        ...

    def not_before(self, ms: int) -> None:
        """``now_ms`` was at least this before: a wall clock that was set back while the broker was
        down goes on from here."""
        ...


class SystemClock:
    """The wall clock at start, carried on by the monotonic clock: a jump of the wall clock while
    the broker runs changes no deadline (HK-13)."""

    __slots__ = ("_base_ms",)

    def __init__(self) -> None:
        self._base_ms = int(time.time() * 1000) - int(time.monotonic() * 1000)

    def not_before(self, ms: int) -> None:
        self._base_ms = max(self._base_ms, ms - int(time.monotonic() * 1000))

    def now_ms(self) -> int:
        return self._base_ms + int(time.monotonic() * 1000)

    def wall_ms(self) -> int:
        return int(time.time() * 1000)

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that tests move. Starts at 1,000,000,000,000 ms."""

    __slots__ = ("_mono_ms", "_now_ms", "_wall_ms")

    def __init__(self, now_ms: int = 1_000_000_000_000) -> None:
        self._now_ms = now_ms
        self._wall_ms = now_ms
        self._mono_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic(self) -> float:
        return self._mono_ms / 1000

    def not_before(self, ms: int) -> None:
        self._now_ms = max(self._now_ms, ms)

    def advance(self, *, ms: int) -> None:
        """All clocks go on."""
        self._now_ms += ms
        self._wall_ms += ms
        self._mono_ms += ms

    def jump(self, *, ms: int) -> None:
        """The wall clock is set forwards or back, and the broker is started with it."""
        self._now_ms += ms
        self._wall_ms += ms

    def set_right(self, *, ms: int) -> None:
        """The wall clock is set forwards or back while the broker runs."""
        self._wall_ms += ms
