"""A queue of a plugin's own, beside those of sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from storage.api import Entry
from storage.outbox import Failure, State
from tests.seam.amqtt_broker import running

if TYPE_CHECKING:
    from pathlib import Path

SINK = {"bridge1": {"type": "bridge", "filters": ["a/#"], "host": "127.0.0.1", "port": 1}}


async def test_a_plugin_has_a_queue_of_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        plugin = broker.plugin
        producer, worker = plugin.producer("mail"), plugin.worker("mail")
        sent = await producer.enqueue(Entry(0, b"alarm", b"on fire", 1), key=b"alarm-1")
        assert not (
            await producer.enqueue(Entry(0, b"alarm", b"on fire", 1), key=b"alarm-1")
        ).is_new
        (one,) = (await worker.claim()).messages
        assert one.id == sent.id
        assert one.message is not None
        assert one.message.payload == b"on fire"
        assert await worker.failed(one, Failure.REJECTED) is State.DEAD
        assert not await worker.done(one)


@pytest.mark.parametrize("queue", ["", "$sessions", "$mine", "x" * 256])
async def test_a_queue_that_is_not_its_own_is_refused(tmp_path: Path, queue: str) -> None:
    async with running(tmp_path) as broker:
        with pytest.raises(ValueError, match="queue"):
            broker.plugin.producer(queue)
        with pytest.raises(ValueError, match="queue"):
            broker.plugin.worker(queue)


async def test_a_queue_of_a_sink_is_the_sinks(tmp_path: Path) -> None:
    async with running(tmp_path, options={"sinks": SINK}) as broker:
        with pytest.raises(ValueError, match="sink"):
            broker.plugin.worker("bridge1")
