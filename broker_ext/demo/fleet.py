"""The sensor fleet: paho clients that keep their sessions and publish readings without pause.

Rule 1  One thread, the fleet's, publishes and keeps the books; paho's threads only put what they
        see into a sensor's `_events`. So an acknowledgement never overtakes its entry.
Rule 2  A sensor gives paho a reading only while its connection stands, and after a reconnect only
        once paho has sent again what was under way. paho writes a message published between the
        opening of the socket and CONNACK ahead of older ones; the order would be broken before
        the broker sees it. Until then readings wait in the sensor.
Rule 3  A sensor dials again only when the broker answers, and once. Each attempt of paho (2.1, 2.2)
        to reconnect resets the state of what is under way; the first turns "PUBREC received" into
        "send PUBREL again", the second turns that into "send PUBLISH again", which MQTT forbids
        [MQTT-4.3.3-1] and which makes a second message of a reading whose PUBREL had arrived.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from broker_ext.demo.broker import HOST, answers
from broker_ext.demo.clock import now_ms, sleep_ms
from broker_ext.demo.facts import Published
from broker_ext.demo.readings import Reading, payload, topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

__all__ = [
    "DIAL_MS",
    "INFLIGHT_MAX",
    "TICK_MS",
    "Fleet",
    "Sensor",
]

TICK_MS = 10
INFLIGHT_MAX = 100  # paho's own 20 would measure round trips
DIAL_MS = 250


class _Event(NamedTuple):
    """What paho's thread saw. number: of an ack the packet id, of an up session present."""

    what: Literal["up", "down", "ack"]
    at_ms: int
    number: int = 0


@dataclass(slots=True)
class _Entry:
    """A reading in the books. downs: broken connections of its sensor when it was published."""

    reading: Reading
    at_ms: int
    downs: int
    acked_ms: int | None = None
    sends: int = 1


