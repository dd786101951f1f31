"""aiomqtt: paho's protocol in asyncio's clothes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import aiomqtt

from interop.mqtt5.device import HOST, Device, Loop, Options
from interop.mqtt5.paho_device import (
    answer,
    connect_properties,
    got,
    publish_properties,
    will_properties,
)

__all__ = ["AiomqttDevice"]


class AiomqttDevice(Device):
    """A thread runs its loop from ``up`` to ``down``."""

    def __init__(self, port: int, client_id: str) -> None:
        super().__init__(port, client_id)
        self._loop: Loop | None = None
        self._client: aiomqtt.Client | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def loop(self) -> Loop:
        assert self._loop is not None
        return self._loop

    @property
    def client(self) -> aiomqtt.Client:
        assert self._client is not None
        return self._client

    def connect(self, options: Options) -> None:
        self._close()
        self._loop = Loop()
        self._loop.run(self._connect(options))

    async def _connect(self, options: Options) -> None:
        will = None
        if options.will is not None:
            topic, payload, _ = options.will
            will = aiomqtt.Will(topic, payload, 1, properties=will_properties(options))
        self._client = aiomqtt.Client(
            HOST,
            self.port,
            identifier=self.client_id,
            protocol=aiomqtt.ProtocolVersion.V5,
            clean_start=options.clean,
            properties=connect_properties(options),
            will=will,
            max_inflight_messages=100,
        )
        self._client.pending_calls_threshold = 10_000
        inner: Any = self._client._client
        tell = inner.on_connect

        def on_connect(client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
            self.answers.append(answer(flags, reason, properties))
            tell(client, data, flags, reason, properties)

        inner.on_connect = on_connect
        await self._client.__aenter__()
        self._reading = asyncio.ensure_future(self._read(self._client))

    async def _read(self, client: aiomqtt.Client) -> None:
        try:
            async for message in client.messages:
                self.got.append(got(message))
        except aiomqtt.MqttError as error:
            cause = error.__cause__
            if isinstance(cause, aiomqtt.MqttCodeError):
                self.ends.append(getattr(cause.rc, "value", 0))

    def subscribe(self, topic_filter: str, qos: int) -> int:
        granted: Any = self.loop.run(self.client.subscribe(topic_filter, qos))
        return int(granted[0].value)

    def publish(
        self,
        topic: str,
        *payloads: bytes,
        qos: int = 1,
        expiry_s: int | None = None,
        user: tuple[tuple[str, str], ...] = (),
    ) -> None:
        properties = publish_properties(expiry_s, user)

        async def publish() -> None:
            await asyncio.gather(
                *(self.client.publish(topic, p, qos, properties=properties) for p in payloads)
            )

        self.loop.run(publish())

    def down(self) -> None:
        if self._client is not None:
            self._close()

    def cut(self) -> None:
        wire: Any = self.client._client.socket()
        wire.shutdown(socket.SHUT_RDWR)
        self._close()

    def _close(self) -> None:
        if self._loop is None:
            return
        self._loop.run(self._leave())
        self._loop.close()
        self._loop = self._client = None

    async def _leave(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(aiomqtt.MqttError):  # it was gone before
            await self.client.__aexit__(None, None, None)
