"""What is explored: each a few clients with short scripts, around one shape of bug.

Names of links are ``client/number``; links of one client dial in any order unless held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from broker_ext.rules import FilterRule
from broker_ext.settings import Settings
from tests.exploration.clients import (
    disconnect,
    drop,
    publish,
    settled,
    subscribe,
    unsubscribe,
    until,
)
from tests.exploration.explore import Scenario
from tests.exploration.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.exploration.choices import Chooser
    from tests.exploration.clients import Link, Step

__all__ = ["SCENARIOS", "scenario"]

SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(**facts: Any) -> Callable[[Callable[[World], None]], Scenario]:
    """Make a scenario of a function that furnishes a world."""

    def decorate(furnish: Callable[[World], None]) -> Scenario:
        def make(chooser: Chooser) -> World:
            world = World(chooser, **facts)
            with world.loop.running():
                furnish(world)
            return world

        name = furnish.__name__
        SCENARIOS[name] = Scenario(name, make)
        return SCENARIOS[name]

    return decorate


def accepted(name: str) -> Step:
    """Wait until a link was accepted, or has failed."""

    def condition(world: World) -> bool:
        link = _link(world, name)
        return link.accepted or link.closing or link.gone

    return until(f"{name} is accepted", condition)


def over(name: str) -> Step:
    """Wait until a link has ended."""
    return until(f"{name} is over", lambda world: _link(world, name).gone)


def subscribed(name: str) -> Step:
    """Wait until a link's first SUBSCRIBE was answered."""
    return until(f"{name} has subscribed", lambda world: _link(world, name).answers > 0)


def asked(name: str) -> Step:
    """Wait until a link has nothing more to say."""
    return until(
        f"{name} has said all",
        lambda world: _link(world, name).gone or not _link(world, name).steps,
    )


def _link(world: World, name: str) -> Link:
    return next(link for link in world.links if link.name == name)


# ------------------------------------------------------------------------------ the shapes


@scenario(faults=1)
def takeover_while_messages_flow(world: World) -> None:
    """Acknowledgements in the turn of the takeover; saves in flight; a failing commit."""
    world.link("dev/1", subscribe((b"t", 1), (b"u", 2)), settled())
    world.link("dev/2", asked("dev/1"), subscribe((b"t", 1), (b"u", 2)))
    world.link(
        "pub/1",
        asked("dev/1"),
        *(publish(b"t", 1), publish(b"u", 2), publish(b"t", 2), publish(b"u", 1)),
        settled(),
        disconnect(),
        clean=True,
    )


@scenario()
def acknowledgements_in_the_turn_of_the_takeover(world: World) -> None:
    world.link("pub/1", accepted("dev/1"), publish(b"t", 1), publish(b"t", 2), publish(b"t", 1))
    world.link("dev/1", subscribe((b"#", 2)), settled())
    world.link("dev/2", until("delivered", lambda w: bool(_link(w, "dev/1").received)))
    world.link("dev/3", until("delivered", lambda w: bool(_link(w, "dev/1").received)))


@scenario(faults=1, guarded=True, slow=frozenset({"may_subscribe"}))
def late_subscribe(world: World) -> None:
    """An old connection's late SUBSCRIBE, waiting on a slow topic plugin, would write its record
    back."""
    world.link("dev/1", subscribe((b"old", 1)), subscribe((b"more", 1)))
    world.link("dev/2", accepted("dev/1"), subscribe((b"new", 1)), clean=False)
    world.link("dev/3", accepted("dev/1"), settled(), disconnect(), clean=True)


@scenario(faults=1)
def save_in_flight_at_a_clean_start(world: World) -> None:
    """A save in flight that lands after a clean start."""
    world.link("dev/1", subscribe((b"t", 1), (b"u", 2)), publish(b"t", 1), publish(b"u", 2))
    world.link("dev/2", accepted("dev/1"), subscribe((b"t", 0)), clean=True)
    world.link("dev/3", accepted("dev/2"), subscribe((b"x", 1)))


