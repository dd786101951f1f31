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
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from broker_ext.reasons import Reason
from broker_ext.wire import Auth, Properties
from broker_ext.wire.properties import AUTHENTICATION_DATA, AUTHENTICATION_METHOD

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker_ext.wire import Connect, PropertyValue

__all__ = ["Accepted", "Authentication", "Challenge", "Exchange", "method_of"]

log = logging.getLogger("amqtt_durable.connection")

REAUTHENTICATE: Final = 0x19
"""AUTH reason code of a client that begins anew."""


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


class Authentication:
    """The enhanced authentication of one connection: with its CONNECT, and what follows.

    provide: makes an exchange for (method, client id), None where nobody provides the method.
    send: writes an AUTH packet. method: that of the connection, None = none.
    told: what CONNACK has to say of it.
    """

    __slots__ = (
        "_answer",
        "_over",
        "_provide",
        "_send",
        "_timeout_s",
        "method",
        "told",
        "under_way",
    )

    def __init__(
        self,
        provide: Callable[[bytes, bytes], Exchange | None],
        send: Callable[[Auth], None],
        *,
        timeout_s: float,
    ) -> None:
        self.method: bytes | None = None
        self.told: Properties | None = None
        self.under_way = False
        self._provide = provide
        self._send = send
        self._timeout_s = timeout_s
        self._answer: asyncio.Future[bytes | None] | None = None
        self._over = False

    async def begin(self, connect: Connect) -> bytes | Reason:
        """With a CONNECT that names a method: its user, or why it is refused."""
        method = method_of(connect.properties)
        assert method is not None
        exchange = self._provide(method, connect.client_id)
        if exchange is None:
            return Reason.BAD_METHOD
        self.method = method
        accepted = await self._converse(exchange, connect.properties)
        if accepted is None:
            return Reason.NOT_AUTHORIZED
        self.told = self._properties(accepted.data)
        return accepted.user

    def begins_again(self, packet: Auth) -> bool:
        """Whether an AUTH packet may begin a re-authentication [MQTT5-4.12.1-1]."""
        return (
            packet.reason == REAUTHENTICATE
            and not self.under_way
            and self.method is not None
            and method_of(packet.properties) == self.method
        )

    async def again(self, packet: Auth, client_id: bytes, user: bytes) -> Properties | None:
        """Re-authenticate: what the client is told with the success; None if it is refused, which
        it also is if it is another user than before."""
        assert self.method is not None
        try:
            exchange = self._provide(self.method, client_id)
            if exchange is None:
                return None
            accepted = await self._converse(exchange, packet.properties)
        except Exception:
            # a plugin's bug: who cannot say yes has not said it
            log.exception("re-authentication of %r failed", client_id)
            return None
        if accepted is None or accepted.user != user:
            return None
        return self._properties(accepted.data)

    async def _converse(self, exchange: Exchange, first: Properties | None) -> Accepted | None:
        """Until the method has decided, in the time that a CONNECT has. None: it refuses, or the
        client is gone."""
        data = first.get(AUTHENTICATION_DATA) if first is not None else None
        self.under_way = True
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    outcome = await exchange.proceed(data)
                    if self._over:
                        return None
                    if not isinstance(outcome, Challenge):
                        return outcome
                    self._answer = asyncio.get_running_loop().create_future()
                    self._send(Auth(Reason.CONTINUE, self._properties(outcome.data)))
                    data = await self._answer
                    if self._over:
                        return None
        except TimeoutError:
            return None
        finally:
            self.under_way = False
            self._answer = None

    def answer(self, packet: Auth) -> bool:
        """An AUTH packet came. False: it is no answer to what was asked [MQTT5-4.12.0-3],
        [MQTT5-4.12.0-5]."""
        waiting = self._answer
        if (
            waiting is None
            or waiting.done()
            or packet.reason != Reason.CONTINUE
            or method_of(packet.properties) != self.method
        ):
            return False
        assert packet.properties is not None
        waiting.set_result(packet.properties.get(AUTHENTICATION_DATA))
        return True

    def stop(self) -> None:
        """The connection is over: nobody waits for the outcome any more."""
        self._over = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _properties(self, data: bytes | None) -> Properties:
        """The method and the data, as every packet of an exchange has them."""
        assert self.method is not None
        pairs: list[tuple[int, PropertyValue]] = [(AUTHENTICATION_METHOD, self.method)]
        if data is not None:
            pairs.append((AUTHENTICATION_DATA, data))
        return Properties(tuple(pairs))