class Sensor:
    """One sensor: a paho client with clean_session=False, its waiting readings and its books."""

    def __init__(self, number: int, seed: int, port: int) -> None:
        self.number = number
        self.books: list[_Entry] = []
        self.acknowledged = 0
        self.returns: list[bool] = []
        self.connected = False
        self.is_down = False
        self._seed = seed
        self._seqs = {1: 0, 2: 0}
        self._waiting: deque[Reading] = deque()
        self._under_way: dict[int, _Entry] = {}
        self._events: deque[_Event] = deque()
        self._open = False  # Rule 2
        self._downs = 0
        self._ups = 0
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"demo-sensor-{number:03}",
            clean_session=False,  # or QoS 2 would not be exactly once over a reconnect
            protocol=paho.MQTTv311,
            reconnect_on_failure=False,  # Rule 3
        )
        self._client.max_inflight_messages_set(INFLIGHT_MAX)
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_publish = self._on_publish
        self._client.connect_async(HOST, port)

    def start(self) -> None:
        """Connect, in paho's own thread."""
        self._client.loop_start()

    def dial(self) -> None:
        """Connect again with the same session; the broker answers (Rule 3)."""
        self._client.loop_stop()  # it has ended with the connection; this collects the thread
        try:
            self._client.reconnect()
        except OSError:
            return  # gone again; the fleet calls later
        self.is_down = False
        self._client.loop_start()

    def stop(self) -> None:
        """Disconnect and end paho's thread."""
        self._client.disconnect()
        self._client.loop_stop()

    @property
    def pending(self) -> int:
        """Readings measured and not yet acknowledged."""
        return len(self._waiting) + len(self._under_way)

    def measure(self, qos: int) -> None:
        """Take the next reading, to be published at this QoS when the sensor can."""
        self._seqs[qos] += 1
        self._waiting.append(Reading(self.number, qos, self._seqs[qos]))

    def work(self) -> None:
        """Book what happened and publish what waits. The fleet's thread alone calls it."""
        while self._events:
            self._book(self._events.popleft())
        while self._waiting and self._open:
            reading = self._waiting.popleft()
            entry = _Entry(reading, now_ms(), self._downs)
            info = self._client.publish(topic(reading), payload(self._seed, reading), reading.qos)
            self._under_way[info.mid] = entry
            self.books.append(entry)

    def _book(self, event: _Event) -> None:
        match event.what:
            case "ack":
                entry = self._under_way.pop(event.number)
                entry.acked_ms = event.at_ms
                entry.sends += self._downs - entry.downs
                self.acknowledged += 1
                self._open = self.connected
            case "up":
                if self._ups:
                    self.returns.append(bool(event.number))
                self._ups += 1
                self.connected = True
                self._open = not self._under_way
            case "down":
                self._downs += 1
                self.connected = self._open = False
                self.is_down = True

    # paho's thread, from here on (Rule 1)

    def _on_connect(
        self,
        _client: paho.Client,
        _userdata: object,
        flags: paho.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if not reason.is_failure:
            self._events.append(_Event("up", now_ms(), int(flags.session_present)))

    def _on_disconnect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.DisconnectFlags,
        _reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        self._events.append(_Event("down", now_ms()))
        self._open = False  # after the event: whichever the fleet's thread sees last says closed

    def _on_publish(
        self,
        _client: paho.Client,
        _userdata: object,
        mid: int,
        _reason: ReasonCode,
        _properties: Properties,
    ) -> None:
        self._events.append(_Event("ack", now_ms(), mid))


class Fleet:
    """All sensors and the thread that works them.

    rate: readings a second of the whole fleet, half of them at each QoS.
    """

    def __init__(self, *, sensors: int, rate: int, seed: int, port: int) -> None:
        self._sensors = [Sensor(number, seed, port) for number in range(1, sensors + 1)]
        self._rate = rate
        self._port = port
        self._turns = random.Random(seed)  # noqa: S311 - no secret
        self._publishing = False
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="fleet", daemon=True)

    def start(self) -> None:
        """Connect all sensors."""
        for sensor in self._sensors:
            sensor.start()
        self._thread.start()

    def publish(self) -> None:
        """Begin to publish."""
        self._publishing = True

    def pause(self) -> None:
        """Measure no more; what was measured is still published and waited for."""
        self._publishing = False

    def stop(self) -> None:
        """Disconnect all sensors and end the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for sensor in self._sensors:
            sensor.stop()

    def raise_failure(self) -> None:
        """Raise what ended the fleet's thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    @property
    def connected(self) -> int:
        """Sensors that are connected."""
        return sum(sensor.connected for sensor in self._sensors)

    @property
    def published(self) -> int:
        """Readings published."""
        return sum(len(sensor.books) for sensor in self._sensors)

    @property
    def acknowledged(self) -> int:
        """Readings acknowledged."""
        return sum(sensor.acknowledged for sensor in self._sensors)

    @property
    def pending(self) -> int:
        """Readings measured and not yet acknowledged."""
        return sum(sensor.pending for sensor in self._sensors)

    def returns(self) -> list[bool]:
        """Session present of every reconnect of a sensor."""
        return [present for sensor in self._sensors for present in sensor.returns]

    def records(self) -> Iterable[Published]:
        """Give the books to the judge; after stop()."""
        for sensor in self._sensors:
            for entry in sensor.books:
                yield Published(entry.reading, entry.at_ms, entry.acked_ms, entry.sends)

    def _work(self) -> None:
        try:
            self._rounds()
        except BaseException as exc:  # noqa: BLE001 - handed to whoever waits for the fleet
            self._failure = exc

    def _rounds(self) -> None:
        order = list(self._sensors)
        measured = 0
        due = 0.0
        last_ms = dial_ms = now_ms()
        while not self._ended.is_set():
            at_ms = now_ms()
            if self._publishing:
                due += self._rate * (at_ms - last_ms) / 1000
            last_ms = at_ms
            while measured + 1 <= due:
                turn = measured % len(order)
                if not turn:
                    self._turns.shuffle(order)
                order[turn].measure(1 + measured // len(order) % 2)
                measured += 1
            for sensor in self._sensors:
                sensor.work()
            if at_ms >= dial_ms:
                self._dial()
                dial_ms = at_ms + DIAL_MS
            sleep_ms(TICK_MS)

    def _dial(self) -> None:
        down = [sensor for sensor in self._sensors if sensor.is_down]
        if down and answers(self._port):
            for sensor in down:
                sensor.dial()
