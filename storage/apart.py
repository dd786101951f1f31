"""A process of its own for work that may end its process.

LMDB trusts the pages of its tree. One that is damaged can make the library abort, or read what is
not there (SIGSEGV, SIGBUS): nothing that could be caught. Whoever looks into a file that may be
damaged does so in a child, whose end can be told.
"""

from __future__ import annotations

import multiprocessing
import signal
from typing import TYPE_CHECKING, TypeVar, cast

from storage.errors import StoreCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ["apart"]

T = TypeVar("T")


def apart(data: Path, work: Callable[[], T]) -> T:
    """What ``work`` gives, or what it raises, in a child process. data: the directory it reads.

    Raises StoreCorrupt if the child died of it.
    """
    fork = multiprocessing.get_context("fork")  # work needs not be something that can be sent
    mine, others = fork.Pipe(duplex=False)
    child = fork.Process(target=_do, args=(work, others))
    child.start()
    others.close()
    try:
        is_done, result = mine.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        reason = (
            f"it cannot be read: the process that read it was ended by it ({name}), so a page of"
            " its tree is damaged. Nothing was changed; restore it from a backup"
        )
        raise StoreCorrupt(str(data), reason) from None
    child.join()
    if not is_done:
        raise cast("BaseException", result)
    return cast("T", result)


def _do(work: Callable[[], object], told: Connection) -> None:
    try:
        result = (True, work())
    except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
        result = (False, error)
    told.send(result)
