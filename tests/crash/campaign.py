"""The campaign: clients, a broker that is killed again and again, and a judge at the end.

A seed decides who does what, how each process dies and when; the operating system decides how the
threads of clients and broker interleave. So a seed replays a run's decisions, not its every race;
a run that failed is worth repeating a few times.

It may be on a sealed store, whose keys are rotated while brokers die (``--sealed``), and on a disk
that is full now and then (``--full``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from typing import TYPE_CHECKING, Literal

from broker_ext.cli.calling import call
from broker_ext.cli.errors import CannotOperate
from broker_ext.wire import Publish
from storage import open_store
from storage.errors import StoreError
from storage.keyring import add_key, read_keys
from tests.crash import facts
from tests.crash.broker import Broker, Fate, free_port
from tests.crash.clients import (
    ANSWER_S,
    SHARED,
    VERSED,
    Client,
    Link,
    Member,
    Publisher,
    Subscriber,
    World,
)
from tests.crash.judge import Verdict, judge
from tests.crash.points import POINTS, points_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from broker_ext.wire import Packet
    from tests.crash.facts import Fact

__all__ = ["Campaign", "Kind", "run"]

Kind = Literal["lmdb", "sqlite"]
LIVE_S = (0.15, 0.9)
"""How long a process lives, from when it listens, if no crash point ends it before."""
WINDOWS = (3, 20, 100)
OPENINGS = ("boot.", "create.")
"""The points at which a process dies before it listens."""


def _clients(world: World) -> tuple[list[Publisher], list[Subscriber]]:
    publishers = [
        Publisher(world, "pub0"),
        Publisher(world, VERSED, versed=True),
        Publisher(world, "pub2", clean=True),
    ]
    end = {"end": 1}
    subscribers = [
        Subscriber(world, "auditor", {"#": 2}),
        Subscriber(world, "overlap", {"t/#": 1, "t/+": 2, "t/1": 1, **end}, away=0.03),
        Subscriber(world, "churn", {"u/#": 1, **end}, ("t/0", "t/+", "+/1", "u/2", "t/kept/#")),
        Subscriber(world, "sleeper", {"t/+": 2, **end}, away=0.4),
        Subscriber(world, "forgetful", {"+/2": 1, **end}, ("u/#",), forgetful=True),
        Member(world, "crew-1", away=0.03),
        Member(world, "crew-2", away=0.1),
        Subscriber(world, "brief", {"t/+": 1, **end}, away=0.2, expiry_s=1),
        Subscriber(world, "passing", {"+/1": 2, **end}, ("u/#",), away=0.1, expiry_s=2),
    ]
    return publishers, subscribers


class Campaign:
    """One run. kills: how often the broker dies before the end, those times not counted that it
    dies in its opening, before it served anybody."""

    def __init__(
        self,
        folder: Path,
        store: Kind,
        seed: int,
        kills: int,
        *,
        is_sealed: bool = False,
        is_short: bool = False,
    ) -> None:
        self.rng = random.Random(f"{seed}/{store}")  # noqa: S311 - no secret
        self.store: Kind = store
        self.kills = kills
        self._sealing = random.Random(f"{seed}/{store}/sealing")  # noqa: S311 - no secret
        keys = folder / "keys" if is_sealed else None
        if keys is not None:
            add_key(keys, "k0")
        self._keys = 1
        self.broker = Broker(folder, store, free_port(self.rng), keys)
        self.is_short = is_short
        self.world = World(seed, self.broker.port, may_refuse=is_short)
        self.publishers, self.subscribers = _clients(self.world)
        self.clients: list[Client] = [*self.publishers, *self.subscribers]
        self.tell: Callable[[str], None] = lambda _: None

    async def run(self) -> list[Fact]:
        """Run all of it; give the history."""
        try:
            fate: Fate | None = None
            served = 0
            while served < self.kills:
                fate = self._fate(fate)
                how = await self._one_life(fate)
                self.world.note(facts.Died(how))
                if how.startswith(OPENINGS):
                    if self.rng.random() < 0.5:  # an opening of its own: not always before the next
                        await self._inspect()
                else:
                    served += 1
                    await self._inspect()
                self.tell(f"{served}/{self.kills} {how}")
            await self._drain()
            await self._inspect()
        finally:
            await self.broker.kill()
            for client in self.clients:
                await client.leave()
        return self.world.history

    def _fate(self, before: Fate | None) -> Fate:
        """Choose a crash point, or a random moment. before: None = there is no database yet."""
        rng = self.rng
        window = rng.choice(WINDOWS)
        if before is not None and before.point.startswith("boot.") and rng.random() < 0.5:
            return before  # it dies in its opening again and again
        if rng.random() < 0.3:
            return Fate("", 0, window, self.is_short)
        point = rng.choice(points_of(self.store, is_new=before is None))
        return Fate(point, rng.randint(1, POINTS[point].most), window, self.is_short)

    async def _one_life(self, fate: Fate) -> str:
        """Start a process, have clients talk to it until it dies; say how it died."""
        self.broker.start(fate)
        living = [asyncio.ensure_future(client.live()) for client in self.clients]
        lives_s = self.rng.uniform(*LIVE_S)
        try:
            if not await self.broker.listens():
                return self._dead_by_itself(fate)
            if self.broker.keys is not None and self._sealing.random() < 0.5:
                await asyncio.to_thread(self._rotate, self.broker.keys)
            if await self.broker.died(2 * lives_s if fate.point else lives_s):
                return self._dead_by_itself(fate)
            if fate.point.startswith("stop."):
                self.world.is_stopping = True
                self.broker.send(signal.SIGTERM)
                await self.broker.died(10.0)
                return fate.point
            await self.broker.kill()
            return "random"
        finally:
            self.world.is_stopping = False
            for task in living:
                task.cancel()
            for result in await asyncio.gather(*living, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
            await self.broker.kill()
            for client in self.clients:
                await client.leave()

    def _rotate(self, keys: Path) -> None:
        """Put a new key first, and have everything sealed with it, as far as it gets."""
        add_key(keys, f"k{self._keys}")
        self._keys += 1
        with contextlib.suppress(CannotOperate):  # it is dead, or dies now
            call(self.broker.data, "rekey")

    def _dead_by_itself(self, fate: Fate) -> str:
        code = self.broker.exit_code
        if code != -signal.SIGKILL or not fate.point:
            self.world.note(facts.Failed("down", f"the process ended by itself, exit {code}"))
            return "itself"
        return fate.point

    async def _inspect(self) -> None:
        """Open the store without a broker: check it, and note what it says of every client."""
        keyring = read_keys(file=self.broker.keys)
        store = open_store(self.store, self.broker.data, keyring=keyring)
        if not self.broker.data.exists():
            return
        try:
            opened = await store.open(now_ms=time.time_ns() // 1_000_000)
        except StoreError as error:
            self.world.note(facts.Failed("down", f"the store cannot be opened: {error}"))
            return
        try:
            problems = await store.check()
            minted = opened.minted if opened.minted not in ("created", "") else ""
            if minted == "sidecar missing" and opened.log.head == 0:
                minted = ""  # it died in its first opening: nothing was told to anybody
            self.world.note(facts.Found(tuple(problems), minted))
            for client in self.clients:
                snapshot = await store.snapshot(client.name.encode())
                subscriptions = inbound = None
                if snapshot is not None:
                    inbound = snapshot.inbound
                    subscriptions = {s.filter.decode(): s.qos for s in snapshot.subscriptions}
                self.world.note(facts.Stored(client.name, subscriptions, inbound or frozenset()))
            retained = {
                entry.topic.decode(): entry.payload.partition(b"\n")[0].decode()
                for entry in await store.retained()
            }
            self.world.note(facts.Retained("store", retained))
        finally:
            await store.close()

    # ------------------------------------------------------------------------------ the end

    async def _drain(self) -> None:
        """Start the broker for the last time, finish everything, receive everything."""
        self.world.is_wild = False
        self.broker.start(Fate())
        if not await self.broker.listens():
            self.world.note(facts.Failed("down", f"no last start, exit {self.broker.exit_code}"))
            return
        draining = [asyncio.ensure_future(self._drained(s)) for s in self.subscribers]
        for publisher in self.publishers:
            if not await publisher.finish():
                left = len(publisher.pending)
                text = f"{publisher.name}: {left} messages are not acknowledged"
                self.world.note(facts.Failed("down", text))
        await self._all_ready()
        await self.publishers[0].connect()
        self.publishers[0].publish_end()
        await asyncio.gather(*draining)
        await self._probe_retained()
        for client in self.clients:
            await client.leave()
        self.broker.send(signal.SIGTERM)
        if not await self.broker.died(20.0):
            self.world.note(facts.Failed("down", "SIGTERM does not stop the broker"))

    async def _all_ready(self) -> None:
        """Wait until everybody is subscribed to the marker: else it is not owed to them."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while not all(s.is_ready for s in self.subscribers):  # noqa: ASYNC110 - of five
                    await asyncio.sleep(0.01)
        except TimeoutError:
            names = [s.name for s in self.subscribers if not s.is_ready]
            self.world.note(facts.Failed("down", f"{names}: no SUBACK"))

    async def _drained(self, subscriber: Subscriber) -> None:
        if await subscriber.drain():
            self.world.note(facts.Drained(subscriber.name))
        else:
            self.world.note(facts.Failed("lost", f"{subscriber.name}: it never sees the end"))

    async def _probe_retained(self) -> None:
        """Ask for the retained messages as a new subscriber does."""
        probe = Probe(self.world)
        await probe.connect()
        self.world.note(facts.Retained("client", await probe.all_retained()))
        await probe.leave()


