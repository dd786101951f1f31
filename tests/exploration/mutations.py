"""The build, broken on purpose: one fence at a time is taken out, from outside.

Each ``Mutation`` patches the source of one method or rewrites one operation on its way into the
store; the product has no switch for it. ``python -m tests.exploration.mutations`` writes the table.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from broker_ext.backlog import Backlog
from broker_ext.connection import Connection
from broker_ext.durable import DurableSession
from broker_ext.registry import Registry
from broker_ext.router import Router
from broker_ext.rules import Newest
from broker_ext.session import Session
from broker_ext.shared import Group, Shared
from broker_ext.shared.backlog import Backlog as GroupBacklog
from broker_ext.shared.record import Record
from broker_ext.wills import Wills
from storage.api import Acquire, Advance, Detach, Discard, DropWill, Subscribe, Unsubscribe
from storage.committer import Committer
from tests.exploration.explore import explore
from tests.exploration.scenarios import SCENARIOS
from tests.exploration.store import OwnerOp, WatchedMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from storage.api import Op

__all__ = ["MUTATIONS", "SCHEDULES_MAX", "TABLE", "Mutation", "Patch", "caught", "source"]

SCHEDULES_MAX: Final = 3000
"""A mutation that this many schedules do not catch is not caught."""
TABLE: Final = Path(__file__).with_name("MUTATIONS.md")

Patch = Callable[["pytest.MonkeyPatch"], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """name: what is taken out. scenario: where its absence shows."""

    name: str
    scenario: str
    patch: Patch


def source(owner: type | ModuleType, method: str, old: str, new: str) -> Patch:
    """Replace ``old`` in the source of a method, or of a function of a module."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        text = textwrap.dedent(inspect.getsource(getattr(owner, method)))
        assert text.count(old) == 1, f"{owner.__name__}.{method} does not read as it did"
        text = text.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
        module = owner if isinstance(owner, ModuleType) else sys.modules[owner.__module__]
        names = dict(vars(module))
        flags = __future__.annotations.compiler_flag
        exec(compile(text, f"<broken {method}>", "exec", flags), names)  # noqa: S102 - our own
        monkeypatch.setattr(owner, method, names[method])

    return patch


def together(*patches: Patch) -> Patch:
    """Take out two fences, of which each is enough in these scenarios."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for one in patches:
            one(monkeypatch)

    return patch


def rewritten(rewrite: Callable[[WatchedMemory, Op], Op]) -> Patch:
    """Rewrite operations on their way into the store."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        make = WatchedMemory.__init__

        def __init__(self: WatchedMemory, watch: Any) -> None:  # noqa: N807 - it is one
            make(self, watch)
            self.rewrite = rewrite

        monkeypatch.setattr(WatchedMemory, "__init__", __init__)

    return patch


def unfenced(kind: type) -> Patch:
    """The store does not compare the incarnation of one kind of operation."""

    def rewrite(memory: WatchedMemory, op: Op) -> Op:
        if isinstance(op, OwnerOp) and isinstance(op, kind):
            record = memory.record(op.consumer_id)
            if record is not None:
                return replace(op, incarnation=record.consumer.incarnation)
        return op

    return rewritten(rewrite)


def _any_claim(memory: WatchedMemory, op: Op) -> Op:
    """To the store, a claim that is gone looks like one that was never made."""
    record = memory.record(op.consumer_id) if isinstance(op, Advance) else None
    if record is not None and isinstance(op, Advance):
        gone = {c.number for c in op.claims} - {c.number for c in record.claims}
        if gone and min(gone) < record.consumer.next_claim:
            consumer = replace(record.consumer, next_claim=min(gone))
            memory._save(replace(record, consumer=consumer))
    return op


def _any_will(memory: WatchedMemory, op: Op) -> Op:
    wills = memory._tables.wills
    if isinstance(op, DropWill) and op.incarnation in wills:
        client_id = wills[op.incarnation].client_id
        for incarnation in [i for i, will in wills.items() if will.client_id == client_id]:
            if incarnation != op.incarnation:
                del wills[incarnation]
    return op


def _not_clean(memory: WatchedMemory, op: Op) -> Op:
    del memory
    return replace(op, clean=False) if isinstance(op, Acquire) and op.clean else op


