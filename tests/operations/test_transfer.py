"""Backup, restore and migration of a database at rest: what is the same, and what is told."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from storage.backup import MANIFEST, back_up, restore
from storage.errors import StoreCorrupt, StoreLocked, StoreTooNew, StoreUnusable
from storage.files import kind_in
from storage.identity import Sidecar
from storage.inspection import inspect, repair
from storage.keyring import Key, Keyring
from storage.rewriting import migrate, rekey
from tests.operations.stores import ENTRIES, content, populate
from tests.storage.harness import message

if TYPE_CHECKING:
    from pathlib import Path

    from tests.operations.stores import Files


class Died(Exception):
    """The process, at a step of an operation."""


def dies_at(step: str) -> object:
    def progress(now: str, _done: int, _total: int) -> None:
        if now == step:
            raise Died(step)

    return progress


def tree(directory: Path) -> dict[str, bytes]:
    """Every file of a directory but the lock, which says only who had it."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in {"lock", "history.mdb-lock"}
    }


# --------------------------------------------------------------------------------- backup


async def test_a_backup_holds_everything_and_says_what_it_is(files: Files) -> None:
    before = await populate(files)
    manifest, violations = back_up(files.data, files.path / "backup", now_ms=5)
    assert violations == []
    told = json.loads((files.path / "backup" / MANIFEST).read_text())
    assert (told["kind"], told["db_id"], told["generation"]) == (files.kind, *before.log[:2])
    assert (told["head"], told["floor"], told["made_ms"]) == (ENTRIES, 0, 5)
    assert told["violations"] == 0
    assert manifest.file == files.database.name
    assert sorted(path.name for path in (files.path / "backup").iterdir()) == sorted(
        [files.database.name, MANIFEST]
    )
    assert content(await files.dump(data=files.path / "backup")) == content(before)


@pytest.mark.parametrize("step", ["copy", "check", "checksum"])
async def test_a_backup_that_dies_leaves_nothing_under_its_name(files: Files, step: str) -> None:
    await populate(files)
    with pytest.raises(Died):
        back_up(files.data, files.path / "backup", now_ms=5, progress=dies_at(step))  # type: ignore[arg-type]
    assert [path.name for path in files.path.iterdir()] == [files.kind]


async def test_a_backup_refuses_a_target_that_is_not_empty_and_a_source_without_a_store(
    files: Files,
) -> None:
    await populate(files)
    (files.path / "backup").mkdir()
    back_up(files.data, files.path / "backup", now_ms=5)
    kept = tree(files.path / "backup")
    with pytest.raises(StoreUnusable, match="not empty: name a new directory"):
        back_up(files.data, files.path / "backup", now_ms=6)
    assert tree(files.path / "backup") == kept
    with pytest.raises(StoreUnusable, match="not a directory"):
        back_up(files.data, files.database, now_ms=6)
    with pytest.raises(StoreUnusable, match="no database"):
        back_up(files.path / "nothing", files.path / "other", now_ms=6)


async def test_a_backup_of_a_damaged_store_is_made_and_says_so(files: Files) -> None:
    await populate(files)
    files.flip_block(10, -1)
    manifest, violations = back_up(files.data, files.path / "backup", now_ms=5)
    assert violations == ["entry 10 is damaged"]
    assert manifest.violations == 1


async def test_a_backup_stays_as_it_was_made(files: Files) -> None:
    await populate(files)
    files.flip_block(10, -1)
    backup = files.path / "backup"
    back_up(files.data, backup, now_ms=5)
    kept = tree(backup)
    with pytest.raises(StoreUnusable, match="it is a backup"):
        migrate(backup, source=files.kind, target=files.other, keep_in=files.path / "kept")
    with pytest.raises(StoreUnusable, match="it is a backup"):
        rekey(backup, Keyring([Key("2026", b"k" * 32)]))
    with pytest.raises(StoreUnusable, match="it is a backup"):
        repair(backup, keep_in=files.path / "kept")
    assert {name: held for name, held in tree(backup).items() if name in kept} == kept
    restore(backup, files.path / "again", keep_in=None)


