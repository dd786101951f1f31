"""The outbox, broken on purpose: one rule at a time is taken out, from outside.

Each ``Mutation`` patches the source of one function; the product has no switch for it. The test
that is named is then run over a database on disk and must fail. ``python -m
tests.storage.outbox_mutations`` prints the table of DESIGN.md.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from storage import consumers, engine, roles, sqlite_roles
from storage.clock import ManualClock
from storage.errors import ClaimNotHeld
from storage.outbox import Failure, Schedule, Verdict, reading, rights, rows, schedule, writing
from storage.outbox.books import Books
from storage.outbox.rights import Role
from storage.roles import Handles, Worker
from tests.exploration.mutations import Patch, source
from tests.storage import test_outbox_schedule
from tests.storage.conformance import test_outbox, test_outbox_claims, test_roles
from tests.storage.engine import test_outbox_damage, test_sqlite_roles
from tests.storage.engine.raw import Files
from tests.storage.harness import NOW_MS, A, Database, OnDisk, scratch
from tests.storage.outbox import ACTS, Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

__all__ = ["MUTATIONS", "Mutation", "caught", "outcome", "row"]


@dataclass(frozen=True, slots=True)
class Mutation:
    """rule: what the outbox promises. taken_out: how it is broken. test: fails then.

    given: arguments of the test that are not the usual ones.
    """

    rule: str
    taken_out: str
    patch: Patch
    test: Callable[..., Any]
    given: dict[str, Any] = field(default_factory=dict)


def operation(module: ModuleType, name: str, old: str, new: str) -> Patch:
    """Patch a function, also where it is an operation of the engine."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        before = getattr(module, name)
        source(module, name, old, new)(monkeypatch)
        for table in (engine._OPERATIONS, engine._OUTBOX):
            for kind, function in table.items():
                if function is before:
                    monkeypatch.setitem(table, kind, getattr(module, name))

    return patch


def _becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schedule.BECOMES, Failure.UNREADABLE, Verdict.RETRY)


def _authorizes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def authorizer(role: Role) -> Any:
        del role
        return lambda *_: 0

    monkeypatch.setattr(sqlite_roles, "authorizer", authorizer)
    monkeypatch.setattr("storage.sqlite_store.authorizer", authorizer)


DONE: Final = {"act": ACTS["done"]}


