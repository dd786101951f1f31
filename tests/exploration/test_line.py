"""The line of CONNECTs in numbers: many for one client id, and one that connects in a loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from broker_ext.registry import BURST_S, Allowance
from broker_ext.settings import Settings
from tests.exploration.choices import Usual
from tests.exploration.world import World

if TYPE_CHECKING:
    from tests.exploration.clients import Link


def run(world: World, *, seconds: float | None = None) -> None:
    """In the usual order, without looking at every client after each step; ``seconds``: of the
    world's clock, at most."""
    loop, store = world.loop, world.store
    until = float("inf") if seconds is None else loop.time() + seconds
    while True:
        if loop.ready:
            loop.run_next()
        elif store.may_tell:
            store.tell()
        elif store.may_commit:
            store.commit()
        elif store.asked:
            store.answer()
        elif (due_s := loop.next_timer_s) is not None and due_s <= until:
            loop.fire_timer()
        else:
            return


def arrive(link: Link) -> None:
    """Its CONNECT arrives, and what it sends behind it."""
    link.dial()
    link._deliver_all()


@pytest.mark.parametrize("clean", [False, True])
def test_a_thousand_connects_together_end_with_one_owner(clean: bool) -> None:
    world = World(Usual())
    links = [world.link(f"dev/{n}", will=b"w", clean=clean) for n in range(1000)]
    with world.loop.running():
        for link in links:
            arrive(link)
        run(world)
        last = links[-1]
        assert last.accepted
        assert world.hub.registry.owners == {b"dev": last.session}
        assert sum(link.accepted for link in links) == 1000, "each had its turn"
        assert all(link.closing for link in links[:-1])
        assert len(world.store.memory.wills) == 1
        assert (world.store.memory.record_of(b"dev") is None) == clean
        assert len(world.store.memory._tables.consumers) == (not clean)
        assert world.loop.pending_tasks() == []
        assert world.hub.registry._lines == {}
        for link in links:
            link.lose()
        run(world)
        assert not world.hub.connections
        assert not world.hub.registry.owners
    world.ledger.look()
    assert not world.ledger.violations


def test_a_client_id_in_a_tight_loop_waits_in_its_own_line() -> None:
    settings = Settings(max_connects_per_second=10.0, takeover_timeout_s=5.0)
    world = World(Usual(), settings=settings)
    with world.loop.running():
        flapping = [world.link(f"flap/{n}") for n in range(100)]
        for link in flapping:
            arrive(link)
        run(world, seconds=0.0)
        burst = int(10.0 * BURST_S)
        assert sum(link.accepted for link in flapping) == burst, "its burst, at once"
        other = world.link("other/1")
        arrive(other)
        run(world, seconds=0.0)
        assert other.accepted, "nobody else waits"
        run(world, seconds=1.0)
        assert abs(sum(link.accepted for link in flapping) - burst - 10) <= 1
        run(world)
        refused = [link for link in flapping if link.refused is not None]
        assert {link.refused for link in refused} == {3}, "who waited too long is told so"
        assert len(refused) + sum(link.accepted for link in flapping) == 100
        assert world.loop.time() < settings.takeover_timeout_s + 0.2, "and the last task soon ends"
        assert world.hub.figures.connects_delayed > 0
        assert world.loop.pending_tasks() == []


def test_four_who_fight_for_one_id_are_not_slowed() -> None:
    """About 100 CONNECTs a second, as four clients make that dial again as soon as they lose."""
    world = World(Usual())
    with world.loop.running():
        for n in range(1000):
            link = world.link(f"dev/{n}")
            arrive(link)
            run(world, seconds=0.01)
            assert link.accepted
            world.loop.pass_time(0.01)
        assert world.hub.figures.connects_delayed == 0


def test_the_allowance_is_forgotten_when_it_is_full_again() -> None:
    allowance = Allowance(100.0)
    for n in range(10_000):
        assert allowance.take(b"%d" % n, n / 1000) == 0
    assert len(allowance) < 100
    assert allowance.take(b"late", 1e6) == 0
    assert len(allowance) == 1


def test_the_allowance_is_a_bucket_of_two_seconds() -> None:
    allowance = Allowance(100.0)
    assert [allowance.take(b"dev", 5.0) for _ in range(200)] == [0.0] * 200
    assert allowance.take(b"dev", 5.0) == pytest.approx(0.01)
    assert allowance.take(b"dev", 5.0) == pytest.approx(0.02)
    assert allowance.take(b"dev", 6.0) == 0.0


def test_a_connect_is_answered_when_the_store_hangs() -> None:
    """And the next one, and the one after; memory for them is not kept."""
    world = World(Usual(), settings=Settings(takeover_timeout_s=2.0))
    with world.loop.running():
        for n in range(50):
            link = world.link(f"dev/{n}", will=b"w")
            arrive(link)
            while world.loop.ready or world.loop.next_timer_s is not None:
                if world.loop.ready:
                    world.loop.run_next()
                else:
                    world.loop.fire_timer()
            assert link.refused == 3
            link.lose()
        assert world.loop.time() == pytest.approx(100.0)
        assert len(asyncio.all_tasks(world.loop)) == 1, "the first one, which the store has"
        assert len(world.hub.registry._lines) == 1
        run(world)
        assert world.loop.pending_tasks() == []
        assert not world.store.memory.wills
        assert world.store.memory.record_of(b"dev") is None, "nobody was told of it"
        after = world.link("dev/after")
        arrive(after)
        run(world)
        assert after.accepted
        assert after.present is False
