"""The judge of the demo: what was counted, and whether a promise was broken. Pure.

acknowledged   the sensor saw PUBACK (QoS 1) or PUBCOMP (QoS 2).
delivered      the gateway's application was given the reading, intact.
lost           acknowledged, and never delivered.
duplicated after acknowledgement, per further delivery of a reading:
    QoS 2      every one. Both sides keep their sessions, so it is exactly once, whatever broke.
    QoS 1      one that neither of the two reasons explains for which MQTT allows it:
               - the sensor sent the reading again, because its connection broke before it saw the
                 PUBACK. It is then another message, once for each time it may have been sent;
               - the gateway's connection broke so soon after the delivery before that its PUBACK
                 may not have arrived and been committed: within GRACE_MS. Such a delivery comes on
                 another connection and has DUP = 1.
out of order   a reading delivered for the first time after a later one of its sensor and QoS.
altered        a message that is not, to the byte, one that was published.
wrong QoS      a delivery at another QoS than min(published, granted), which is the published one.
session present, of every CONNACK that greets the gateway on its return; and of every sensor's,
               without which its QoS 2 readings would not be exactly once.
drained        the last reading acknowledged before the gateway came back was delivered; the time
               is from its CONNACK.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from broker_ext.demo.readings import Reading

__all__ = ["GRACE_MS", "Arrival", "Connection", "Drain", "Facts", "Published", "Tally", "judge"]

FINDINGS_MAX = 100  # what a person reads; the counts are complete
GRACE_MS = 1000  # a PUBACK on loopback and its commit take a hundredth of it, on a bad disk a tenth


class Published(NamedTuple):
    """What a sensor knows of one reading. acked_ms: None while not acknowledged.

    sends: how often it may have been sent, at least 1: once, and again for every connection
    that broke between publishing and acknowledgement.
    """

    reading: Reading
    at_ms: int
    acked_ms: int | None
    sends: int


class Arrival(NamedTuple):
    """One message that the gateway's application was given. reading: None when altered."""

    reading: Reading | None
    at_ms: int
    connection: int
    qos: int
    dup: bool


class Connection(NamedTuple):
    """One connection of the gateway. down_ms: None while it holds."""

    up_ms: int
    session_present: bool
    down_ms: int | None


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of readings at one QoS, or in all; unit: readings (deliveries for the copies)."""

    published: int = 0
    acknowledged: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    out_of_order: int = 0
    sent_again: int = 0
    """copies a sensor sent again before it was acknowledged; QoS 1 allows them"""
    redelivered: int = 0
    """copies delivered again because the gateway's PUBACK went down with its connection"""

    @property
    def unacknowledged(self) -> int:
        """Readings whose acknowledgement never came: the demo gave up waiting for it."""
        return self.published - self.acknowledged

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )


@dataclass(frozen=True, slots=True)
class Drain:
    """How the gateway caught up after its return. duration_ms: None when it never did."""

    backlog: int
    duration_ms: int | None

    @property
    def per_second(self) -> int | None:
        """Backlog readings a second while draining; None when there is nothing to divide."""
        return self.backlog * 1000 // self.duration_ms if self.duration_ms else None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was counted in one run."""

    by_qos: Mapping[int, Tally]
    altered: int
    wrong_qos: int
    session_present: bool
    sensor_returns: int
    sensor_sessions_missing: int
    drain: Drain
    acknowledged_per_second: int
    findings: Sequence[str] = ()
    """of each reading that was lost or duplicated, all that is known; at most FINDINGS_MAX"""

    @property
    def total(self) -> Tally:
        """Both QoS together."""
        return sum(self.by_qos.values(), Tally())

    def reasons(self) -> list[str]:
        """Say which promises were broken; empty when none was."""
        total = self.total
        found = [
            (total.lost, "acknowledged and lost"),
            (total.duplicated, "duplicated after acknowledgement"),
            (total.out_of_order, "out of order"),
            (self.altered, "altered"),
            (self.wrong_qos, "delivered at another QoS"),
            (total.unacknowledged, "never acknowledged"),
        ]
        reasons = [f"{count} {what}" for count, what in found if count]
        if not self.session_present:
            reasons.append("session present was 0")
        if self.sensor_sessions_missing:
            reasons.append(f"session present was 0 for {self.sensor_sessions_missing} sensors")
        if not total.published:
            reasons.append("nothing was published")
        return reasons


def judge(
    published: Iterable[Published],
    arrivals: Sequence[Arrival],
    connections: Sequence[Connection],
    sensor_returns: Sequence[bool] = (),
    *,
    grace_ms: int = GRACE_MS,
) -> Facts:
    """Count what became of the readings.

    published: each reading once, in any order. arrivals: in the order they came. connections:
    of the gateway, in order; Arrival.connection is an index. The first one set the session up,
    the last one is its return. sensor_returns: session present of every reconnect of a sensor.
    """
    known = {one.reading: one for one in published}
    seen: dict[Reading, list[Arrival]] = defaultdict(list)
    altered = 0
    for arrival in arrivals:
        if arrival.reading is None or arrival.reading not in known:
            altered += 1
        else:
            seen[arrival.reading].append(arrival)
    return Facts(
        by_qos={qos: _tally(qos, known, seen, connections, grace_ms) for qos in (1, 2)},
        altered=altered,
        wrong_qos=sum(
            copy.qos != reading.qos for reading, copies in seen.items() for copy in copies
        ),
        session_present=len(connections) > 1
        and all(connection.session_present for connection in connections[1:]),
        sensor_returns=len(sensor_returns),
        sensor_sessions_missing=sensor_returns.count(False),
        drain=_drain(known.values(), seen, connections),
        acknowledged_per_second=_acknowledged_per_second(known.values()),
        findings=list(islice(_findings(known, seen, connections, grace_ms), FINDINGS_MAX)),
    )


