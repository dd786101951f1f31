"""What reads a damaged file may die of it: that is told, and ends nobody else."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from broker_ext.cli.errors import CannotOperate
from broker_ext.cli.operations import check
from broker_ext.cli.store import Keys, Store
from storage.apart import apart
from storage.errors import StoreCorrupt, StoreLocked
from storage.lock import DirectoryLock
from tests.operations.stores import Files, populate

if TYPE_CHECKING:
    from pathlib import Path

    from storage.files import Kind


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_done_apart_gives_what_it_gave(tmp_path: Path) -> None:
    assert apart(tmp_path, lambda: [os.getppid(), b"x"]) == [os.getpid(), b"x"]


def test_what_is_done_apart_raises_what_it_raised(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    with pytest.raises(StoreLocked) as raised:
        apart(tmp_path, DirectoryLock(tmp_path).acquire)
    assert raised.value.pid == os.getpid()
    lock.release()


def test_a_process_that_dies_of_what_it_reads_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreCorrupt, match=r"SIGKILL.*restore it from a backup"):
        apart(tmp_path, die)


@pytest.mark.parametrize("is_repaired", [False, True])
async def test_check_tells_of_a_file_that_ends_who_reads_it(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch, *, is_repaired: bool
) -> None:
    files = Files(tmp_path, kind)
    await populate(files)
    before = files.database.read_bytes()
    monkeypatch.setattr("storage.inspection._walk", die)
    with pytest.raises(CannotOperate, match="SIGKILL"):
        check(Store(files.data, Keys()), is_repaired=is_repaired, as_json=False)
    monkeypatch.undo()
    assert check(Store(files.data, Keys()), is_repaired=is_repaired, as_json=True)
    assert files.database.read_bytes() == before