# -------------------------------------------------------------------------------- restore


async def test_restore_puts_back_what_was_backed_up_in_a_new_generation(files: Files) -> None:
    before = await populate(files)
    back_up(files.data, files.path / "backup", now_ms=5)
    store = files.store()
    await store.open()
    await store.append(message(b"a/1", b"after the backup"))
    after_backup = await store.dump()
    await store.stop()

    done = restore(files.path / "backup", files.data, keep_in=files.path / "kept")

    assert done.kept_in == files.path / "kept"
    now = await files.dump()
    assert content(now) == content(before)
    assert now.log[0] == before.log[0]
    assert now.log[1] not in {before.log[1], after_backup.log[1]}
    assert now.log[1] == done.identity.generation  # minted by restore, not by the opening
    shutil.move(files.path / "kept", files.path / "moved")
    assert content(await files.dump(data=files.path / "moved")) == content(after_backup)


async def test_restore_mints_whatever_becomes_of_the_sidecar(files: Files) -> None:
    """A backup of this boot, and the sidecar that it had then: nothing but the new generation in
    the database itself tells them apart from what was closed."""
    before = await populate(files)
    back_up(files.data, files.path / "backup", now_ms=5)
    sidecar = files.sidecar.read_bytes()
    for keep_sidecar in (True, False):
        restore(files.path / "backup", files.data, keep_in=files.path / f"kept-{keep_sidecar}")
        files.sidecar.write_bytes(sidecar) if keep_sidecar else files.sidecar.unlink()
        assert (await files.opened()).log.generation != before.log[1]


async def test_restore_refuses_a_store_that_is_there_and_one_that_is_in_use(files: Files) -> None:
    await populate(files)
    back_up(files.data, files.path / "backup", now_ms=5)
    kept = tree(files.data)
    with pytest.raises(StoreUnusable, match="--force sets it aside"):
        restore(files.path / "backup", files.data, keep_in=None)
    assert tree(files.data) == kept
    store = files.store()
    await store.open()
    with pytest.raises(StoreLocked):
        restore(files.path / "backup", files.data, keep_in=files.path / "kept")
    await store.stop()


