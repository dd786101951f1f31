"""One process has a data directory at a time.

The lock is an exclusive ``flock`` on the file ``lock``: the kernel lets go of it when the process
dies, however it dies, so there is nothing to clean up. The file holds the pid of who has it, for
the one who asks in vain; it is never deleted, because two processes could then lock two files.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from storage.errors import StoreLocked, StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Held from ``acquire`` to ``release`` or the death of the process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def acquire(self) -> None:
        """Take it at once or raise StoreLocked with the holder's pid. Never waits."""
        path = self._directory / "lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnavailable(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 20, 0).strip()
            os.close(fd)
            pid = int(text) if text.isdigit() else 0
            raise StoreLocked(str(self._directory), "one process at a time", pid) from None
        except OSError as error:
            os.close(fd)
            raise StoreUnavailable(f"{path}: {error.strerror}") from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except OSError:
            pass  # a full disk: the lock is held all the same, only the pid cannot be told
        self._fd = fd

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
