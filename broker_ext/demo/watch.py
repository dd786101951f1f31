"""The watchman of act two: one paho client that publishes alerts at QoS 1 and waits for PUBACKs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from broker_ext.demo.broker import HOST
from broker_ext.demo.receiver import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

__all__ = ["Watch"]


class Watch:
    """Publishes alerts. Its books are written by paho's thread and by ours, under a lock."""

    def __init__(self, port: int) -> None:
        self.published: list[str] = []
        self._acknowledged: set[int] = set()
        self._of: dict[int, str] = {}
        self._lock = threading.Lock()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id="demo-watch")
        self._client.on_publish = self._on_publish
        self._client.connect(HOST, port)
        self._client.loop_start()

    @property
    def acknowledged(self) -> list[str]:
        """Alerts whose PUBACK came."""
        with self._lock:
            return [self._of[number] for number in self._acknowledged if number in self._of]

    def publish(self, names: Iterable[str], payload: str = "") -> None:
        """Publish one alert for each name."""
        for name in names:
            self.published.append(name)
            told = self._client.publish(PREFIX + name, payload or f"alert {name}", qos=1)
            with self._lock:
                self._of[told.mid] = name

    def _on_publish(
        self, _client: paho.Client, _: object, number: int, _why: ReasonCode, _more: Properties
    ) -> None:
        with self._lock:
            self._acknowledged.add(number)

    def stop(self) -> None:
        """Disconnect. Idempotent."""
        self._client.disconnect()
        self._client.loop_stop()
