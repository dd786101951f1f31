"""An event loop without sockets, threads or a clock of its own: the test decides what runs next.

Rule 1. What was scheduled with ``call_soon`` runs first in, first out, as asyncio promises; but
        between any two of these calls the test may let something happen outside.
Rule 2. A timer fires when the test says so, in the order of their times, and only when nothing is
        ready; then the clock jumps to it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterator
    from contextvars import Context

__all__ = ["ControlledLoop", "LoopClock", "result_of"]

START_MS = 1_000_000_000_000


class ControlledLoop(asyncio.AbstractEventLoop):
    """errors: what asyncio would have logged (exceptions that nobody took)."""

    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._made = 0
        self._now_s = 0.0
        self.errors: list[str] = []

    # ----------------------------------------------------------------- what asyncio calls

    def time(self) -> float:
        return self._now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their turn comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ------------------------------------------------------------------- what the test calls

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop of this thread."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    @property
    def ready(self) -> bool:
        """Whether something is to be run now."""
        while self._ready and self._ready[0].cancelled():
            self._ready.popleft()
        return bool(self._ready)

    def run_next(self) -> None:
        """Run the next of what is ready."""
        self._ready.popleft()._run()

    @property
    def next_timer_s(self) -> float | None:
        """When the next timer is due; None if there is none."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def fire_timer(self) -> None:
        """Let the time of the next timer come."""
        when, _, handle = heapq.heappop(self._timers)
        self._now_s = max(self._now_s, when)
        self._ready.append(handle)

    def pass_time(self, seconds: float) -> None:
        """The clock goes on by itself; timers become due with it."""
        self._now_s += seconds

    def pending_tasks(self) -> list[str]:
        """Names of tasks that have not ended."""
        return sorted(t.get_coro().__qualname__ for t in asyncio.all_tasks(self))  # type: ignore[union-attr]


class LoopClock:
    """The clock of a broker on a controlled loop (storage.clock.Clock)."""

    def __init__(self, loop: ControlledLoop) -> None:
        self._loop = loop

    def wall_ms(self) -> int:
        return self.now_ms()

    def now_ms(self) -> int:
        return START_MS + int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()

    def not_before(self, now_ms: int) -> None:
        """This clock is set by nobody."""


def result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("it waits")
