"""What the connection of a role may do in SQLite: its authorizer.

SQLite asks it when a statement is prepared, for every table and column that the statement reads or
changes. So it holds for whatever is run on that connection, by whomever. It knows tables, not rows:
that a worker settles what it acquired itself is the credential's business (storage.outbox).
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any, TypeVar

from storage.outbox.rights import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from storage.outbox.rights import Role

__all__ = ["RoleWorker", "authorizer"]

T = TypeVar("T")


def authorizer(role: Role) -> Callable[..., int]:
    """For sqlite3.Connection.set_authorizer: the rights of a role, and nothing else."""
    rights = {space.name.lower(): letters for space, letters in TABLES[role].items()}
    changes = {
        sqlite3.SQLITE_INSERT: "w",
        sqlite3.SQLITE_UPDATE: "w",
        sqlite3.SQLITE_DELETE: "d",
    }

    def authorize(action: int, table: str | None, column: str | None, *_: str | None) -> int:
        if action in {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION}:
            return sqlite3.SQLITE_OK
        letters = rights.get(table or "", "")
        if action == sqlite3.SQLITE_READ:
            is_allowed = "r" in letters or (bool(letters) and column != "v")
        else:
            is_allowed = changes.get(action, "-") in letters
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    return authorize


class RoleWorker:
    """The worker of a role's connection (storage.sqlite_store), opened when it is first needed.

    connect: opens it. What that raises is the answer to whatever waits for it; the next one tries
        again.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._connect = connect
        self._opening: asyncio.Task[Any] | None = None
        self._waiting: set[asyncio.Task[None]] = set()

    @property
    def worker(self) -> Any:
        """None unless it is open."""
        opening = self._opening
        is_open = opening is not None and opening.done() and opening.exception() is None
        return opening.result() if opening is not None and is_open else None

    async def _opened(self) -> Any:
        if self._opening is None or (self._opening.done() and self.worker is None):
            self._opening = asyncio.get_running_loop().create_task(self._connect())
        return await asyncio.shield(self._opening)

    def post(self, work: Callable[[Any], T], done: Callable[[Any], None]) -> None:
        """Do a job after those before it; ``done`` gets what it returned or raised."""
        if self.worker is not None and not self._waiting:
            self.worker.post(work, done)
            return
        task = asyncio.get_running_loop().create_task(self._post(work, done))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _post(self, work: Callable[[Any], T], done: Callable[[Any], None]) -> None:
        try:  # those who wait for one task go on in the order they came
            worker = await self._opened()
        except Exception as error:  # noqa: BLE001 - it is handed to whoever asked
            done(error)
        else:
            worker.post(work, done)

    async def run(self, work: Callable[[Any], T]) -> T:
        """Do a job, and wait for it."""
        result: T = await (await self._opened()).run(work)
        return result

    async def stop(self) -> None:
        """Finish what was posted, and close the file."""
        if self._waiting:
            await asyncio.wait(self._waiting)
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self.worker is not None:
            await self.worker.stop()
