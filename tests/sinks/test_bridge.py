"""The bridge: paho against a scripted broker, and between two real ones."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.sinks import bridge as bridge_module
from broker_ext.sinks.bridge import failure_of
from broker_ext.sinks.settings import BridgeSettings
from broker_ext.wire import Properties, Publish
from broker_ext.wire.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY_S,
    PAYLOAD_FORMAT,
    RESPONSE_TOPIC,
    USER_PROPERTY,
    encode_properties,
)
from storage.outbox import Failure, State
from tests.broker.mqtt import running
from tests.sinks.plant import (
    advance,
    backlog,
    dead_letters,
    done,
    drained,
    message,
    publish,
    sink,
    until,
)
from tests.sinks.remote import Remote, scripted

if TYPE_CHECKING:
    from tests.storage.harness import Backend

SECRET = "hunter2-the-secret"  # noqa: S105 - what must not be told
VERSIONS = pytest.mark.parametrize("version", [4, 5])
QOS = pytest.mark.parametrize("qos", [1, 2])


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge comes back soon."""
    monkeypatch.setattr(bridge_module, "BACK_OFF_S", (0.01, 0.05))


def to(remote: Remote, **options: Any) -> tuple[BridgeSettings, ...]:
    settings = {"name": "up", "filters": ("alerts/#",), "host": "127.0.0.1", "port": remote.port}
    return (BridgeSettings(**(settings | options)),)


@VERSIONS
@QOS
async def test_messages_arrive_in_order_and_are_done_when_acknowledged(
    backend: Backend, version: int, qos: int
) -> None:
    async with (
        scripted() as remote,
        running(backend, sinks=to(remote, version=version, qos=qos)) as broker,
    ):
        await publish(broker, *(b"%d" % n for n in range(300)), qos=2)
        await done(broker, 300, "up")
        assert remote.payloads() == [b"%d" % n for n in range(300)]
        assert {packet.qos for packet in remote.taken} == {qos}
        assert len(remote.connects) == 1
        assert remote.connects[0].version == version


async def test_nothing_is_done_before_it_is_acknowledged(backend: Backend) -> None:
    async with scripted() as remote, running(backend, sinks=to(remote)) as broker:
        remote.decide = lambda _: "keep"
        await publish(broker, b"1", b"2")
        await remote.until(lambda r: len(r.kept) == 2)
        assert (await backlog(broker, "up"))[1:4] == (0, 2, 0)
        remote.answer_kept()
        await done(broker, 2, "up")


@VERSIONS
@QOS
async def test_after_a_lost_connection_what_was_under_way_comes_first_in_order(
    backend: Backend, version: int, qos: int
) -> None:
    async with (
        scripted() as remote,
        running(backend, sinks=to(remote, version=version, qos=qos, inflight=10)) as broker,
    ):
        remote.decide = lambda _: "keep"
        await publish(broker, *(b"%d" % n for n in range(30)), qos=2)
        await remote.until(lambda r: len(r.kept) == 10)
        remote.decide = lambda _: 0
        remote.seen.clear()
        remote.cut()
        await done(broker, 30, "up")
        assert [packet.payload for packet in remote.seen] == [b"%d" % n for n in range(30)]
        assert [bool(packet.dup) for packet in remote.seen] == 10 * [True] + 20 * [False]
        assert sink(broker, "up").figures.retried == 0, "a lost connection is no attempt"


async def test_qos_2_is_exactly_once_over_lost_connections(backend: Backend) -> None:
    """MQTT 5: PUBREC came, then the connection is lost before PUBCOMP; again and again."""
    async with (
        scripted() as remote,
        running(backend, sinks=to(remote, qos=2, inflight=5)) as broker,
    ):
        count = 0

        def decide(_: Publish) -> int | str:
            nonlocal count
            count += 1
            if count % 7 == 0:  # taken, and the PUBREC is lost
                asyncio.get_running_loop().call_soon(remote.cut)
            return 0

        remote.decide = decide
        await publish(broker, *(b"%d" % n for n in range(60)), qos=2)
        await done(broker, 60, "up")
        assert remote.payloads() == [b"%d" % n for n in range(60)]
        assert len(remote.connects) > 3
        assert [c.clean_start for c in remote.connects] == [True] + [False] * (
            len(remote.connects) - 1
        )


