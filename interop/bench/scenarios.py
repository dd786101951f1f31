"""What is measured on every broker. Each scenario gets a broker with an empty data directory.

Clients publish 100-byte payloads in sessions of their own process. ``Figures`` are the cells of the
table: a name that a row of ``rows.py`` knows, and a number. ``lost`` and ``again`` are counted by
every scenario that can: acknowledged and never delivered; delivered twice.
"""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from broker_ext.wire import PACKET_ID, PUBACK_HEAD
from interop.bench.client import (
    HOST,
    RECV_BYTES,
    Link,
    Published,
    Received,
    connect_packet,
    make_sessions,
    publish,
    receive,
)
from interop.bench.packets import Shape
from interop.bench.processes import Failed, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interop.bench.brokers import Broker

__all__ = ["FULL", "TINY", "Figures", "Scenario", "Sizes", "live_for", "percentile", "scenarios"]

Figures: TypeAlias = dict[str, float]

PAYLOAD_BYTES: Final = 100
WINDOW: Final = 100
WINDOW_QOS2: Final = 16
TOPIC: Final = b"bench/topic"
QUEUED_MAX: Final = 500_000
RATE_MAX: Final = 250_000
"""No broker takes more from one publisher here."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Times in seconds bound a broker that is slower.

    messages, messages_qos2: of a run at full speed. rate_s: how long 200 messages a second are
    published. backlog: of the drain. storm: sessions that return at once, and messages of each.
    asleep: sessions of the memory figures; queued: messages for each of them. settle_s: before
    memory is looked at, since a broker may have work left.
    start: sessions and messages behind them.
    """

    messages: int = 20_000
    messages_qos2: int = 10_000
    publish_s: float = 4.0
    rate_s: float = 5.0
    backlog: int = 20_000
    backlog_s: float = 8.0
    storm: tuple[int, int] = (500, 20)
    asleep: int = 2_000
    queued: int = 1_000
    queue_s: float = 10.0
    settle_s: float = 2.0
    sessions: tuple[int, ...] = (0, 1, 100, 1000)
    start: tuple[int, int] = (100_000, 1_000_000)
    limit_s: float = 120.0

    def messages_for(self, sessions: int, *, slow: bool) -> int:
        """Fewer for a broker that needs kilobytes to queue one message for one session."""
        return min(self.messages, QUEUED_MAX // max(sessions, 1)) if slow else self.messages


FULL: Final = Sizes()
TINY: Final = Sizes(
    messages=200,
    messages_qos2=100,
    publish_s=2.0,
    rate_s=0.3,
    backlog=200,
    storm=(5, 4),
    asleep=20,
    queued=5,
    settle_s=0.1,
    sessions=(0, 1, 5),
    start=(200, 2_000),
)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values; 0.0 of none."""
    return values[min(len(values) - 1, int(percent / 100 * len(values)))] if values else 0.0


def _publisher(
    broker: Broker, shapes: list[Shape], sizes: Sizes, **how: float | None
) -> Process[Published]:
    settings = {"window": WINDOW, "seconds": sizes.publish_s, "finish_s": 15.0, **how}

    def work(go: Callable[[], None]) -> Published:
        link = Link(broker.port, f"publisher-{shapes[0].topic.decode()}", clean=True)
        go()
        published = publish(link, shapes, **settings)  # type: ignore[arg-type]
        link.leave()
        return published

    return Process(work, timeout_s=sizes.limit_s)


def _subscriber(
    broker: Broker, client_id: str, shape: Shape, sizes: Sizes, *, subscribes: bool, **how: float
) -> Process[tuple[float, Received]]:
    """Gives the time of its CONNECT too. It connects before ``go`` only if it subscribes."""
    settings = {"seconds": sizes.limit_s - 10, "quiet_s": 5.0, "linger_s": 0.3, **how}

    def work(go: Callable[[], None]) -> tuple[float, Received]:
        if not subscribes:
            go()
        link = Link(broker.port, client_id)
        if subscribes:
            link.subscribe(shape.topic.decode(), shape.qos)
            go()
        received = receive(link, shape, **settings)  # type: ignore[arg-type]
        link.leave()
        return link.began, received

    return Process(work, timeout_s=sizes.limit_s)


def _fill(broker: Broker, shapes: list[Shape], sizes: Sizes, count: int, seconds: float) -> int:
    """Publish a backlog; how much of it was acknowledged."""
    with _publisher(broker, shapes, sizes, count=count, seconds=seconds) as publisher:
        publisher.wait_ready()
        publisher.start()
        return publisher.result().acked


# --------------------------------------------------------------------------------- scenarios


def ingest(sessions: int, broker: Broker, sizes: Sizes) -> Figures:
    """PUBACKs a second while so many sessions sleep that want the message."""
    shape = Shape(TOPIC, 1, PAYLOAD_BYTES)
    make_sessions(broker.port, [(f"asleep{i}", TOPIC.decode()) for i in range(sessions)])
    count = sizes.messages_for(sessions, slow=broker.kind.slow)
    with _publisher(broker, [shape], sizes, count=count, seconds=3.0) as publisher:
        publisher.wait_ready()
        before_s = broker.cpu_s()
        publisher.start()
        published = publisher.result()
        cpu_s = broker.cpu_s() - before_s
    name = f"ingest {sessions}"
    figures = {name: published.per_s, f"{name} cpu": cpu_s * 1e6 / max(published.acked, 1)}
    if sessions:
        how = {"expect": published.acked, "seconds": 20.0}
        with _subscriber(broker, "asleep0", shape, sizes, subscribes=False, **how) as subscriber:
            subscriber.wait_ready()
            subscriber.start()
            figures |= _kept(published.acked, subscriber.result()[1])
    return figures


def _kept(acked: int, received: Received) -> Figures:
    return {"lost": max(0, acked - len(received.sequences)), "again": received.again}


def live(qos: int, broker: Broker, sizes: Sizes) -> Figures:
    """From a publisher to a connected persistent subscriber, which acknowledges; at full speed."""
    shape = Shape(TOPIC, qos, PAYLOAD_BYTES)
    count = sizes.messages if qos == 1 else sizes.messages_qos2
    window = WINDOW if qos == 1 else WINDOW_QOS2
    published, received, cpu_s = _live(broker, shape, sizes, count=count, window=window)
    name = f"live {qos}"
    return {
        name: len(received.sequences) / max(received.last - published.began, 1e-9),
        f"{name} cpu": cpu_s * 1e6 / max(len(received.sequences), 1),
        **_kept(published.acked, received),
    }


def live_for(
    broker: Broker, sizes: Sizes, seconds: float, started: Callable[[], None]
) -> tuple[Published, Received, float]:
    """Traffic at full speed for some seconds: what both ends saw, and the broker's CPU seconds."""
    shape = Shape(TOPIC, 1, PAYLOAD_BYTES)
    count = int(seconds * RATE_MAX)
    quiet_s = min(seconds / 2, 2.0)
    return _live(
        broker, shape, sizes, started=started, quiet_s=quiet_s, count=count, seconds=seconds
    )


def _live(
    broker: Broker,
    shape: Shape,
    sizes: Sizes,
    *,
    count: int,
    window: int = WINDOW,
    seconds: float | None = None,
    rate: float | None = None,
    quiet_s: float = 5.0,
    started: Callable[[], None] = lambda: None,
) -> tuple[Published, Received, float]:
    wanted = {"expect": count, "quiet_s": quiet_s}
    how = {"count": count, "window": window, "seconds": seconds or sizes.publish_s, "rate": rate}
    with (
        _subscriber(broker, "live0", shape, sizes, subscribes=True, **wanted) as subscriber,
        _publisher(broker, [shape], sizes, **how) as publisher,
    ):
        subscriber.wait_ready()
        publisher.wait_ready()
        before_s = broker.cpu_s()
        subscriber.start()
        publisher.start()
        started()
        published = publisher.result()
        _, received = subscriber.result()
        return published, received, broker.cpu_s() - before_s


def latency(broker: Broker, sizes: Sizes) -> Figures:
    """From PUBLISH to arrival at 200 messages a second."""
    shape = Shape(TOPIC, 1, PAYLOAD_BYTES)
    count = int(200 * sizes.rate_s)
    seconds = sizes.rate_s + 2
    published, received, _ = _live(broker, shape, sizes, count=count, seconds=seconds, rate=200.0)
    return {
        "latency p50": percentile(received.latencies_s, 50) * 1e3,
        "latency p99": percentile(received.latencies_s, 99) * 1e3,
        **_kept(published.acked, received),
    }


def drain(broker: Broker, sizes: Sizes) -> Figures:
    """A session comes back to a backlog: messages a second from CONNECT to the last one."""
    shape = Shape(TOPIC, 1, PAYLOAD_BYTES)
    make_sessions(broker.port, [("drain0", TOPIC.decode())])
    acked = _fill(broker, [shape], sizes, sizes.backlog, sizes.backlog_s)
    with _subscriber(broker, "drain0", shape, sizes, subscribes=False, expect=acked) as subscriber:
        subscriber.wait_ready()
        before_s = broker.cpu_s()
        subscriber.start()
        began, received = subscriber.result()
        cpu_s = broker.cpu_s() - before_s
    return {
        "drain": len(received.sequences) / max(received.last - began, 1e-9),
        "drain cpu": cpu_s * 1e6 / max(len(received.sequences), 1),
        **_kept(acked, received),
    }


def storm(broker: Broker, sizes: Sizes) -> Figures:
    """Many sessions return in the same moment, each to some messages of its own."""
    sessions, each = sizes.storm
    shapes = [Shape(b"storm/%04d" % i, 1, PAYLOAD_BYTES) for i in range(sessions)]
    names = [(f"storm{i}", shape.topic.decode()) for i, shape in enumerate(shapes)]
    make_sessions(broker.port, names)
    acked = _fill(broker, shapes, sizes, sessions * each, 40.0)
    work = partial(_storm, broker.port, names, shapes[0], each)
    with Process(work, timeout_s=sizes.limit_s) as clients:
        before_s = broker.cpu_s()
        took_s, received, again = clients.result()
        cpu_s = broker.cpu_s() - before_s
    figures = {"lost": acked - received, "again": again, "storm cpu": cpu_s * 1e6 / max(acked, 1)}
    return figures | ({"storm": took_s} if received >= acked else {})


class _Client(NamedTuple):
    """One session of the storm. data: what is read and not looked at yet."""

    packet: bytes
    data: bytearray
    sequences: set[int]


def _storm(
    port: int, names: list[tuple[str, str]], shape: Shape, each: int, _go: object
) -> tuple[float, int, int]:
    """Seconds until the last message, messages received, and how many came again."""
    selector = selectors.DefaultSelector()
    received = again = 0
    began = last = time.monotonic()
    for client_id, _ in names:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex((HOST, port))
        client = _Client(connect_packet(client_id, clean=False), bytearray(), set())
        selector.register(sock, selectors.EVENT_WRITE, client)
    end = began + 40.0
    wanted = len(names) * each
    while (now := time.monotonic()) < end:
        if received >= wanted and end - now > 1.0:
            end = now + 0.5  # what comes now is a duplicate
        for key, _ in selector.select(0.05):
            connection, client = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            if key.events & selectors.EVENT_WRITE:
                connection.send(client.packet)
                selector.modify(connection, selectors.EVENT_READ, client)
                continue
            got = _read(connection, client, shape)
            before = len(client.sequences)
            client.sequences.update(got)
            fresh = len(client.sequences) - before
            again += len(got) - fresh
            received += fresh
            if fresh:
                last = time.monotonic()
    for left in list(selector.get_map().values()):
        assert isinstance(left.fileobj, socket.socket)
        left.fileobj.close()
    return last - began, received, again


def _read(sock: socket.socket, client: _Client, shape: Shape) -> list[int]:
    """Read and acknowledge what came; its sequence numbers."""
    data = sock.recv(RECV_BYTES)
    if not data:
        raise Failed("a connection of the storm was closed")
    client.data.extend(data)
    if len(client.data) < 4:
        return []
    if client.data[0] == 0x20:
        del client.data[:4]
    got, rest = shape.read(bytes(client.data))
    client.data[:] = rest
    if got:
        sock.send(b"".join([PUBACK_HEAD + PACKET_ID[g.packet_id] for g in got]))
    return [g.sequence for g in got]


def memory(broker: Broker, sizes: Sizes) -> Figures:
    """Bytes of memory for a session that sleeps, and for a message that waits for it."""
    shape = Shape(TOPIC, 1, PAYLOAD_BYTES)
    sessions = sizes.asleep // 10 if broker.kind.slow else sizes.asleep
    # what it takes to serve so many of them at all is not what a sleeping one takes
    make_sessions(broker.port, [(f"warm{i}", f"warm/{i}") for i in range(sessions)])
    _fill(broker, [Shape(b"bench/other", 1, PAYLOAD_BYTES)], sizes, 2000, 1.0)
    time.sleep(sizes.settle_s)
    empty, empty_anonymous = broker.rss()
    make_sessions(broker.port, [(f"asleep{i}", TOPIC.decode()) for i in range(sessions)])
    time.sleep(sizes.settle_s)
    asleep, asleep_anonymous = broker.rss()
    acked = _fill(broker, [shape], sizes, sizes.queued, sizes.queue_s)
    time.sleep(sizes.settle_s)
    queued, _ = broker.rss()
    return {
        "session bytes": (asleep - empty) / sessions,
        "session bytes anonymous": (asleep_anonymous - empty_anonymous) / sessions,
        "message bytes": (queued - asleep) / max(sessions * acked, 1),
    }


class Scenario(NamedTuple):
    """name: what ``--scenarios`` looks for."""

    name: str
    run: Callable[[Broker, Sizes], Figures]


def scenarios(sizes: Sizes) -> list[Scenario]:
    """All of them, in the order of the table."""
    return [
        *(Scenario(f"ingest {n}", partial(ingest, n)) for n in sizes.sessions),
        Scenario("live 1", partial(live, 1)),
        Scenario("live 2", partial(live, 2)),
        Scenario("latency", latency),
        Scenario("drain", drain),
        Scenario("storm", storm),
        Scenario("memory", memory),
    ]
