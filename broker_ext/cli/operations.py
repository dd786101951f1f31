"""`backup`, `restore`, `migrate` and `check`: operations on a data directory, told to a person.

The work is done by storage.backup, storage.rewriting and storage.inspection. Results go to stdout,
progress to stderr: a bar on a terminal, else a line for every tenth. Whatever cannot be done is one
line that says what to do, and CannotOperate.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from broker_ext.cli.errors import CannotOperate
from storage.apart import apart
from storage.backup import back_up
from storage.backup import restore as restore_backup
from storage.errors import StoreError, StoreLocked
from storage.inspection import inspect
from storage.inspection import repair as repair_directory
from storage.rewriting import migrate as migrate_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from broker_ext.cli.store import Store
    from storage.backup import Manifest
    from storage.files import Kind
    from storage.inspection import Figures, Inspection
    from storage.repair import Repaired, Reset

__all__ = [
    "as_one_line",
    "backup",
    "check",
    "migrate",
    "progress_on_stderr",
    "restore",
]


LINES_MAX = 100
"""Sentences of one kind printed; --json has all of them."""

STOP_IT = "stop the broker first"
UNCHECKED = (
    "sessions that are in it are resumed unchecked from where it has them, or reset with "
    "`on_generation_change: reset`"
)
CHECK_A_BACKUP = "stop the broker first, or take a backup of it and check that"


def backup(store: Store, target: Path, *, is_checked: bool) -> bool:
    """Copy the store to ``target``; whether the copy is sound."""
    with as_one_line(), progress_on_stderr() as progress:
        manifest, violations = back_up(
            store.data,
            target,
            now_ms=int(time.time() * 1000),
            is_checked=is_checked,
            keyring=store.keys.read(),
            progress=progress,
        )
    checked = "not checked" if not is_checked else "sound" if not violations else "damaged"
    typer.echo(
        f"backed up the {manifest.kind} store of {store.data} to {target}: "
        f"{_size(manifest.bytes)}, {_entries(manifest)}, "
        f"generation {manifest.generation}; the copy is {checked}"
    )
    _list(violations)
    if violations:
        typer.echo("what is damaged in the copy is damaged in the store: see `check --repair`")
    return not violations


def restore(source: Path, data: Path, *, is_forced: bool) -> None:
    """Put a backup in place."""
    with as_one_line(STOP_IT), progress_on_stderr() as progress:
        keep_in = _aside(data, "replaced") if is_forced else None
        done = restore_backup(source, data, keep_in=keep_in, progress=progress)
    typer.echo(
        f"restored the {done.manifest.kind} store of {_date(done.manifest.made_ms)} to {data}: "
        f"{_entries(done.manifest)}, new generation "
        f"{done.identity.generation}"
    )
    if done.kept_in is not None:
        typer.echo(f"what was there is kept in {done.kept_in}")
    typer.echo(UNCHECKED)


def migrate(store: Store, source: Kind, target: Kind, to_data: Path | None) -> None:
    """Move a store to the other backend."""
    data = store.data
    with as_one_line(STOP_IT), progress_on_stderr() as progress:
        done = migrate_directory(
            data,
            source=source,
            target=target,
            to_data=to_data,
            keep_in=_aside(data, "replaced"),
            keyring=store.keys.read(),
            progress=progress,
        )
    typer.echo(
        f"migrated {done.rows} rows ({_size(done.bytes)}) from {source} to {target} in "
        f"{to_data or data}: head {done.head}, new generation {done.identity.generation}; "
        "compared row by row, and sound"
    )
    if done.kept_in is not None:
        typer.echo(f"the {source} files are kept in {done.kept_in}")
    else:
        typer.echo(f"the {source} store in {data} is as it was: serve only one of them")
    typer.echo(f"configure `store: {target}` before the next start")


def check(store: Store, *, is_repaired: bool, as_json: bool) -> bool:
    """Walk every invariant, repair if asked; whether it is sound now."""
    done: Repaired | None = None
    kept: Path | None = None
    with as_one_line(STOP_IT if is_repaired else CHECK_A_BACKUP):
        data, keyring = store.data, store.keys.read()
        if is_repaired:
            keep_in = _aside(data, "damaged")
            found, done, kept = apart(
                data, lambda: repair_directory(data, keep_in=keep_in, keyring=keyring)
            )
        else:
            found = apart(data, lambda: inspect(data, keyring))
    if as_json:
        typer.echo(json.dumps(_fields(found, done, kept), indent=1))
    else:
        _tell_findings(found)
        if done is not None:
            _tell_repair(done, kept)
        elif found.violations:
            typer.echo("`--repair` sets aside what is damaged; a backup has all of it")
    return done is not None or not found.violations


# -------------------------------------------------------------------------------- telling


def _tell_findings(found: Inspection) -> None:
    count = len(found.violations)
    what = "sound" if not count else f"{count} violation{'s' if count > 1 else ''}"
    typer.echo(f"{found.kind} store in {found.path}: {what}")
    _list(found.violations)
    if found.figures is not None:
        for name, value in _figures(found.figures):
            typer.echo(f"  {name:<22} {value}")
    if found.key_ids:
        typer.echo(f"sealed with: {', '.join(found.key_ids)}")
    if found.unseen:
        typer.echo(
            f"{found.unseen} sealed rows were not looked into: give their keys with --key-file"
        )
    if found.mints:
        typer.echo(f"the next start will mint a new generation: {found.mints}")


def _figures(found: Figures) -> Iterator[tuple[str, str]]:
    """Name and value of each figure, for people."""
    yield "database", found.db_id
    yield "generation", f"{found.generation}, boot {found.boot}"
    yield "file", _size(found.file_bytes)
    yield "head, floor", f"{found.head}, {found.floor}"
    yield "entries", f"{found.entries} in {found.blocks} blocks, {_size(found.history_bytes)}"
    if found.oldest_ms:
        yield "oldest entry", _date(found.oldest_ms)
    yield "needed by sessions", f"above {found.needed_from}"
    yield "topics", f"{found.topics}, {found.marks} with marks, coarse floor {found.coarse}"
    yield (
        "sessions",
        f"{found.sessions}, {found.sessions_attached} attached, {found.sessions_expiring} expire",
    )
    if found.groups:
        yield "groups of shared subscriptions", f"{found.groups}"
    yield "subscriptions", f"{found.subscriptions}, {found.filters} distinct filters"
    yield "deliveries", f"{found.deliveries} under way, {found.held} messages held"
    yield "inbound QoS 2 ids", str(found.inbound)
    yield "retained", f"{found.retained}, {_size(found.retained_bytes)}"
    yield "wills", str(found.wills)
    if found.outbox_messages:
        live = f"{found.outbox_waiting} wait, {found.outbox_claimed} claimed"
        size = _size(found.outbox_bytes)
        yield "outbox", f"{found.outbox_messages}: {live}, {found.outbox_dead} dead letters; {size}"


def _tell_repair(done: Repaired, kept: Path | None) -> None:
    typer.echo("repaired; it is sound now:")
    _list(done.done)
    gone = [reset for reset in done.resets if reset.is_removed]
    told = [reset for reset in done.resets if not reset.is_removed]
    typer.echo(f"{len(gone)} sessions were left out (their next CONNECT begins a new one):")
    _list([_reset(reset) for reset in gone])
    typer.echo(f"{len(told)} sessions will be reset at their next CONNECT (410):")
    _list([_reset(reset) for reset in told])
    if done.minted:
        typer.echo(f"a new generation was minted, since {done.minted}: {UNCHECKED}")
    if kept is not None:
        typer.echo(f"the damaged files, and repair.json with all of this, are kept in {kept}")


def _reset(reset: Reset) -> str:
    return f"{_name(reset.client_id)}: {reset.reason}"


def _name(client_id: bytes) -> str:
    """A client id as text that a terminal can take."""
    return repr(client_id.decode("utf-8", "backslashreplace")) if client_id else "unknown client"


def _list(sentences: list[str]) -> None:
    for sentence in sentences[:LINES_MAX]:
        typer.echo(f"  {sentence}")
    if len(sentences) > LINES_MAX:
        typer.echo(f"  and {len(sentences) - LINES_MAX} more")


def _fields(found: Inspection, done: Repaired | None, kept: Path | None) -> dict[str, Any]:
    fields = asdict(found)
    fields["is_sound"] = done is not None or not found.violations
    fields["repaired"] = None
    if done is not None:
        fields["repaired"] = {
            "done": done.done,
            "lost_entries": done.lost_entries,
            "minted": done.minted,
            "kept_in": str(kept) if kept else None,
            "resets": [
                {
                    "client_id": reset.client_id.decode("utf-8", "backslashreplace"),
                    "reason": reset.reason,
                    "is_removed": reset.is_removed,
                }
                for reset in done.resets
            ],
        }
    return fields


def _entries(found: Manifest) -> str:
    if found.head == found.floor:
        return f"no entries (head {found.head})"
    return f"entries {found.floor + 1} to {found.head}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _date(now_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_ms / 1000))


def _aside(data: Path, why: str) -> Path:
    """Beside the data directory, a name that is free: DATA.replaced-20250131T235959Z."""
    data = data.resolve()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    wanted = data.with_name(f"{data.name}.{why}-{stamp}")
    for number in range(2, 1000):
        if not wanted.exists() and not (data / wanted.name).exists():
            break
        wanted = data.with_name(f"{data.name}.{why}-{stamp}-{number}")
    return wanted


# ------------------------------------------------------------------------- errors, progress


@contextlib.contextmanager
def as_one_line(if_locked: str = "") -> Iterator[None]:
    """Turn what the store refuses into one line. Raises CannotOperate."""
    try:
        yield
    except StoreLocked as error:
        raise CannotOperate(
            f"{error.path} is in use by process {error.pid or 'unknown'}: {if_locked}"
        ) from error
    except (StoreError, OSError) as error:
        raise CannotOperate(" ".join(str(error).split())) from error


@contextlib.contextmanager
def progress_on_stderr() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on stderr: a bar on a terminal, else plain lines."""
    if sys.stderr.isatty():
        with _bar() as tell:
            yield tell
        return
    last: dict[str, int] = {}

    def tell_lines(step: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if last.get(step, -1) < tenth and (tenth == 10 or total > 64 << 20):
            last[step] = tenth
            typer.echo(f"{step}: {10 * tenth}%", err=True)

    yield tell_lines


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console  # noqa: PLC0415 - for terminals only
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def tell(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield tell