@scenario(faults=2)
def subscribes_that_miss_each_other(world: World) -> None:
    """Two SUBSCRIBEs of one session, and changes of one filter from two connections."""
    world.link(
        "dev/1",
        subscribe((b"a", 1), (b"b", 0)),
        subscribe((b"a", 2), (b"b", 1)),
        unsubscribe(b"a"),
        subscribe((b"a", 0), (b"c", 1)),
        pipelines=True,
    )
    world.link("dev/2", accepted("dev/1"), unsubscribe(b"a", b"c"), subscribe((b"a", 1)))
    world.link("pub/1", publish(b"a", 1), publish(b"b", 2), publish(b"c", 1))


@scenario(faults=1)
def contexts_subscribe_beside_the_client(world: World) -> None:
    """``context.add_subscription`` of amqtt beside SUBSCRIBE, CONNECT and clean start."""
    world.link("dev/1", subscribe((b"a", 1)), unsubscribe(b"b"), subscribe((b"b", 1)))
    world.link("dev/2", accepted("dev/1"), subscribe((b"a", 2)), drop())
    for topic_filter in (b"a", b"b"):
        world.event(
            f"a plugin subscribes dev to {topic_filter!r}",
            lambda _: True,
            lambda w, f=topic_filter: w.subscribes(b"dev", f, 1),  # type: ignore[misc]
        )


@scenario(faults=1)
def wills_of_two_connections(world: World) -> None:
    """An older will that deletes a newer one, or is published for it."""
    world.link("watch/1", subscribe((b"will/#", 1)), settled())
    world.link("dev/1", asked("watch/1"), will=b"will/1")
    world.link("dev/2", accepted("dev/1"), disconnect(), will=b"will/2")
    world.link("dev/3", accepted("dev/1"), drop(), will=b"will/3")


@scenario(faults=1, guarded=True, slow=frozenset({"may_publish_will", "authenticate"}))
def wills_that_wait_for_a_plugin(world: World) -> None:
    world.link("watch/1", subscribe((b"will/#", 1)), settled())
    world.link("dev/1", asked("watch/1"), will=b"will/1", droppable=True)
    world.link("dev/2", accepted("dev/1"), will=b"will/2", clean=True)


@scenario(faults=1, guarded=True, slow=frozenset({"may_publish_will"}))
def wills_after_a_crash(world: World) -> None:
    """The will of a connection that died with the broker, and its client that comes back."""
    world.link("watch/1", subscribe((b"will/#", 1)), settled())
    dev = world.link("dev/1", asked("watch/1"), will=b"will/dev", droppable=True)
    world.died(b"dev", b"will/dev")
    world.event("the time to come back is over", lambda _: True, lambda w: w.recover(dev))


@scenario(faults=1, slow=frozenset({"authenticate"}))
def connects_in_line(world: World) -> None:
    """A CONNECT that passes one still loading."""
    world.link("pub/1", publish(b"t", 1), publish(b"t", 2))
    world.link("dev/1", subscribe((b"t", 1)), pipelines=True)
    world.link("dev/2", subscribe((b"t", 2)), pipelines=True, clean=True)
    world.link("dev/3", subscribe((b"t", 1)), pipelines=True)
    world.link("dev/4", unsubscribe(b"t"), pipelines=True)


@scenario(faults=1, slow=frozenset({"authenticate"}))
def client_leaves_between_two_steps_of_connect(world: World) -> None:
    world.link("watch/1", subscribe((b"will/#", 1)), settled())
    for number, clean in enumerate((False, True, False), 1):
        world.link(
            f"dev/{number}",
            asked("watch/1"),
            subscribe((b"t", 1)),
            drop(),
            will=b"will/dev",
            clean=clean,
            pipelines=True,
        )


