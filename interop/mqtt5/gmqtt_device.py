"""gmqtt: MQTT in asyncio, without paho."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import gmqtt

from interop.mqtt5.device import HOST, PATIENCE_S, Answer, Device, Got, Loop, Options

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GmqttDevice"]

STAY_AWAY = -2
"""gmqtt comes back by itself while it has failed no more often than this; -1 is for ever."""


class GmqttDevice(Device):
    """A thread runs its loop from ``up`` to ``down``."""

    def __init__(self, port: int, client_id: str) -> None:
        super().__init__(port, client_id)
        self._loop: Loop | None = None
        self._client: Any = None
        self._subacks: dict[int, asyncio.Future[int]] = {}

    @property
    def loop(self) -> Loop:
        assert self._loop is not None
        return self._loop

    def connect(self, options: Options) -> None:
        self._close()
        self._loop = Loop()
        self._loop.run(self._connect(options))

    async def _connect(self, options: Options) -> None:
        will = None
        if options.will is not None:
            topic, payload, delay_s = options.will
            will = gmqtt.Message(topic, payload, qos=1, will_delay_interval=delay_s)
        said: dict[str, int] = {"session_expiry_interval": options.expiry_s}
        if options.window:
            said["receive_maximum"] = options.window
        self._client = gmqtt.Client(
            self.client_id, clean_session=options.clean, will_message=will, **said
        )
        self._client.set_config({"reconnect_retries": STAY_AWAY, "reconnect_delay": 0})
        self._client.on_connect = self._on_connect
        self._client.on_message = self._on_message
        self._client.on_disconnect = self._on_disconnect
        self._client.on_subscribe = self._on_subscribe
        await self._client.connect(HOST, self.port, keepalive=30)

    def _on_connect(self, _client: Any, flags: int, reason: int, said: Mapping[str, Any]) -> None:
        text = said.get("reason_string", [""])[0]
        self.answers.append(Answer(bool(flags), reason, text, dict(said.get("user_property", ()))))

    def _on_message(
        self, _client: Any, topic: str, payload: bytes, qos: int, said: Mapping[str, Any]
    ) -> int:
        expiry_s = said.get("message_expiry_interval", [None])[0]
        user = tuple(said.get("user_property", ()))
        self.got.append(Got(topic, payload, qos, bool(said["retain"]), user, expiry_s))
        return 0

    def _on_disconnect(self, _client: Any, packet: bytes, _error: object = None) -> None:
        if packet:  # an empty one is how gmqtt says that the connection is gone
            self.ends.append(packet[0])

    def _on_subscribe(self, _client: Any, mid: int, reasons: tuple[int, ...], _said: Any) -> None:
        self._subacks.pop(mid).set_result(reasons[0])

    def subscribe(self, topic_filter: str, qos: int) -> int:
        async def subscribe() -> int:
            mid = self._client.subscribe(topic_filter, qos)
            answered = self._subacks[mid] = asyncio.get_running_loop().create_future()
            return await asyncio.wait_for(answered, PATIENCE_S)

        return self.loop.run(subscribe())

    def publish(
        self,
        topic: str,
        *payloads: bytes,
        qos: int = 1,
        expiry_s: int | None = None,
        user: tuple[tuple[str, str], ...] = (),
    ) -> None:
        said: dict[str, Any] = {}
        if expiry_s is not None:
            said["message_expiry_interval"] = expiry_s
        if user:
            said["user_property"] = list(user)

        async def publish() -> None:
            for payload in payloads:
                self._client.publish(topic, payload, qos=qos, **said)
            await self._client._persistent_storage.wait_empty()

        self.loop.run(publish())

    def down(self) -> None:
        self._close()

    def cut(self) -> None:
        self.loop.loop.call_soon_threadsafe(self._client._connection._transport.abort)
        self._close()

    def _close(self) -> None:
        if self._loop is not None:
            self._loop.run(self._client.disconnect())
            self._loop.close()
            self._loop = None
