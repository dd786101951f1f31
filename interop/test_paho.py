"""Eclipse paho, as it is, against `amqtt -c broker.yaml` with our plugin, on both stores.

Nothing here knows how the broker works: paho's clients connect, publish, disconnect and are kicked
out; the broker is a process that is killed and started again on the same port and data.

AMQTT_DURABLE_LONG=1 (or `pytest --long` for all tests) has clients fight for their ids for a
minute, not for seconds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from broker_ext.demo.broker import BrokerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

HOST: Final = "127.0.0.1"
PATIENCE_S: Final = 20.0
QUIET_S: Final = 0.3
"""How long nothing may arrive before we believe that nothing more comes."""
FIGHTERS: Final = 50
IDS: Final = 5


class Got(NamedTuple):
    """A message as paho handed it over."""

    topic: str
    payload: bytes
    qos: int
    dup: bool
    retain: bool


def until(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"in {within_s} s: {what}"
        time.sleep(0.005)


class Device:
    """A paho client that notes what it sees. It comes back by itself when it is cut off."""

    def __init__(self, broker: BrokerProcess, client_id: str, *, clean: bool = False) -> None:
        self.port = broker.port
        self.got: list[Got] = []
        self.acknowledged: set[int] = set()
        self.present: list[bool] = []
        self.subacks: list[int] = []
        self.is_up = False
        self.paho = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id, clean_session=clean, protocol=mqtt.MQTTv311
        )
        self.paho.reconnect_delay_set(1, 1)
        self.paho.max_inflight_messages_set(100)
        self.paho.on_connect = self._on_connect
        self.paho.on_disconnect = self._on_disconnect
        self.paho.on_message = self._on_message
        self.paho.on_publish = self._on_publish
        self.paho.on_subscribe = self._on_subscribe

    def _on_connect(
        self,
        _client: mqtt.Client,
        _userdata: Any,
        flags: mqtt.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if not reason.is_failure:
            self.present.append(flags.session_present)
            self.is_up = True

    def _on_disconnect(self, *_: Any) -> None:
        self.is_up = False

    def _on_message(self, _client: mqtt.Client, _userdata: Any, message: mqtt.MQTTMessage) -> None:
        self.got.append(
            Got(message.topic, bytes(message.payload), message.qos, message.dup, message.retain)
        )

    def _on_publish(
        self,
        _client: mqtt.Client,
        _userdata: Any,
        mid: int,
        _reason: ReasonCode,
        _properties: Properties,
    ) -> None:
        self.acknowledged.add(mid)

    def _on_subscribe(
        self,
        _client: mqtt.Client,
        _userdata: Any,
        mid: int,
        _reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        self.subacks.append(mid)

    def up(self) -> Device:
        """Connect, and wait until the broker says yes."""
        before = len(self.present)
        self.paho.connect(HOST, self.port, keepalive=30)
        self.paho.loop_start()
        until(lambda: len(self.present) > before, "no CONNACK")
        return self

    def down(self) -> None:
        """DISCONNECT."""
        self.paho.disconnect()
        self.paho.loop_stop()

    def subscribe(self, topic_filter: str, qos: int) -> Device:
        mid = self.paho.subscribe(topic_filter, qos)[1]
        assert mid is not None
        until(lambda: mid in self.subacks, "no SUBACK")
        return self

    def publish(self, topic: str, payload: bytes, qos: int, *, retain: bool = False) -> int:
        return self.paho.publish(topic, payload, qos, retain=retain).mid

    def publish_all(self, topic: str, payloads: list[bytes], qos: Callable[[int], int]) -> None:
        """Publish, and wait for every acknowledgement."""
        mids = {self.publish(topic, payload, qos(i)) for i, payload in enumerate(payloads)}
        until(lambda: mids <= self.acknowledged, "not everything is acknowledged")

    def quiet(self) -> None:
        """Wait until nothing more arrives."""
        before = -1
        while len(self.got) != before:
            before = len(self.got)
            time.sleep(QUIET_S)

    @property
    def payloads(self) -> list[bytes]:
        return [got.payload for got in self.got]


@pytest.fixture(scope="module")
def long_run(request: pytest.FixtureRequest) -> bool:
    wanted = request.config.getoption("--long", default=False)
    return bool(wanted or os.environ.get("AMQTT_DURABLE_LONG"))


@pytest.fixture(scope="module", params=["lmdb", "sqlite"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    plugins = {
        "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
        "broker_ext.DurableSessionPlugin": {"data": str(folder / "data"), "store": request.param},
    }
    with BrokerProcess(folder, plugins, seed=1) as process:
        process.start_on_a_free_port()
        yield process


class Devices:
    """Makes devices whose ids and topics belong to one test, and disconnects them after it."""

    def __init__(self, broker: BrokerProcess, prefix: str) -> None:
        self.broker = broker
        self.prefix = prefix
        self.made: list[Device] = []

    def __call__(self, name: str, *, clean: bool = False) -> Device:
        device = Device(self.broker, f"{self.prefix}-{name}", clean=clean)
        self.made.append(device)
        return device

    def topic(self, name: str) -> str:
        return f"{self.prefix}/{name}"


@pytest.fixture
def devices(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Devices]:
    made = Devices(broker, request.node.originalname.removeprefix("test_")[:40])
    if broker.pid is None:
        broker.start()  # a test that failed left it dead
    yield made
    for device in made.made:
        device.down()


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


def test_a_device_resumes_after_disconnect(devices: Devices) -> None:
    device = devices("device").up().subscribe(devices.topic("#"), 2)
    device.down()
    devices("sensor").up().publish_all(devices.topic("a"), numbered(30), lambda i: 1 + i % 2)
    device.up()
    until(lambda: len(device.got) >= 30, "not everything arrived")
    device.quiet()
    assert device.present == [False, True]
    # paho hands a QoS 2 message over at its PUBREL, so the two qualities overtake each other there
    for qos in (1, 2):
        assert [got.payload for got in device.got if got.qos == qos] == numbered(30)[qos - 1 :: 2]
    assert len(device.got) == 30


def test_a_device_resumes_after_kill_9(broker: BrokerProcess, devices: Devices) -> None:
    device = devices("device").up().subscribe(devices.topic("+"), 1)
    sensor = devices("sensor").up()
    sensor.publish_all(devices.topic("a"), numbered(10), lambda _: 1)
    device.down()
    sensor.publish_all(devices.topic("a"), numbered(20)[10:], lambda _: 2)
    broker.kill()
    broker.start()
    device.up()
    until(lambda: len(set(device.payloads)) >= 20, "not everything arrived")
    device.quiet()
    assert device.present == [False, True]
    assert list(dict.fromkeys(device.payloads)) == numbered(20)
    # what it had and had not acknowledged when it left comes again, and says so
    again = Counter(device.payloads) - Counter(numbered(20))
    assert all(sum(got.dup for got in device.got if got.payload == p) for p in again)


def test_the_newer_connection_takes_over(devices: Devices) -> None:
    older = devices("device").up().subscribe(devices.topic("a"), 1)
    sensor = devices("sensor").up()
    sensor.publish_all(devices.topic("a"), [b"first"], lambda _: 1)
    until(lambda: older.payloads == [b"first"], "the older one got nothing")
    older.paho.reconnect_delay_set(60, 60)  # it would fight
    newer = devices("device").up()
    until(lambda: not older.is_up, "the older one is still connected")
    sensor.publish_all(devices.topic("a"), [b"second"], lambda _: 1)
    until(lambda: newer.payloads == [b"second"], "the newer one got nothing")
    newer.quiet()
    assert newer.present == [True]
    assert older.payloads == [b"first"]
    assert newer.payloads == [b"second"]


def test_qos_2_is_exactly_once_over_kill_9(broker: BrokerProcess, devices: Devices) -> None:
    device = devices("device").up().subscribe(devices.topic("a"), 2)
    sensor = devices("sensor").up()
    mids = {sensor.publish(devices.topic("a"), payload, 2) for payload in numbered(150)}
    until(lambda: len(device.got) >= 30, "nothing arrives")
    broker.kill()
    mids |= {sensor.publish(devices.topic("a"), payload, 2) for payload in numbered(300)[150:]}
    broker.start()
    until(lambda: mids <= sensor.acknowledged, "not everything is acknowledged")
    until(lambda: len(device.got) >= 300, "not everything arrived")
    device.quiet()
    assert device.payloads == numbered(300)
    assert device.present == [False, True]
    assert sensor.present == [False, True]


def test_a_thousand_messages_wait_in_order(broker: BrokerProcess, devices: Devices) -> None:
    device = devices("device").up().subscribe(devices.topic("#"), 1)
    device.down()
    sensor = devices("sensor").up()
    sensor.publish_all(devices.topic("a"), numbered(1000), lambda _: 1)
    broker.kill()
    broker.start()
    device.up()
    until(lambda: len(device.got) >= 1000, "not everything arrived")
    device.quiet()
    assert device.payloads == numbered(1000)
    assert not any(got.dup or got.retain for got in device.got)


def test_retained_messages_survive(broker: BrokerProcess, devices: Devices) -> None:
    sensor = devices("sensor").up()
    kept = [sensor.publish(devices.topic(name), b"x", 1, retain=True) for name in "abc"]
    kept.append(sensor.publish(devices.topic("b"), b"", 1, retain=True))
    kept.append(sensor.publish(devices.topic("c"), b"y", 2, retain=True))
    until(lambda: set(kept) <= sensor.acknowledged, "not everything is acknowledged")
    broker.kill()
    broker.start()
    reader = devices("reader", clean=True).up().subscribe(devices.topic("#"), 2)
    reader.quiet()
    assert sorted(reader.got) == [
        Got(devices.topic("a"), b"x", 1, dup=False, retain=True),
        Got(devices.topic("c"), b"y", 2, dup=False, retain=True),
    ]


WILL_CLIENT = """
import sys
import paho.mqtt.client as mqtt
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, sys.argv[2])
client.will_set(sys.argv[3], b"gone", qos=1)
client.on_connect = lambda *_: print("up", flush=True)
client.connect("127.0.0.1", int(sys.argv[1]))
client.loop_forever()
"""


def test_the_will_of_a_client_that_is_killed_is_published(
    broker: BrokerProcess, devices: Devices
) -> None:
    watcher = devices("watcher").up().subscribe(devices.topic("will"), 1)
    watcher.down()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", WILL_CLIENT, str(broker.port)),
            *(f"{devices.prefix}-dying", devices.topic("will")),
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        process.kill()
        process.wait()
    watcher.up()
    until(lambda: bool(watcher.got), "no will")
    watcher.quiet()
    assert watcher.payloads == [b"gone"]


def test_session_present_says_what_is_there(broker: BrokerProcess, devices: Devices) -> None:
    seen: list[bool] = []
    for clean, is_killed_before in (
        (False, False),
        (False, False),
        (False, True),
        (True, False),
        (False, False),
        (True, False),
        (True, True),
        (False, False),
    ):
        if is_killed_before:
            broker.kill()
            broker.start()
        device = devices("device", clean=clean).up()
        device.down()
        seen += device.present
    assert seen == [False, True, True, False, False, False, False, False]


class Fighter(threading.Thread):
    """Connects, is kicked out by another with the same id, and comes back at once."""

    def __init__(self, device: Device, over: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self.device = device
        self.over = over
        self.rng = random.Random(seed)  # noqa: S311 - no secret

    def run(self) -> None:
        paho = self.device.paho
        while not self.over.is_set():
            try:
                paho.connect(HOST, self.device.port, keepalive=30)
            except OSError:
                time.sleep(0.05)
                continue
            # until the connection ends; then this thread, not paho, decides to come back
            while paho.loop(timeout=0.2) == mqtt.MQTT_ERR_SUCCESS:
                pass
            self.device.is_up = False
            time.sleep(self.rng.uniform(0.05, 0.5))


@pytest.mark.timeout(300)
def test_fifty_clients_fight_for_five_ids(devices: Devices, *, long_run: bool) -> None:
    """Nothing lost, nothing that was acknowledged comes again, one owner for each id at the end.

    QoS 1, since clients that share an id do not share what QoS 2 has them remember.
    """
    topics = [devices.topic(str(i)) for i in range(IDS)]
    for i, topic in enumerate(topics):
        first = devices(str(i)).up().subscribe(topic, 1)
        first.down()
    over = threading.Event()
    fighters = [Fighter(devices(str(i % IDS)), over, seed=i) for i in range(FIGHTERS)]
    for fighter in fighters:
        fighter.start()
    sensor = devices("sensor").up()
    sent = 0
    mids: set[int] = set()
    end = time.monotonic() + (60.0 if long_run else 4.0)
    while time.monotonic() < end:
        for topic in topics:
            mids.add(sensor.publish(topic, b"%d" % sent, 1 + sent % 2))
        sent += 1
        time.sleep(0.01)
    over.set()
    until(lambda: len(mids & sensor.acknowledged) == len(mids), "not everything is acknowledged")

    def owners() -> list[int]:
        return [sum(f.device.is_up for f in fighters[i::IDS]) for i in range(IDS)]

    until(lambda: owners() == [1] * IDS, "not one owner for each id")
    expected = set(numbered(sent))
    for i in range(IDS):
        everybody = [f.device for f in fighters[i::IDS]]

        def arrived(everybody: list[Device] = everybody) -> set[bytes]:
            return {got.payload for device in everybody for got in device.got}

        until(lambda: expected <= arrived(), f"id {i} lost messages")
        # if the publisher itself was cut off, it has sent some QoS 1 messages twice
        new = [
            (got.payload, number, got.qos)
            for number, device in enumerate(everybody)
            for got in device.got
            if not got.dup and (len(sensor.present) == 1 or int(got.payload) % 2)
        ]
        counts = Counter(payload for payload, _, _ in new)
        twice = [one for one in new if counts[one[0]] > 1]
        assert not twice, f"delivered twice as if new: (payload, client, QoS) {twice}"
        assert all(all(device.present) for device in everybody), "a session was not there"
    time.sleep(QUIET_S)
    assert owners() == [1] * IDS
    # everything is acknowledged: whoever comes next gets nothing
    for i in range(IDS):
        last = devices(str(i)).up()
        last.quiet()
        assert last.present == [True]
        assert last.got == []