def _tally(
    qos: int,
    known: Mapping[Reading, Published],
    seen: Mapping[Reading, Sequence[Arrival]],
    connections: Sequence[Connection],
    grace_ms: int,
) -> Tally:
    mine = [one for one in known.values() if one.reading.qos == qos]
    delivered = [reading for reading in seen if reading.qos == qos]  # in order of first delivery
    acknowledged = [one for one in mine if one.acked_ms is not None]
    copies = [
        why
        for reading in delivered
        for why in _copies(known[reading], seen[reading], connections, grace_ms)
    ]
    return Tally(
        published=len(mine),
        acknowledged=len(acknowledged),
        delivered=len(delivered),
        lost=sum(one.reading not in seen for one in acknowledged),
        duplicated=copies.count("duplicated"),
        out_of_order=_out_of_order(delivered),
        sent_again=copies.count("sent again"),
        redelivered=copies.count("redelivered"),
    )


def _out_of_order(delivered: Iterable[Reading]) -> int:
    """Count the readings that came after a later one of their sensor. delivered: of one QoS."""
    highest: dict[int, int] = defaultdict(int)
    late = 0
    for reading in delivered:
        late += reading.seq < highest[reading.sensor]
        highest[reading.sensor] = max(reading.seq, highest[reading.sensor])
    return late


def _copies(
    one: Published,
    deliveries: Sequence[Arrival],
    connections: Sequence[Connection],
    grace_ms: int,
) -> Iterator[str]:
    """Say of each delivery after the first what it is. deliveries: of this reading, in order."""
    spare = one.sends - 1 if one.reading.qos == 1 else 0
    for before, copy in pairwise(deliveries):
        if one.reading.qos == 1 and _may_redeliver(before, copy, connections, grace_ms):
            yield "redelivered"
        elif spare:
            spare -= 1
            yield "sent again"
        else:
            yield "duplicated"


def _may_redeliver(
    before: Arrival, copy: Arrival, connections: Sequence[Connection], grace_ms: int
) -> bool:
    down_ms = connections[before.connection].down_ms
    return (
        copy.dup
        and copy.connection > before.connection
        and down_ms is not None
        and down_ms - before.at_ms <= grace_ms
    )


def _findings(
    known: Mapping[Reading, Published],
    seen: Mapping[Reading, Sequence[Arrival]],
    connections: Sequence[Connection],
    grace_ms: int,
) -> Iterator[str]:
    """Tell the story of each reading that was lost or duplicated; times since the first CONNACK."""
    from_ms = connections[0].up_ms if connections else 0
    for one in known.values():
        deliveries = seen.get(one.reading, ())
        if "duplicated" in _copies(one, deliveries, connections, grace_ms):
            what = "duplicated"
        elif not deliveries and one.acked_ms is not None:
            what = "lost"
        else:
            continue
        acked = "never" if one.acked_ms is None else f"{one.acked_ms - from_ms} ms"
        told = "; ".join(
            f"at {copy.at_ms - from_ms} ms on connection {copy.connection}, DUP {copy.dup:d}"
            for copy in deliveries
        )
        yield (
            f"{what}: sensor {one.reading.sensor}, QoS {one.reading.qos}, seq {one.reading.seq}: "
            f"published at {one.at_ms - from_ms} ms, acknowledged {acked}, sent up to "
            f"{one.sends} times; delivered {told or 'never'}"
        )


def _drain(
    published: Iterable[Published],
    seen: Mapping[Reading, Sequence[Arrival]],
    connections: Sequence[Connection],
) -> Drain:
    """Time the backlog: acknowledged before the gateway's return, delivered after it or never."""
    if len(connections) < 2:
        return Drain(0, None)
    back_ms = connections[-1].up_ms
    arrived = [
        seen[one.reading][0].at_ms if one.reading in seen else None
        for one in published
        if one.acked_ms is not None and one.acked_ms < back_ms
    ]
    waiting = [at_ms for at_ms in arrived if at_ms is None or at_ms >= back_ms]
    times = [at_ms for at_ms in waiting if at_ms is not None]
    if len(times) < len(waiting):
        return Drain(len(waiting), None)
    return Drain(len(waiting), max(times) - back_ms if times else 0)


def _acknowledged_per_second(published: Iterable[Published]) -> int:
    """Readings acknowledged a second, from the first one published to the last acknowledgement."""
    spans = [(one.at_ms, one.acked_ms) for one in published if one.acked_ms is not None]
    if not spans:
        return 0
    duration_ms = max(acked for _, acked in spans) - min(at for at, _ in spans)
    return len(spans) * 1000 // max(1, duration_ms)
