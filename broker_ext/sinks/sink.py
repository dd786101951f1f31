"""A sink is a consumer of the store, like a session; this is its life, and all sinks of a broker.

Its record is that of a client id no MQTT client can have (SINK_PREFIX, name), with subscriptions, a
cursor and an incarnation of the one who feeds it. At each start its position is checked as a
session's is (``broker_ext.resume``), with the same choices: ``on_history_pruned`` and
``on_generation_change``. A sink that is reset goes on from the head; that is told (log, count,
``on_durable_session_reset``), since there is no client that could be.

A sink that is no longer configured keeps its position, and the history it needs, for UNUSED_S: it
may be a slip in the YAML. Then it expires like a session. Its queue stays until it is purged.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from broker_ext.figures import SinkFigures
from broker_ext.replay import Wanted
from broker_ext.resume import Finding, Verdict, verdict
from broker_ext.sinks.dispatcher import Dispatcher
from broker_ext.sinks.feeder import Feeder
from broker_ext.sinks.settings import BridgeSettings, WebhookSettings
from storage.api import (
    INCARNATION_BYTES,
    Acquire,
    Acquired,
    Advance,
    Detach,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.errors import Fenced, ResumeHistoryUnavailable, StoreError
from storage.outbox import Schedule

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from broker_ext.sinks.sender import Sender
    from broker_ext.sinks.settings import SinkSettings
    from storage.outbox import Message
    from storage.roles import Janitor

__all__ = ["LEASE_MS", "SINK_PREFIX", "UNUSED_S", "Sink", "Sinks"]

log = logging.getLogger("amqtt_durable.sinks")

SINK_PREFIX: Final = b"\x00sink/"
"""Client ids of sinks; no MQTT client id has a NUL [MQTT-1.5.3-2]."""
UNUSED_S: Final = 7 * 86_400
LEASE_MS: Final = 30_000
"""How long a message of a worker that vanished waits. It is extended while it is sent."""
GRACE_S: Final = 3.0
"""How long a stop waits for what is being sent."""
SWEEP_MAX: Final = 100
"""Messages that one commit of the janitor's ends or deletes at most."""
AGAIN_S: Final = 1.0
"""Pause after the store could not be read or written, or after a bug of ours."""


