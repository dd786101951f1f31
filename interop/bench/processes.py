"""Work in a process of its own, so that a client never waits for another one's interpreter."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Failed", "Process"]

T = TypeVar("T")
_FORK = mp.get_context("fork")


class Failed(Exception):
    """The work raised, died, or took too long."""


class Process(Generic[T]):
    """Runs ``work(go)`` in a process. ``go`` says that all is prepared, and waits for ``start``.

    The process ends with the block, whatever happened.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], *, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
        self._pipe, theirs = _FORK.Pipe()

        def run() -> None:
            def go() -> None:
                theirs.send(("ready", None))
                theirs.recv()

            try:
                result = work(go)
            except BaseException as error:  # noqa: BLE001 - it is told to the parent
                theirs.send(("failed", f"{type(error).__name__}: {error}"))
            else:
                theirs.send(("done", result))
            os._exit(0)  # nothing of the parent's is to be cleaned up here

        self._process = _FORK.Process(target=run, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Process[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _next(self) -> tuple[str, T]:
        if not self._pipe.poll(max(0.0, self._end - time.monotonic())):
            raise Failed("not done in time")
        with contextlib.suppress(EOFError):
            kind, value = self._pipe.recv()
            if kind == "failed":
                raise Failed(value)
            return kind, value
        raise Failed("a client process died")

    def wait_ready(self) -> None:
        """Wait until it says that all is prepared."""
        kind, _ = self._next()
        assert kind == "ready"

    def start(self) -> None:
        """Let it begin."""
        self._pipe.send(None)

    def result(self) -> T:
        """Wait for what the work returned. Raises Failed."""
        kind, value = self._next()
        assert kind == "done"
        return value
