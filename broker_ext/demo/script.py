"""What the demo plays: a stage with a real broker and real clients, and the acts upon it.

Act one is the promise of this plugin. Act two is a webhook: its receiver goes away and comes back.
A further act is one more function (Stage) -> Facts-like outcome, added to `play`; it finds the
broker as the act before left it.
"""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from broker_ext.cli.calling import call
from broker_ext.cli.errors import CannotOperate
from broker_ext.demo.broker import BrokerProcess, DemoFailed
from broker_ext.demo.clock import now_ms, sleep_ms
from broker_ext.demo.facts import Facts, judge
from broker_ext.demo.fleet import Fleet
from broker_ext.demo.gateway import Gateway
from broker_ext.demo.hooks import HookFacts, judge_hooks
from broker_ext.demo.receiver import BUSY_S, POISON
from broker_ext.demo.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from broker_ext.demo.receiver import Receiver
    from broker_ext.demo.show import Screen

__all__ = ["SINK", "Outcome", "Schedule", "Stage", "play"]

CONNECT_MS = 20_000
UNANSWERED_MS = 6_000  # sensors that see no acknowledgement for so long will see none
QUIET_MS = 5_000  # a gateway that is given nothing for so long will be given nothing more
SETTLE_MS = 1_000  # a duplicate would come right behind
UNDER_WAY_MS = 200  # readings are under way every few ms; the kill should hit some
POLL_MS = 20
ALERTS, ALERTS_WHILE_DOWN = 100, 200
DOWN_MS = 1_000
ALERTS_MS = 15_000  # the sink's longest pause in this act is 4 s
POISON_NAME = "poison"
SINK = "alerts"
COMMAND = (sys.executable, "-c", "from broker_ext.cli import main; main()")


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
    """Facts of act one and what it took. restart_ms: from the new process to a CONNACK.
    hooks: facts of act two, None = it was not played."""

    facts: Facts
    restart_ms: int
    duration_ms: int
    hooks: HookFacts | None = None

    def reasons(self) -> list[str]:
        """Say which promises were broken; empty when none was."""
        return self.facts.reasons() + (self.hooks.reasons() if self.hooks is not None else [])


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
        receiver: Receiver | None = None,
    ) -> None:
        self.screen = screen
        self.receiver = receiver
        self.data = folder / "data"
        self.chance = random.Random(seed)  # noqa: S311 - no secret
        self._exits = ExitStack()
        if receiver is not None:
            self._exits.callback(receiver.stop)
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
    """Play all acts. Without our plugin there is one."""
    outcome = _sessions_survive(stage, sensors=sensors, duration_ms=duration_ms)
    if stage.receiver is not None:
        try:
            outcome = replace(outcome, hooks=_alerts_arrive(stage, stage.receiver))
        except CannotOperate as error:
            raise DemoFailed(str(error)) from error
    stage.screen.phase("stopping the broker")
    stage.broker.stop()
    return outcome


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
    return Outcome(
        judge(list(fleet.records()), gateway.arrivals(), gateway.connections, fleet.returns()),
        restart_ms,
        ended_ms - began_ms,
    )


def _alerts_arrive(stage: Stage, receiver: Receiver) -> HookFacts:
    """Act two: a webhook's receiver goes away, comes back busy, and does not understand one."""
    say = stage.screen.phase
    watch = Watch(stage.broker.port)
    try:
        say(f"act two: {ALERTS} alerts for a webhook")
        watch.publish(str(n) for n in range(1, ALERTS + 1))
        stage.wait(lambda: receiver.delivered >= ALERTS, ALERTS_MS)
        say(f"its receiver goes away; {ALERTS_WHILE_DOWN} more alerts")
        receiver.stop()
        total = ALERTS + ALERTS_WHILE_DOWN
        watch.publish(str(n) for n in range(ALERTS + 1, total + 1))
        stage.wait(lambda: len(watch.acknowledged) >= total, ALERTS_MS)
        stage.wait(lambda: False, DOWN_MS)
        waited = _queue(stage)["waiting"]
        say(f"{waited} wait; the receiver is back, and busy: Retry-After {BUSY_S}")
        receiver.is_busy = True
        receiver.start()
        returned_ms = now_ms()
        stage.wait(lambda: receiver.delivered >= total, ALERTS_MS)
        say("all have arrived; now one that the receiver does not understand")
        watch.publish([POISON_NAME], POISON)
        stage.wait(lambda: _queue(stage)["dead"] > 0, ALERTS_MS, poll_ms=100)
        letters = call(stage.data, "outbox_dead_letters", queue=SINK)["dead_letters"]
        ids = [str(letter["id"]) for letter in letters]
        say(f"message {', '.join(ids)} is a dead letter; the receiver is mended, it is reissued")
        receiver.understands = True
        if ids:
            _command(stage, "outbox", "reissue", *ids)
        stage.wait(lambda: receiver.delivered > total, ALERTS_MS)
        stage.wait(lambda: False, SETTLE_MS)
    finally:
        watch.stop()
    return judge_hooks(
        watch.published,
        watch.acknowledged,
        receiver.requests,
        poison=POISON_NAME,
        waited=waited,
        dead_letters=len(letters),
        returned_ms=returned_ms,
        busy_ms=BUSY_S * 1000,
    )


def _queue(stage: Stage) -> dict[str, Any]:
    """Figures of the sink's queue."""
    empty = {"waiting": 0, "dead": 0}
    queues = call(stage.data, "outbox_backlog")
    return next((queue for queue in queues if queue["queue"] == SINK), empty)


def _command(stage: Stage, *arguments: str) -> None:
    """Run our own command line, as an operator would. Raises DemoFailed."""
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [*COMMAND, *arguments, "--data", str(stage.data)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        raise DemoFailed(f"`amqtt-durable {' '.join(arguments)}`: {done.stderr.strip()}")


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