class Sink:
    """One sink of a running broker."""

    def __init__(self, hub: Hub, settings: SinkSettings) -> None:
        self.hub = hub
        self.settings = settings
        self.name = settings.name
        self.client_id = SINK_PREFIX + settings.name.encode()
        self.figures = SinkFigures()
        self.feeder: Feeder
        self.sender: Sender = self._make_sender()
        schedule = Schedule(tuple(int(s * 1000) for s in settings.retry))
        self.dispatcher = Dispatcher(
            self.name,
            self.sender,
            hub.handles.worker(self.name.encode(), lease_ms=LEASE_MS, schedule=schedule),
            hub.store.outbox,
            hub.clock,
            event_id=self._event_id,
            figures=self.figures,
            on_ended=self._ended,
        )
        self._feeding: asyncio.Task[None] | None = None
        self._had: dict[bytes, int] = {}

    def _ended(self, payload_bytes: int) -> None:
        self.feeder.ended(payload_bytes)

    def _make_sender(self) -> Sender:
        settings = self.settings
        if isinstance(settings, WebhookSettings):
            from broker_ext.sinks.webhook import Webhook  # noqa: PLC0415 - aiohttp

            return Webhook(settings, self.hub.clock)
        assert isinstance(settings, BridgeSettings)
        from broker_ext.sinks.bridge import Bridge  # noqa: PLC0415 - paho

        client_id = f"amqtt-durable-{self.name}-{self.hub.opened.log.db_id[:8]}"
        return Bridge(settings, self.hub.clock, client_id=client_id)

    def _event_id(self, message: Message) -> str:
        """The same for each attempt and each reissue. By generation: after a restore an offset may
        be given to another message, and a receiver must not take that for a repetition."""
        generation = self.hub.opened.log.generation
        if message.offset:
            return f"{generation}-{message.offset}"
        return f"{generation}-m{message.id}"

    # ------------------------------------------------------------------------ life cycle

    async def start(self) -> None:
        """Acquire the consumer, check its position, begin. Raises StoreError; OSError and
        ValueError when a secret cannot be read."""
        await self.sender.open()
        try:
            self.feeder = await self._acquire()
        except BaseException:
            await self.sender.close()
            raise
        for topic_filter in dict.fromkeys(self.settings.filters):
            self.hub.router.follow(topic_filter.encode(), 1)
        self._feeding = asyncio.ensure_future(self._feed())
        self.dispatcher.start()

    async def stop(self) -> None:
        """Feed no more, let what is being sent end for a while, and leave the consumer."""
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        await self.dispatcher.stop(GRACE_S)
        await self.sender.close()

    async def abandon(self) -> None:
        """Stop at once, as a crash would: nothing is given back or settled."""
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        await self.dispatcher.abandon()
        await self.sender.close()

    async def _feed(self) -> None:
        """Feed as long as the broker runs: what cannot be done now is tried again."""
        while True:
            try:
                await self.feeder.run()
            except ResumeHistoryUnavailable as error:
                await self._lost(error)
            except Fenced:
                log.error("sink %r: another one feeds it; it is not fed by us any more", self.name)  # noqa: TRY400 - no traceback
                return
            except StoreError as error:
                # the committer says it once; the cursor is where it was
                log.debug("sink %r is put off: %s", self.name, error)
                await asyncio.sleep(AGAIN_S)
            except Exception:
                log.exception("sink %r cannot be fed", self.name)
                await asyncio.sleep(AGAIN_S)

    # ---------------------------------------------------------------------- the position

    async def _acquire(self, *, clean: bool = False) -> Feeder:
        hub = self.hub
        incarnation = os.urandom(INCARNATION_BYTES)
        outcome = await hub.committer.apply(
            Acquire(self.client_id, incarnation, self.client_id, hub.clock.now_ms(), clean=clean)
        )
        assert isinstance(outcome, Acquired)
        assert outcome.snapshot is not None
        for topic_filter in outcome.dropped:
            hub.router.count(topic_filter, -1)
        snapshot = outcome.snapshot
        head = hub.committer.last
        had = {s.filter: s.from_offset for s in snapshot.subscriptions}
        finding = Finding(Verdict.RESUME)
        if had:
            finding = verdict(
                snapshot,
                outcome.log,
                on_generation_change=hub.settings.on_generation_change,
                on_history_pruned=hub.settings.on_history_pruned,
            )
        if finding.verdict is Verdict.RESET:
            self._tell_reset(finding)
            return await self._acquire(clean=True)
        if finding.verdict is Verdict.REBIND:
            log.warning("sink %r: %s; it resumes unchecked", self.name, finding.error)
        cursor = snapshot.consumer.cursor
        begin = head
        if not had and not clean:  # it is new; one that was reset goes on from the head
            begin = cursor = self._begin(outcome.log.floor, head)
        elif not had:
            cursor = head
        await self._subscribe(snapshot.consumer.id, incarnation, had, begin, cursor)
        return Feeder(
            hub,
            self.settings,
            consumer_id=snapshot.consumer.id,
            incarnation=incarnation,
            wanted=[Wanted(f, 2, since) for f, since in self._had.items()],
            cursor=cursor,
            figures=self.figures,
            on_fed=self.dispatcher.wake,
            unbound=finding.verdict is Verdict.REBIND,
        )

    def _begin(self, floor: int, head: int) -> int:
        """Where a new sink begins."""
        start = self.settings.start
        if start == "head":
            return head
        wanted = floor if start == "earliest" else int(start)
        begin = min(max(wanted, floor), head)
        if begin != wanted:
            log.warning(
                "sink %r: the history is from %d to %d; it begins at %d instead of %d",
                self.name,
                floor,
                head,
                begin,
                wanted,
            )
        return begin

    async def _subscribe(
        self, consumer_id: int, incarnation: bytes, had: dict[bytes, int], begin: int, cursor: int
    ) -> None:
        """Bring the stored filters in line with the configured ones. One commit for all of it: a
        record without filters is one that was never begun."""
        hub = self.hub
        wanted = {f.encode() for f in self.settings.filters}
        gone = tuple(f for f in had if f not in wanted)
        new = tuple(Subscription(f, 2, begin) for f in sorted(wanted - had.keys()))
        self._had = {f: had.get(f, begin) for f in sorted(wanted)}
        writes = []
        if not had:
            writes.append(Advance(consumer_id, incarnation, cursor=cursor, checkpoint=True))
        if gone:
            writes.append(Unsubscribe(consumer_id, incarnation, gone))  # type: ignore[arg-type]
        if new:
            writes.append(Subscribe(consumer_id, incarnation, new))  # type: ignore[arg-type]
        for subscription in new:
            hub.router.count(subscription.filter, 1)
        for topic_filter in gone:
            hub.router.count(topic_filter, -1)
        await asyncio.gather(*(hub.committer.apply(op) for op in writes))

    async def _lost(self, error: ResumeHistoryUnavailable) -> None:
        """History that it should have had is gone, or damaged: found while it was read."""
        if self.hub.settings.on_history_pruned == "skip":
            self.figures.gaps += 1
            self.hub.tell_gap(self.client_id, error.position, error.floor)
            self.feeder.cursor = max(self.feeder.cursor, error.floor)
            return
        self._tell_reset(Finding(Verdict.RESET, "history-unavailable", error))
        while True:
            try:
                self.feeder = await self._acquire(clean=True)
            except StoreError as refusal:
                log.debug("sink %r is put off: %s", self.name, refusal)
                await asyncio.sleep(AGAIN_S)
            else:
                return

    def _tell_reset(self, finding: Finding) -> None:
        self.figures.resets += 1
        self.hub.tell_reset(self.client_id, finding)


