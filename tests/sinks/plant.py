"""A broker with sinks in one process: real sockets, a clock that stands still, any store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from broker_ext.sinks.sink import SINK_PREFIX, Sink
from storage.outbox import Backlog, State
from tests.broker.mqtt import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.api import Snapshot
    from storage.outbox import Message
    from tests.broker.mqtt import Broker

__all__ = [
    "advance",
    "after_pauses",
    "backlog",
    "dead_letters",
    "done",
    "drained",
    "message",
    "publish",
    "record",
    "sink",
    "until",
]

TURN_S: Final = 0.002


def sink(broker: Broker, name: str = "alerts") -> Sink:
    return next(s for s in broker.hub.sinks.sinks if s.name == name)


async def publish(
    broker: Broker, *payloads: bytes, topic: bytes = b"alerts/a", **more: Any
) -> None:
    """Publish, and wait until it is stored."""
    for payload in payloads:
        broker.hub.router.publish(topic, payload, more.get("qos", 1), **_without(more, "qos"))
    await broker.hub.committer.drain()


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Let sockets and stores work until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(TURN_S)
    raise AssertionError(what)


async def drained(broker: Broker) -> None:
    """Everything that was written is committed."""
    await broker.hub.committer.drain()
    await broker.hub.handles.drain()


async def advance(broker: Broker, *, ms: int, name: str = "alerts") -> None:
    """Time goes on: leases are extended when they would be, then the janitor comes."""
    broker.clock.advance(ms=ms)
    await broker.hub.sinks.sweep()
    sink(broker, name).dispatcher.wake()


async def after_pauses(broker: Broker, condition: Callable[[], Any], *, ms: int = 4_000) -> None:
    """Let time go on whenever nothing is under way, until something is so."""

    async def is_so() -> bool:
        if condition():
            return True
        if not sink(broker).dispatcher._held:
            await advance(broker, ms=ms)
        return False

    await until(is_so)


async def backlog(broker: Broker, name: str = "alerts") -> Backlog:
    for one in await broker.store.outbox.backlog():
        if one.queue == name.encode():
            return one
    return Backlog(name.encode())


async def message(broker: Broker, number: int = 1) -> Message:
    found = await broker.store.outbox.show(number)
    assert found is not None
    return found


async def dead_letters(broker: Broker, name: str = "alerts") -> list[Message]:
    found = await broker.store.outbox.dead_letters(name.encode())
    assert all(m.state is State.DEAD for m in found)
    return found


async def record(broker: Broker, name: str = "alerts") -> Snapshot | None:
    await broker.hub.committer.drain()
    return await broker.store.inner.snapshot(SINK_PREFIX + name.encode())


async def done(broker: Broker, number: int, name: str = "alerts") -> None:
    """Wait until so many messages were delivered and settled."""

    async def enough() -> bool:
        return (await backlog(broker, name)).done >= number

    await until(enough, f"{number} done")