async def test_qos_2_is_exactly_once_over_a_broker_that_is_away_for_long(
    backend: Backend,
) -> None:
    """PUBREL arrived, PUBCOMP did not; then many attempts to connect fail."""
    remote = await Remote().start()
    async with running(backend, sinks=to(remote, qos=2)) as broker:
        remote.completes = False
        await publish(broker, *(b"%d" % n for n in range(10)), qos=2)
        await remote.until(lambda r: r.uncompleted == 10)
        await remote.stop()
        bridge = sink(broker, "up").sender
        assert isinstance(bridge, bridge_module.Bridge)
        await until(lambda: "no connection" in bridge._told)
        await asyncio.sleep(0.3)  # some more attempts
        remote.completes = True
        await remote.start()
        await done(broker, 10, "up")
        assert remote.payloads() == [b"%d" % n for n in range(10)]
    await remote.stop()


async def test_a_broker_that_restarts_gets_everything(backend: Backend) -> None:
    remote = await Remote().start()
    async with running(backend, sinks=to(remote)) as broker:
        await publish(broker, *(b"%d" % n for n in range(10)))
        await done(broker, 10, "up")
        await remote.stop()
        await publish(broker, *(b"%d" % n for n in range(10, 500)))
        assert sink(broker, "up").figures.fed <= 500
        await remote.start()
        await done(broker, 500, "up")
        assert remote.payloads() == [b"%d" % n for n in range(500)]
    await remote.stop()


async def test_nothing_is_claimed_while_there_is_no_connection(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    remote = await Remote().start()
    await remote.stop()
    async with running(backend, sinks=to(remote, outstanding=20)) as broker:
        await publish(broker, *(b"%d" % n for n in range(100)))
        await until(lambda: sink(broker, "up").figures.fed == 20)
        await until(lambda: "trying again" in caplog.text)
        assert (await backlog(broker, "up"))[1:3] == (20, 0)
        await remote.start()
        await done(broker, 100, "up")
        assert {m.attempts for m in [await message(broker, n) for n in range(1, 101)]} == {1}
    told = [r.getMessage() for r in caplog.records if "trying again" in r.message]
    assert len(told) == 1, "once, however often it is tried"
    assert any("connected to mqtt://127.0.0.1" in r.getMessage() for r in caplog.records)
    await remote.stop()


@pytest.mark.parametrize("version", [4, 5])
async def test_a_refused_bridge_tries_again_with_a_clean_start(
    backend: Backend, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = 0x87 if version == 5 else 5
    async with scripted(refuse=refusal) as remote:
        remote.ids = {1, 2, 3}  # of a process before, or of another client
        async with running(backend, sinks=to(remote, version=version, qos=2)) as broker:
            await publish(broker, b"1", qos=2)
            await remote.until(lambda r: len(r.connects) >= 3)
            remote.refuse = 0
            await done(broker, 1, "up")
        assert all(connect.clean_start for connect in remote.connects)
        assert remote.payloads() == [b"1"], "taken for a repetition of an old packet id"
    assert "refused: Not authorized" in caplog.text


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        (0x00, Failure.NONE),
        (0x10, Failure.NONE),
        (0x80, Failure.INDETERMINATE),
        (0x83, Failure.INDETERMINATE),
        (0x87, Failure.REJECTED),
        (0x90, Failure.REJECTED),
        (0x91, Failure.INDETERMINATE),
        (0x97, Failure.THROTTLED),
        (0x99, Failure.REJECTED),
    ],
)
async def test_a_reason_code_is_a_class_of_failure(reason: int, failure: Failure) -> None:
    assert failure_of(reason) is failure