def _table() -> Iterator[Mutation]:
    take = writing._Acquisition
    yield Mutation(
        "a cursor moves and its range is enqueued together, or neither",
        "an Advance enqueues before it is checked",
        operation(
            consumers,
            "advance",
            "_must_hold(txn, record, op)",
            "outbox.add(txn, op.enqueue, op.dead, b''); _must_hold(txn, record, op)",
        ),
        test_outbox.test_an_advance_that_is_refused_leaves_nothing_in_the_outbox,
        {"incarnation": A, "settled": [7], "refusal": ClaimNotHeld(1, 7)},
    )
    yield Mutation(
        "enqueue is idempotent by key",
        "nobody looks for the key",
        operation(writing, "enqueue", ", key)) is not None:", ", key)) is not None and False:"),
        test_outbox.test_a_key_that_is_known_enqueues_nothing_whatever_became_of_it,
    )
    yield Mutation(
        "not before `not_before`",
        "it is due at once",
        operation(writing, "enqueue", "max(op.now_ms, op.not_before_ms)", "op.now_ms"),
        test_outbox.test_not_before_is_not_due_before,
    )
    yield Mutation(
        "what expired is not sent",
        "a claim does not look at deadlines",
        source(take, "take", "0 < row.expires_ms <= op.now_ms", "False"),
        test_outbox.test_what_expired_is_not_claimed,
    )
    yield Mutation(
        "a newer message supersedes an older one that waits",
        "nobody looks for the older one",
        operation(writing, "enqueue", "if older is not None:", "if False:"),
        test_outbox.test_a_newer_message_supersedes_those_that_wait,
    )
    yield Mutation(
        "... and one that is claimed: whoever commits first wins",
        "a claimed message is left alone",
        operation(
            writing,
            "enqueue",
            "if older is not None:",
            "if older is not None and older.state is State.WAITING:",
        ),
        test_outbox.test_a_claimed_message_is_superseded_unless_it_was_settled_before,
        {"is_settled_first": False},
    )
    yield Mutation(
        "claims are disjoint",
        "a claim is not written down",
        source(take, "take", "books.put(claimed, row)", "pass"),
        test_outbox.test_claims_are_disjoint_between_workers_and_queues,
    )
    yield Mutation(
        "ordered by due time, then id",
        "ordered by the time of the enqueue",
        source(
            rows,
            "indexes",
            "_DUE.pack(row.queue, row.due_ms, row.id)",
            "_DUE.pack(row.queue, row.created_ms, row.id)",
        ),
        test_outbox.test_claims_go_by_due_time_then_id,
    )
    yield Mutation(
        "a claim that lapsed is refused, even if nobody has taken the message since",
        "the time of the lease is not looked at",
        source(writing, "_held", "row.until_ms <= now_ms", "False"),
        test_outbox_claims.test_a_claim_that_lapsed_is_refused_even_if_nobody_took_it,
        DONE,
    )
    yield Mutation(
        "a claim of the same worker made anew refuses the older one",
        "the claim number is not compared",
        source(writing, "_held", "row.claim != claim or row.worker", "row.worker"),
        test_outbox_claims.test_a_claim_that_the_same_worker_made_anew_refuses_the_older_one,
        DONE,
    )
    yield Mutation(
        "a claim of another worker is no credential",
        "the worker is not compared",
        source(writing, "_held", "row.claim != claim or row.worker != worker", "False"),
        test_outbox_claims.test_each_part_of_a_credential_must_be_right,
        {**DONE, "other": {"worker": b"2" * 16}, "found": "claimed"},
    )
    yield Mutation(
        "a settlement re-states the state",
        "the state is not compared",
        source(writing, "_held", "row.state is not State.CLAIMED", "False"),
        test_outbox_claims.test_what_has_ended_is_refused,
        {"act": ACTS["extend"], "verdict": Verdict.DONE},
    )
    yield Mutation(
        "a credential with a part missing is refused before anything is read",
        "nobody looks whether it is whole",
        source(writing, "_held", "not (message_id and claim and _is_worker(worker))", "False"),
        test_outbox_claims.test_a_credential_with_a_part_missing_is_refused,
        {**DONE, "missing": {"worker": b""}},
    )
    yield Mutation(
        "a refused operation leaves the row as it is, to the byte",
        "a late settlement leaves a trace",
        source(
            writing,
            "_held",
            "    raise ClaimNotHeld(0, claim, message_id, found)",
            "    if row: txn.put(Space.OUTBOX, U64.pack(row.id), row._replace(attempts=9).pack())\n"
            "    raise ClaimNotHeld(0, claim, message_id, found)",
        ),
        test_outbox_claims.test_a_claim_that_was_taken_by_another_worker_settles_nothing,
        DONE,
    )
    yield Mutation(
        "a late extension is refused, too",
        "an extension is not fenced",
        operation(
            writing,
            "extend",
            "_held(books.txn, op.credential, op.now_ms)",
            "row_of(books.txn, op.credential.message_id)",
        ),
        test_outbox_claims.test_two_dispatchers_replay,
        {"late": "a late extend", "taken_by": "another node"},
    )
    yield Mutation(
        "a lease is never made shorter",
        "the last extension counts",
        operation(writing, "extend", "max(row.until_ms, op.until_ms)", "op.until_ms"),
        test_outbox.test_an_extension_moves_the_lease_on_and_never_back,
    )
    yield Mutation(
        "a release (shutdown) is no attempt",
        "a release is charged",
        operation(writing, "release", "until_ms=0", "until_ms=0, attempts=_charged(row)"),
        test_outbox.test_a_release_is_no_attempt_and_keeps_the_place_in_line,
    )
    yield Mutation(
        "a lapsed lease is an attempt: poison that kills its worker ends",
        "a reap charges nothing",
        operation(
            writing,
            "reap",
            "after = _failed(row, op.now_ms, due_ms, Failure.LAPSED)",
            "after = _move(row, Event.RETRY, until_ms=0, due_ms=due_ms)",
        ),
        test_outbox_claims.test_poison_becomes_a_dead_letter_and_the_others_go_on,
        {"kills": True},
    )
    yield Mutation(
        "... and takes no others with it",
        "what lapsed is claimed together with others",
        source(take, "take", "row.failure is Failure.LAPSED", "False"),
        test_outbox_claims.test_poison_becomes_a_dead_letter_and_the_others_go_on,
        {"kills": True},
    )
    yield Mutation(
        "reaping goes by the lease alone",
        "a claim without an owner is passed",
        operation(writing, "reap", "if row is None:", "if row is None or row.worker == NO_KEY:"),
        test_outbox_claims.test_a_lapsed_claim_without_an_owner_is_recovered,
    )
    yield Mutation(
        "a retry waits its delay",
        "a failed message is due at once",
        source(writing, "_failed", "due_ms = max(due_ms, now_ms)", "due_ms = now_ms"),
        test_outbox_claims.test_what_is_refused_again_and_again_is_tried_less_and_less_and_ends,
    )
    yield Mutation(
        "exhaustion is a dead letter",
        "there is no last attempt",
        source(writing, "_failed", "if row.attempts_max and", "if False and"),
        test_outbox.test_the_last_attempt_that_fails_makes_a_dead_letter,
    )
    yield Mutation(
        "Retry-After wins only when it is valid and in the future",
        "whatever the receiver says",
        source(
            Schedule,
            "due_ms",
            "retry_at_ms is not None and now_ms < retry_at_ms <= now_ms + RETRY_AFTER_MS_MAX",
            "retry_at_ms is not None",
        ),
        test_outbox_schedule.test_retry_after_wins_when_it_is_valid_and_in_the_future,
        {"retry_at_ms": NOW_MS - 1, "expected_ms": NOW_MS + 5_000},
    )
    yield Mutation(
        "delays are jittered",
        "they are not",
        source(Schedule, "due_ms", "self.jitter * (2", "0 * (2"),
        test_outbox_schedule.test_jitter_spreads_a_delay_both_ways,
    )
    yield Mutation(
        "each class of failure has its end",
        "what cannot be read is tried again",
        _becomes,
        test_outbox_schedule.test_each_class_of_failure_has_its_end,
        {"failure": Failure.UNREADABLE, "verdict": Verdict.DEAD},
    )
    yield Mutation(
        "what cannot be read is a dead letter at once, and holds up nobody",
        "its error goes through",
        source(take, "take", "except MessageDamaged:", "except ZeroDivisionError:"),
        test_outbox_damage.test_a_body_that_cannot_be_read_is_a_dead_letter_at_once,
    )
    yield Mutation(
        "a body is erased when its message is done",
        "it stays",
        source(
            writing,
            "_settled",
            "attempts=_charged(row), failure=failure)",
            "attempts=_charged(row), failure=failure, has_body=row.has_body)",
        ),
        test_outbox.test_done_keeps_the_tale_and_not_the_body,
    )
    yield Mutation(
        "a dead letter is erased if that was asked for",
        "it never is",
        source(writing, "_settled", "row.has_body and not op.erase", "row.has_body"),
        test_outbox.test_a_dead_letter_keeps_its_body_unless_it_is_to_be_erased,
        {"erase": True},
    )
    yield Mutation(
        "a reissue is a fresh message",
        "it takes its attempts along",
        operation(writing, "reissue", "attempts=0,", "attempts=old.attempts,"),
        test_outbox.test_a_reissue_is_a_fresh_message_and_is_recorded,
    )
    yield Mutation(
        "every reissue is in the audit",
        "it is not written",
        operation(
            writing,
            "reissue",
            "txn.put(Space.AUDIT, U64.pack(record.number), encode_audit(record))",
            "pass",
        ),
        test_outbox.test_a_reissue_is_a_fresh_message_and_is_recorded,
    )
    yield Mutation(
        "a reissue is refused while a newer one lives",
        "nobody looks for a newer one",
        operation(writing, "reissue", "if live is not None and", "if False and"),
        test_outbox.test_a_reissue_is_refused_while_a_newer_one_lives,
    )
    yield Mutation(
        "only a dead letter is reissued, and once",
        "its state is not looked at",
        operation(writing, "reissue", "if Event.REISSUE not in MOVES[old.state]:", "if False:"),
        test_outbox.test_only_a_dead_letter_with_a_body_is_reissued_and_once,
    )
    yield Mutation(
        "dead letters are kept as long as they are configured to be",
        "as long as what is done",
        operation(writing, "purge", "(1, op.dead_before_ms)", "(1, op.done_before_ms)"),
        test_outbox.test_purge_deletes_what_ended_long_enough_ago_in_steps,
    )
    yield Mutation(
        "a purge is in bounded steps",
        "it is in one",
        operation(writing, "purge", "op.limit - deleted", "None"),
        test_outbox.test_purge_deletes_what_ended_long_enough_ago_in_steps,
    )
    yield Mutation(
        "figures are those of the messages",
        "a state that is left is not counted down",
        source(Books, "put", "counts[before.state] -= 1", "pass"),
        test_outbox.test_figures_say_when_to_come_back,
    )
    yield Mutation(
        "dead letters are told a page at a time",
        "all at once",
        source(reading, "dead_letters", "islice(rows, limit)", "rows"),
        test_outbox.test_dead_letters_are_told_in_pages_in_the_order_they_died,
    )
    yield Mutation(
        "a refused ack is logged once",
        "each time",
        source(Worker, "_record", "if credential not in self._lost:", "if True:"),
        test_roles.test_a_refused_ack_is_counted_and_logged_once_and_the_batch_goes_on,
    )
    yield Mutation(
        "a refused ack ends nothing but itself",
        "the worker is told by an exception",
        source(Worker, "_record", "return _REFUSED", "raise"),
        test_outbox_claims.test_a_refused_ack_ends_nothing_but_itself,
    )
    yield Mutation(
        "what was claimed for a caller that was cancelled is given back",
        "it is left to its lease",
        source(roles.Worker, "_give_back", "if isinstance(outcome, Claimed):", "if False:"),
        test_roles.test_a_claim_whose_caller_is_cancelled_is_given_back,
        {"turns": 1},
    )
    yield Mutation(
        "a role does nothing but its own operations",
        "the store does not look",
        source(rights, "refusal", "if type(op) not in allowed:", "if False:"),
        test_roles.test_a_batch_with_one_foreign_operation_is_refused_whole,
    )
    yield Mutation(
        "on SQLite its connection touches nothing but its own tables",
        "the authorizer allows everything",
        _authorizes_all,
        test_sqlite_roles.test_a_connection_touches_the_tables_of_its_role_and_no_others,
        {"role": Role.WORKER, "kind": "sqlite"},
    )


