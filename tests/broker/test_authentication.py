"""Enhanced authentication: AUTH packets between a client and a method that somebody provides."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from broker_ext.authentication import Accepted, Challenge
from broker_ext.wire import Auth, Connack, Disconnect, Properties
from broker_ext.wire.properties import AUTHENTICATION_DATA, AUTHENTICATION_METHOD
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

METHOD = b"riddle"


class Riddle:
    """Asks back ``steps`` times, and believes who says "friend"."""

    def __init__(self, client_id: bytes, steps: int = 1) -> None:
        self.client_id = client_id
        self.steps = steps

    async def proceed(self, data: bytes | None) -> Challenge | Accepted | None:
        await asyncio.sleep(0)
        if data == b"bug":
            msg = "a bug of the plugin"
            raise RuntimeError(msg)
        if self.steps:
            self.steps -= 1
            return Challenge(b"who?")
        if data == b"friend":
            return Accepted(b"alice", b"welcome")
        return Accepted(b"mallory") if data == b"other" else None


def auth(data: bytes | None = None, method: bytes = METHOD) -> Properties:
    pairs = [(AUTHENTICATION_METHOD, method)]
    if data is not None:
        pairs.append((AUTHENTICATION_DATA, data))
    return Properties(tuple(pairs))


async def begin(broker: Broker, data: bytes | None = None, **options: bytes) -> Client:
    """A client that has sent its CONNECT."""
    broker.methods[METHOD] = Riddle
    client = await broker.dial()
    client.reads(5)
    client.client_id = b"dev"
    packet = client.connect_packet(b"dev", version=5, properties=auth(data, **options))
    client.send(packet)
    return client


async def accepted(broker: Broker) -> Client:
    client = await begin(broker)
    await client.next(Auth)
    client.send(Auth(0x18, auth(b"friend")))
    await client.next(Connack)
    return client


async def ended(client: Client, reason: int) -> None:
    assert (await client.next(Disconnect)).reason == reason
    await client.closed()


async def refused(client: Client, reason: int) -> None:
    assert (await client.next(Connack)).reason == reason
    await client.closed()


async def test_0x18_a_client_is_asked_back_and_accepted(broker: Broker) -> None:
    client = await begin(broker)
    challenge = await client.next(Auth)
    assert challenge == Auth(0x18, auth(b"who?"))
    client.send(Auth(0x18, auth(b"friend")))
    connack = await client.next(Connack)
    assert connack.reason == 0
    assert connack.properties is not None
    assert connack.properties.get(AUTHENTICATION_METHOD) == METHOD
    assert connack.properties.get(AUTHENTICATION_DATA) == b"welcome"
    assert broker.hub.registry.owners[b"dev"].user == b"alice"


async def test_0x87_a_client_that_the_method_refuses(broker: Broker) -> None:
    client = await begin(broker)
    await client.next(Auth)
    client.send(Auth(0x18, auth(b"foe")))
    await refused(client, 0x87)
    assert b"dev" not in broker.hub.registry.owners


async def test_0x8c_a_method_that_nobody_provides(broker: Broker) -> None:
    await refused(await begin(broker, method=b"unknown"), 0x8C)


@pytest.mark.parametrize(
    "wrong",
    [
        Auth(0x18, auth(b"friend", method=b"other")),
        Auth(0x19, auth(b"friend")),
        Auth(0, None),
    ],
)
async def test_0x82_an_answer_that_breaks_the_rules(broker: Broker, wrong: Auth) -> None:
    client = await begin(broker)
    await client.next(Auth)
    client.send(wrong)
    await refused(client, 0x82)


async def test_0x82_a_packet_in_the_middle_of_an_exchange(broker: Broker) -> None:
    client = await begin(broker)
    await client.next(Auth)
    client.publish(b"t", b"1")
    await refused(client, 0x82)
    assert broker.hub.figures.published == 0


async def test_a_client_that_leaves_in_the_middle_is_gone(broker: Broker) -> None:
    client = await begin(broker)
    await client.next(Auth)
    await client.disconnect()
    client = await begin(broker)
    await client.next(Auth)
    await client.cut()
    assert not broker.hub.registry.owners


async def test_a_client_that_does_not_answer_has_the_time_of_a_connect() -> None:
    async with running(connect_timeout_s=0.05) as broker:
        client = await begin(broker)
        await client.next(Auth)
        await refused(client, 0x87)


async def test_a_method_that_fails_refuses(broker: Broker) -> None:
    await refused(await begin(broker, b"bug"), 0x88)


async def test_a_client_may_authenticate_again_beside_everything_else(broker: Broker) -> None:
    client = await accepted(broker)
    await client.subscribe(b"t")
    publisher = await broker.connect(b"pub")
    for _ in range(2):
        client.send(Auth(0x19, auth()))
        await client.next(Auth)
        await publisher.deliver(b"t", b"1")
        assert await client.payloads(1) == [b"1"]
        client.send(Auth(0x18, auth(b"friend")))
        assert await client.next(Auth) == Auth(0, auth(b"welcome"))
    await client.quiet()


@pytest.mark.parametrize("data", [b"foe", b"other", b"bug"])
async def test_0x87_who_cannot_authenticate_again_is_disconnected(
    broker: Broker, data: bytes
) -> None:
    client = await accepted(broker)
    client.send(Auth(0x19, auth()))
    await client.next(Auth)
    client.send(Auth(0x18, auth(data)))
    await ended(client, 0x87)


@pytest.mark.parametrize(
    "wrong", [Auth(0x19, auth(method=b"other")), Auth(0x18, auth(b"friend")), Auth(0x19, None)]
)
async def test_0x82_a_re_authentication_that_breaks_the_rules(broker: Broker, wrong: Auth) -> None:
    client = await accepted(broker)
    client.send(wrong)
    await ended(client, 0x82)


async def test_0x82_auth_where_no_method_was_named(broker: Broker) -> None:
    client = await broker.connect(version=5)
    client.send(Auth(0x19, auth()))
    await ended(client, 0x82)