@scenario(faults=1)
def client_leaves_during_its_first_connect(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 1)), will=b"w", pipelines=True, droppable=True)
    world.link("dev/2", over("dev/1"), drop(), will=b"w", pipelines=True)


@scenario(faults=2)
def unsubscribe_whose_save_fails(world: World) -> None:
    """An UNSUBSCRIBE reported done whose save failed, then retried."""
    world.link("dev/1", subscribe((b"t", 1)), settled(), unsubscribe(b"t"), settled())
    world.link("dev/2", over("dev/1"), unsubscribe(b"t"), settled())
    world.link("pub/1", accepted("dev/1"), publish(b"t", 1), publish(b"t", 2))


@scenario(faults=3)
def takeover_after_a_failed_save(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 2)), settled())
    world.link("pub/1", asked("dev/1"), publish(b"t", 2), publish(b"t", 1), publish(b"t", 2))
    world.link("dev/2", until("delivered", lambda w: bool(_link(w, "dev/1").received)), drop())
    world.link("dev/3", over("dev/1"))


@scenario(faults=1)
def kicked_while_busy(world: World) -> None:
    """Kick while connected, and checkpoints at any time."""
    world.link("dev/1", subscribe((b"t", 1)), subscribe((b"u", 2)), will=b"t")
    world.link("pub/1", accepted("dev/1"), publish(b"t", 1), publish(b"u", 2))
    dev = _link(world, "dev/1")
    world.event("dev/1 is kicked", lambda _: dev.accepted, lambda w: w.kick(dev))
    for n in range(2):
        world.event(f"checkpoint {n}", lambda _: True, lambda w: w.hub._checkpoint())
    world.link("dev/2", over("dev/1"))


@scenario(settings=Settings(session_expiry_interval_s=1), faults=1)
def expiry_beside_a_connect(world: World) -> None:
    world.forgets = True
    world.link("dev/1", subscribe((b"t", 1)), settled(), drop())
    world.link("dev/2", accepted("dev/1"), drop())
    world.event("a second passes", lambda _: True, lambda w: w.loop.pass_time(1.5))
    for n in range(2):
        world.event(f"expiry {n}", lambda _: True, lambda w: w.spawn(w.expire()))
    world.link("dev/3", over("dev/1"), subscribe((b"u", 1)))


@scenario(faults=1)
def history_is_lost_under_a_session(world: World) -> None:
    """410 at CONNECT and after it, with subscription changes under way."""
    world.forgets = True
    world.link("dev/1", subscribe((b"t", 1), (b"u", 1)), settled(), drop())
    world.link("pub/1", over("dev/1"), publish(b"t", 1), publish(b"u", 1), settled())
    world.event(
        "history is pruned",
        lambda w: asked("pub/1").ready(_link(w, "pub/1")),
        lambda w: w.spawn(w.prune()),
    )
    world.link("dev/2", asked("pub/1"), unsubscribe(b"t"), subscribe((b"v", 1)), pipelines=True)
    world.link("dev/3", asked("pub/1"), droppable=True)


@scenario(faults=1)
def reset_that_its_client_never_heard_of(world: World) -> None:
    """A session is reset by a CONNECT whose client leaves: the next one is told."""
    world.forgets = True
    world.link("dev/1", subscribe((b"t", 1)), settled(), drop())
    world.link("pub/1", over("dev/1"), publish(b"t", 1), settled(), disconnect())
    world.event("history is pruned", lambda w: _link(w, "pub/1").gone, lambda w: w.spawn(w.prune()))
    world.link("dev/2", until("pruned", lambda w: "pruned" in w.flags), droppable=True)
    world.link("dev/3", over("dev/2"))


@scenario(slow=frozenset({"authenticate"}), settings=Settings(takeover_timeout_s=1.0))
def the_store_hangs(world: World) -> None:
    """Commits that hang longer than a CONNECT waits."""
    world.link("dev/1", subscribe((b"t", 1)), will=b"t")
    world.link("dev/2", subscribe((b"t", 2)), clean=True)
    world.link("dev/3", subscribe((b"u", 2)), will=b"t")
    world.link("pub/1", publish(b"t", 1), publish(b"t", 2))


