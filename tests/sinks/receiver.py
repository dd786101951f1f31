"""A real HTTP server that does what a test wants: answers, stalls, cuts, goes, and comes back."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Answer", "Receiver", "Request", "answering"]

PATIENCE_S = 20.0


@dataclass
class Request:
    headers: dict[str, str]
    body: bytes

    @property
    def event_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        return int(self.headers["amqtt-attempt"])

    @property
    def topic(self) -> str:
        return self.headers["amqtt-topic"]


@dataclass
class Answer:
    """status 0: the connection is cut after the request was taken. stall: until the gate opens."""

    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stall: asyncio.Event | None = None


class Receiver:
    """It answers what ``answers`` has, in turn, and then ``default``; or what ``decide`` says."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: deque[Answer] = deque()
        self.default = Answer()
        self.decide: Callable[[Request], Answer] | None = None
        self.port = 0
        self.under_way = 0
        self.most_under_way = 0
        self._runner: web.AppRunner | None = None
        self._came = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=in-the-query"

    async def start(self) -> Self:
        """Listen, on the same port as before."""
        application = web.Application(client_max_size=64 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Go away: nobody listens on the port."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Request({k.lower(): v for k, v in request.headers.items()}, await request.read())
        self.requests.append(seen)
        self._came.set()
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.decide is not None:
                answer = self.decide(seen)
            else:
                answer = self.answers.popleft() if self.answers else self.default
            if answer.stall is not None:
                await answer.stall.wait()
            if not answer.status:
                assert request.transport is not None
                request.transport.abort()
            return web.Response(
                status=answer.status or 204, headers=answer.headers, body=answer.body
            )
        finally:
            self.under_way -= 1

    async def until(self, condition: Callable[[Self], Any]) -> None:
        """Wait until the requests are such."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self._came.clear()
                await self._came.wait()

    async def count(self, number: int) -> list[Request]:
        """Wait for so many requests."""
        await self.until(lambda r: len(r.requests) >= number)
        return self.requests


@asynccontextmanager
async def answering(*answers: Answer) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    receiver.answers.extend(answers)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.stop()
