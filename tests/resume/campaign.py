"""A long random campaign: publishes, hostile caps, crashes, restores of older copies, reconnects.

Devices and a publisher go on by themselves, whatever the broker does; the campaign starts and ends
brokers. A *place* is where the broker is: a process that is killed with SIGKILL, or the same hub in
this process, which dies without a last write; the latter has many more deaths a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from broker_ext.wire import (
    DISCONNECT,
    Connack,
    Connect,
    Decoder,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
    encode,
)
from storage.memory import MemoryStore
from tests.broker.mqtt import Broker
from tests.resume.judge import (
    Accepted,
    Answered,
    Copied,
    Published,
    Received,
    Restored,
    Subscribed,
    judge,
)
from tests.resume.site import HOST, Site
from tests.storage import faults
from tests.storage.engine.raw import Files
from tests.storage.harness import Memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from broker_ext.wire import Packet
    from tests.resume.judge import Fact, Judgement
    from tests.storage.engine.raw import Kind

__all__ = ["Campaign", "InProcess", "InThisProcess", "Place"]

PATIENCE_S: Final = 20.0
TOPICS: Final = tuple(b"t/%d" % n for n in range(5))
MARKER: Final = b"end"
OURS: Final = "broker_ext"
FILTERS: Final[dict[str, tuple[bytes, ...]]] = {
    "one": (b"t/1",),
    "two": (b"t/2", b"t/3"),
    "plus": (b"t/+",),
    "hash": (b"#",),
    "late": (b"t/4", b"t/#"),
}
Mode = Literal["reset", "resume"]


class GoneError(Exception):
    """The connection is over."""


# --------------------------------------------------------------------------------------- places


class Place(Protocol):
    """Where a broker runs. pace_s: how long a round takes."""

    pace_s: float

    @property
    def port(self) -> int: ...

    async def start(self, **options: Any) -> None: ...

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...

    def copy(self, number: int) -> None: ...

    def restore(self, number: int) -> None: ...


class InProcess:
    """A real broker process, with its own timers beside a prune every few milliseconds."""

    pace_s = 0.5

    def __init__(self, folder: Path, kind: Kind, mode: Mode) -> None:
        self.site = Site(folder, kind, durability="os", on_generation_change=mode, prune_often=True)

    @property
    def port(self) -> int:
        return self.site.port

    async def start(self, **options: Any) -> None:
        await asyncio.to_thread(self.site.start, checkpoint_interval=0.1, **options)

    async def stop(self) -> None:
        await asyncio.to_thread(self.site.stop)

    async def kill(self) -> None:
        await asyncio.to_thread(self.site.kill)

    def copy(self, number: int) -> None:
        shutil.copytree(
            self.site.data,
            self.site.folder / f"copy-{number}",
            ignore=shutil.ignore_patterns("*.sock"),
        )

    def restore(self, number: int) -> None:
        self.site.restore(self.site.folder / f"copy-{number}")


class InThisProcess:
    """The hub and its connections, over any store. A crash leaves what is committed."""

    pace_s = 0.06

    def __init__(self, folder: Path, kind: Kind | Literal["memory"], mode: Mode) -> None:
        self.files = None if kind == "memory" else Files(kind, folder / "data")
        self.memory = Memory(folder)
        self.copies: dict[int, Any] = {}
        self.mode: Mode = mode
        self.broker = Broker(self.files or self.memory)
        self.broker.timers = True

    @property
    def port(self) -> int:
        port: int = self.broker.port
        return port

    async def start(self, **options: Any) -> None:
        names = {"max_age": "max_age_s", "retain_for": "retain_for_s"}
        await self.broker.start(
            **{names.get(name, name): value for name, value in options.items()},
            on_generation_change=self.mode,
            checkpoint_interval_s=0.01,
            prune_interval_s=0.01,
            max_connects_per_second=1e6,
        )

    async def stop(self) -> None:
        assert await self.broker.store.inner.check() == []
        await self.broker.stop()

    async def kill(self) -> None:
        await self.broker.crash()
        for task in asyncio.all_tasks():  # what waits for a commit that never comes died, too
            if f"{OURS}/" in task.get_coro().cr_code.co_filename:  # type: ignore[union-attr]
                task.cancel()

    def copy(self, number: int) -> None:
        if self.files is None:
            self.copies[number] = deepcopy(self.memory._store._tables)
        else:
            shutil.copytree(self.files.directory, f"{self.files.directory}-{number}")

    def restore(self, number: int) -> None:
        if self.files is None:
            store = self.memory._store
            assert isinstance(store, MemoryStore)
            store._tables = deepcopy(self.copies[number])
            faults.restore(store)
            return
        sidecar = self.files.sidecar.read_bytes()
        shutil.rmtree(self.files.directory)
        shutil.copytree(f"{self.files.directory}-{number}", self.files.directory)
        self.files.sidecar.write_bytes(sidecar)


# -------------------------------------------------------------------------------------- clients


class Link:
    """One connection of one client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder(server=False)
        self._packets: deque[Packet] = deque()

    @classmethod
    async def open(cls, port: int) -> Link:
        try:
            return cls(*await asyncio.open_connection(HOST, port))
        except OSError as error:
            raise GoneError from error

    def send(self, *packets: Packet) -> None:
        self._writer.write(b"".join(encode(packet, 4) for packet in packets))

    async def next(self, within_s: float) -> Packet | None:
        """The next packet, None if none comes in time. Raises GoneError."""
        while not self._packets:
            try:
                async with asyncio.timeout(within_s):
                    data = await self._reader.read(65_536)
            except TimeoutError:
                return None
            except OSError as error:
                raise GoneError from error
            if not data:
                raise GoneError
            self._packets.extend(self._decoder.feed(data))
        return self._packets.popleft()

    async def connected(self, client_id: bytes, *, clean: bool) -> bool:
        """CONNECT; whether Session Present is set. Raises GoneError."""
        self.send(Connect(4, client_id, clean, 0, None, None, None))
        packet = await self.next(PATIENCE_S)
        if type(packet) is not Connack or packet.reason:
            raise GoneError
        return packet.session_present

    def abort(self) -> None:
        self._writer.transport.abort()

    def leave(self) -> None:
        self._writer.write(DISCONNECT)
        self._writer.close()


