"""Real MQTT clients for the tests of operations."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion

from broker_ext.wire import Connack, Connect, Decoder, Puback, Publish, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.processes import Serving

__all__ = ["Flood", "device", "publish"]

PATIENCE_S = 20
QOS_1 = 0x02


class Device:
    """A paho client, connected. session_present: of its CONNACK."""

    def __init__(self, client: Client, session_present: bool, inbox: queue.Queue[bytes]) -> None:
        self.client = client
        self.session_present = session_present
        self._inbox = inbox

    def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        done = threading.Event()
        self.client.on_subscribe = lambda *_: done.set()
        self.client.subscribe(topic_filter, qos)
        assert done.wait(PATIENCE_S)

    def payloads(self, count: int) -> list[bytes]:
        """The next ``count`` messages."""
        return [self._inbox.get(timeout=PATIENCE_S) for _ in range(count)]

    def is_quiet(self) -> bool:
        """Whether nothing more comes for a moment."""
        try:
            self._inbox.get(timeout=0.3)
        except queue.Empty:
            return True
        return False


@contextmanager
def device(broker: Serving, client_id: str) -> Iterator[Device]:
    """Connect with a session that is kept; disconnect when the block ends."""
    inbox: queue.Queue[bytes] = queue.Queue()
    connected: queue.Queue[bool] = queue.Queue()

    def on_message(_client: Client, _data: Any, message: MQTTMessage) -> None:
        inbox.put(bytes(message.payload))

    def on_connect(_client: Client, _data: Any, flags: Any, *_: Any) -> None:
        connected.put(flags.session_present)

    client = Client(CallbackAPIVersion.VERSION2, client_id, clean_session=False)
    client.on_message = on_message
    client.on_connect = on_connect
    host, port = broker.address
    client.connect(host, port)
    client.loop_start()
    try:
        yield Device(client, connected.get(timeout=PATIENCE_S), inbox)
    finally:
        client.disconnect()
        client.loop_stop()


def publish(broker: Serving, topic: str, *payloads: bytes) -> None:
    """Publish at QoS 1, each after the acknowledgement of the one before."""
    with device(broker, "publisher") as publisher:
        for payload in payloads:
            info = publisher.client.publish(topic, payload, qos=1)
            info.wait_for_publish(PATIENCE_S)
            assert info.is_published()


class Flood(threading.Thread):
    """A raw client that publishes at QoS 1 as fast as it is acknowledged.

    acked: how many so far. Payloads are the numbers 1, 2, 3, ... and some ballast.
    """

    WINDOW = 200
    BALLAST = b"." * 200

    def __init__(self, broker: Serving, topic: bytes) -> None:
        super().__init__(daemon=True)
        self._socket = broker.connect()
        self._topic = topic
        self._is_over = threading.Event()
        self._enough = threading.Condition()
        self.acked = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        decoder = Decoder(server=False)
        sent = 0
        self._socket.sendall(encode(Connect(4, b"flood")))
        try:
            while not self._is_over.is_set():
                for packet in decoder.feed(self._socket.recv(65536)):
                    if isinstance(packet, Connack):
                        continue
                    assert isinstance(packet, Puback)
                    self.acked += 1
                with self._enough:
                    self._enough.notify_all()
                out = []
                while sent - self.acked < self.WINDOW:
                    sent += 1
                    payload = b"%d " % sent + self.BALLAST
                    out.append(encode(Publish(QOS_1, self._topic, sent % 60_000 + 1, payload)))
                self._socket.sendall(b"".join(out))
        except (OSError, AssertionError) as error:
            self.error = error
        finally:
            self._socket.close()

    def wait_for(self, count: int) -> None:
        """Wait until so many are acknowledged."""
        with self._enough:
            assert self._enough.wait_for(lambda: self.acked >= count, PATIENCE_S), self.error

    def stop(self) -> None:
        self._is_over.set()
        self.join(PATIENCE_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
