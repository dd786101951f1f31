"""A restore, a migration or a repair that dies at any step never leaves an empty history."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from storage import files as storage_files
from storage.backup import back_up, restore
from storage.errors import StoreUnusable
from storage.files import KINDS, database_file
from storage.identity import Sidecar
from storage.inspection import repair
from storage.rewriting import migrate
from tests.operations.stores import ENTRIES, content, populate
from tests.storage.harness import message

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.operations.stores import Files
    from tests.storage.harness import Dump

STEPS = (
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "hardlink_to"),
    (Sidecar, "write"),
    (storage_files, "sync_file"),
    (storage_files, "sync_directory"),
)
"""What changes names on the disk, or makes them last."""


class Died(BaseException):
    """The process, just before a step."""


class Life:
    """Ends before the nth step; whatever comes after does nothing either."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def guard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Died
            return original(*arguments, **options)

        return step


def run_for(steps: int, operation: Callable[[], object]) -> bool:
    """Run an operation that dies before its nth step; whether it lived."""
    life = Life(steps)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, life.guard(getattr(owner, name)))
        try:
            operation()
        except Died:
            return False
    return True


async def found(files: Files) -> Dump | None:
    """What a broker finds that starts now; None = it is refused."""
    kind = next(kind for kind in KINDS if database_file(files.data, kind).exists())
    try:
        return await files.dump(kind)
    except StoreUnusable:
        return None


async def dies_everywhere(
    files: Files, prepare: Callable[[], object], operation: Callable[[Path], object], *may: Dump
) -> int:
    """Die before each step in turn, from a fresh start each time; how many steps there are."""
    for steps in range(200):
        prepare()
        lived = run_for(steps, partial(operation, files.path / f"kept-{steps}"))
        now = await found(files)
        assert now is None or content(now) in [content(dump) for dump in may], steps
        if lived:
            assert now is not None
            assert content(now) == content(may[-1])
            return steps
    raise AssertionError("it never ends")


def again(files: Files, path: Path) -> None:
    """Put a copy of a data directory in place."""
    shutil.rmtree(files.data)
    shutil.copytree(path, files.data)


async def test_a_restore_that_dies_leaves_the_old_history_or_the_new_one(files: Files) -> None:
    backed_up = await populate(files)
    back_up(files.data, files.path / "backup", now_ms=5)
    store = files.store()
    await store.open()
    await store.append(message(b"a/1", b"since"))
    replaced = await store.dump()
    await store.stop()
    files.data.rename(files.path / "state")
    files.data.mkdir()
    steps = await dies_everywhere(
        files,
        lambda: again(files, files.path / "state"),
        lambda kept: restore(files.path / "backup", files.data, keep_in=kept),
        replaced,
        backed_up,
    )
    assert steps > 5


async def test_a_migration_that_dies_leaves_one_history_or_is_refused(files: Files) -> None:
    before = await populate(files)
    files.data.rename(files.path / "state")
    files.data.mkdir()
    steps = await dies_everywhere(
        files,
        lambda: again(files, files.path / "state"),
        lambda kept: migrate(files.data, source=files.kind, target=files.other, keep_in=kept),
        before,
    )
    assert steps > 5


async def test_a_repair_that_dies_can_be_run_again(files: Files) -> None:
    await populate(files)
    files.flip_block(12, 3)  # an entry that everybody had
    damaged = files.path / "state"
    files.data.rename(damaged)
    files.data.mkdir()
    for steps in range(200):
        again(files, damaged)
        lived = run_for(steps, partial(repair, files.data, keep_in=files.path / f"1-{steps}"))
        repair(files.data, keep_in=files.path / f"2-{steps}")
        after = await files.dump()
        assert after.log[2] == ENTRIES
        assert len(after.consumers) == 5
        if lived:
            assert steps > 5
            return