@QOS
async def test_a_refused_message_is_no_done_one_and_the_others_go_on(
    backend: Backend, qos: int
) -> None:
    async with (
        scripted() as remote,
        running(backend, sinks=to(remote, retry=(1,), qos=qos)) as broker,
    ):
        remote.decide = lambda p: {b"not allowed": 0x87, b"odd": 0x80}.get(p.payload, 0)
        await publish(broker, b"1", b"not allowed", b"odd", b"2", qos=qos)
        await done(broker, 2, "up")
        await until(lambda: sink(broker, "up").figures.retried)
        await advance(broker, ms=1_100, name="up")
        await until(lambda: sink(broker, "up").figures.dead == 2)
        letters = {m.failure: m.attempts for m in await dead_letters(broker, "up")}
        assert letters == {Failure.REJECTED: 1, Failure.INDETERMINATE: 2}
        assert remote.payloads() == [b"1", b"2"]


@pytest.mark.case("HK-09")
@VERSIONS
async def test_a_message_that_costs_the_connection_each_time_does_not_block_the_others(
    backend: Backend, version: int
) -> None:
    async with (
        scripted() as remote,
        running(backend, sinks=to(remote, version=version, retry=(1,))) as broker,
    ):
        remote.decide = lambda p: "drop" if p.payload == b"poison" else 0
        await publish(broker, b"1", b"poison", b"2", b"3")
        await done(broker, 3, "up")
        await until(lambda: sink(broker, "up").figures.retried == 1)
        await advance(broker, ms=1_100, name="up")
        await until(lambda: sink(broker, "up").figures.dead == 1)
        (letter,) = await dead_letters(broker, "up")
        assert (letter.failure, letter.attempts) == (Failure.INDETERMINATE, 2)
        assert set(remote.payloads()) == {b"1", b"2", b"3"}


async def test_no_more_are_under_way_than_the_other_broker_takes(backend: Backend) -> None:
    async with (
        scripted(receive_max=7) as remote,
        running(backend, sinks=to(remote, inflight=50)) as broker,
    ):
        await until(lambda: sink(broker, "up").sender.window == 7)
        remote.decide = lambda _: "keep"
        await publish(broker, *(b"%d" % n for n in range(40)))
        await remote.until(lambda r: len(r.kept) == 7)
        remote.decide = lambda _: 0
        remote.answer_kept()
        await done(broker, 40, "up")
        assert remote.most_under_way == 7


async def test_what_belongs_to_a_message_goes_with_it(backend: Backend) -> None:
    pairs = (
        (PAYLOAD_FORMAT, 1),
        (CONTENT_TYPE, b"text/plain"),
        (RESPONSE_TOPIC, b"r/1"),
        (CORRELATION_DATA, b"\xff"),
        (USER_PROPERTY, (b"k", b"1")),
        (USER_PROPERTY, (b"k", b"2")),
    )
    raw = encode_properties(Properties(pairs), 3)[1:]
    async with (
        scripted() as remote,
        running(backend, sinks=to(remote, qos=2, topic_prefix="site/")) as broker,
    ):
        expires_ms = broker.clock.now_ms() + 90_500
        topic = "alerts/küche".encode()
        await publish(broker, b"1", topic=topic, retain=True, properties=raw, expires_ms=expires_ms)
        await publish(broker, b"", qos=2)
        await done(broker, 2, "up")
        first, second = remote.taken
        assert (first.topic, first.qos, first.retain) == (b"site/" + topic, 1, True)
        assert first.properties is not None
        assert set(first.properties.pairs) == {*pairs, (MESSAGE_EXPIRY_S, 90)}
        assert (second.payload, second.qos, second.retain) == (b"", 2, False)