@dataclass
class Device:
    """A durable client that misbehaves within the rules, until it is told to finish.

    is_subscribed: what it believes of its session.
    """

    campaign: Campaign
    name: str
    rng: random.Random
    is_subscribed: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        while not self.finished.is_set():
            with contextlib.suppress(GoneError):
                await self.live()
            await asyncio.sleep(self.campaign.pace_s * self.rng.random() / 4)

    async def live(self) -> None:
        """One connection."""
        wild = self.campaign.wild
        link = await Link.open(self.campaign.port)
        try:
            if wild and self.rng.random() < 0.1:  # it never hears the answer
                link.send(Connect(4, self.name.encode(), False, 0, None, None, None))
                await asyncio.sleep(self.rng.random() * 0.01)
                link.abort()
                return
            present = await link.connected(self.name.encode(), clean=False)
            self.campaign.note(Answered(self.name, present))
            self.is_subscribed &= present
            if not self.is_subscribed or self.campaign.mode == "resume":
                filters = (*FILTERS[self.name], MARKER)
                qos = self.rng.choice((1, 2))
                link.send(Subscribe(1, tuple(SubscribeFilter(name, qos) for name in filters)))
            await self.receive(link)
        finally:
            if self.rng.random() < 0.5:
                link.leave()
            else:
                link.abort()

    async def receive(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        lasts_s = self.rng.choice((0.05, 0.3, 1.0, 3.0)) * self.campaign.pace_s
        end = loop.time() + lasts_s
        lazy = self.rng.choice((0.0, 0.0, 0.3)) if self.campaign.wild else 0.0
        while True:
            if self.campaign.wild and loop.time() >= end:
                return
            packet = await link.next(max(end - loop.time(), 0.01))
            if type(packet) is Suback:
                if any(code == 0x80 for code in packet.reasons):
                    return
                self.campaign.note(Subscribed(self.name))
                self.is_subscribed = True
            elif type(packet) is Publish:
                if packet.topic == MARKER:
                    if not self.campaign.wild and packet.payload == self.campaign.marker:
                        self.finished.set()
                        return
                else:
                    self.campaign.note(Received(self.name, int(packet.payload)))
                if self.rng.random() >= lazy:
                    answer = Puback if packet.qos == 1 else Pubrec
                    link.send(answer(packet.packet_id))
            elif type(packet) is Pubrel:
                link.send(Pubcomp(packet.packet_id))


@dataclass
class Publisher:
    """Publishes in bursts; what was not accepted when its connection ends is left in doubt."""

    campaign: Campaign
    rng: random.Random
    published: int = 0

    async def run(self) -> None:
        while self.campaign.wild:
            with contextlib.suppress(GoneError):
                await self.live()
            await asyncio.sleep(self.campaign.pace_s / 20)

    async def live(self) -> None:
        link = await Link.open(self.campaign.port)
        try:
            await link.connected(b"publisher", clean=True)
            while self.campaign.wild:
                await self.burst(link)
                await asyncio.sleep(self.campaign.pace_s * self.rng.random() / 10)
        finally:
            link.abort()

    async def burst(self, link: Link) -> None:
        under_way: dict[int, int] = {}
        for packet_id in range(1, self.rng.choice((1, 3, 10, 40)) + 1):
            self.published += 1
            topic = self.rng.choice(TOPICS)
            self.campaign.note(Published(self.published, topic))
            under_way[packet_id] = self.published
            qos = self.rng.choice((1, 2))
            link.send(Publish(qos << 1, topic, packet_id, b"%d" % self.published))
        while under_way:
            packet = await link.next(PATIENCE_S)
            if type(packet) in (Puback, Pubrec):
                self.campaign.note(Accepted(under_way[packet.packet_id]))  # type: ignore[union-attr]
            if type(packet) is Pubrec:
                link.send(Pubrel(packet.packet_id))
            elif type(packet) in (Puback, Pubcomp):
                del under_way[packet.packet_id]  # type: ignore[union-attr]
            elif packet is None:
                raise GoneError


# ------------------------------------------------------------------------------------- campaign


class Campaign:
    """Rounds of a broker's life at one place. The seed repeats its decisions, not its timing."""

    def __init__(self, place: Place, mode: Mode, seed: int) -> None:
        self.place = place
        self.mode: Mode = mode
        self.pace_s = place.pace_s
        self.wild = True
        self.marker = b"%d" % seed
        self.history: list[Fact] = []
        self._rng = random.Random(seed)  # noqa: S311 - it has to be repeatable
        self._up = False
        self._copies = 0
        self.missing: list[str] = []

    @property
    def port(self) -> int:
        """Of the broker. Raises GoneError while there is none."""
        if not self._up:
            raise GoneError
        return self.place.port

    def note(self, fact: Fact) -> None:
        self.history.append(fact)

    async def run(self, rounds: int) -> Judgement:
        """Play ``rounds`` lives and a last one in which everybody catches up; judge."""
        rng = self._rng
        devices = [Device(self, name, random.Random(rng.random())) for name in FILTERS]  # noqa: S311
        publisher = Publisher(self, random.Random(rng.random()))  # noqa: S311
        tasks = [asyncio.ensure_future(device.run()) for device in devices]
        tasks.append(asyncio.ensure_future(publisher.run()))
        try:
            for _ in range(rounds):
                await self._round()
            self.wild = False
            await asyncio.wait_for(tasks[-1], PATIENCE_S)
            await self._last(devices)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._up:
                await self.place.kill()
        judgement = judge(self.history, FILTERS, resumes=self.mode == "resume")
        judgement.wrong += [f"{name} never had the marker" for name in self.missing]
        return judgement

    async def _round(self) -> None:
        rng = self._rng
        await self._start(**self._caps())
        await asyncio.sleep(self.pace_s * (0.3 + rng.random()))
        how: Callable[[], Awaitable[None]] = rng.choice((self.place.stop, self.place.kill))
        self._up = False
        await how()
        if self._copies and rng.random() < 0.15:
            number = rng.randint(max(self._copies - 3, 1), self._copies)
            self.place.restore(number)
            self.note(Restored(number))
        elif rng.random() < 0.3:
            self._copies += 1
            self.place.copy(self._copies)
            self.note(Copied(self._copies))

    def _caps(self) -> dict[str, Any]:
        rng = self._rng
        return {
            "max_messages": rng.choice((None, None, None, 5, 100)),
            "max_bytes": rng.choice((0, 0, 3000, 30_000)),
            "max_age": rng.choice((None, None, None, 1.0)),
            "retain_for": rng.choice((0.0, 0.2)),
            "max_inflight": rng.choice((1, 5, 100)),
        }

    async def _start(self, **options: Any) -> None:
        await self.place.start(**options)
        self._up = True

    async def _last(self, devices: list[Device]) -> None:
        """No caps; a marker that everybody waits for, published until everybody is subscribed."""
        await self._start(
            max_messages=None, max_bytes=0, max_age=None, retain_for=0.0, max_inflight=100
        )
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while not all(device.finished.is_set() for device in devices):
            if asyncio.get_running_loop().time() >= end:
                self.missing = [d.name for d in devices if not d.finished.is_set()]
                return
            link = await Link.open(self.port)
            await link.connected(b"marker", clean=True)
            link.send(Publish(2, MARKER, 1, self.marker))
            await link.next(PATIENCE_S)
            link.leave()
            await asyncio.sleep(self.pace_s / 4)
        self._up = False
        await self.place.stop()