def _no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, inner in (("subscribe", "_subscribe"), ("unsubscribe", "_unsubscribe")):
        monkeypatch.setattr(DurableSession, name, getattr(DurableSession, inner))


def _no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def turn(self: Registry, client_id: bytes) -> Any:
        del self, client_id
        yield

    monkeypatch.setattr(Registry, "turn", turn)


def _acknowledge_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def acknowledge(self: Connection, data: bytes, *, stored: bool) -> None:
        del stored
        self.write(data)

    monkeypatch.setattr(Connection, "acknowledge", acknowledge)


def _not_first_in_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    source(
        Committer,
        "_failed",
        "self._loop.call_later(self._retry_ms / 1000, self._retry, batch)",
        "self._loop.call_later(self._retry_ms / 1000, self._retry, batch); "
        "self._flying = None; self._flush()",
    )(monkeypatch)


def _both(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for one in patches:
            one(monkeypatch)

    return patch


def _table() -> Iterator[Mutation]:
    """In the order of the promises."""
    fenced = "fenced_by_another_node"
    yield Mutation("store: `Advance` is not fenced", fenced, unfenced(Advance))
    yield Mutation("store: `Subscribe` is not fenced", fenced, unfenced(Subscribe))
    yield Mutation("store: `Unsubscribe` is not fenced", fenced, unfenced(Unsubscribe))
    yield Mutation("store: `Detach` is not fenced", "fenced_before_it_leaves", unfenced(Detach))
    yield Mutation(
        "store: `Discard` is not fenced",
        "history_is_lost_under_a_fenced_session",
        unfenced(Discard),
    )
    yield Mutation("store: a claim need not be held", "claims_are_reaped", rewritten(_any_claim))
    yield Mutation(
        "store: `DropWill` by client id, not by incarnation",
        "wills_that_wait_for_a_plugin",
        rewritten(_any_will),
    )
    yield Mutation(
        "store: a clean start deletes nothing",
        "save_in_flight_at_a_clean_start",
        rewritten(_not_clean),
    )
    yield Mutation("registry: no line of CONNECTs", "connects_in_line", _no_line)
    yield Mutation(
        "registry: one that gave up lets the next one pass",
        "the_store_hangs",
        source(Registry, "turn", "before.add_done_callback(done)", "done()"),
    )
    yield Mutation(
        "registry: the older session is not ended",
        "takeover_while_messages_flow",
        source(Registry, "_take", "older.peer.finish(TAKEN_OVER)", "pass"),
    )
    yield Mutation(
        "registry: a CONNECT does not look whether its client left",
        "client_leaves_between_two_steps_of_connect",
        lambda m: m.setattr(sys.modules[Registry.__module__], "_left", lambda _: False),
    )
    yield Mutation(
        "registry: a clean start does not wait for its deletion",
        "save_in_flight_at_a_clean_start",
        source(
            Registry,
            "_transient",
            "outcome = await hub.committer.apply(",
            "outcome = (lambda op: hub.committer.submit(op, self._uncount))(",
        ),
    )
    yield Mutation(
        "registry: CONNACK does not wait for the will",
        "clean_sessions_with_wills",
        source(Registry, "_settle_wills", "await self.hub.wills.stored(incarnation)", "pass"),
    )
    yield Mutation(
        "registry: a session that nobody was told of stays",
        "client_leaves_during_its_first_connect",
        source(Registry, "_undo", "session.fresh", "False"),
    )
    yield Mutation(
        "registry: a reset whose CONNACK may be lost is not told again",
        "reset_that_its_client_never_heard_of",
        together(
            source(Registry, "leave", "and session.peer.confirmed", ""),
            source(DurableSession, "end", "self.peer.confirmed or end is DISCONNECTED", "True"),
        ),
    )
    yield Mutation(
        "session: its end does not seal it",
        "takeover_while_messages_flow",
        source(Session, "end", "self.sealed = True", "pass"),
    )
    yield Mutation(
        "session: SUBSCRIBE does not look whether it is sealed",
        "late_subscribe",
        source(DurableSession, "_save_subscriptions", "if self.sealed:", "if False:"),
    )
    yield Mutation(
        "session: UNSUBSCRIBE does not look whether it is sealed",
        "contexts_subscribe_beside_the_client",
        source(DurableSession, "_unsubscribe", "if self.sealed:", "if False:"),
    )
    yield Mutation(
        "session: when it is sealed, it is still offered messages and saves them",
        "takeover_while_messages_flow",
        _both(
            source(Session, "end", "self.hub.router.detach(self, topic_filter)", "pass"),
            source(DurableSession, "join", "if not self.sealed:", "if True:"),
            source(DurableSession, "collect", "if not self.sealed:", "if True:"),
        ),
    )
    yield Mutation(
        "session: dispatch is not held while subscriptions change",
        "messages_while_subscriptions_change",
        source(Backlog, "hold", "if self.live:", "if False:"),
    )
    yield Mutation(
        "session: subscription changes do not wait for each other",
        "contexts_subscribe_beside_the_client",
        _no_lock,
    )
    yield Mutation(
        "session: SUBACK does not wait for the commit",
        "subscribes_that_miss_each_other",
        source(
            DurableSession,
            "_save_subscriptions",
            "await self.committer.apply(",
            "(lambda op: self.committer.submit(op, lambda _: None))(",
        ),
    )
    yield Mutation(
        "session: an UNSUBSCRIBE that was not saved is reported done",
        "unsubscribe_whose_save_fails",
        source(
            DurableSession,
            "_unsubscribe",
            "return [REFUSED] * len(filters)\n    else",
            "return codes\n    else",
        ),
    )
    yield Mutation(
        "session: a SUBSCRIBE that was not saved stays counted",
        "subscribes_that_miss_each_other",
        source(DurableSession, "_subscribe", "self._uncount(gained)", "pass"),
    )
    yield Mutation(
        "session: PUBLISH does not wait for the commit of its claim",
        "takeover_while_messages_flow",
        source(
            DurableSession,
            "_save",
            "self.saved_cursor = cursor",
            "self.saved_cursor = cursor; "
            "self.out.ready.extend(collected.flights); collected.flights = []; self._send()",
        ),
    )
    yield Mutation(
        "session: PUBREL does not wait for the commit of 'received'",
        "qos2_both_ways_across_connections",
        source(
            DurableSession,
            "pubrec",
            "elif due:",
            "elif self.peer.write(PUBREL_HEAD + PACKET_ID[packet_id]) or due:",
        ),
    )
    yield Mutation(
        "session: the cursor stays when unsent deliveries are given back",
        "a_slow_client_with_a_small_window",
        source(DurableSession, "end", "if cursor is not None:", "if False:"),
    )
    yield Mutation(
        "session: the cursor passes an entry for which there is no room",
        "a_slow_client_with_no_room",
        source(Backlog, "begin", "entry.offset - 1", "entry.offset"),
    )
    yield Mutation(
        "wills: the will of a clean end is published",
        "wills_of_two_connections",
        source(Wills, "ended", "if end.publish_will:", "if True:"),
    )
    yield Mutation(
        "wills: who has come back does not cancel the will that a crash left",
        "wills_after_a_crash",
        source(
            Registry,
            "_settle_wills",
            "await self.hub.wills.returned(packet.client_id, clean=packet.clean_start)",
            "[]",
        ),
    )
    yield Mutation(
        "wills: one that waits for its delay is published at once",
        "wills_with_a_delay",
        source(Wills, "ended", "if end.publish_will and delay_s:", "if False:"),
    )
    yield Mutation(
        "wills: one that waits is forgotten by a clean start",
        "wills_with_a_delay",
        source(Wills, "returned", "waiting.orphan or not (clean or", "True or (clean or"),
    )
    yield Mutation(
        "session: what has expired is sent",
        "messages_that_expire",
        source(DurableSession, "_failure", "elif entry.expires_ms and", "elif False and"),
    )
    yield Mutation(
        "session: QoS 0 that was read while it caught up is read again",
        "qos_0_for_who_is_away",
        source(Backlog, "_give", "self._qos0_after = entry.offset", "pass"),
    )
    yield Mutation(
        "session: what it was given with QoS 0 is not noted at its end",
        "qos_0_for_who_is_away",
        source(DurableSession, "end", "self.backlog.qos0_through", "None"),
    )
    yield Mutation(
        "router: who catches up is handed QoS 0 that is logged, too",
        "qos_0_for_who_is_away",
        source(Router, "_publish_qos0", "not (logged and session.catches_up)", "True"),
    )
    yield Mutation(
        "keep: latest: the last value is passed over, too",
        "last_values",
        source(Newest, "supersedes", "> entry.offset", ">= entry.offset"),
    )
    yield Mutation(
        "keep: latest: every topic has it",
        "last_values",
        source(Router, "publish", "if route.keeps_latest and", "if"),
    )
    yield Mutation(
        "connection: acknowledgements do not wait for the commit",
        "qos2_both_ways_across_connections",
        _acknowledge_at_once,
    )
    yield Mutation(
        "committer: what is tried again may be passed",
        "takeover_after_a_failed_save",
        _not_first_in_first_out,
    )
    yield from _of_groups()


def _of_groups() -> Iterator[Mutation]:
    yield Mutation(
        "group: PUBLISH does not wait for the commit of its claim",
        "a_group_whose_members_come_and_go",
        source(
            Group,
            "hand",
            "self.rows.claim(flight)",
            "self.rows.claim(flight); member.deliver(flight)",
        ),
    )
    yield Mutation(
        "group: PUBREL does not wait for the commit of 'received'",
        "a_group_whose_members_come_and_go",
        source(Group, "received", "    return False", "    flight.undurable = False; return True"),
    )
    yield Mutation(
        "group: QoS 2 that was sent is handed to another member",
        "a_group_whose_members_come_and_go",
        source(Group, "left", "flight.begun and flight.qos == QOS", "False"),
    )
    yield Mutation(
        "group: what its member did not acknowledge is forgotten",
        "a_group_with_no_room",
        source(Group, "left", "self.backlog.put_back(flight)", "self.settle(flight)"),
    )
    yield Mutation(
        "group: a packet id that goes back stays in its row",
        "the_last_one_here_unsubscribes",
        source(Group, "left", "self._vacate(flight)", "pass"),
    )
    yield Mutation(
        "group: the cursor passes an entry for which nobody has room",
        "a_group_with_no_room",
        source(
            GroupBacklog,
            "_claim_all",
            "self.cursor = entry.offset - 1",
            "self.cursor = entry.offset",
        ),
    )
    yield Mutation(
        "group: it is live while nobody is there",
        "a_group_whose_members_come_and_go",
        source(GroupBacklog, "stand", "if self.live:", "if False:"),
    )
    yield Mutation(
        "group: its record goes while a durable member joins",
        "members_that_unsubscribe",
        source(Record, "discard_if_settled", " or self._making", ""),
    )
    yield Mutation(
        "group: its record stays when its last member has left",
        "members_that_unsubscribe",
        source(Shared, "count", "group.forsaken()", "pass"),
    )
    yield Mutation(
        "group: SUBACK does not wait for its record",
        "two_who_make_one_group",
        source(DurableSession, "_save_subscriptions", "await self.hub.shared.prepare(gained)", ""),
    )
    yield Mutation(
        "group: what is with a session that ended stays with it",
        "two_who_make_one_group",
        source(Shared, "ended", "flight.group.settle(flight)", "pass"),
    )


MUTATIONS: Final = tuple(_table())


def caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> tuple[str, int]:
    """The promise that was seen broken first ("" = none), and the schedules that it took."""
    mutation.patch(monkeypatch)
    found = explore(SCENARIOS[mutation.scenario], SCHEDULES_MAX, seed)
    lines = found.violation.splitlines()
    return (lines[2].strip() if lines else "", found.schedules)


def row(mutation: Mutation) -> str:
    """The beginning of its line in the table."""
    return f"| {mutation.name} | `{mutation.scenario}` |"


def _write() -> None:
    import pytest  # noqa: PLC0415 - only when the table is written

    lines = ["| taken out | scenario that caught it | what it saw first |", "|---|---|---|"]
    for mutation in MUTATIONS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            promise, schedules = caught(mutation, monkeypatch)
        print(f"{schedules:5} {mutation.name}: {promise}")  # noqa: T201 - a command
        lines.append(f"{row(mutation)} {promise.replace('|', '/')} |")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    _write()
