"""What the sensors say: readings that tell exactly what became of them.

A reading is (sensor, QoS, sequence number 1, 2, 3, ... of that sensor at that QoS), and its
topic and payload follow from it and the seed of the run alone. So whoever receives one knows
whether it is intact by making it again, and which ones are missing, twice, or out of order.
Each QoS has its topic, because MQTT promises an order per topic and QoS [MQTT-4.6.0-5].
"""

from __future__ import annotations

import json
import zlib
from typing import NamedTuple

__all__ = ["FILTER", "Reading", "payload", "read", "topic"]

FILTER = "fleet/#"  # what the gateway subscribes to


class Reading(NamedTuple):
    """One reading. sensor from 1, qos 1 or 2, seq from 1 within (sensor, qos)."""

    sensor: int
    qos: int
    seq: int


def topic(reading: Reading) -> str:
    """Give the topic a reading is published to."""
    return f"fleet/sensor-{reading.sensor:03}/qos{reading.qos}"


def payload(seed: int, reading: Reading) -> bytes:
    """Give the bytes of a reading. Pure: the temperature too follows from seed and reading."""
    number = zlib.crc32(f"{seed}/{reading.sensor}/{reading.qos}/{reading.seq}".encode())
    return json.dumps({**reading._asdict(), "celsius": 15 + number % 20_000 / 1000}).encode()


def read(seed: int, of_topic: str, body: bytes) -> Reading | None:
    """Read a message of a run; None when it is not, to the byte, one that a sensor publishes."""
    try:
        fields = json.loads(body)
        reading = Reading(fields["sensor"], fields["qos"], fields["seq"])
    except (ValueError, TypeError, LookupError):
        return None  # not a reading
    if not all(type(number) is int for number in reading):
        return None
    intact = topic(reading) == of_topic and payload(seed, reading) == body
    return reading if intact else None
