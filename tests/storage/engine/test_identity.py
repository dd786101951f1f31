"""When a database is taken for the one that was closed, and when a new generation is minted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from errno import ENOSPC
from typing import TYPE_CHECKING

import pytest

from storage import identity
from storage.errors import StoreFull
from storage.identity import Place, Sidecar, changed
from storage.meta import Identity, read_identity
from tests.storage.harness import NOW_MS, message

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.engine.raw import Files

DB = Identity("d" * 32, "a" * 32, 7)
PLACE = Place("machine", "/data/history.mdb", 42)
SIDECAR = Sidecar.of(DB, 100, PLACE)


@pytest.mark.parametrize(
    ("sidecar", "finding"),
    [
        (SIDECAR, ""),
        (replace(SIDECAR, head=99), ""),
        (replace(SIDECAR, boot=6), ""),  # a crash between the commit and the sidecar
        (replace(SIDECAR, machine=""), ""),
        (None, "sidecar missing"),
        (replace(SIDECAR, db_id="e" * 32), "replaced"),
        (replace(SIDECAR, generation="b" * 32), "replaced"),
        (replace(SIDECAR, boot=8), "restored from a backup: boot 7, the sidecar says 8"),
        (replace(SIDECAR, boot=5), "sidecar is old"),
        (replace(SIDECAR, head=101), "restored from a backup: head 100, the sidecar says 101"),
        (replace(SIDECAR, inode=43), "copied"),
        (replace(SIDECAR, machine="another"), "copied"),
        (replace(SIDECAR, path="/elsewhere/history.mdb"), "moved"),
    ],
)
def test_the_decision_table(sidecar: Sidecar | None, finding: str) -> None:
    found = changed(DB, 100, sidecar, PLACE)
    assert found.startswith(finding)
    assert bool(found) == bool(finding)


async def test_a_new_database_is_created_and_the_next_opening_mints_nothing(files: Files) -> None:
    db = files.database()
    assert (await db.open()).minted == "created"
    opened = await db.reopen()
    assert (opened.minted, opened.log.boot) == ("", 2)
    await db.stop()


async def test_without_its_sidecar_a_database_gets_a_new_generation_once(files: Files) -> None:
    db = files.database()
    first = (await db.open()).log
    await db.store.close()
    files.sidecar.unlink()
    opened = await db.reopen()
    assert opened.minted == "sidecar missing"
    assert opened.log.db_id == first.db_id
    assert opened.log.generation != first.generation
    assert (await db.reopen()).minted == ""
    await db.stop()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": 1}', "\x00" * 100])
async def test_a_damaged_sidecar_is_no_sidecar(files: Files, text: str) -> None:
    db = files.database()
    await db.open()
    await db.store.close()
    files.sidecar.write_text(text)
    assert (await db.reopen()).minted == "sidecar damaged"
    await db.stop()


async def test_an_older_file_put_back_in_place_is_a_restore(files: Files) -> None:
    db = files.database()
    await db.open()
    await db.append(message())
    await db.store.close()
    backup = files.file.with_suffix(".backup")
    shutil.copyfile(files.file, backup)
    await db.reopen()
    await db.store.close()
    with files.file.open("r+b") as file:  # the same inode
        file.truncate(0)
        file.write(backup.read_bytes())
    assert (await db.reopen()).minted == "restored from a backup: boot 1, the sidecar says 2"
    await db.stop()


async def test_a_backup_since_the_last_opening_is_told_by_its_head(files: Files) -> None:
    db = files.database()
    await db.open()
    await db.append(message())
    await db.store.close()
    backup = files.file.read_bytes()
    sidecar = json.loads(files.sidecar.read_text())
    sidecar["head"] = 2  # as it was when the disk died, some appends later
    with files.file.open("r+b") as file:
        file.write(backup)
    files.sidecar.write_text(json.dumps(sidecar))
    assert (await db.reopen()).minted == "restored from a backup: head 1, the sidecar says 2"
    await db.stop()


async def test_the_head_in_the_sidecar_follows_while_the_store_is_open(files: Files) -> None:
    db = files.database()
    await db.open()
    await db.append(message(), stored_ms=NOW_MS + 1)
    assert json.loads(files.sidecar.read_text())["head"] == 0
    await db.append(message(), stored_ms=NOW_MS + identity.WITNESS_MS)
    assert json.loads(files.sidecar.read_text())["head"] == 2
    await db.append(message(), stored_ms=NOW_MS + identity.WITNESS_MS)
    await db.store.close()
    assert json.loads(files.sidecar.read_text())["head"] == 3


async def test_a_copy_of_the_directory_is_another_generation(files: Files) -> None:
    db = files.database()
    first = (await db.open()).log
    await db.store.close()
    moved = files.directory.with_name("elsewhere")
    shutil.copytree(files.directory, moved)
    files.directory = moved
    opened = await db.reopen()
    assert opened.minted.startswith("copied")
    assert opened.log.db_id == first.db_id
    await db.stop()


async def test_crashes_between_the_commit_of_a_boot_and_the_sidecar_mint_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = files.database()
    generation = (await db.open()).log.generation
    await db.store.close()
    write = Sidecar.write

    def write_unless_new(self: Sidecar, path: Path) -> None:
        """The disk says no to the sidecar of a boot that was committed just now."""
        if self.boot == boot + 1:
            raise OSError(ENOSPC, "died", str(path))
        write(self, path)

    for boot in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Sidecar, "write", write_unless_new)
            with pytest.raises(StoreFull):
                await db.backend.start().open(now_ms=NOW_MS)
        assert files.alter(read_identity).boot == boot + 1
    opened = await db.reopen()
    assert (opened.minted, opened.log.generation, opened.log.boot) == ("", generation, 5)
    await db.stop()
