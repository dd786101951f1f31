"""The garbage collector, in a process that is a broker and nothing else.

What Python's defaults find is hardly ever garbage here: nearly everything is freed by its last
reference, and what stays (routes, recent messages, imported modules) is walked again and again, 10
to 20% of the CPU and pauses of 20 ms at a bad moment. TLS connections that ended are rings, and so
may be what plugins make, so it is not turned off.
"""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["calm"]

THRESHOLDS: Final = (5_000, 20, 100)
"""A walk through the youngest 5,000 objects takes a quarter of a millisecond."""


def calm() -> None:
    """Leave alone what is there now; look less often at what comes. Call it once a broker listens.

    Not for a program that has a broker as one of its parts: the collector is the whole process's.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