@scenario(faults=1)
def qos2_both_ways_across_connections(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 2)), publish(b"t", 2), publish(b"t", 2), droppable=True)
    world.link("dev/2", accepted("dev/1"), publish(b"t", 2), droppable=True)
    world.link("dev/3", over("dev/1"), publish(b"t", 1))


@scenario(faults=1)
def somebody_else_s_client_id(world: World) -> None:
    """P14, and the wills of a session that a stranger asks for."""
    world.link("dev/1", subscribe((b"t", 1)), will=b"t", user=b"owner")
    world.link("dev/2", user=b"stranger", will=b"t")
    world.link("dev/3", user=b"stranger", clean=True)
    world.link("dev/4", over("dev/2"), over("dev/3"), user=b"owner")


@scenario(settings=Settings(max_inflight=1), faults=1)
def a_slow_client_with_a_small_window(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 2)), settled(), droppable=True)
    world.link("pub/1", asked("dev/1"), *(publish(b"t", 1 + n % 2) for n in range(5)))
    world.link("dev/2", until("delivered", lambda w: bool(_link(w, "dev/1").received)))


@scenario()
def a_slow_client_with_no_room(world: World) -> None:
    """More messages than may be claimed ahead."""
    world.link("dev/1", subscribe((b"t", 1)), settled(), claims_max=2)
    world.link("pub/1", asked("dev/1"), *(publish(b"t", 1) for _ in range(6)))


@scenario(faults=1)
def clean_sessions_with_wills(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 1)), will=b"t", clean=True)
    world.link("dev/2", subscribe((b"t", 2)), will=b"t", droppable=True)
    world.link("dev/3", accepted("dev/1"), will=b"t", clean=True, droppable=True)


@scenario()
def messages_while_subscriptions_change(world: World) -> None:
    """What is published while a SUBSCRIBE is being saved belongs to it or to nobody."""
    world.link("pub/1", accepted("dev/1"), *(publish(t, 1) for t in (b"t", b"u", b"t", b"u")))
    world.link(
        "dev/1", subscribe((b"t", 1)), subscribe((b"u", 1)), unsubscribe(b"t"), subscribe((b"t", 2))
    )


# ------------------------------------------------------------------------------- MQTT 5


@scenario(faults=1)
def wills_with_a_delay(world: World) -> None:
    """A return, a takeover, a clean start and a crash of the store while wills wait."""
    world.link("watch/1", subscribe((b"will/#", 1)), settled())
    delayed: dict[str, Any] = {"version": 5, "will_delay_s": 2}
    world.link("dev/1", asked("watch/1"), will=b"will/1", droppable=True, **delayed)
    world.link("dev/2", accepted("dev/1"), drop(), will=b"will/2", **delayed)
    world.link("dev/3", accepted("dev/1"), disconnect(), will=b"will/3", **delayed)
    world.link("dev/4", over("dev/1"), will=b"will/4", clean=True, droppable=True, **delayed)
    _time_passes(world, 2.5)


@scenario(faults=1, guarded=True, slow=frozenset({"may_publish_will"}))
def wills_with_a_delay_that_wait_for_a_plugin(world: World) -> None:
    delayed: dict[str, Any] = {"version": 5, "will_delay_s": 2}
    world.link("dev/1", drop(), will=b"will/1", **delayed)
    world.link("dev/2", over("dev/1"), drop(), will=b"will/2", **delayed)
    _time_passes(world, 2.5)