async def test_retain_is_left_out_where_so_configured(backend: Backend) -> None:
    async with scripted() as remote, running(backend, sinks=to(remote, retain=False)) as broker:
        await publish(broker, b"1", retain=True)
        await done(broker, 1, "up")
        assert not remote.taken[0].retain


async def test_user_and_password_are_sent_and_not_told(
    backend: Backend, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    password_file = tmp_path / "password"
    password_file.write_text(SECRET + "\n")
    options = {"username": "site", "password_file": str(password_file), "client_id": "bridge-1"}
    async with scripted() as remote, running(backend, sinks=to(remote, **options)) as broker:
        await publish(broker, SECRET.encode())
        await done(broker, 1, "up")
        (connect,) = remote.connects
        assert (connect.client_id, connect.username) == (b"bridge-1", b"site")
        assert connect.password == SECRET.encode()
    assert SECRET not in caplog.text


async def test_two_brokers_of_one_configuration_have_two_client_ids() -> None:
    async with scripted() as remote:
        async with running(sinks=to(remote)), running(sinks=to(remote)):
            await remote.until(lambda r: len(r.connects) == 2)
        first, second = (connect.client_id for connect in remote.connects)
        assert first != second
        assert first.startswith(b"amqtt-durable-up-")


@pytest.mark.case("HK-06")
async def test_a_stop_leaves_what_was_sent_to_its_lease(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from broker_ext.sinks import sink as sink_module  # noqa: PLC0415

    monkeypatch.setattr(sink_module, "GRACE_S", 0.05)
    async with scripted() as remote, running(backend, sinks=to(remote)) as broker:
        remote.decide = lambda _: "keep"
        await publish(broker, b"1", b"2")
        await remote.until(lambda r: len(r.kept) == 2)
        await broker.hub.sinks.stop()
        await drained(broker)
        assert [(await message(broker, n)).state for n in (1, 2)] == 2 * [State.CLAIMED]
        remote.decide = lambda _: 0
        await broker.restart()
        await done(broker, 2, "up")
        assert remote.payloads() == [b"1", b"2"]


@QOS
async def test_after_a_crash_what_was_under_way_comes_first_in_order(
    backend: Backend, qos: int
) -> None:
    async with scripted() as remote, running(backend, sinks=to(remote, qos=qos)) as broker:
        remote.decide = lambda _: "keep"
        await publish(broker, *(b"%d" % n for n in range(20)), qos=2)
        await remote.until(lambda r: len(r.kept) == 20)
        await broker.crash_and_restart()
        remote.decide = lambda _: 0
        remote.cut()
        await publish(broker, *(b"%d" % n for n in range(20, 40)), qos=2)
        await done(broker, 40, "up")
        assert remote.payloads() == [b"%d" % n for n in range(40)]


async def test_a_broker_that_does_not_answer_delays_no_stop(backend: Backend) -> None:
    async with scripted() as remote:
        remote.mute = True
        async with running(backend, sinks=to(remote, timeout=30)) as broker:
            await publish(broker, b"1")
            await until(lambda: remote.peers)
            async with asyncio.timeout(5):
                await broker.hub.sinks.stop()


async def test_between_two_brokers_of_ours(backend: Backend) -> None:
    async with running() as upstream:
        reader = await upstream.subscriber(b"reader", (b"site/#", 2))
        settings = BridgeSettings(
            name="up",
            filters=("alerts/#",),
            host="127.0.0.1",
            port=upstream.port,
            qos=2,
            topic_prefix="site/",
        )
        async with running(backend, sinks=(settings,)) as broker:
            await publish(broker, *(b"%d" % n for n in range(200)), qos=2)
            got = await reader.publishes(200)
            assert [packet.payload for packet in got] == [b"%d" % n for n in range(200)]
            assert {packet.topic for packet in got} == {b"site/alerts/a"}
            await done(broker, 200, "up")
