"""On SQLite the connection of a role refuses what is not the role's, whatever is run on it."""

from __future__ import annotations

import random
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from storage.errors import RoleRefused, StoreError
from storage.kv import Space
from storage.outbox import Enqueue
from storage.outbox.rights import TABLES, Role
from storage.sqlite_roles import authorizer
from storage.sqlite_store import SqliteStore
from tests.storage.harness import NOW_MS, Database, OnDisk, message, scratch
from tests.storage.test_outbox_model import Walk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from storage.kv import ReadTxn, WriteTxn

ROLES = [role for role in Role if role is not Role.BROKER]


@pytest.fixture
async def db() -> AsyncIterator[Database]:
    """A SQLite database with one message in it."""
    with scratch() as path:
        database = Database(OnDisk("sqlite", path))
        await database.open()
        await database.do(Enqueue(b"hook", message(), NOW_MS))
        yield database
        await database.stop()


async def attempt(db: Database, role: Role, what: str, space: Space) -> bool:
    """Whether the connection of a role does it."""
    store = db.store
    assert isinstance(store, SqliteStore)

    def work(txn: WriteTxn) -> Any:
        if what == "read":
            return list(txn.scan(space))
        if what == "write":
            return txn.put(space, b"k" * 9, b"v")
        return txn.delete(space, b"k" * 9)

    def read(txn: ReadTxn) -> Any:
        return work(txn)  # type: ignore[arg-type]

    class GiveUp(Exception):
        pass

    def nothing(txn: WriteTxn) -> None:
        work(txn)
        raise GiveUp

    try:
        if role is Role.READER:
            await store._role(role).run(lambda database: database.read(read))
        else:
            await store._role(role).run(lambda database: database.write(nothing))
    except GiveUp:
        return True
    except (RoleRefused, sqlite3.DatabaseError, StoreError):
        return False
    return True


@pytest.mark.parametrize("role", ROLES, ids=lambda r: r.value)
async def test_a_connection_touches_the_tables_of_its_role_and_no_others(
    db: Database, role: Role
) -> None:
    letters = {"read": "r", "write": "w", "delete": "d"}
    for space in Space:
        for what, letter in letters.items():
            expected = letter in TABLES[role].get(space, "")
            if space is Space.HISTORY and what != "read":
                expected = False  # its keys are numbers; no role has it
            assert await attempt(db, role, what, space) == expected, (space, what)


@pytest.mark.parametrize("role", ROLES, ids=lambda r: r.value)
@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH DATABASE ':memory:' AS other",
        "CREATE TABLE t (x)",
        "DROP TABLE outbox",
        "PRAGMA writable_schema = ON",
        "SELECT sql FROM sqlite_schema",
        "SELECT v FROM consumer",
        "UPDATE claim SET k = k",
    ],
)
async def test_a_connection_of_a_role_runs_nothing_else(
    db: Database, role: Role, statement: str
) -> None:
    store = db.store
    assert isinstance(store, SqliteStore)

    def run(database: Any) -> None:
        database._connection.execute(statement)

    with pytest.raises(sqlite3.DatabaseError, match=r"not authorized|prohibited|readonly"):
        await store._role(role).run(run)


async def test_one_that_cannot_be_opened_is_opened_the_next_time(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = db.store
    assert isinstance(store, SqliteStore)
    file = store._file
    monkeypatch.setattr(store, "_file", file.with_name("gone"))
    with pytest.raises(StoreError):
        await store.outbox.backlog()
    monkeypatch.setattr(store, "_file", file)
    assert [one.waiting for one in await store.outbox.backlog()] == [1]


def test_a_role_has_no_right_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that SQLite asks while all roles do all they can is what is granted."""
    asked: dict[Role, set[tuple[str, str]]] = {role: set() for role in ROLES}
    letters = {
        sqlite3.SQLITE_INSERT: "w",
        sqlite3.SQLITE_UPDATE: "w",
        sqlite3.SQLITE_DELETE: "d",
    }

    def watched(role: Role) -> Callable[..., int]:
        whole = authorizer(role)

        def authorize(action: int, table: str | None, column: str | None, *rest: Any) -> int:
            if action in letters or (action == sqlite3.SQLITE_READ and column == "v"):
                asked[role].add((table or "", letters.get(action, "r")))
            return whole(action, table, column, *rest)

        return authorize

    monkeypatch.setattr("storage.sqlite_store.authorizer", watched)
    granted = {
        role: {
            (space.name.lower(), letter) for space, rights in tables.items() for letter in rights
        }
        for role, tables in TABLES.items()
    }
    for number in range(10):  # until everything was asked for
        if asked == granted:
            break
        walk = Walk(as_roles=True, kinds=("memory", "sqlite"))
        choose = random.Random(number).choice  # noqa: S311 - not for secrets
        try:
            for _ in range(300):
                walk.step(choose)
        finally:
            walk.stop()
    assert asked == granted
