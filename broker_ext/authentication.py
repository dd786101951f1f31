"""Enhanced authentication (section 4.12): AUTH packets between a client and a plugin's method.

We provide no method. A plugin of amqtt does, with two attributes:

    authentication_method: str      the name of its method, as a client gives it
    def authentication_exchange(self, *, client_id: str) -> Exchange

An ``Exchange`` is made for each CONNECT with that Authentication Method, and for each
re-authentication. Who authenticates so is not asked by amqtt's authentication plugins; the topic
plugins are asked as always. A method that nobody provides is answered 0x8C.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Protocol

from broker_ext.reasons import Reason
from broker_ext.wire import Auth, Properties
from broker_ext.wire.properties import AUTHENTICATION_DATA, AUTHENTICATION_METHOD

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker_ext.wire import PropertyValue

__all__ = ["Accepted", "Challenge", "Dialogue", "Exchange", "method_of"]


class Challenge(NamedTuple):
    """The client has to answer this. data: None = no Authentication Data."""

    data: bytes | None = None


class Accepted(NamedTuple):
    """Who it is. user: UTF-8, empty = anonymous. data: told to the client with the success."""

    user: bytes
    data: bytes | None = None


class Exchange(Protocol):
    """One exchange of a method with one client."""

    async def proceed(self, data: bytes | None) -> Challenge | Accepted | None:
        """What the client sent, first with its CONNECT (or AUTH 0x19). None: it is refused."""
        ...


def method_of(properties: Properties | None) -> bytes | None:
    """The Authentication Method of a packet."""
    method: bytes | None = properties.get(AUTHENTICATION_METHOD) if properties else None
    return method


class Dialogue:
    """An exchange on a connection. send: writes an AUTH packet."""

    def __init__(self, method: bytes, exchange: Exchange, send: Callable[[Auth], None]) -> None:
        self.method = method
        self._exchange = exchange
        self._send = send
        self._answer: asyncio.Future[bytes | None] | None = None
        self._over = False

    async def run(self, data: bytes | None) -> Accepted | None:
        """Until the method has decided. None: it refuses, or the client is gone."""
        while True:
            outcome = await self._exchange.proceed(data)
            if self._over:
                return None
            if not isinstance(outcome, Challenge):
                return outcome
            self._answer = asyncio.get_running_loop().create_future()
            self._send(Auth(Reason.CONTINUE, self.properties(outcome.data)))
            data = await self._answer
            if self._over:
                return None

    def answer(self, packet: Auth) -> bool:
        """An AUTH packet came. False: it breaks the rules [MQTT5-4.12.0-3], [MQTT5-4.12.0-5]."""
        waiting = self._answer
        if (
            waiting is None
            or waiting.done()
            or packet.reason != Reason.CONTINUE
            or method_of(packet.properties) != self.method
        ):
            self.stop()
            return False
        assert packet.properties is not None
        waiting.set_result(packet.properties.get(AUTHENTICATION_DATA))
        return True

    def stop(self) -> None:
        """Nobody waits for the outcome any more."""
        self._over = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def properties(self, data: bytes | None) -> Properties:
        """The method and the data, as every packet of an exchange has them."""
        pairs: list[tuple[int, PropertyValue]] = [(AUTHENTICATION_METHOD, self.method)]
        if data is not None:
            pairs.append((AUTHENTICATION_DATA, data))
        return Properties(tuple(pairs))
