"""MQTT 5 as clients of four libraries see it, against `amqtt -c broker.yaml` with our plugin.

Each scenario is run by each library: paho-mqtt, aiomqtt and gmqtt, and MQTT.js where node and npm
are installed. paho does it on both stores, the others on one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from broker_ext.demo.broker import BrokerProcess
from interop.mqtt5.aiomqtt_device import AiomqttDevice
from interop.mqtt5.device import Options, until
from interop.mqtt5.gmqtt_device import GmqttDevice
from interop.mqtt5.mqttjs_device import MqttjsDevice, Node, NotInstalled
from interop.mqtt5.paho_device import PahoDevice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from interop.mqtt5.device import Device

RUNS: Final = (
    ("paho", "sqlite"),
    ("paho", "lmdb"),
    ("aiomqtt", "lmdb"),
    ("gmqtt", "sqlite"),
    ("mqttjs", "lmdb"),
)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node | str]:
    """The process that runs MQTT.js, or why there is none."""
    try:
        started = Node(tmp_path_factory.mktemp("mqttjs"))
    except NotInstalled as missing:
        yield str(missing)
        return
    with started:
        yield started


class Brokers:
    """Started when they are first wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, BrokerProcess] = {}

    def running(self, store: str, name: str, **options: Any) -> BrokerProcess:
        key = f"{store}-{name}"
        broker = self._started.get(key)
        if broker is None:
            folder = self._folder / key
            folder.mkdir()
            plugins = {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
                "broker_ext.DurableSessionPlugin": {
                    "data": str(folder / "data"),
                    "store": store,
                    **options,
                },
            }
            broker = self._started[key] = BrokerProcess(folder, plugins, seed=len(key))
            broker.start_on_a_free_port()
        elif broker.pid is None:
            broker.start()  # a test that failed left it dead
        return broker

    def kill(self) -> None:
        for broker in self._started.values():
            broker.kill()


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    started = Brokers(tmp_path_factory.mktemp("mqtt5"))
    yield started
    started.kill()


class Bench:
    """A broker, and devices of one library whose ids and topics belong to one test."""

    def __init__(self, brokers: Brokers, library: str, store: str, test: str, node: Any) -> None:
        self.library = library
        self.store = store
        self.prefix = f"{test}-{library}"
        self._brokers = brokers
        self._node = node
        self._made: list[Device] = []
        self.broker = brokers.running(store, "usual")

    def device(self, name: str) -> Device:
        port, client_id = self.broker.port, f"{self.prefix}-{name}"
        made: Device
        if self.library == "mqttjs":
            made = MqttjsDevice(self._node, port, client_id)
        elif self.library == "aiomqtt":
            made = AiomqttDevice(port, client_id)
        elif self.library == "gmqtt":
            made = GmqttDevice(port, client_id)
        else:
            made = PahoDevice(port, client_id)
        self._made.append(made)
        return made

    def topic(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def restart(self) -> None:
        """Kill -9, and start."""
        self.broker.kill()
        self.broker.start()

    def close(self) -> None:
        for device in self._made:
            device.down()


@pytest.fixture(params=RUNS, ids="-".join)
def bench(request: pytest.FixtureRequest, brokers: Brokers, node: Node | str) -> Iterator[Bench]:
    library, store = request.param
    if library == "mqttjs" and isinstance(node, str):
        pytest.skip(node)
    made = Bench(brokers, library, store, request.node.originalname.removeprefix("test_"), node)
    yield made
    made.close()


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


def test_a_session_resumes(bench: Bench) -> None:
    """Over a disconnect and a kill -9, with what MQTT 5 adds to a message."""
    device = bench.device("device")
    assert not device.up().present
    assert device.subscribe(bench.topic("#"), 2) == 2
    device.down()
    sensor = bench.device("sensor")
    sensor.up()
    user = (("unit", "°C"), ("place", "cellar"))
    sensor.publish(bench.topic("a"), *numbered(20), qos=1, user=user)
    sensor.publish(bench.topic("a"), *[b"x%d" % i for i in range(20)], qos=2)
    sensor.publish(bench.topic("a"), b"last", qos=1, expiry_s=1000)
    sensor.down()
    bench.restart()
    assert device.up().present
    device.has(*numbered(20), *[b"x%d" % i for i in range(20)], b"last")
    assert [got.user for got in device.got if got.qos == 1] == [user] * 20 + [()]
    left = next(got.expiry_s for got in device.got if got.payload == b"last")
    assert left is not None
    assert 900 < left <= 1000


def test_the_newer_connection_takes_over(bench: Bench) -> None:
    """DISCONNECT 0x8E [MQTT5-3.1.4-3]."""
    older, newer = bench.device("device"), bench.device("device")
    older.up()
    older.subscribe(bench.topic("a"), 1)
    assert newer.up().present
    until(lambda: older.ends, "the older one was told nothing")
    assert older.ends == [0x8E]
    sensor = bench.device("sensor")
    sensor.up()
    sensor.publish(bench.topic("a"), b"1")
    newer.has(b"1")
    assert older.got == []


def test_a_large_window_drains(bench: Bench) -> None:
    """As many at once as both sides allow; each of them once, in order."""
    device = bench.device("device")
    device.up(Options(window=5000))
    device.subscribe(bench.topic("a"), 1)
    device.down()
    sensor = PahoDevice(bench.broker.port, f"{bench.prefix}-sensor")
    sensor.up()
    sensor.publish(bench.topic("a"), *numbered(3000))
    sensor.down()
    assert device.up(Options(window=5000)).present
    until(lambda: len(device.got) >= 3000, "not everything arrived")
    device.quiet()
    assert device.payloads == numbered(3000)