class Probe(Subscriber):
    """Collects the retained messages."""

    clean = True

    def __init__(self, world: World) -> None:
        super().__init__(world, "probe", {})
        self._found: dict[str, str] = {}

    async def all_retained(self) -> dict[str, str]:
        """Subscribe, and collect until nothing more comes."""
        assert self.link is not None
        before = -1
        self._subscribe(self.link, {"+/kept/#": 1})
        while len(self._found) != before:
            before = len(self._found)
            await asyncio.sleep(0.3)
        return self._found

    def arrived(self, link: Link, packet: Packet) -> None:
        if isinstance(packet, Publish) and packet.retain:
            message_id = packet.payload.partition(b"\n")[0].decode()
            self._found[packet.topic.decode()] = message_id
        super().arrived(link, packet)


async def run(
    folder: Path,
    store: Kind,
    seed: int,
    kills: int,
    tell: Callable[[str], None] | None = None,
    *,
    is_sealed: bool = False,
    is_short: bool = False,
) -> Verdict:
    """Run a campaign and judge it.

    folder: an empty one that exists; a history that breaks a promise is left there, as
        ``history.txt``, a fact in each line. tell: gets a line for each death.
    """
    campaign = Campaign(folder, store, seed, kills, is_sealed=is_sealed, is_short=is_short)
    if tell is not None:
        campaign.tell = tell
    history = await campaign.run()
    verdict = judge(history, shared=SHARED, may_refuse=is_short)
    if verdict.total:
        lines = [f"{index} {fact}\n" for index, fact in enumerate(history, 1)]
        (folder / "history.txt").write_text("".join(lines), encoding="utf-8")
    return verdict