@scenario(settings=Settings(max_inflight=1), faults=1)
def qos_0_for_who_is_away(world: World) -> None:
    """Before, between and after its connections, in front of and behind what is claimed."""
    world.link("other/1", subscribe((b"#", 1)), disconnect())
    world.link("dev/1", subscribe((b"t", 1)), droppable=True, claims_max=1)
    world.link(
        "pub/1",
        *(accepted("other/1"), asked("dev/1")),
        *(publish(b"t", qos) for qos in (0, 1, 0, 1, 0, 1)),
    )
    world.link("pub/2", accepted("dev/2"), *(publish(b"t", qos) for qos in (0, 1, 0)))
    world.link("dev/2", over("dev/1"), droppable=True, claims_max=1)
    world.link("dev/3", accepted("dev/2"), settled(), claims_max=1)


@scenario(settings=Settings(max_inflight=1), faults=1)
def messages_that_expire(world: World) -> None:
    """While they wait for the window, for a commit, for their subscriber."""
    world.link("dev/1", subscribe((b"t", 2)), settled(), droppable=True, version=5)
    world.link(
        "pub/1",
        asked("dev/1"),
        *(publish(b"t", 1 + n % 2, expires_s=1 + n) for n in range(4)),
        publish(b"t", 1),
        version=5,
    )
    world.link("dev/2", until("delivered", lambda w: bool(_link(w, "dev/1").received)), version=5)
    _time_passes(world, 1.1)


@scenario(
    settings=Settings(max_inflight=1, filters=(FilterRule(b"t", keep_latest=True),)), faults=1
)
def last_values(world: World) -> None:
    """Who is behind, or away, gets the last value of one topic and everything of the other."""
    world.link("dev/1", subscribe((b"t", 2), (b"u", 1)), settled(), droppable=True)
    world.link(
        "pub/1",
        asked("dev/1"),
        publish(b"t", 1),
        publish(b"t", 2),
        publish(b"u", 1),
        publish(b"t", 1),
        settled(),
        publish(b"t", 1),
        publish(b"u", 1),
    )
    world.link("dev/2", until("delivered", lambda w: bool(_link(w, "dev/1").received)))


@scenario(faults=1)
def a_session_of_both_versions(world: World) -> None:
    """3.1.1 and 5 in turn, with QoS 2 both ways."""
    world.link("dev/1", subscribe((b"t", 2)), publish(b"t", 2), droppable=True, version=5)
    world.link("dev/2", accepted("dev/1"), publish(b"t", 2), droppable=True)
    world.link("dev/3", over("dev/1"), unsubscribe(b"u"), publish(b"t", 1), version=5)


def _time_passes(world: World, seconds: float) -> None:
    for n in range(2):
        world.event(f"time passes {n}", lambda _: True, lambda w: w.loop.pass_time(seconds))
        world.event(f"wills {n}", lambda _: True, lambda w: w.hub.wills.publish_due())


# ------------------------------------------------------------------- shared subscriptions

JOBS: Final = b"$share/g/t"


def _four(qos: int) -> tuple[Step, ...]:
    return tuple(publish(b"t", qos) for _ in range(4))


@scenario(faults=1)
def a_group_whose_members_come_and_go(world: World) -> None:
    """Cuts and takeovers with deliveries of QoS 1 and 2 under way, and a commit that fails."""
    world.link("one/1", subscribe((JOBS, 2)), settled(), droppable=True)
    world.link("two/1", subscribe((JOBS, 2)), settled(), droppable=True)
    world.link("pub/1", subscribed("one/1"), *(publish(b"t", 1 + n % 2) for n in range(5)))
    world.link("one/2", subscribed("one/1"))
    world.link("two/2", until("delivered", lambda w: bool(_link(w, "two/1").received)), drop())


@scenario(settings=Settings(max_inflight=1), faults=1)
def a_group_with_no_room(world: World) -> None:
    """It lags, reads, and hands on what came back."""
    world.link("one/1", subscribe((JOBS, 1)), settled(), droppable=True)
    world.link("two/1", asked("one/1"), subscribe((JOBS, 2)), droppable=True)
    world.link("pub/1", subscribed("one/1"), *_four(1), *_four(2))
    world.link("one/2", over("one/1"))


