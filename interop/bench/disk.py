"""How long the disk takes to sync, measured beside everything: who syncs is as fast as that."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Final

__all__ = ["sync_ms"]

PROBES: Final = 20
PAGE: Final = b"x" * 4096


def sync_ms() -> float:
    """The median of appending a page and syncing it, in the directory that the data is in."""
    took: list[float] = []
    with tempfile.TemporaryFile(prefix="bench-") as file:
        for _ in range(PROBES):
            began = time.monotonic()
            file.write(PAGE)
            file.flush()
            os.fdatasync(file.fileno())
            took.append(time.monotonic() - began)
    return statistics.median(took) * 1e3
