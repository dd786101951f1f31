"""One broker, its store, its clients and its plugins, moved step by step by a ``Chooser``."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from broker_ext.hub import Hub
from broker_ext.on_behalf import subscribe
from broker_ext.session import End, Grant
from broker_ext.settings import Settings
from broker_ext.wire import ConnectWill, Properties
from broker_ext.wire.properties import WILL_DELAY_S
from storage.api import Acquire, Advance, Batch, Entry, Prune, StoreWill, Will
from storage.errors import StoreError
from tests.exploration.choices import Chooser, Option, Usual
from tests.exploration.clients import Identity, Link
from tests.exploration.loop import ControlledLoop, LoopClock
from tests.exploration.promises import Ledger
from tests.exploration.store import ControlledStore

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from tests.exploration.clients import Step

__all__ = ["Violation", "World"]

STEPS_MAX = 20_000
"""No scenario takes a tenth of it: one that does never comes to rest."""


class Violation(AssertionError):
    """A promise was broken. The text says which, and how it came to that."""


class _Errors(logging.Handler):
    """Exceptions that the broker logs instead of raising: bugs of ours, all of them."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.ERROR)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self._ledger.broken(f"logged: {record.getMessage()}: {record.exc_info[1]!r}")


class World:
    """guarded: every packet is asked about. slow: questions whose answers are held back.
    faults: how many commits and reads may fail. forbidden: names that topic plugins refuse."""

    def __init__(
        self,
        chooser: Chooser,
        *,
        settings: Settings | None = None,
        guarded: bool = False,
        slow: frozenset[str] = frozenset(),
        faults: int = 0,
    ) -> None:
        self.chooser = chooser
        self.loop = ControlledLoop()  # type: ignore[abstract]
        self.clock = LoopClock(self.loop)
        self.guarded = guarded
        self.slow = slow
        self.faults = faults
        self.forbidden: set[bytes] = set()
        self.links: list[Link] = []
        self.identities: dict[bytes, Identity] = {}
        self.questions: list[tuple[str, Link | None, asyncio.Future[None]]] = []
        self.events: list[tuple[str, Callable[[World], bool], Callable[[World], None]]] = []
        self.flags: set[str] = set()
        self.trace: list[str] = []
        self.taken: dict[int, int] = {}
        self.points = 0
        self.steps = 0
        self.ledger = Ledger(self)
        self.store = ControlledStore(self.ledger)
        self.outsiders = False
        """Somebody writes to records past the registry: fences do refuse."""
        self.forgets = False
        """Sessions are pruned or expire: they may be deleted, if their clients are told."""
        self.stopped = False
        self._intruders = 0
        self._errors = _Errors(self.ledger)
        with self.loop.running():
            self.hub = Hub(self.store, settings or Settings(), self.clock)
            self.do(self.hub.start())
            self.hub.router.guarded = guarded
            if guarded:
                self.hub.permits_will = self._permits_will
            self.ledger.watch(self.hub)

    # --------------------------------------------------------------------- making a scenario

    def link(self, name: str, *steps: Step, will: bytes | None = None, **facts: Any) -> Link:
        """A connection. name: ``client/number``. will: its topic; the payload is the name."""
        client_id = name.partition("/")[0].encode()
        identity = self.identities.setdefault(client_id, Identity(client_id))
        message = ConnectWill(will, b"will-" + name.encode(), 1, retain=False) if will else None
        if message is not None and (delay_s := facts.get("will_delay_s")):
            message = message._replace(properties=Properties(((WILL_DELAY_S, delay_s),)))
        link = Link(self, name, identity, steps, will=message, **facts)
        self.links.append(link)
        return link

    def event(self, name: str, when: Callable[[World], bool], do: Callable[[World], None]) -> None:
        """Something that happens once, at any moment at which ``when`` holds."""
        self.events.append((name, when, do))

    async def ask(self, question: str, link: Link | None) -> None:
        """A question to a plugin; it is answered when the world says so."""
        if question not in self.slow:
            return
        answer: asyncio.Future[None] = self.loop.create_future()
        self.questions.append((question, link, answer))
        await answer

    async def _permits_will(self, will: object, session: object) -> bool:
        del will, session
        await self.ask("may_publish_will", None)
        return True

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, in the usual order. For what is not explored."""
        task = self.loop.create_task(coroutine)
        while not task.done():
            assert self._step(Usual()), "it waits for something that never happens"
        return task.result()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine; it is explored with the rest."""
        self.loop.create_task(coroutine).add_done_callback(_raise)

    def subscribes(self, client_id: bytes, topic_filter: bytes, qos: int) -> None:
        """A plugin of amqtt subscribes a client, connected or not."""
        self.spawn(self._subscribe_for(client_id, topic_filter, qos))

    async def _subscribe_for(self, client_id: bytes, topic_filter: bytes, qos: int) -> None:
        self.ledger.subscribed_for(client_id, topic_filter, qos)
        with contextlib.suppress(StoreError):
            await subscribe(self.hub, client_id, Grant(topic_filter, qos))

    async def expire(self) -> None:
        """What the hub does once a second."""
        with contextlib.suppress(StoreError):
            await self.hub._expire()

    async def prune(self) -> None:
        """The hard caps take all there is."""
        with contextlib.suppress(StoreError):
            await self.hub.committer.apply(Prune(self.store.memory.head, 0, 1000))
        self.flags.add("pruned")

    def intrude(self, client_id: bytes) -> None:
        """Another node becomes the owner of a record, past the registry."""
        self._intruders += 1
        incarnation = b"intruder" + self._intruders.to_bytes(8, "big")
        acquire = Acquire(client_id, incarnation, b"", self.clock.now_ms())
        self.hub.committer.submit(acquire, lambda _: None)

    def died(self, client_id: bytes, topic: bytes) -> None:
        """A connection of this client died with the broker, before it was started again."""
        will = Will(client_id, b"died with broker", b"", Entry(0, topic, b"orphan", 1))
        self.store.memory.apply_whole(Batch(ops=[StoreWill(will)]))
        self.hub.wills.load((will,))

    def recover(self, link: Link) -> None:
        """The wills of those who have not come back are published; of one who is about to be
        told that it has, perhaps."""
        told = link.session is not None
        self.ledger.orphans[b"orphan"] = {0} if told else {0, 1} if link.arrived else {1}
        self.hub.wills.publish_orphans()

    def reap(self, link: Link) -> None:
        """Somebody settles all claims of a connected session in its name."""
        record = self.store.memory.record_of(link.identity.client_id)
        if record is not None and record.claims:
            numbers = tuple(claim.number for claim in record.claims)
            advance = Advance(record.consumer.id, record.consumer.incarnation, settled=numbers)
            self.hub.committer.submit(advance, lambda _: None)

    def stop(self) -> None:
        """The broker stops; whatever comes after that is nobody's."""
        self.stopped = True
        self.spawn(self.hub.stop())

    def kick(self, link: Link) -> None:
        """An administrator ends a connection."""
        assert link.connection is not None
        link.connection.finish(End("kicked"))

    # ----------------------------------------------------------------------------- running

    def options(self) -> list[Option]:
        """What may happen now, the usual first."""
        loop, store = self.loop, self.store
        out: list[Option] = []
        if loop.ready:
            out.append(Option("loop", "the loop runs a call", loop.run_next))
        if store.may_tell:
            out.append(Option("store", "the store tells", store.tell))
        if store.may_commit:
            out.append(Option("store", "the store commits", store.commit))
        if store.asked:
            out.append(Option("reader", f"the store answers {store.asked[0].name}", store.answer))
        out += [
            Option(
                f"{question} {link}",
                f"plugin answers {question} of {link}",
                lambda i=i: self._answer(i),  # type: ignore[misc]
            )
            for i, (question, link, _) in enumerate(self.questions)
        ]
        for link in self.links:
            out += link.options()
        out += [
            Option(name, name, lambda i=i: self._happen(i))  # type: ignore[misc]
            for i, (name, when, _) in enumerate(self.events)
            if when(self)
        ]
        if not loop.ready and (due_s := loop.next_timer_s) is not None:
            out.append(Option("clock", f"a timer fires at {due_s:.3f} s", loop.fire_timer))
        if self.faults:
            if store.may_commit:
                out.append(Option("store", "the commit fails", self._fail, 1))
            if store.asked:
                out.append(Option("reader", "the read fails", self._refuse, 1))
        return out

    def _answer(self, index: int) -> None:
        answer = self.questions.pop(index)[2]
        if not answer.done():
            answer.set_result(None)

    def _happen(self, index: int) -> None:
        self.events.pop(index)[2](self)

    def _fail(self) -> None:
        self.faults -= 1
        self.store.fail()

    def _refuse(self) -> None:
        self.faults -= 1
        self.store.refuse()

    def _step(self, chooser: Chooser) -> bool:
        """Let one thing happen. False: nothing can."""
        options = self.options()
        usual = [option for option in options if option.rank == 0]
        if not usual:
            return False
        index = 0
        if len(options) > 1:
            index = chooser.choose(options)
            if index:
                self.taken[self.points] = index
            self.points += 1
        option = options[index]
        self.trace.append(f"{self.points - 1}={index} {option.name}" if index else option.name)
        option.do()
        for link in self.links:
            link.follow()
        self.steps += 1
        if self.steps > STEPS_MAX:
            self.ledger.broken("it never comes to rest")
        return True

    def rest(self, chooser: Chooser) -> None:
        """Let things happen until nothing can, and look at the promises after each."""
        ledger = self.ledger
        while self._step(chooser):
            ledger.look()
            if ledger.violations:
                raise Violation(self.story())
        if not self.stopped:
            ledger.look_at_rest()
        if ledger.violations:
            raise Violation(self.story())

    def run(self) -> None:
        """The scenario, in the order that is chosen; then everybody comes for what is theirs."""
        log = logging.getLogger("amqtt_durable")
        log.addHandler(self._errors)
        level, propagate = log.level, log.propagate
        log.setLevel(logging.ERROR)
        log.propagate = False
        try:
            with self.loop.running():
                self.rest(self.chooser)
                if self.stopped:
                    self.ledger.look_at_stop()
                else:
                    self._epilogue()
                if self.ledger.violations:
                    raise Violation(self.story())
        finally:
            log.removeHandler(self._errors)
            log.setLevel(level)
            log.propagate = propagate

    def _epilogue(self) -> None:
        """Every client comes back for what it has not had, and leaves; then nothing is left."""
        for client_id in list(self.identities):
            name = client_id.decode()
            last = [link for link in self.links if link.identity.client_id == client_id][-1]
            if not last.clean:
                self.link(f"{name}/last", user=last.user, version=last.version)
        self.rest(Usual())
        self.ledger.look_at_deliveries()
        for link in self.links:
            if link.up:
                link.lose()
            link.gone = True
        self.rest(Usual())
        self.ledger.look_at_end()

    def story(self) -> str:
        """What happened, to be read, and the schedule, to be replayed."""
        schedule = " ".join(f"{point}={index}" for point, index in self.taken.items())
        lines = "\n  ".join(_shortened(self.trace))
        broken = "\n  ".join(dict.fromkeys(self.ledger.violations))
        return f"broken:\n  {broken}\nschedule: {schedule}\n  {lines}"


def _shortened(trace: list[str]) -> list[str]:
    """Runs of the same line as one."""
    out: list[str] = []
    count = 1
    for line, following in zip(trace, [*trace[1:], ""], strict=True):
        if line == following:
            count += 1
            continue
        out.append(line if count == 1 else f"{line} ({count} times)")
        count = 1
    return out


def _raise(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        raise task.exception()  # type: ignore[misc]
