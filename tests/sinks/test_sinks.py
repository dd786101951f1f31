"""Sinks in one process: what reaches a real HTTP server, and what the outbox says of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.sinks import sink as sink_module
from broker_ext.sinks.settings import WebhookSettings
from broker_ext.sinks.sink import LEASE_MS, SINK_PREFIX, UNUSED_S
from broker_ext.sinks.webhook import Webhook
from storage.errors import StoreFull
from storage.outbox import Failure, State
from tests.broker.mqtt import running
from tests.sinks.plant import (
    advance,
    after_pauses,
    backlog,
    dead_letters,
    done,
    drained,
    message,
    publish,
    record,
    sink,
    until,
)
from tests.sinks.receiver import Answer, Receiver, Request, answering

if TYPE_CHECKING:
    from broker_ext.sinks.sender import Outgoing, Sent
    from tests.storage.harness import Backend

SECRET = b"hunter2-the-secret"


def hook(receiver: Receiver, **options: Any) -> tuple[WebhookSettings, ...]:
    settings = {"name": "alerts", "filters": ("alerts/#",), "url": receiver.url, "body": "raw"}
    return (WebhookSettings(**(settings | options)),)


def bodies(receiver: Receiver) -> list[bytes]:
    return [request.body for request in receiver.requests]


async def test_what_matches_is_delivered_once_and_its_history_may_go(backend: Backend) -> None:
    async with (
        answering() as receiver,
        running(backend, sinks=hook(receiver, workers=1)) as broker,
    ):
        await publish(broker, b"0", qos=0)
        await publish(broker, b"other", topic=b"other")
        await publish(broker, *(b"%d" % n for n in range(50)))
        await done(broker, 50)
        assert bodies(receiver) == [b"%d" % n for n in range(50)], "one worker keeps the order"
        assert {request.attempt for request in receiver.requests} == {1}
        assert len({request.event_id for request in receiver.requests}) == 50
        assert (await backlog(broker))[1:] == (0, 0, 50, 0, 0, 0, 0, 0)
        assert (await message(broker)).message is None, "the body of what is done is erased"
        await broker.hub.sinks.checkpoint()
        broker.clock.advance(ms=1)
        await broker.hub._prune()
        assert (await broker.store.log()).floor == (await broker.store.log()).head == 50


async def test_workers_send_at_once_and_no_more_than_there_are(backend: Backend) -> None:
    gate = asyncio.Event()
    async with answering() as receiver:
        receiver.default = Answer(stall=gate)
        async with running(backend, sinks=hook(receiver, workers=3)) as broker:
            await publish(broker, *(b"%d" % n for n in range(20)))
            await receiver.count(3)
            assert (await backlog(broker)).claimed == 6, "as many again wait for their turn"
            gate.set()
            await done(broker, 20)
        assert receiver.most_under_way == 3
        assert sorted(bodies(receiver)) == sorted(b"%d" % n for n in range(20))


async def test_a_receiver_that_is_down_costs_a_cursor_and_no_attempts(backend: Backend) -> None:
    receiver = await Receiver().start()
    await receiver.stop()
    options = hook(receiver, outstanding=20)
    async with running(backend, sinks=options) as broker:
        await publish(broker, *(b"%d" % n for n in range(300)))
        await until(lambda: sink(broker).figures.released)
        await until(lambda: sink(broker).figures.fed == 20)
        snapshot = await record(broker)
        assert snapshot is not None
        assert snapshot.consumer.cursor == 20
        await broker.restart()  # and over a restart
        await until(lambda: sink(broker).figures.released)
        queue = await backlog(broker)
        assert queue.waiting + queue.claimed == 20
        await receiver.start()
        await advance(broker, ms=60_000)
        await done(broker, 300)
        assert sorted(bodies(receiver)) == sorted(b"%d" % n for n in range(300))
        assert {request.attempt for request in receiver.requests} == {1}
    await receiver.stop()


async def test_what_is_claimed_while_a_pause_begins_is_given_back(backend: Backend) -> None:
    gate = asyncio.Event()
    receiver = await Receiver().start()
    receiver.answers.append(Answer(429, {"retry-after": "60"}, stall=gate))
    async with running(backend, sinks=hook(receiver, workers=1)) as broker:
        await publish(broker, b"1")
        await receiver.count(1)
        held_up = broker.store.hang_submit(nth=3)  # the claim of the second
        await publish(broker, b"2")
        await asyncio.wait_for(held_up.reached.wait(), 20)
        gate.set()
        await until(lambda: sink(broker).dispatcher.pace.is_failing)
        held_up.release()
        await until(lambda: sink(broker).figures.retried)
        await advance(broker, ms=60_000)
        await done(broker, 2)
    await receiver.stop()


async def test_one_goes_first_after_a_pause(backend: Backend) -> None:
    receiver = await Receiver().start()
    await receiver.stop()
    async with running(backend, sinks=hook(receiver)) as broker:
        await publish(broker, *(b"%d" % n for n in range(9)))
        await until(lambda: sink(broker).dispatcher.pace.is_failing)
        gate = asyncio.Event()
        receiver.answers.append(Answer(stall=gate))
        await receiver.start()
        await advance(broker, ms=60_000)
        await receiver.count(1)
        assert sink(broker).dispatcher._running == 1
        gate.set()
        await done(broker, 9)
    await receiver.stop()


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_respected(backend: Backend, status: int) -> None:
    async with (
        answering(Answer(status, {"retry-after": "600"})) as receiver,
        running(backend, sinks=hook(receiver, workers=1)) as broker,
    ):
        await publish(broker, b"1", b"2")
        await until(lambda: sink(broker).figures.retried == 1)
        until_ms = broker.clock.now_ms() + 600_000
        assert (await message(broker)).due_ms == until_ms
        assert sink(broker).dispatcher.pace.until_ms == until_ms, "for every message"
        await advance(broker, ms=599_999)
        await broker.turns(lambda: True)
        assert len(receiver.requests) == 1
        await advance(broker, ms=1)
        await done(broker, 2)
        assert [(r.body, r.attempt) for r in receiver.requests[1:]] in (
            [(b"1", 2), (b"2", 1)],
            [(b"2", 1), (b"1", 2)],
        )


async def test_a_rejected_message_is_dead_at_once_and_the_others_go_on(backend: Backend) -> None:
    def decide(request: Request) -> Answer:
        return Answer(422 if request.body == b"poison" else 204)

    async with answering() as receiver:
        receiver.decide = decide
        async with running(backend, sinks=hook(receiver)) as broker:
            await publish(broker, b"1", b"poison", b"2")
            await done(broker, 2)
            await until(lambda: sink(broker).figures.dead)
            (letter,) = await dead_letters(broker)
            assert letter.failure is Failure.REJECTED
            assert letter.attempts == 1
            assert letter.message is not None
            assert letter.message.payload == b"poison"
        assert sorted(bodies(receiver)) == [b"1", b"2", b"poison"]


async def test_attempts_follow_the_schedule_and_end(backend: Backend) -> None:
    async with answering() as receiver:
        receiver.default = Answer(500)
        async with running(backend, sinks=hook(receiver, retry=(5, 30))) as broker:
            await publish(broker, b"1")
            for attempt, delay_ms in ((1, 5_000), (2, 30_000)):
                await until(lambda n=attempt: sink(broker).figures.retried == n)
                due_ms = (await message(broker)).due_ms - broker.clock.now_ms()
                assert 0.9 * delay_ms <= due_ms <= 1.1 * delay_ms
                await advance(broker, ms=due_ms)
            await until(lambda: sink(broker).figures.dead)
            (letter,) = await dead_letters(broker)
            assert (letter.attempts, letter.failure) == (3, Failure.INDETERMINATE)
        assert [request.attempt for request in receiver.requests] == [1, 2, 3]
        assert len({request.event_id for request in receiver.requests}) == 1


@pytest.mark.parametrize("how", ["stalls", "cuts"])
async def test_what_may_have_been_taken_is_sent_again_under_the_same_id(
    backend: Backend, how: str
) -> None:
    gate = asyncio.Event()
    answer = Answer(stall=gate) if how == "stalls" else Answer(0)
    async with (
        answering(answer) as receiver,
        running(backend, sinks=hook(receiver, timeout=0.3)) as broker,
    ):
        await publish(broker, b"1")
        await until(lambda: sink(broker).figures.retried)
        assert (await message(broker)).failure is Failure.INDETERMINATE
        await advance(broker, ms=6_000)
        await done(broker, 1)
        gate.set()
        assert [request.attempt for request in receiver.requests] == [1, 2]
        assert len({request.event_id for request in receiver.requests}) == 1


@pytest.mark.case("HK-08")
async def test_a_send_that_takes_longer_than_the_lease_is_not_repeated(backend: Backend) -> None:
    gate = asyncio.Event()
    async with (
        answering(Answer(stall=gate)) as receiver,
        running(backend, sinks=hook(receiver)) as broker,
    ):
        await publish(broker, b"1")
        await receiver.count(1)
        for _ in range(10):
            broker.clock.advance(ms=LEASE_MS // 3)
            sink(broker).dispatcher.extend()
            await drained(broker)
            await advance(broker, ms=0)
        gate.set()
        await done(broker, 1)
        assert len(receiver.requests) == 1


@pytest.mark.case("HK-01")
@pytest.mark.case("HK-02")
@pytest.mark.case("HK-07")
async def test_a_late_answer_is_refused_logged_once_and_the_rest_goes_on(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gate = asyncio.Event()
    async with (
        answering(Answer(stall=gate)) as receiver,
        running(backend, sinks=hook(receiver)) as broker,
    ):
        await publish(broker, b"slow", b"2")
        await receiver.count(2)
        await done(broker, 1)
        await advance(broker, ms=LEASE_MS)  # nobody extended it: the loop stood still, say
        assert (await message(broker)).attempts == 1, "a lapsed lease is an attempt"
        await advance(broker, ms=6_000)
        await done(broker, 2)
        row = await message(broker)
        gate.set()
        await until(lambda: sink(broker).figures.lost)
        await drained(broker)
        assert await message(broker) == row, "the late answer changed the row"
        await publish(broker, b"3")
        await done(broker, 3)
        assert sorted(bodies(receiver)) == [b"2", b"3", b"slow", b"slow"]
    refused = [r for r in caplog.records if "ack refused, claim no longer held" in r.message]
    assert [r.getMessage() for r in refused] == [
        "ack refused, claim no longer held: message 1 of b'alerts' (done)"
    ]


@pytest.mark.case("HK-06")
async def test_a_stop_gives_back_what_was_not_begun_and_leaves_the_rest_to_its_lease(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "GRACE_S", 0.05)
    gate = asyncio.Event()
    async with (
        answering(Answer(stall=gate)) as receiver,
        running(backend, sinks=hook(receiver, workers=1)) as broker,
    ):
        receiver.answers.append(Answer(stall=gate))
        await publish(broker, b"1", b"2", b"3")
        await receiver.count(1)
        await broker.hub.sinks.stop()
        await drained(broker)
        first, *others = [await message(broker, number) for number in (1, 2, 3)]
        assert (first.state, first.attempts) == (State.CLAIMED, 0)
        assert {other.state for other in others} == {State.WAITING}
        gate.set()
        receiver.answers.clear()
        await broker.restart()
        await done(broker, 3)  # at the start nobody can have a lease
        assert [(r.body, r.attempt) for r in receiver.requests] == [
            (b"1", 1),
            (b"1", 2),
            (b"2", 1),
            (b"3", 1),
        ]


async def test_a_crash_repeats_what_was_under_way_and_loses_nothing(backend: Backend) -> None:
    gate = asyncio.Event()
    async with answering() as receiver:
        receiver.default = Answer(stall=gate)
        async with running(backend, sinks=hook(receiver, workers=2)) as broker:
            await publish(broker, *(b"%d" % n for n in range(10)))
            await receiver.count(2)
            await broker.crash_and_restart()
            receiver.default = Answer()
            gate.set()
            await done(broker, 10)
        assert set(bodies(receiver)) == {b"%d" % n for n in range(10)}
        assert len(receiver.requests) == 12


@pytest.mark.case("HK-09")
async def test_a_message_that_kills_the_broker_each_time_ends(backend: Backend) -> None:
    gate = asyncio.Event()
    async with answering() as receiver:
        receiver.default = Answer(stall=gate)
        async with running(backend, sinks=hook(receiver, workers=1, retry=(1, 1))) as broker:
            await publish(broker, b"poison", b"2")
            for attempt in (1, 2, 3):
                await receiver.count(attempt)
                await broker.crash_and_restart()
            receiver.default = Answer()
            await done(broker, 1)
            (letter,) = await dead_letters(broker)
            assert (letter.failure, letter.attempts) == (Failure.LAPSED, 3)
            gate.set()
        assert bodies(receiver) == [b"poison", b"poison", b"poison", b"2"]


@pytest.mark.case("HK-09")
async def test_a_message_that_our_own_code_fails_on_ends_without_a_word_of_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    send = Webhook.send

    async def fails(self: Webhook, out: Outgoing) -> Sent:
        if out.message.payload == SECRET:
            raise ValueError(SECRET)
        return await send(self, out)

    monkeypatch.setattr(Webhook, "send", fails)
    async with (
        answering() as receiver,
        running(backend, sinks=hook(receiver, retry=(1, 1))) as broker,
    ):
        await publish(broker, SECRET, b"2")
        await done(broker, 1)
        for attempt in (1, 2):
            await until(lambda n=attempt: sink(broker).figures.retried == n)
            await advance(broker, ms=1_100)
        await until(lambda: sink(broker).figures.dead)
        (letter,) = await dead_letters(broker)
        assert (letter.failure, letter.attempts) == (Failure.UNEXPECTED, 3)
    assert "unexpected ValueError at " in caplog.text
    assert SECRET.decode() not in caplog.text


async def test_while_the_disk_is_full_nothing_is_lost_and_it_goes_on_by_itself(
    backend: Backend,
) -> None:
    async with answering() as receiver, running(backend, sinks=hook(receiver)) as broker:
        await publish(broker, b"1")
        await done(broker, 1)
        broker.store.fail_submit(StoreFull("no space"), times=3)
        broker.hub.router.publish(b"alerts/a", b"2", 1)
        await drained(broker)
        await done(broker, 2)
        gate = asyncio.Event()
        receiver.answers.append(Answer(stall=gate))
        await publish(broker, b"3")
        await receiver.count(3)
        broker.store.fail_submit(StoreFull("no space"), times=3)
        gate.set()  # it is settled when the disk is there again
        await done(broker, 3)
        assert bodies(receiver) == [b"1", b"2", b"3"]


async def test_a_message_is_not_sent_after_its_deadline(backend: Backend) -> None:
    gate = asyncio.Event()
    async with answering(Answer(stall=gate)) as receiver:
        async with running(backend, sinks=hook(receiver, workers=1)) as broker:
            deadline_ms = broker.clock.now_ms() + 1_000
            await publish(broker, b"first")
            await publish(broker, b"claimed", expires_ms=deadline_ms)
            await publish(broker, b"waiting", expires_ms=deadline_ms)
            await receiver.count(1)

            async def both_claimed() -> bool:
                return (await backlog(broker))[1:3] == (1, 2)

            await until(both_claimed)
            broker.clock.advance(ms=1_000)
            await broker.hub.sinks.sweep()
            assert (await backlog(broker)).expired == 1
            gate.set()
            await until(lambda: sink(broker).figures.expired == 1)
            assert (await backlog(broker)).expired == 2
            await publish(broker, b"last", expires_ms=broker.clock.now_ms() + 1_000)
            await done(broker, 2)
        assert bodies(receiver) == [b"first", b"last"]


# ------------------------------------------------------------------------- the position


async def test_a_new_sink_begins_at_the_head_or_where_it_is_told(backend: Backend) -> None:
    async with running(backend, history_filters=("alerts/#",)) as broker:
        await publish(broker, *(b"%d" % n for n in range(1, 6)))
        for start, expected in (
            ("head", [b"6"]),
            ("earliest", [b"1", b"2", b"3", b"4", b"5", b"6"]),
            (3, [b"4", b"5", b"6"]),
            (99, [b"6"]),
        ):
            async with answering() as receiver:
                name = f"from-{start}"
                await broker.stop()
                broker.backend = broker.backend
                await broker.start(
                    history_filters=("alerts/#",),
                    sinks=hook(receiver, name=name, start=start, workers=1),
                )
                if start == "head":
                    await publish(broker, b"6")
                    expected_here = [b"6"]
                else:
                    expected_here = expected if start != 99 else []
                await done(broker, len(expected_here), name)
                assert bodies(receiver) == expected_here
                await broker.stop()
                await broker.start(history_filters=("alerts/#",))


async def test_filters_may_change_and_what_they_had_is_not_repeated(backend: Backend) -> None:
    async with answering() as receiver, running(backend, sinks=hook(receiver)) as broker:
        await publish(broker, b"1")
        await done(broker, 1)
        await broker.restart(sinks=hook(receiver, filters=("alerts/#", "more")))
        await publish(broker, b"2", topic=b"more")
        await publish(broker, b"3")
        await done(broker, 3)
        await broker.restart(sinks=hook(receiver, filters=("more",)))
        await publish(broker, b"4", topic=b"more")
        await publish(broker, b"not logged")
        await done(broker, 4)
        assert sorted(bodies(receiver)) == [b"1", b"2", b"3", b"4"]
        assert await broker.history() == [b"1", b"2", b"3", b"4"]


async def test_a_sink_that_is_no_longer_configured_is_kept_for_a_week(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering() as receiver, running(backend, sinks=hook(receiver)) as broker:
        await publish(broker, b"1")
        await done(broker, 1)
        await broker.restart(sinks=())
        assert "'alerts' is no longer configured" in caplog.text
        await publish(broker, b"2")
        broker.clock.advance(ms=(UNUSED_S - 1) * 1000)
        await broker.hub._expire()
        await broker.restart(sinks=hook(receiver))
        await done(broker, 2)
        await broker.restart(sinks=())
        broker.clock.advance(ms=UNUSED_S * 1000)
        await broker.hub._expire()
        assert await record(broker) is None
        await publish(broker, b"not logged")
        assert await broker.history() == [b"1", b"2"]
        assert bodies(receiver) == [b"1", b"2"]


async def test_a_sink_that_was_away_for_long_has_its_position(backend: Backend) -> None:
    async with answering() as receiver, running(backend, sinks=hook(receiver)) as broker:
        await publish(broker, b"1")
        await done(broker, 1)
        await broker.stop()
        broker.clock.advance(ms=10 * UNUSED_S * 1000)
        await broker.start()
        await broker.hub._expire()
        await publish(broker, b"2")
        await done(broker, 2)


@pytest.mark.parametrize("policy", ["reset", "skip"])
async def test_history_that_is_pruned_behind_a_sink_is_told(
    backend: Backend, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = await Receiver().start()
    await receiver.stop()
    options: dict[str, Any] = {
        "sinks": hook(receiver, outstanding=1),
        "max_messages": 10,
        "on_history_pruned": policy,
    }
    async with running(backend, **options) as broker:
        for number in range(50):  # each its own block
            await publish(broker, b"%d" % number)
        await broker.hub._prune()
        await broker.restart()
        await receiver.start()
        await publish(broker, b"last")
        expected = {b"0", b"last"} | (
            {b"%d" % n for n in range(40, 50)} if policy == "skip" else set()
        )
        await after_pauses(broker, lambda: set(bodies(receiver)) == expected)
        figures = sink(broker).figures
        if policy == "reset":
            assert figures.resets == 1
            assert "is reset" in caplog.text
        else:
            assert figures.gaps
            assert "skips a gap" in caplog.text
    await receiver.stop()


@pytest.mark.parametrize("policy", ["resume", "reset"])
async def test_another_generation_is_resumed_or_reset_as_for_sessions(
    backend: Backend, policy: str
) -> None:
    receiver = await Receiver().start()
    await receiver.stop()
    options: dict[str, Any] = {
        "sinks": hook(receiver, outstanding=1),
        "on_generation_change": policy,
    }
    async with running(backend, **options) as broker:
        await publish(broker, *(b"%d" % n for n in range(5)))
        await until(lambda: sink(broker).figures.fed)
        await broker.stop()
        backend.back_up()
        backend.restore()
        await broker.start()
        await receiver.start()
        await publish(broker, b"last")
        expected = {b"0", b"last"} | (
            {b"%d" % n for n in range(5)} if policy == "resume" else set()
        )
        await after_pauses(broker, lambda: set(bodies(receiver)) == expected)
        assert sink(broker).figures.resets == (policy == "reset")
        if policy == "resume":
            await publish(broker, b"more")
            await done(broker, len(expected) + 1)
            snapshot = await record(broker)
            assert snapshot is not None
            assert snapshot.consumer.generation == broker.hub.opened.log.generation
    await receiver.stop()


async def test_a_quiet_sink_follows_the_head(backend: Backend) -> None:
    async with (
        answering() as receiver,
        running(backend, sinks=hook(receiver), history_filters=("other",)) as broker,
    ):
        await publish(broker, *(b"%d" % n for n in range(20)), topic=b"other")
        await until(lambda: sink(broker).feeder.cursor == 20)
        await broker.hub.sinks.checkpoint()
        snapshot = await record(broker)
        assert snapshot is not None
        assert snapshot.consumer.cursor == 20
        await publish(broker, b"1")
        await done(broker, 1)
        assert bodies(receiver) == [b"1"]


async def test_no_mqtt_client_can_have_the_id_of_a_sink(backend: Backend) -> None:
    async with answering() as receiver, running(backend, sinks=hook(receiver)) as broker:
        client = await broker.dial()
        client.send(client.connect_packet(SINK_PREFIX + b"alerts"))
        await client.closed()
        assert sink(broker).client_id not in broker.hub.registry.owners


# ------------------------------------------------------------------------------ the rest


async def test_what_ended_long_ago_is_purged(backend: Backend) -> None:
    def decide(request: Request) -> Answer:
        return Answer(400 if request.body == b"dead" else 204)

    async with answering() as receiver:
        receiver.decide = decide
        async with running(backend, sinks=hook(receiver)) as broker:
            await publish(broker, b"dead", *(b"%d" % n for n in range(250)))
            await done(broker, 250)
            await until(lambda: sink(broker).figures.dead)
            day_ms = 86_400_000
            broker.clock.advance(ms=30 * day_ms)
            await broker.hub.sinks.purge()
            assert (await backlog(broker)).done == 250
            broker.clock.advance(ms=1)
            await broker.hub.sinks.purge()
            assert (await backlog(broker))[3:5] == (0, 1)
            broker.clock.advance(ms=60 * day_ms)
            await broker.hub.sinks.purge()
            assert (await backlog(broker))[3:5] == (0, 0)


async def test_no_payload_secret_or_url_is_ever_logged(
    backend: Backend, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    answers = (Answer(500, body=SECRET), Answer(422, {"x": SECRET.decode()}), Answer(0))
    async with answering(*answers) as receiver:
        options = {
            "secret_file": str(secret_file),
            "header_files": {"Authorization": str(secret_file)},
            "retry": (1,),
            "url": receiver.url + SECRET.decode(),
        }
        async with running(backend, sinks=hook(receiver, **options)) as broker:
            await publish(broker, SECRET, SECRET, SECRET)
            await after_pauses(broker, lambda: sink(broker).figures.done == 2, ms=1_100)
            await receiver.stop()
            await publish(broker, SECRET)
            await until(lambda: sink(broker).figures.released)
            for thing in (sink(broker).dispatcher._held, broker.store.batches):
                assert SECRET.decode() not in repr(thing)
    ours = [r for r in caplog.records if r.name.startswith("amqtt_durable")]
    assert len(ours) > 2
    for one in ours:
        assert SECRET.decode() not in one.getMessage()
        assert "in-the-query" not in one.getMessage()
        assert SECRET.decode() not in str(one.exc_info)
