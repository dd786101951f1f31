"""The operator's view of the outbox, over every store."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.operating import OPERATING
from broker_ext.operations import RefusedError
from storage.api import Advance
from storage.outbox import DeadLetter, Failure
from tests.broker.mqtt import running
from tests.sinks.plant import backlog, dead_letters, done, drained, publish, sink, until
from tests.sinks.receiver import Answer, Receiver, Request, answering
from tests.sinks.test_sinks import hook

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker
    from tests.storage.harness import Backend


async def ask(broker: Broker, name: str, **arguments: Any) -> Any:
    answer = await OPERATING[name](broker.hub, **arguments)
    json.dumps(answer)
    return answer


def rejecting(receiver: Receiver, *payloads: bytes) -> None:
    def decide(request: Request) -> Answer:
        return Answer(422 if request.body in payloads else 204)

    receiver.decide = decide


async def died(broker: Broker, number: int) -> None:
    async def enough() -> bool:
        return (await backlog(broker)).dead >= number

    await until(enough)


async def test_figures_and_dead_letters_are_told_without_a_payload(backend: Backend) -> None:
    async with answering() as receiver:
        rejecting(receiver, b"poison")
        async with running(backend, sinks=hook(receiver, workers=1)) as broker:
            await publish(broker, b"1", b"poison", b"poison", b"poison", b"2")
            await done(broker, 2)
            await died(broker, 3)
            (told,) = await ask(broker, "outbox_backlog")
            assert (told["queue"], told["done"], told["dead"]) == ("alerts", 2, 3)
            assert told["destination"] == f"http://127.0.0.1:{receiver.port}"
            found: list[int] = []
            after = ""
            while True:
                page = await ask(
                    broker, "outbox_dead_letters", queue="alerts", after=after, limit=2
                )
                found += [letter["id"] for letter in page["dead_letters"]]
                after = page["next"]
                if not after:
                    break
            assert found == [m.id for m in await dead_letters(broker)]
            letter = page["dead_letters"][-1]
            assert letter["failure"] == "rejected"
            assert (letter["topic"], letter["payload_bytes"]) == ("alerts/a", 6)
            assert "poison" not in json.dumps(await ask(broker, "outbox_show", message_id=found[0]))
            shown = await ask(broker, "outbox_show", message_id=found[0], payload=True)
            assert base64.b64decode(shown["payload"]) == b"poison"


async def test_a_reissue_is_a_fresh_message_due_at_once_and_in_the_audit(backend: Backend) -> None:
    async with answering() as receiver:
        rejecting(receiver, b"poison")
        async with running(backend, sinks=hook(receiver)) as broker:
            await publish(broker, b"poison")
            await died(broker, 1)
            receiver.decide = None
            told = await ask(broker, "outbox_reissue", message_id=1, actor="alice")
            assert told == {"message_id": 1, "new_id": 2, "queue": "alerts"}
            await done(broker, 1)
            old = await ask(broker, "outbox_show", message_id=1)
            new = await ask(broker, "outbox_show", message_id=2)
            assert (old["state"], old["reissued_as"], old["has_body"]) == ("reissued", 2, False)
            assert (new["state"], new["reissue_of"]) == ("done", 1)
            assert [r.attempt for r in receiver.requests] == [1, 1]
            assert len({r.event_id for r in receiver.requests}) == 1
            with pytest.raises(RefusedError) as refused:
                await ask(broker, "outbox_reissue", message_id=1, actor="alice")
            assert refused.value.code == 409
            (record,) = (await ask(broker, "outbox_audit"))["records"]
            assert (record["actor"], record["message_id"], record["new_id"]) == ("alice", 1, 2)
            assert record["at_ms"] == broker.clock.now_ms()


async def test_what_is_not_there_is_refused_in_our_words(backend: Backend) -> None:
    async with answering() as receiver, running(backend, sinks=hook(receiver)) as broker:
        for name in ("outbox_show", "outbox_reissue"):
            more = {"actor": "a"} if name == "outbox_reissue" else {}
            with pytest.raises(RefusedError) as refused:
                await ask(broker, name, message_id=99, **more)
            assert refused.value.code == 404
        for arguments in ({"queue": "a", "after": "1"}, {"queue": "a", "after": "x-1"}):
            with pytest.raises(RefusedError):
                await ask(broker, "outbox_dead_letters", **arguments)
        assert await ask(broker, "outbox_dead_letters", queue="none") == {
            "dead_letters": [],
            "next": "",
        }


async def test_a_session_s_dead_letter_is_shown_and_reissued(backend: Backend) -> None:
    async with running(backend) as broker:
        client = await broker.subscriber(b"thermometer", b"a")
        session = broker.session(b"thermometer")
        await publish(broker, b"1", topic=b"a")
        (entry,) = (
            await broker.store.inner.read(0, lambda _: 1, entries_max=1, bytes_max=1)
        ).entries
        await broker.hub.committer.apply(
            Advance(
                session.consumer_id,
                session.incarnation,
                dead=[DeadLetter(entry[0], Failure.TOO_LARGE, broker.clock.now_ms())],
            )
        )
        await client.publishes(1)
        page = await ask(broker, "outbox_dead_letters", queue="$sessions")
        (letter,) = page["dead_letters"]
        assert (letter["destination"], letter["failure"]) == ("thermometer", "too_large")
        told = await ask(broker, "outbox_reissue", message_id=letter["id"], actor="a")
        assert told["queue"] == "$sessions"


async def test_a_purge_deletes_what_is_old_enough_of_one_sink_or_all(backend: Backend) -> None:
    async with answering() as receiver, answering() as other:
        rejecting(receiver, b"poison")
        sinks = hook(receiver) + hook(other, name="more", filters=("more",))
        async with running(backend, sinks=sinks) as broker:
            await publish(broker, b"poison", *(b"%d" % n for n in range(30)))
            await publish(broker, b"1", topic=b"more")
            await done(broker, 30)
            await done(broker, 1, "more")
            await died(broker, 1)
            await drained(broker)
            keep: dict[str, Any] = {"done_kept_ms": 1000, "dead_kept_ms": 1000}
            assert await ask(broker, "outbox_purge", **keep) == {"messages": 0, "more": False}
            broker.clock.advance(ms=1001)
            purged = await ask(
                broker, "outbox_purge", queue="alerts", **keep | {"dead_kept_ms": 2000}
            )
            assert purged["messages"] == 30
            assert (await backlog(broker, "more")).done == 1
            assert (await ask(broker, "outbox_purge", **keep))["messages"] == 2
            assert sink(broker).figures.dead == 1