@scenario(faults=1)
def members_that_unsubscribe(world: World) -> None:
    """With messages under way, the last one too; and somebody joins while the record goes."""
    delivered = until("delivered", lambda w: bool(_link(w, "one/1").received))
    world.link("one/1", subscribe((JOBS, 2)), delivered, unsubscribe(JOBS), settled())
    world.link("pub/1", subscribed("one/1"), *_four(2), publish(b"t", 1))
    world.link("two/1", subscribed("one/1"), subscribe((JOBS, 1)), unsubscribe(JOBS), settled())
    world.link("three/1", subscribed("two/1"), subscribe((JOBS, 2)), settled(), droppable=True)


@scenario(faults=1)
def the_last_one_here_unsubscribes(world: World) -> None:
    """With messages claimed and sent; another member is at rest."""
    world.link("two/1", subscribe((JOBS, 1)), settled(), disconnect())
    world.link("one/1", over("two/1"), subscribe((JOBS, 2)), settled(), unsubscribe(JOBS))
    world.link("pub/1", subscribed("one/1"), *_four(2), publish(b"t", 1))


@scenario(faults=1)
def transient_members_beside_a_durable_one(world: World) -> None:
    """From memory to the history and back."""
    world.link("one/1", subscribe((JOBS, 2)), settled(), clean=True, droppable=True)
    world.link("two/1", subscribe((JOBS, 1)), settled(), clean=True, droppable=True)
    world.link("pub/1", subscribed("one/1"), *_four(2), *_four(1))
    world.link("dev/1", subscribed("two/1"), subscribe((JOBS, 2)), settled(), droppable=True)
    world.link("dev/2", over("dev/1"), unsubscribe(JOBS), settled())


@scenario(faults=1)
def two_who_make_one_group(world: World) -> None:
    """At the same moment, and one of them starts clean right after it."""
    world.link("one/1", subscribe((JOBS, 2)), settled(), droppable=True)
    world.link("two/1", subscribe((JOBS, 1)), settled(), droppable=True)
    world.link("pub/1", accepted("one/1"), *_four(1), *_four(2))
    world.link("one/2", accepted("one/1"), subscribe((JOBS, 2)), settled(), clean=True)
    world.link("two/2", over("two/1"), unsubscribe(JOBS), subscribe((JOBS, 2)))


@scenario(settings=Settings(max_delivery_attempts=200), faults=1)
def a_group_whose_members_break(world: World) -> None:
    """What was under way goes alone, beside the session's own messages."""
    topics = (b"t", b"t", b"own", b"t", b"t")
    world.link("one/1", subscribe((JOBS, 2), (b"own", 1)), settled(), droppable=True)
    world.link("two/1", subscribe((JOBS, 1)), settled(), droppable=True)
    world.link("pub/1", subscribed("one/1"), *(publish(t, 1 + n % 2) for n, t in enumerate(topics)))
    world.link("one/2", over("one/1"), settled(), droppable=True)
    world.link("two/2", until("delivered", lambda w: bool(_link(w, "two/1").received)), drop())
    world.link("one/3", over("one/2"))


@scenario(settings=Settings(max_delivery_attempts=200, max_inflight=2), faults=1)
def a_small_group_whose_members_break(world: World) -> None:
    """One of them is transient, and nobody has much room."""
    world.link("one/1", subscribe((JOBS, 1)), settled(), clean=True, droppable=True)
    world.link("two/1", subscribe((JOBS, 1)), settled(), droppable=True)
    world.link("pub/1", subscribed("two/1"), *_four(1), *_four(1))
    world.link("two/2", over("two/1"), settled(), droppable=True)
    world.link("two/3", over("two/2"))


