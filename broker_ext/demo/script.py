"""What the demo plays: a stage with a real broker and real clients, and the acts upon it.

Act one is the promise of this plugin. A further act is one more function (Stage) -> Facts-like
outcome, added to `play`; it finds the broker, the fleet and the gateway as act one left them.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from broker_ext.demo.broker import BrokerProcess, DemoFailed
from broker_ext.demo.clock import now_ms, sleep_ms
from broker_ext.demo.facts import Facts, judge
from broker_ext.demo.fleet import Fleet
from broker_ext.demo.gateway import Gateway

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from broker_ext.demo.show import Screen

__all__ = ["Outcome", "Schedule", "Stage", "play"]

CONNECT_MS = 20_000
UNANSWERED_MS = 6_000  # sensors that see no acknowledgement for so long will see none
QUIET_MS = 5_000  # a gateway that is given nothing for so long will be given nothing more
SETTLE_MS = 1_000  # a duplicate would come right behind
UNDER_WAY_MS = 200  # readings are under way every few ms; the kill should hit some
POLL_MS = 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """When what happens in act one; unit: ms since the sensors began to publish."""

    cut_ms: int
    kill_ms: int
    return_ms: int
    end_ms: int

    @classmethod
    def of(cls, duration_ms: int, chance: random.Random) -> Self:
        """Spread the moments over the time, the kill at a moment that chance chooses. Pure."""
        return cls(
            cut_ms=int(duration_ms * chance.uniform(0.20, 0.25)),
            kill_ms=int(duration_ms * chance.uniform(0.40, 0.60)),
            return_ms=int(duration_ms * 0.80),
            end_ms=duration_ms,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Facts of act one and what it took. restart_ms: from the new process to a CONNACK."""

    facts: Facts
    restart_ms: int
    duration_ms: int


class Stage:
    """The broker, the fleet and the gateway of one run; leaving it ends them all."""

    def __init__(
        self,
        folder: Path,
        plugins: dict[str, Any],
        screen: Screen,
        *,
        sensors: int,
        rate: int,
        seed: int,
    ) -> None:
        self.screen = screen
        self.chance = random.Random(seed)  # noqa: S311 - no secret
        self._exits = ExitStack()
        self.broker = self._exits.enter_context(BrokerProcess(folder, plugins, seed))
        try:
            screen.phase("starting the broker")
            self.broker.start_on_a_free_port()
            self.fleet = Fleet(sensors=sensors, rate=rate, seed=seed, port=self.broker.port)
            self._exits.callback(self.fleet.stop)
            self.gateway = Gateway(seed, self.broker.port)
            self._exits.callback(self.gateway.stop)
        except BaseException:
            self._exits.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def wait(self, until: Callable[[], bool], limit_ms: int, *, poll_ms: int = POLL_MS) -> bool:
        """Wait until it is so, or `limit_ms` have passed; return whether it is."""
        end_ms = now_ms() + limit_ms
        while not until():
            if now_ms() >= end_ms:
                return False
            self.fleet.raise_failure()
            self.screen.refresh(self)
            sleep_ms(poll_ms)
        return True

    def wait_for(self, what: str, until: Callable[[], bool], limit_ms: int) -> None:
        """Wait as wait() does. Raises DemoFailed when it did not come about."""
        if not self.wait(until, limit_ms):
            raise DemoFailed(f"{what} did not come about within {limit_ms // 1000} s")


def play(stage: Stage, *, sensors: int, duration_ms: int) -> Outcome:
    """Play all acts; there is one so far."""
    return _sessions_survive(stage, sensors=sensors, duration_ms=duration_ms)


def _sessions_survive(stage: Stage, *, sensors: int, duration_ms: int) -> Outcome:
    """Act one: the gateway is cut off, the broker is killed, and nothing acknowledged is lost."""
    schedule = Schedule.of(duration_ms, stage.chance)
    say = stage.screen.phase
    fleet, gateway = stage.fleet, stage.gateway

    say(f"connecting {sensors} sensors and the gateway")
    fleet.start()
    gateway.start()
    stage.wait_for("the gateway's subscription", gateway.subscribed.is_set, CONNECT_MS)
    stage.wait_for("the fleet's connections", lambda: fleet.connected == sensors, CONNECT_MS)

    began_ms = now_ms()

    def at(moment_ms: int) -> None:
        stage.wait(lambda: now_ms() - began_ms >= moment_ms, moment_ms)

    say("the sensors publish, the gateway listens")
    fleet.publish()
    at(schedule.cut_ms)
    say("the gateway is cut off; the sensors go on")
    gateway.cut()
    at(schedule.kill_ms)
    stage.wait(lambda: fleet.pending > sensors // 2, UNDER_WAY_MS, poll_ms=1)
    say(f"SIGKILL for the broker (pid {stage.broker.pid}), and a new one on its data")
    stage.broker.kill()
    restart_ms = stage.broker.start()
    say(f"the broker is back after {restart_ms} ms; sensors send again what was under way")
    stage.wait_for("the fleet's return", lambda: fleet.connected == sensors, CONNECT_MS)
    at(schedule.return_ms)
    say("the gateway comes back and drains its backlog")
    gateway.come_back()
    stage.wait_for("the gateway's return", lambda: gateway.connected, CONNECT_MS)
    at(schedule.end_ms)
    say("the sensors have said all; waiting for the last acknowledgements")
    fleet.pause()
    _wait_while_it_goes_on(
        stage, lambda: fleet.pending == 0, lambda: fleet.acknowledged, UNANSWERED_MS
    )
    say("the gateway receives the rest")
    _drain(stage)
    ended_ms = now_ms()
    fleet.stop()
    gateway.stop()
    say("stopping the broker")
    stage.broker.stop()
    return Outcome(
        judge(list(fleet.records()), gateway.arrivals(), gateway.connections, fleet.returns()),
        restart_ms,
        ended_ms - began_ms,
    )


def _drain(stage: Stage) -> None:
    """Wait until all that was acknowledged arrived, or nothing comes any more; then for copies."""
    fleet, gateway = stage.fleet, stage.gateway
    _wait_while_it_goes_on(
        stage,
        lambda: gateway.delivered >= fleet.acknowledged,
        lambda: gateway.delivered,
        QUIET_MS,
    )
    stage.wait(lambda: False, SETTLE_MS)


def _wait_while_it_goes_on(
    stage: Stage, complete: Callable[[], bool], count: Callable[[], int], quiet_ms: int
) -> None:
    """Wait until it is complete, or the count has not moved for `quiet_ms`."""
    before = -1
    while (now := count()) != before:
        before = now
        if stage.wait(complete, quiet_ms):
            return
