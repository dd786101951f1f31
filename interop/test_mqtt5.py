"""MQTT 5 as clients of four libraries see it, against `amqtt -c broker.yaml` with our plugin.

Each scenario is run by each library: paho-mqtt, aiomqtt and gmqtt, and MQTT.js where node and npm
are installed. paho does it on both stores, the others on one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from broker_ext.cli.calling import call
from broker_ext.demo.broker import BrokerProcess
from interop.mqtt5.aiomqtt_device import AiomqttDevice
from interop.mqtt5.device import Options, Will, until
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
FEW: Final = 30
"""History that the small broker keeps, in messages."""


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

    def small(self) -> None:
        """Go on with a broker that keeps few messages, and trusts no other generation."""
        self.broker = self._brokers.running(
            self.store, "small", max_messages=FEW, on_generation_change="reset"
        )

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

    def history(self) -> dict[str, int]:
        """Head and floor, as the broker tells."""
        told: dict[str, int] = call(self.broker.log.parent / "data", "figures")["history"]
        return told

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


def test_sessions_and_messages_expire(bench: Bench) -> None:
    """[MQTT5 3.1.2.11.2], [MQTT5-3.3.2-5]"""
    brief, patient, gone = (bench.device(name) for name in ("brief", "patient", "gone"))
    brief.up(Options(expiry_s=1))
    brief.subscribe(bench.topic("a"), 1)
    brief.down()
    patient.up(Options(expiry_s=1000))
    patient.subscribe(bench.topic("a"), 1)
    patient.down()
    gone.up(Options(expiry_s=0))
    gone.subscribe(bench.topic("a"), 1)
    gone.down()
    assert not gone.up(Options(expiry_s=0)).present
    sensor = bench.device("sensor")
    sensor.up()
    sensor.publish(bench.topic("a"), b"brief", expiry_s=1)
    sensor.publish(bench.topic("a"), b"lasting")
    time.sleep(1.5)  # both of them count seconds of real time
    assert not brief.up(Options(expiry_s=1)).present
    assert brief.subscribe(bench.topic("b"), 1) == 1
    sensor.publish(bench.topic("b"), b"new")
    brief.has(b"new")
    assert patient.up().present
    patient.has(b"lasting")


def test_a_reset_says_why(bench: Bench) -> None:
    """Session Present 0, with the verdict in words and in User Properties."""
    bench.small()
    device, other = bench.device("device"), bench.device("other")
    for one in (device, other):
        one.up()
        one.subscribe(bench.topic(one.client_id[-5:]), 1)
        one.down()
    sensor = bench.device("sensor")
    sensor.up()
    sensor.publish(bench.topic(device.client_id[-5:]), b"lost")
    lost = bench.history()["head"]
    sensor.publish(bench.topic(device.client_id[-5:]), *numbered(FEW + 10))
    until(lambda: bench.history()["floor"] >= lost, "history is not pruned")
    assert not device.up().present
    assert device.answers[-1].text
    assert device.answers[-1].user["resume"] == "410 history-pruned"
    assert device.answers[-1].user.keys() >= {"position", "floor"}
    bench.broker.kill()
    next((bench.broker.log.parent / "data").glob("*.identity.json")).unlink()
    bench.broker.start()
    answer = other.up()
    assert not answer.present
    assert answer.user["resume"] == "409 generation-changed"


def test_a_will_waits_for_its_delay(bench: Bench) -> None:
    """[MQTT5-3.1.3-9]: the one who came back in time has not died."""
    watcher = bench.device("watcher")
    watcher.up()
    watcher.subscribe(bench.topic("will/+"), 1)
    lost, back = bench.device("lost"), bench.device("back")
    for device in (lost, back):
        name = device.client_id.rpartition("-")[2]
        device.up(Options(will=Will(bench.topic(f"will/{name}"), name.encode(), 1)))
        device.subscribe(bench.topic("a"), 1)  # so that it is known to have had its CONNACK
    cut_at = time.monotonic()
    lost.cut()
    back.cut()
    assert back.up().present
    until(lambda: watcher.got, "no will")
    assert time.monotonic() - cut_at > 0.9
    watcher.has(b"lost")


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


def test_a_shared_subscription_serves_one_of_its_group(bench: Bench) -> None:
    """[MQTT5 4.8.2]; what its members have not had waits for the next one, also over kill -9."""
    shared = f"$share/group/{bench.topic('#')}"
    first, second = bench.device("first"), bench.device("second")
    for member in (first, second):
        member.up()
        assert member.subscribe(shared, 1) == 1
    sensor = bench.device("sensor")
    sensor.up()
    sensor.publish(bench.topic("a"), *numbered(40))
    until(lambda: len(first.got) + len(second.got) >= 40, "not everything arrived")
    first.quiet()
    second.quiet()
    assert sorted(first.payloads + second.payloads) == sorted(numbered(40))
    assert first.got
    assert second.got
    first.down()
    second.down()
    sensor.publish(bench.topic("a"), *numbered(80)[40:])
    sensor.down()
    bench.restart()
    assert second.up().present
    until(lambda: len(first.got) + len(second.got) >= 80, "not everything arrived")
    second.quiet()
    assert sorted(first.payloads + second.payloads) == sorted(numbered(80))