async def test_restore_refuses_what_is_not_the_backup_that_was_made(files: Files) -> None:
    await populate(files)
    backup = files.path / "backup"
    back_up(files.data, backup, now_ms=5)
    kept = tree(files.data)
    copy = backup / files.database.name
    spoilt = bytearray(copy.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    copy.write_bytes(spoilt)
    with pytest.raises(StoreCorrupt, match="SHA-256 differs"):
        restore(backup, files.data, keep_in=files.path / "kept")
    manifest = json.loads((backup / MANIFEST).read_text())
    (backup / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(StoreTooNew):
        restore(backup, files.data, keep_in=files.path / "kept")
    (backup / MANIFEST).write_text("{")
    with pytest.raises(StoreUnusable, match="damaged"):
        restore(backup, files.data, keep_in=files.path / "kept")
    (backup / MANIFEST).unlink()
    with pytest.raises(StoreUnusable, match="not a backup"):
        restore(backup, files.data, keep_in=files.path / "kept")
    assert tree(files.data) == kept


async def test_a_backup_of_the_other_kind_takes_the_place_of_a_store(files: Files) -> None:
    before = await populate(files)
    back_up(files.data, files.path / "backup", now_ms=5)
    migrate(files.data, source=files.kind, target=files.other, keep_in=files.path / "migrated")
    restore(files.path / "backup", files.data, keep_in=files.path / "kept")
    assert kind_in(files.data) == files.kind
    assert kind_in(files.path / "kept") == files.other
    assert content(await files.dump()) == content(before)


async def test_an_interrupted_swap_is_refused_by_name_and_not_started_empty(files: Files) -> None:
    """Two kinds are what a crash between the last two steps leaves behind."""
    await populate(files)
    back_up(files.data, files.path / "backup", now_ms=5)
    migrate(files.data, source=files.kind, target=files.other, keep_in=files.path / "kept")
    shutil.copy(files.path / "kept" / files.database.name, files.database)
    for kind in (files.kind, files.other):
        with pytest.raises(StoreUnusable):
            await files.store(kind).open()
    with pytest.raises(StoreUnusable, match="run it again"):
        inspect(files.data)
    migrate(files.data, source=files.kind, target=files.other, keep_in=files.path / "again")
    assert kind_in(files.data) == files.other


# ------------------------------------------------------------------------------ migration


async def test_everything_survives_a_migration_there_and_back(files: Files) -> None:
    before = await populate(files)

    there = migrate(files.data, source=files.kind, target=files.other, keep_in=files.path / "1")
    assert kind_in(files.data) == files.other
    on_the_other = await files.dump(files.other)
    assert content(on_the_other) == content(before)
    assert on_the_other.log[1] == there.identity.generation != before.log[1]

    migrate(files.data, source=files.other, target=files.kind, keep_in=files.path / "2")
    assert content(await files.dump()) == content(before)
    assert kind_in(files.path / "1") == files.kind


async def test_a_migration_to_another_directory_leaves_the_old_one(files: Files) -> None:
    before = await populate(files)
    kept = tree(files.data)
    new = files.path / "new"
    done = migrate(
        files.data, source=files.kind, target=files.other, to_data=new, keep_in=files.path / "k"
    )
    assert done.kept_in is None
    assert tree(files.data) == kept
    assert content(await files.dump(files.other, new)) == content(before)
    with pytest.raises(StoreUnusable, match="name another directory"):
        migrate(
            files.data, source=files.kind, target=files.other, to_data=new, keep_in=files.path / "k"
        )


@pytest.mark.parametrize("step", ["copy", "compare", "check"])
async def test_a_migration_that_dies_leaves_the_old_store_untouched(
    files: Files, step: str
) -> None:
    before = await populate(files)
    kept = tree(files.data)
    with pytest.raises(Died):
        migrate(
            files.data,
            source=files.kind,
            target=files.other,
            keep_in=files.path / "kept",
            progress=dies_at(step),  # type: ignore[arg-type]
        )
    assert tree(files.data) == kept
    (files.data / f"{files.database.name}.incoming").write_bytes(b"left by one that was killed")
    assert await files.dump() == before


async def test_a_damaged_store_is_not_migrated(files: Files) -> None:
    await populate(files)
    files.flip_block(10, -1)
    with pytest.raises(StoreCorrupt, match="check --repair"):
        migrate(files.data, source=files.kind, target=files.other, keep_in=files.path / "kept")
    assert kind_in(files.data) == files.kind


async def test_a_store_in_use_is_not_migrated(files: Files) -> None:
    await populate(files)
    store = files.store()
    await store.open()
    with pytest.raises(StoreLocked):
        migrate(files.data, source=files.kind, target=files.other, keep_in=files.path / "kept")
    await store.stop()


# ----------------------------------------------------------------- the same without commands


async def test_a_copied_directory_is_told_apart(files: Files) -> None:
    before = await populate(files)
    shutil.copytree(files.data, files.path / "copy")
    assert inspect(files.data).mints == ""
    assert (await files.opened(files.path / "copy")).log.generation != before.log[1]
    assert (await files.opened()).log.generation == before.log[1]


async def test_a_missing_or_old_sidecar_makes_a_new_generation_and_check_says_so(
    files: Files,
) -> None:
    before = await populate(files)
    old = files.sidecar.read_bytes()
    files.sidecar.unlink()
    assert inspect(files.data).mints == "sidecar missing"
    second = await files.opened()
    assert second.log.generation != before.log[1]
    files.sidecar.write_bytes(old)
    assert "sidecar" in inspect(files.data).mints
    third = await files.opened()
    assert third.log.generation != second.log.generation
    sidecar = Sidecar.read(files.sidecar)
    assert sidecar is not None
    assert sidecar.generation == third.log.generation
