"""What goes on beside a replay: prunes that overtake it, reads that fail, owners that change.

A replay waits in four places, and a prune may come in each of them:

    verdict -> [1] -> read -> [2] -> claim, send, wait for room -> [3] -> read ...
    verdict -> [4] -> fetch what an earlier connection left -> send

At 1, 3 and 4 the next read sees what was pruned, and refuses. At 2 the messages are in memory
already: they are delivered, and only who could not acknowledge them is refused when it comes back.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext import durable
from broker_ext.wire import Puback
from storage.api import Acquire, Acquired, Prune
from storage.errors import EntryDamaged, StoreUnavailable
from tests.broker.mqtt import running
from tests.storage.harness import BACKENDS, scratch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from broker_ext.wire import Publish
    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend

BACKLOG = 1200
"""More than two chunks of a replay, and than what a session may claim."""
ROOM = 356
"""Deliveries that are claimed at once: a window of 100, and 256 ahead."""
PRUNED = "history-unavailable"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with scratch() as path:
        yield BACKENDS[request.param](path)


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "AHEAD_MIN", ROOM - 100)


def payloads(first: int, last: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, last + 1)]


@asynccontextmanager
async def behind(backend: Backend, count: int = BACKLOG, **settings: Any) -> AsyncIterator[Broker]:
    """A broker that was started again: session ``c`` missed ``count`` of ``a``, ``d`` three of
    ``b`` that came last. Nothing of it is in memory."""
    async with running(backend, **settings) as broker:
        await broker.sleeper(b"c", b"a")
        await broker.sleeper(b"d", b"b")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *payloads(1, count))
        await publisher.deliver(b"b", *payloads(1, 3))
        await broker.restart()
        yield broker


async def prune(broker: Broker, through: int) -> None:
    """A hard cap at work."""
    more = True
    while more:
        more = (await broker.hub.committer.apply(Prune(through, 0, 1000))).more  # type: ignore[attr-defined]


async def refused(broker: Broker, client: Client) -> None:
    """It is cut off and told when it comes back; the other topic goes on."""
    await client.closed()
    assert broker.ends[-1] == (b"c", "resume refused")
    assert broker.hub.figures.resets == {PRUNED: 1}
    assert await broker.snapshot(b"c") is None
    other = await broker.connect(b"d")
    assert other.connack.session_present
    assert await other.payloads(3) == payloads(1, 3)
    again = await broker.connect(b"c")
    assert not again.connack.session_present
    await again.quiet()
    assert broker.hub.figures.resets == {PRUNED: 1}


def in_order(got: list[Publish], first: int, last: int) -> bool:
    return [p.payload for p in got] == payloads(first, last)


# ------------------------------------------------------------------------ prunes that overtake


async def test_a_prune_before_the_first_read_is_refused(backend: Backend) -> None:
    async with behind(backend) as broker:
        gate = broker.store.hang_read()
        client = await broker.connect(b"c")
        assert client.connack.session_present  # when it was asked, all of it was there
        await gate.reached.wait()
        await prune(broker, 1)
        gate.release()
        await refused(broker, client)


async def test_a_prune_between_two_chunks_is_refused(backend: Backend) -> None:
    async with behind(backend) as broker:
        client = await broker.connect(b"c")
        assert in_order(await client.publishes(100, ack=False), 1, 100)
        gate = broker.store.hang_read()
        for packet_id in range(1, 101):
            client.send(Puback(packet_id))
        got = await client.publishes(ROOM - 100)
        assert in_order(got, 101, ROOM)
        await gate.reached.wait()
        await prune(broker, BACKLOG - 1)
        gate.release()
        await refused(broker, client)


async def test_a_prune_of_what_it_has_had_or_does_not_want_is_no_loss(backend: Backend) -> None:
    async with behind(backend) as broker:
        client = await broker.connect(b"c")
        gate = broker.store.hang_read()
        assert in_order(await client.publishes(ROOM), 1, ROOM)
        await gate.reached.wait()
        await prune(broker, ROOM)
        gate.release()
        assert in_order(await client.publishes(BACKLOG - ROOM), ROOM + 1, BACKLOG)
        await prune(broker, BACKLOG + 3)
        await client.quiet()
        assert broker.hub.figures.resets == {}
        await client.cut()
        assert (await broker.connect(b"c")).connack.session_present
        assert not (await broker.connect(b"d")).connack.session_present  # it never had them


async def test_a_prune_between_read_and_claim_takes_nothing_that_was_read(
    backend: Backend,
) -> None:
    async with behind(backend, 50) as broker:
        after_a_read(broker, lambda: prune(broker, 40))
        client = await broker.connect(b"c")
        assert in_order(await client.publishes(50), 1, 50)
        await client.quiet()
        await client.cut()
        again = await broker.connect(b"c")
        assert again.connack.session_present
        await again.quiet()


async def test_a_prune_between_read_and_claim_resets_who_could_not_acknowledge(
    backend: Backend,
) -> None:
    async with behind(backend, 50) as broker:
        after_a_read(broker, lambda: prune(broker, 40))
        client = await broker.connect(b"c")
        assert in_order(await client.publishes(50, ack=False), 1, 50)
        await client.cut()
        again = await broker.connect(b"c")
        assert not again.connack.session_present
        assert broker.hub.figures.resets == {"history-pruned": 1}


async def test_a_prune_while_a_plugin_is_asked_takes_nothing_that_was_read(
    backend: Backend,
) -> None:
    async with behind(backend, 50) as broker:
        broker.hub.router.guarded = True
        pruned = False

        async def asked(_: bytes) -> bool:
            nonlocal pruned
            if not pruned:
                pruned = True
                await prune(broker, 40)
            return True

        gate = broker.store.hang_read()
        client = await broker.connect(b"c")
        await gate.reached.wait()
        broker.session(b"c").may_receive = asked
        gate.release()
        assert in_order(await client.publishes(50), 1, 50)
        await client.quiet()


async def test_a_prune_before_the_fetch_of_what_was_left_is_refused(backend: Backend) -> None:
    async with behind(backend, 10) as broker:
        client = await broker.connect(b"c")
        await client.publishes(10, ack=False)
        await client.cut()
        gate = broker.store.hang_read()
        client = await broker.connect(b"c")
        assert client.connack.session_present
        await gate.reached.wait()
        await prune(broker, 4)
        gate.release()
        await refused(broker, client)


def after_a_read(broker: Broker, call: Callable[[], Awaitable[None]]) -> None:
    """Have something happen when the next read of the history has its answer."""
    read = broker.store.read

    async def hooked(*args: Any, **options: Any) -> Any:
        chunk = await read(*args, **options)
        broker.store.read = read  # type: ignore[method-assign]
        await call()
        return chunk

    broker.store.read = hooked  # type: ignore[method-assign]


# ----------------------------------------------------------------- how a refusal is carried out


async def test_a_refusal_closes_the_socket_without_waiting_for_storage(backend: Backend) -> None:
    async with behind(backend) as broker:
        read = broker.store.hang_read()
        client = await broker.connect(b"c")
        await read.reached.wait()
        await prune(broker, 1)
        write = broker.store.hang_submit()
        read.release()
        await client.closed()  # its record is not deleted yet
        assert broker.hub.figures.resets == {PRUNED: 1}
        stored = await broker.store.inner.snapshot(b"c")
        assert stored is not None
        # who comes back meanwhile waits behind the deletion, and is told
        early = await broker.dial()
        early.send(early.connect_packet(b"c"))
        await write.reached.wait()
        write.release()
        connack = await early.any()
        assert not connack.session_present
        assert await broker.snapshot(b"c") is not None


async def test_after_a_refusal_nothing_of_the_session_is_written(backend: Backend) -> None:
    """Its last acknowledgements arrive with the refusal; its incarnation is off the record."""
    async with behind(backend) as broker:
        client = await broker.connect(b"c")
        session = broker.session(b"c")
        gate = broker.store.hang_read()
        assert in_order(await client.publishes(ROOM), 1, ROOM)
        await gate.reached.wait()
        await prune(broker, BACKLOG)
        gate.release()
        await client.closed()
        await broker.hub.committer.drain()
        assert session.sealed
        written = len(broker.store.applied)
        session.checkpoint()
        session.puback(1)
        session.turn_over()
        await broker.hub.committer.drain()
        assert len(broker.store.applied) == written
        assert await broker.snapshot(b"c") is None


async def test_a_refusal_deletes_only_a_record_that_is_still_its_own(backend: Backend) -> None:
    async with behind(backend, 10) as broker:
        gate = broker.store.hang_read()
        client = await broker.connect(b"c")
        await gate.reached.wait()
        taken = await broker.hub.committer.apply(Acquire(b"c", b"N" * 16, b"", 0))
        assert isinstance(taken, Acquired)
        gate.release(EntryDamaged(5, b"a"))
        await client.closed()
        snapshot = await broker.snapshot(b"c")
        assert snapshot is not None
        assert snapshot.consumer.incarnation == b"N" * 16
        assert [s.filter for s in snapshot.subscriptions] == [b"a"]
        assert broker.hub.figures.fenced >= 1


async def test_a_refusal_that_comes_after_a_takeover_is_not_the_newer_one_s(
    backend: Backend,
) -> None:
    async with behind(backend, 10) as broker:
        gate = broker.store.hang_read()
        older = await broker.connect(b"c")
        await gate.reached.wait()
        newer = await broker.connect(b"c")
        gate.release(EntryDamaged(5, b"a"))
        await older.closed()
        assert newer.connack.session_present
        assert in_order(await newer.publishes(10), 1, 10)
        await newer.quiet()
        assert broker.hub.figures.resets == {}


async def test_a_will_is_published_when_the_resume_is_refused(backend: Backend) -> None:
    from tests.broker.mqtt import will  # noqa: PLC0415 - one test's only

    async with behind(backend, 10) as broker:
        watcher = await broker.subscriber(b"w", b"wills")
        gate = broker.store.hang_read()
        client = await broker.connect(b"c", will=will(b"wills"))
        await gate.reached.wait()
        await prune(broker, 4)
        gate.release()
        await client.closed()
        assert await watcher.payloads(1) == [b"gone"]


# ----------------------------------------------------------------------------- reads that fail


async def test_a_read_error_closes_and_the_client_resumes_where_it_was(backend: Backend) -> None:
    async with behind(backend) as broker:
        client = await broker.connect(b"c")
        gate = broker.store.hang_read()
        assert in_order(await client.publishes(ROOM), 1, ROOM)
        await client.quiet()  # its acknowledgements have arrived
        gate.release(StoreUnavailable("no answer"))
        await client.closed()
        assert broker.ends[-1] == (b"c", "store unavailable")
        snapshot = await broker.snapshot(b"c")
        assert snapshot is not None
        assert snapshot.consumer.cursor == ROOM
        again = await broker.connect(b"c")
        assert again.connack.session_present
        got = await again.publishes(BACKLOG - ROOM)
        assert in_order(got, ROOM + 1, BACKLOG)
        assert not any(p.dup for p in got)
        assert broker.hub.figures.resets == {}


async def test_a_fetch_error_closes_and_the_client_resumes_where_it_was(backend: Backend) -> None:
    async with behind(backend, 10) as broker:
        client = await broker.connect(b"c")
        await client.publishes(10, ack=False)
        await client.cut()
        broker.store.fail_read(StoreUnavailable("no answer"))
        client = await broker.connect(b"c")
        await client.closed()
        again = await broker.connect(b"c")
        assert again.connack.session_present
        got = await again.publishes(10)
        assert in_order(got, 1, 10)
        assert all(p.dup for p in got)


async def test_our_own_bug_in_a_replay_closes_one_connection_and_loses_nothing(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind(backend, 10) as broker:
        broker.store.fail_read(KeyError("a bug"))
        with caplog.at_level(logging.CRITICAL, "amqtt_durable.session"):
            client = await broker.connect(b"c")
            await client.closed()
        again = await broker.connect(b"c")
        assert again.connack.session_present
        assert in_order(await again.publishes(10), 1, 10)


async def test_the_saved_position_never_passes_what_was_read(backend: Backend) -> None:
    """Checkpoints, acknowledgements and publishes go on while a read hangs; then it dies."""
    async with behind(backend) as broker:
        client = await broker.connect(b"c")
        gate = broker.store.hang_read()
        assert in_order(await client.publishes(ROOM), 1, ROOM)
        await gate.reached.wait()
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"%d" % (BACKLOG + 1))
        broker.hub._checkpoint()
        await client.quiet()
        await broker.hub.committer.drain()
        snapshot = await broker.snapshot(b"c")
        assert snapshot is not None
        assert snapshot.consumer.cursor == ROOM
        await broker.crash()
        gate.release()
        await broker.start()
        again = await broker.connect(b"c")
        assert again.connack.session_present
        assert in_order(await again.publishes(BACKLOG + 1 - ROOM), ROOM + 1, BACKLOG + 1)


async def test_a_prune_beside_a_slow_consumer_ends_in_a_refusal_not_in_a_gap(
    backend: Backend,
) -> None:
    """It takes ten at a time while the cap follows the publisher: sooner or later it is passed."""
    async with behind(backend, max_inflight=10) as broker:
        client = await broker.connect(b"c")
        got: list[bytes] = []
        floor = 0
        try:
            while len(got) < BACKLOG:
                async with asyncio.timeout(10):
                    got += [p.payload for p in await client.publishes(10)]
                floor += 40
                await prune(broker, min(floor, BACKLOG))
        except (AssertionError, ConnectionError):  # the broker closed the connection
            await client.close()
        assert got == payloads(1, len(got))
        assert len(got) < BACKLOG
        again = await broker.connect(b"c")
        assert not again.connack.session_present
