"""The demo's clock: real time, because real processes and real sockets are what it shows."""

from __future__ import annotations

import time

__all__ = ["now_ms", "sleep_ms"]


def now_ms() -> int:
    """Milliseconds of a clock that only goes forward; its zero means nothing."""
    return time.monotonic_ns() // 1_000_000


def sleep_ms(duration_ms: int) -> None:
    """Wait, without measure below a millisecond."""
    time.sleep(max(0, duration_ms) / 1000)
