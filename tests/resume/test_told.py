"""Session Present 0 is said until it was heard: not even a crash comes between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.broker.mqtt import running
from tests.storage.harness import BACKENDS, scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.broker.mqtt import Broker
    from tests.storage.harness import Backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with scratch() as path:
        yield BACKENDS[request.param](path)


async def unheard_connect(broker: Broker, client_id: bytes) -> None:
    """The broker accepts a client, which does not get the answer before all is over."""
    client = await broker.dial()
    client.send(client.connect_packet(client_id))
    await broker.turns(lambda: client_id in broker.hub.registry.owners)


@pytest.mark.case("HK-17")
async def test_a_reset_is_told_again_when_the_broker_dies_before_it_is_heard(
    backend: Backend,
) -> None:
    async with running(backend, max_messages=1) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1", b"2")
        await broker.hub._prune()
        for _ in range(3):
            await unheard_connect(broker, b"c")
            await broker.crash_and_restart()
        await unheard_connect(broker, b"c")  # this time it is the client that dies
        await broker.clients[-1].cut()
        client = await broker.connect(b"c")
        assert not client.connack.session_present
        await client.quiet()
        await broker.crash_and_restart()
        assert not (await broker.connect(b"c")).connack.session_present  # there is nothing in it


@pytest.mark.case("HK-17")
async def test_a_reset_is_told_again_to_who_gave_up_waiting_for_it(backend: Backend) -> None:
    async with running(backend, max_messages=1) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1", b"2")
        await broker.hub._prune()
        await unheard_connect(broker, b"c")
        await broker.clients[-1].disconnect()
        assert not (await broker.connect(b"c")).connack.session_present


async def test_an_expiry_is_told_again_when_the_broker_dies_before_it_is_heard(
    backend: Backend,
) -> None:
    async with running(backend, session_expiry_interval_s=60) as broker:
        await broker.sleeper(b"c", b"a")
        broker.clock.advance(ms=60_000)
        await unheard_connect(broker, b"c")
        await broker.crash_and_restart()
        assert not (await broker.connect(b"c")).connack.session_present


async def test_a_refusal_in_the_replay_is_told_again_when_the_broker_dies(
    backend: Backend,
) -> None:
    async with running(backend, max_messages=1) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1", b"2")
        await broker.restart()
        gate = broker.store.hang_read()
        client = await broker.connect(b"c")
        await gate.reached.wait()
        await broker.hub._prune()
        gate.release()
        await client.closed()
        await unheard_connect(broker, b"c")
        await broker.crash_and_restart()
        assert not (await broker.connect(b"c")).connack.session_present


@pytest.mark.case("HK-17")
async def test_a_reset_is_told_again_when_the_broker_was_started_anew_in_between(
    backend: Backend,
) -> None:
    async with running(backend, max_messages=1) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1", b"2")
        await broker.hub._prune()
        for _ in range(3):
            await unheard_connect(broker, b"c")
            await broker.clients[-1].cut()
            await broker.restart()
        assert not (await broker.connect(b"c")).connack.session_present


@pytest.mark.parametrize("how", ["disconnect", "cut"])
async def test_an_empty_session_that_its_client_knows_is_there(backend: Backend, how: str) -> None:
    """[MQTT-3.1.2-4]: the existence of a session is part of its state."""
    async with running(backend) as broker:
        client = await broker.connect(b"c")
        await client.quiet()
        await (client.disconnect() if how == "disconnect" else client.cut())
        for _ in range(2):
            await broker.restart()
            client = await broker.connect(b"c")
            assert client.connack.session_present
            await client.cut()
        await broker.crash_and_restart()
        assert (await broker.connect(b"c")).connack.session_present


@pytest.mark.parametrize("sent", [b"\x00\x00", b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00"])
async def test_one_that_breaks_the_rules_when_it_was_answered_knows_its_session(
    backend: Backend, sent: bytes
) -> None:
    """What cannot be a packet, and a second CONNECT [MQTT-3.1.0-2], come after the CONNACK."""
    async with running(backend) as broker:
        client = await broker.connect(b"c")
        client.send_bytes(sent)
        await client.closed()
        assert (await broker.connect(b"c")).connack.session_present


async def test_a_publisher_that_was_answered_is_known_after_a_crash(backend: Backend) -> None:
    async with running(backend) as broker:
        client = await broker.connect(b"c")
        await client.deliver(b"a", b"1")
        await broker.hub.committer.drain()
        await broker.crash_and_restart()
        assert (await broker.connect(b"c")).connack.session_present


async def test_a_session_that_was_subscribed_is_there_after_a_crash(backend: Backend) -> None:
    async with running(backend) as broker:
        for qos, client_id in enumerate((b"zero", b"one", b"two")):
            await broker.subscriber(client_id, (b"a", qos))
        await broker.crash_and_restart()
        for client_id in (b"zero", b"one", b"two"):
            assert (await broker.connect(client_id)).connack.session_present
