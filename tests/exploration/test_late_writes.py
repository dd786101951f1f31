"""Whatever an old connection does late touches nothing of the new one.

The old connection is held just before it writes; its client id is taken over; then it is let go,
and the stored rows are compared. It is taken over in two ways: by a newer CONNECT of this broker,
and past its registry (by another node), where nothing but the fence in the store is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from broker_ext.durable import DurableSession
from broker_ext.wire import Puback, Pubcomp, Pubrec, Subscribe, SubscribeFilter, Unsubscribe, encode
from storage.api import Entry, Snapshot, Will
from tests.exploration.choices import Usual
from tests.exploration.clients import Link, disconnect, publish, settled, subscribe, until
from tests.exploration.world import World

if TYPE_CHECKING:
    from collections.abc import Callable


class Rows(NamedTuple):
    """All that is stored, but for the will of the old connection, which is its own."""

    record: Snapshot | None
    wills: dict[bytes, Will]
    history: list[Entry]


def rows(world: World, old: Link) -> Rows:
    memory = world.store.memory
    assert old.session is not None
    mine = old.session.incarnation
    wills = {i: will for i, will in memory._tables.wills.items() if i != mine}
    will = old.will.payload if old.will is not None else b""
    history = [entry for entry in memory.entries if entry.payload != will]
    return Rows(memory.record_of(b"dev"), wills, history)


def connected(link: Link) -> DurableSession:
    assert isinstance(link.session, DurableSession)
    return link.session


def says(link: Link, *packets: bytes) -> None:
    assert link.connection is not None
    link.connection.data_received(b"".join(packets))


def acknowledge(world: World, old: Link) -> None:
    """PUBACK, PUBREC and PUBCOMP for all that was delivered."""
    del world
    for packet in old.received:
        if packet.qos == 1:
            says(old, encode(Puback(packet.packet_id)))
        else:
            says(old, encode(Pubrec(packet.packet_id)), encode(Pubcomp(packet.packet_id)))


def change_subscriptions(world: World, old: Link) -> None:
    del world
    says(old, encode(Subscribe(90, (SubscribeFilter(b"late", 2),))))
    says(old, encode(Unsubscribe(91, (b"t",))))


def change_at_the_plugin(world: World, old: Link) -> None:
    """The SUBSCRIBE that had waited for a topic plugin goes on."""
    assert world.questions
    while world.questions:
        world._answer(0)
    del old


def checkpoint(world: World, old: Link) -> None:
    world.hub._checkpoint()
    connected(old).checkpoint()


def leave(world: World, old: Link) -> None:
    """The late disconnect handler: the final save, Detach, and the will."""
    del world
    if not old.gone:
        old.lose()


def save(world: World, old: Link) -> None:
    """A participant that is asked for its operations after all."""
    del world
    session = connected(old)
    session._checkpoint = True
    session.collect()


def offer(world: World, old: Link) -> None:
    """A dispatch in progress reaches it."""
    world.hub.router.publish(b"t", b"late", 1)
    if connected(old).sealed:
        connected(old).offer(Entry(world.hub.committer.last, b"t", b"late", 1), 1)


LATE: Final[dict[str, Callable[[World, Link], None]]] = {
    "save": save,
    "SUBSCRIBE": change_subscriptions,
    "SUBSCRIBE at a topic plugin": change_at_the_plugin,
    "acknowledgement": acknowledge,
    "will": leave,
    "checkpoint": checkpoint,
    "dispatch": offer,
}


def furnish(kind: str) -> tuple[World, Link]:
    """An old connection with subscriptions, deliveries that are not acknowledged, and a will; and
    held at a topic plugin, if that is what is late."""
    plugin = kind == "SUBSCRIBE at a topic plugin"
    world = World(Usual(), guarded=plugin)
    old = world.link("dev/1", subscribe((b"t", 1), (b"u", 2)), settled(), will=b"w")
    world.link(
        "pub/1",
        until("subscribed", lambda _: old.answers == 1),
        publish(b"t", 1),
        publish(b"u", 2),
        settled(),
        disconnect(),
    )
    with world.loop.running():
        rest(world, until=lambda: len(old.received) == 2)
        old.out.clear()  # its acknowledgements are late
        if plugin:
            world.slow = frozenset({"may_subscribe"})
            change_subscriptions(world, old)
        rest(world)
    assert old.accepted
    return world, old


def rest(world: World, until: Callable[[], bool] = lambda: False) -> None:
    """Go on until nothing happens but what the old connection has to do."""
    while not until():
        options = [o for o in world.options() if not o.rank and not _is_held(o.actor)]
        if not options:
            return
        options[0].do()
        for link in world.links:
            link.follow()
        world.ledger.look()


def _is_held(actor: str) -> bool:
    return actor.startswith("may_")


@pytest.mark.case("HK-18")
@pytest.mark.parametrize("kind", LATE)
def test_a_late_write_of_a_connection_that_was_taken_over_changes_nothing(kind: str) -> None:
    world, old = furnish(kind)
    with world.loop.running():
        new = world.link("dev/2", will=b"w", claims_max=8)
        rest(world, until=lambda: new.accepted)
        new.reading = False  # what it is sent is not acknowledged meanwhile
        rest(world)
        before = rows(world, old)
        assert before.record is not None
        assert before.record.consumer.incarnation == connected(new).incarnation
        LATE[kind](world, old)
        rest(world)
        after = rows(world, old)
        if kind == "dispatch":
            assert after.history[-1].payload == b"late"
            assert connected(old).sealed
            assert after.record is not None
            claimed = sorted(d.offset for c in after.record.claims for d in c.deliveries)
            assert claimed == [1, 2, 3], "the new session claims it, once"
        else:
            assert after == before
        assert world.hub.figures.fenced == 0, "nothing late came as far as the store"
        assert world.hub.registry.owners[b"dev"] is new.session
        assert new.up
    assert not world.ledger.violations


@pytest.mark.case("HK-18")
@pytest.mark.parametrize("kind", LATE)
def test_a_late_write_past_the_registry_is_refused_by_the_store(kind: str) -> None:
    world, old = furnish(kind)
    world.outsiders = True
    with world.loop.running():
        world.intrude(b"dev")
        rest(world)
        before = rows(world, old)
        assert before.record is not None
        assert before.record.consumer.incarnation.startswith(b"intruder")
        LATE[kind](world, old)
        rest(world)
        after = rows(world, old)
        assert after.record == before.record
        assert after.wills == before.wills
        if kind != "save":  # with nothing to save, nothing is refused
            assert world.hub.figures.fenced > 0
            assert connected(old).sealed, "it is closed, so that its client comes back"
    assert not world.ledger.violations