class Sinks:
    """All sinks of a broker, and what is done by the clock for the outbox."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.sinks: list[Sink] = []
        self._janitor: Janitor

    async def start(self) -> None:
        """Start what is configured; leave what no longer is. Raises as Sink.start does."""
        hub = self.hub
        self._janitor = hub.handles.janitor()
        configured = {SINK_PREFIX + s.name.encode() for s in hub.settings.sinks}
        await self._leave_others(configured)
        for settings in hub.settings.sinks:
            sink = Sink(hub, settings)
            self.sinks.append(sink)
            hub.figures.sinks[sink.name] = sink.figures
        while self.sinks and (await self._janitor.reap_all(limit=SWEEP_MAX)).more:
            pass
        for sink in self.sinks:
            try:
                await sink.start()
            except ValueError as error:  # a file that is no use: our words, not a bug
                raise OSError(f"sinks.{sink.name}: {error}") from None

    async def _leave_others(self, configured: set[bytes]) -> None:
        hub = self.hub
        after = SINK_PREFIX
        while True:
            page = await hub.store.consumers(after, 100)
            for consumer in page:
                client_id = consumer.client_id
                if not client_id.startswith(SINK_PREFIX):
                    return
                after = client_id
                if client_id not in configured and consumer.expiry_s is None:
                    await self._leave(client_id)
            if len(page) < 100:
                return

    async def _leave(self, client_id: bytes) -> None:
        hub = self.hub
        incarnation = os.urandom(INCARNATION_BYTES)
        now_ms = hub.clock.now_ms()
        outcome = await hub.committer.apply(
            Acquire(client_id, incarnation, client_id, now_ms, create=False, expiry_s=UNUSED_S)
        )
        assert isinstance(outcome, Acquired)
        if outcome.snapshot is not None:
            await hub.committer.apply(Detach(outcome.snapshot.consumer.id, incarnation, now_ms))
        log.warning(
            "sink %r is no longer configured; its position is kept for %d days, and the history "
            "behind it as long",
            client_id[len(SINK_PREFIX) :].decode(),
            UNUSED_S // 86_400,
        )

    async def checkpoint(self) -> None:
        """Save the positions of quiet sinks (the hub's timer)."""
        for sink in self.sinks:
            await sink.feeder.checkpoint()

    async def sweep(self) -> None:
        """End leases that lapsed and messages whose deadline is over (the hub's timer)."""
        hub = self.hub
        if hub.committer.failing_since is not None:
            return
        more = any(b.waiting or b.claimed for b in await hub.store.outbox.backlog())
        while more:
            reaped, expired = await asyncio.gather(
                self._janitor.reap(limit=SWEEP_MAX), self._janitor.expire(limit=SWEEP_MAX)
            )
            for message_id in reaped.waiting + reaped.dead:
                log.warning("outbox: the lease of message %d lapsed", message_id)
            if reaped.waiting:
                self.wake()
            more = reaped.more or len(expired) == SWEEP_MAX

    async def purge(self) -> None:
        """Delete what ended long ago, in steps (the hub's timer)."""
        settings = self.hub.settings
        more = self.hub.committer.can_delete
        while more:
            purged = await self._janitor.purge(
                done_kept_ms=int(settings.keep_done_s * 1000),
                dead_kept_ms=int(settings.keep_dead_s * 1000),
                limit=SWEEP_MAX,
            )
            more = purged.more
            await asyncio.sleep(0.05 if more else 0)  # others write, too

    def wake(self) -> None:
        """Look for messages that are due: something was reissued."""
        for sink in self.sinks:
            sink.dispatcher.wake()

    async def stop(self) -> None:
        """Stop all of them at once."""
        await asyncio.gather(*(sink.stop() for sink in self.sinks))
        self.sinks.clear()
