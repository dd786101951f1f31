"""P13: payloads and passwords are in no log line, no repr and no error."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from broker_ext.wire import Publish, Pubrec
from storage.errors import EntryDamaged, StoreFull, StoreUnavailable
from tests.broker.mqtt import running, will

if TYPE_CHECKING:
    import pytest

    from tests.broker.mqtt import Broker

SECRET = b"hunter2-the-secret"


async def scenario(broker: Broker) -> None:
    """Everything that is logged about, with a secret in every payload and password."""
    client = await broker.subscriber(
        b"c", (b"#", 2), user=b"alice", password=SECRET, will=will(b"w", SECRET)
    )
    publisher = await broker.connect(b"p", user=b"bob", password=SECRET)
    await publisher.deliver(b"a", SECRET)
    await publisher.deliver(b"a", SECRET, qos=2)
    publisher.publish(b"r", SECRET, 1, retain=True)
    broker.store.fail_submit(StoreFull("no space"), times=1)
    await publisher.any()
    got = await client.publishes(3, ack=False)
    client.send(Pubrec(got[1].packet_id))
    await client.any()
    refused = await broker.dial()
    assert (await refused.connect(b"c", user=b"mallory", password=SECRET)).reason == 5
    unknown = await broker.dial()
    assert (await unknown.connect(b"d", user=b"nobody", password=SECRET)).reason == 5
    malformed = await broker.connect(b"m", user=b"m", password=SECRET, will=will(b"w", SECRET))
    malformed.send_bytes(b"\x37" + bytes([len(SECRET)]) + SECRET)
    await malformed.closed()
    special = await broker.connect(b"$", user=b"m", password=SECRET)
    special.publish(b"$SYS/x", SECRET)
    await special.any()
    for thing in (*broker.hub.connections, *broker.hub.registry.owners.values()):
        assert SECRET.decode() not in repr(thing)
    for batch in broker.store.batches:
        assert SECRET.decode() not in repr(batch)
    snapshot = await broker.snapshot(b"c")
    assert SECRET.decode() not in repr(snapshot)
    assert SECRET.decode() not in repr(broker.hub.opened)
    newer = await broker.connect(b"c", user=b"alice", password=SECRET)
    await newer.any()
    await newer.cut()
    broker.store.fail_read(EntryDamaged(1, b"a"), times=2)
    damaged = await broker.dial()
    await damaged.connect(b"c", user=b"alice", password=SECRET)
    await damaged.closed()
    broker.store.fail_submit(StoreUnavailable("I/O error"))
    late = await broker.dial()
    late.send(late.connect_packet(b"late", user=b"m", password=SECRET, will=will(b"w", SECRET)))
    await late.closed()
    unknown_to_the_store: object = Publish(2, b"a", 1, SECRET)
    broker.hub.committer.submit(unknown_to_the_store, lambda _: None)  # type: ignore[arg-type]
    await broker.hub.committer.drain()


async def test_no_payload_and_no_password_is_ever_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running() as broker:
        await scenario(broker)
        await broker.crash_and_restart()
        broker.hub.wills.publish_orphans()
    assert len(caplog.records) > 8
    for record in caplog.records:
        assert SECRET.decode() not in record.getMessage()
        assert SECRET.decode() not in str(record.exc_info)
    assert SECRET.decode() not in caplog.text