MUTATIONS: Final = tuple(_table())


def caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> str:
    """Break it and run the test; how that failed, "" = it did not."""
    mutation.patch(monkeypatch)
    # who imported a function by its name gets the broken one, too
    for module in ("storage.durable", "storage.memory"):
        monkeypatch.setattr(f"{module}.refusal", rights.refusal)
    monkeypatch.setattr("storage.outbox.books.indexes", rows.indexes)
    return outcome(mutation, caplog)


def outcome(mutation: Mutation, caplog: Any) -> str:
    """Run the test; how it failed, "" = it did not."""
    try:
        if inspect.iscoroutinefunction(mutation.test):
            asyncio.run(_run(mutation, caplog))
        else:
            mutation.test(**mutation.given)
    except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001 - that is the question
        told = str(failure).strip().splitlines()
        return f"{type(failure).__name__}: {told[0]}" if told else type(failure).__name__
    return ""


async def _run(mutation: Mutation, caplog: Any) -> None:
    wanted = inspect.signature(mutation.test).parameters
    given = {key: value for key, value in mutation.given.items() if key != "kind"}
    kind = mutation.given.get("kind", "lmdb")
    with scratch() as path:
        if "files" in wanted:
            await mutation.test(files=Files(kind, path / kind), **given)
            return
        db = Database(OnDisk(kind, path))
        await db.open()
        clock = ManualClock(NOW_MS)
        usual: dict[str, Callable[[], Any]] = {
            "db": lambda: db,
            "outbox": lambda: Outbox(db),
            "clock": lambda: clock,
            "handles": lambda: Handles(db.store, clock),
            "caplog": lambda: caplog,
        }
        for name in wanted:
            if name in usual and name not in given:
                given[name] = usual[name]()
        try:
            await mutation.test(**given)
            assert await db.store.check() == []
        finally:
            with suppress(Exception):
                await db.store.close()


def row(mutation: Mutation) -> str:
    """The beginning of its line in the table."""
    name = f"{mutation.test.__module__.replace('.', '/')}.py::{mutation.test.__name__}"
    return f"| {mutation.rule} | {mutation.taken_out} | `{name}` |"


if __name__ == "__main__":
    print("| rule | taken out | test that fails |\n|---|---|---|")  # noqa: T201 - a command
    for each in MUTATIONS:
        print(row(each))  # noqa: T201