@scenario(guarded=True, slow=frozenset({"may_receive"}), faults=1)
def a_group_that_asks_topic_plugins(world: World) -> None:
    world.link("one/1", subscribe((JOBS, 2)), settled(), droppable=True)
    world.link("two/1", subscribe((JOBS, 1)), settled(), droppable=True)
    world.link("pub/1", subscribed("one/1"), *_four(2), publish(b"t", 1), publish(b"t", 0))
    world.link("one/2", over("one/1"))


@scenario(faults=1)
def the_broker_stops_under_a_group(world: World) -> None:
    world.link("one/1", subscribe((JOBS, 2)), settled())
    world.link("two/1", subscribe((JOBS, 1)), settled(), clean=True)
    world.link("pub/1", subscribed("one/1"), *_four(2), *_four(1))
    world.event("the broker stops", lambda _: True, lambda w: w.stop())


# ------------------------------------------------- somebody who writes past the registry


@scenario()
def fenced_by_another_node(world: World) -> None:
    """Another owner takes the record past the registry: everything that comes later is late."""
    world.outsiders = True
    world.link(
        "dev/1",
        subscribe((b"t", 1), (b"u", 2)),
        until("delivered", lambda w: len(_link(w, "dev/1").received) > 1),
        subscribe((b"v", 1)),
        unsubscribe(b"t"),
        settled(),
        drop(),
        will=b"w",
    )
    world.link("pub/1", subscribed("dev/1"), publish(b"t", 1), publish(b"u", 2), publish(b"u", 2))
    dev = _link(world, "dev/1")
    world.event("another node takes dev", lambda _: dev.accepted, lambda w: w.intrude(b"dev"))
    world.event("checkpoint", lambda _: dev.accepted, lambda w: w.hub._checkpoint())


@scenario()
def fenced_before_it_leaves(world: World) -> None:
    world.outsiders = True
    world.link("dev/1", subscribe((b"t", 1)), drop(), will=b"w")
    dev = _link(world, "dev/1")
    world.event("another node takes dev", lambda _: dev.accepted, lambda w: w.intrude(b"dev"))


@scenario()
def history_is_lost_under_a_fenced_session(world: World) -> None:
    """410 after CONNACK, when another node has the record already."""
    world.outsiders = world.forgets = True
    delivered = until("delivered", lambda w: bool(_link(w, "dev/1").received))
    world.link("dev/1", subscribe((b"t", 1)), settled(), delivered, drop())
    world.link("pub/1", subscribed("dev/1"), publish(b"t", 1), publish(b"t", 1))
    world.link("dev/2", over("dev/1"))
    dev = _link(world, "dev/2")
    world.event("history is pruned", lambda _: dev.arrived > 0, lambda w: w.spawn(w.prune()))
    world.event("another node takes dev", lambda _: dev.arrived > 0, lambda w: w.intrude(b"dev"))


@scenario()
def claims_are_reaped(world: World) -> None:
    """Somebody settles the claims of a session; what it says of them later is refused."""
    world.outsiders = True
    world.link("dev/1", subscribe((b"t", 1)))
    world.link("pub/1", subscribed("dev/1"), publish(b"t", 1), publish(b"t", 1))
    dev = _link(world, "dev/1")
    world.event("the claims are reaped", lambda _: len(dev.received) > 1, lambda w: w.reap(dev))


@scenario(guarded=True, slow=frozenset({"may_receive", "may_publish"}), faults=1)
def slow_topic_plugins(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 1)), settled(), droppable=True)
    world.link("pub/1", asked("dev/1"), publish(b"t", 1), publish(b"t", 2), publish(b"t", 0))
    world.link("dev/2", over("dev/1"), unsubscribe(b"u"), publish(b"t", 1))


@scenario(faults=1)
def the_broker_stops(world: World) -> None:
    world.link("dev/1", subscribe((b"t", 1)), publish(b"t", 1), will=b"t")
    world.link("dev/2", subscribe((b"t", 2)), publish(b"t", 2), clean=True)
    world.event("the broker stops", lambda _: True, lambda w: w.stop())
