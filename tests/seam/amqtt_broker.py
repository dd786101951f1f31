"""Real amqtt brokers in this process, and clients for them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from amqtt.broker import Broker, BrokerContext
from amqtt.plugins.base import BasePlugin

from tests.broker.mqtt import Client

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from broker_ext.hub import Hub
    from broker_ext.plugin import DurableSessionPlugin

__all__ = ["ANONYMOUS", "DURABLE", "RECORDER", "Recorder", "Running", "configuration", "running"]

DURABLE: Final = "broker_ext.DurableSessionPlugin"
RECORDER: Final = "tests.seam.amqtt_broker.Recorder"
ANONYMOUS: Final[dict[str, dict[str, Any]]] = {
    "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}
}
PATIENCE_S: Final = 20.0


class Recorder(BasePlugin[BrokerContext]):
    """A plugin that notes every event with its arguments."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Event()

    def _note(self, event: str, arguments: dict[str, Any]) -> None:
        self.events.append((event, arguments))
        self._news.set()

    async def wait_for(
        self, event: str, condition: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """The arguments of the first such event, now or soon."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for name, arguments in self.events:
                    if name == event and condition(arguments):
                        return arguments
                self._news.clear()
                await self._news.wait()

    async def on_broker_pre_start(self) -> None:
        self._note("broker_pre_start", {})

    async def on_broker_post_start(self) -> None:
        self._note("broker_post_start", {})

    async def on_broker_pre_shutdown(self) -> None:
        self._note("broker_pre_shutdown", {})

    async def on_broker_post_shutdown(self) -> None:
        self._note("broker_post_shutdown", {})

    async def on_broker_client_connected(self, **arguments: Any) -> None:
        self._note("broker_client_connected", arguments)

    async def on_broker_client_disconnected(self, **arguments: Any) -> None:
        self._note("broker_client_disconnected", arguments)

    async def on_broker_client_subscribed(self, **arguments: Any) -> None:
        self._note("broker_client_subscribed", arguments)

    async def on_broker_client_unsubscribed(self, **arguments: Any) -> None:
        self._note("broker_client_unsubscribed", arguments)

    async def on_broker_retained_message(self, **arguments: Any) -> None:
        self._note("broker_retained_message", arguments)

    async def on_broker_message_received(self, **arguments: Any) -> None:
        self._note("broker_message_received", arguments)

    async def on_broker_message_broadcast(self, **arguments: Any) -> None:
        self._note("broker_message_broadcast", arguments)

    async def on_durable_session_reset(self, **arguments: Any) -> None:
        self._note("durable_session_reset", arguments)

    async def on_mqtt_packet_received(self, **arguments: Any) -> None:
        self._note("mqtt_packet_received", arguments)

    async def on_mqtt_packet_sent(self, **arguments: Any) -> None:
        self._note("mqtt_packet_sent", arguments)


class Running:
    """A broker that runs."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.guards: dict[str, Any] = {}
        self.clients: list[Client] = []

    def port(self, listener: str = "default") -> int:
        server: Any = self.broker._servers[listener].instance
        port: int = next(iter(server.sockets)).getsockname()[1]
        return port

    @property
    def plugin(self) -> DurableSessionPlugin:
        plugin: Any = self.broker.plugins_manager.get_plugin("DurableSessionPlugin")
        return plugin  # type: ignore[no-any-return]

    @property
    def hub(self) -> Hub:
        hub = self.plugin.hub
        assert hub is not None
        return hub

    @property
    def recorder(self) -> Recorder:
        recorder = self.broker.plugins_manager.get_plugin("Recorder")
        assert isinstance(recorder, Recorder)
        return recorder

    @property
    def context(self) -> BrokerContext:
        """What any plugin gets."""
        return self.recorder.context

    async def dial(self, listener: str = "default", *, tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self.port(listener),
            ssl=tls,
            server_hostname="localhost" if tls is not None else None,
        )
        client = Client(self, reader, writer)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    async def connect(self, client_id: bytes, **options: Any) -> Client:
        """A client that is connected; durable unless ``clean``."""
        client = await self.dial()
        client.connack = await client.connect(client_id, **options)
        assert client.connack.reason == 0, client.connack
        return client

    async def subscriber(
        self, client_id: bytes, *filters: bytes | tuple[bytes, int], **options: Any
    ) -> Client:
        """A durable client, connected and subscribed (QoS 1 where nothing is said)."""
        client = await self.connect(client_id, **options)
        await client.subscribe(*filters)
        return client

    async def left(self, client_id: bytes) -> None:
        """Wait until the broker has noticed that a client left."""
        async with asyncio.timeout(PATIENCE_S):
            while client_id in self.hub.registry.owners:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.001)


def configuration(
    data: Path,
    *,
    plugins: dict[str, Any] | None = None,
    listeners: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """A configuration of amqtt with our plugin in it."""
    listeners = listeners or {"default": {"type": "tcp", "bind": "127.0.0.1:0"}}
    mine = {"data": str(data), **(options or {})}
    others = ANONYMOUS if plugins is None else plugins
    return {"listeners": listeners, "plugins": {**others, RECORDER: {}, DURABLE: mine}, **rest}


@asynccontextmanager
async def running(
    data: Path,
    *,
    plugins: dict[str, Any] | None = None,
    listeners: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **rest: Any,
) -> AsyncIterator[Running]:
    """A broker until the block ends. plugins: without our own and the recorder."""
    logging.getLogger("transitions").setLevel(logging.WARNING)
    broker = Broker(
        configuration(data, plugins=plugins, listeners=listeners, options=options, **rest)
    )
    await broker.start()
    instance = Running(broker)
    try:
        yield instance
    finally:
        for client in instance.clients:
            client._writer.transport.abort()
        await broker.shutdown()
