"""The queue of a store's thread: jobs go in from the event loop, what came of them comes back.

A commit is handed over twice, to the thread and back, and at a few hundred microseconds a commit
that is a good part of what it costs. So there is one queue and one call into the loop for each job,
and no future, task or coroutine unless somebody awaits it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Jobs"]

T = TypeVar("T")


class Jobs:
    """Made and filled in the event loop; ``serve`` is the thread's side. First in, first out."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None]
        self._queue = SimpleQueue()

    def post(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run a job after those before it; ``done`` gets what it returned or raised."""
        self._queue.put((job, done))

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job after those before it, and wait for it."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.post(job, partial(_settle, future))
        return await future

    def end(self) -> None:
        """``serve`` returns when it has done what was posted before."""
        self._queue.put(None)

    def serve(self) -> None:
        """Do jobs as they come. Call it in the thread."""
        take, tell = self._queue.get, self._loop.call_soon_threadsafe
        while (work := take()) is not None:
            job, done = work
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - it is handed to whoever asked
                result = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                tell(done, result)
            del work, job, done, result  # a batch is not kept while there is nothing to do


def _settle(future: asyncio.Future[T], result: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
