"""A position of the client's own, as paho-mqtt uses it: SUBSCRIBE with User Properties against
`amqtt -c broker.yaml` with our plugin, over `kill -9`, on both stores."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from broker_ext.demo.broker import BrokerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 20.0


@pytest.fixture(params=["sqlite", "lmdb"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess]:
    plugins = {
        "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
        "broker_ext.DurableSessionPlugin": {
            "data": str(tmp_path / "data"),
            "store": request.param,
            "history_filters": ["sensors/#"],
            "retain_for": 3600,
        },
    }
    process = BrokerProcess(tmp_path, plugins, seed=7)
    process.start_on_a_free_port()
    yield process
    process.kill()


class Reader:
    """An ETL job without a session. subacks: (code, properties). got: (payload, position)."""

    def __init__(self, port: int) -> None:
        self.subacks: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.got: queue.Queue[tuple[bytes, dict[str, str]]] = queue.Queue()
        self.acknowledged: queue.Queue[int] = queue.Queue()
        self.paho = mqtt.Client(CallbackAPIVersion.VERSION2, "etl", protocol=mqtt.MQTTv5)
        self.paho.on_subscribe = self._on_subscribe
        self.paho.on_message = self._on_message
        self.paho.on_publish = lambda *args: self.acknowledged.put(args[2])
        self.paho.connect("127.0.0.1", port)
        self.paho.loop_start()

    def _on_subscribe(self, _c: Any, _u: Any, _mid: int, reasons: Any, properties: Any) -> None:
        self.subacks.put((reasons[0].value, properties))

    def _on_message(self, _client: Any, _userdata: Any, message: mqtt.MQTTMessage) -> None:
        pairs = getattr(message.properties, "UserProperty", [])
        self.got.put((message.payload, dict(pairs)))

    def ask(self, *pairs: tuple[str, str]) -> tuple[int, Any]:
        properties = Properties(PacketTypes.SUBSCRIBE)
        properties.UserProperty = list(pairs)
        options = SubscribeOptions(qos=1, retainHandling=2)
        self.paho.subscribe("sensors/#", options=options, properties=properties)
        return self.subacks.get(timeout=PATIENCE_S)

    def publish(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.paho.publish("sensors/1", payload, qos=1)
        for _ in payloads:
            self.acknowledged.get(timeout=PATIENCE_S)

    def read(self, count: int) -> list[tuple[bytes, dict[str, str]]]:
        return [self.got.get(timeout=PATIENCE_S) for _ in range(count)]

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()


def test_a_reader_goes_on_from_its_own_position(broker: BrokerProcess) -> None:
    publisher = Reader(broker.port)
    publisher.publish(*(b"%d" % n for n in range(10)))
    publisher.close()
    reader = Reader(broker.port)
    assert reader.ask(("previous-count", "4"))[0] == 1
    got = reader.read(4)
    assert [payload for payload, _ in got] == [b"6", b"7", b"8", b"9"]
    position = got[1][1]
    reader.close()
    broker.kill()
    broker.start()
    reader = Reader(broker.port)
    asked = (
        ("resume-generation", position["generation"]),
        ("resume-position", position["position"]),
    )
    assert reader.ask(*asked)[0] == 1
    assert [payload for payload, _ in reader.read(2)] == [b"8", b"9"]
    reader.publish(b"live")
    ((payload, live),) = reader.read(1)
    assert payload == b"live"
    assert int(live["position"]) > int(position["position"])
    reader.close()


def test_a_position_of_another_generation_is_refused_in_words(broker: BrokerProcess) -> None:
    reader = Reader(broker.port)
    code, properties = reader.ask(("resume-generation", "0" * 32), ("resume-position", "0"))
    assert code == 0x83
    assert properties.ReasonString == "resume: 409 generation-changed"
    assert ("resume", "409 generation-changed") in properties.UserProperty
    reader.close()
