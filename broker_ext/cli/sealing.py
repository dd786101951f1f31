"""`keygen` and `rekey`: making keys, and sealing everything with the newest one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import typer

from broker_ext.cli.calling import call
from broker_ext.cli.errors import CannotOperate, NoBroker
from broker_ext.cli.operations import as_one_line, progress_on_stderr
from storage.keyring import add_key
from storage.rewriting import rekey as rekey_directory

if TYPE_CHECKING:
    from pathlib import Path

    from broker_ext.cli.store import Store

__all__ = ["keygen", "rekey", "tell"]

POLL_S: Final = 0.2


def keygen(file: Path, key_id: str | None) -> str:
    """Make a key and put it first in a key file; its id."""
    key_id = key_id or time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())
    with as_one_line():
        add_key(file, key_id)
    return key_id


def rekey(store: Store, *, seal_topics: bool) -> dict[str, Any]:
    """Seal everything with the first key, in the broker that serves the store or, where none does,
    in a new file. What was done."""
    try:
        progress = call(store.data, "rekey", seal_topics=seal_topics)
    except NoBroker:
        return _offline(store, seal_topics=seal_topics)
    if any(store.keys):
        typer.echo("a broker is running, and uses the keys that it is configured with", err=True)
    return {"online": True, **_watch(store.data, progress)}


def _watch(data: Path, progress: dict[str, Any]) -> dict[str, Any]:
    """Follow the broker's work to its end. It goes on whether somebody looks or not."""
    told = ""
    while progress["state"] == "running":
        step = f"{progress['space'] or 'begun'}: {progress['looked_at']} rows"
        if progress["space"] == "history":
            step += f", {progress['through']:.0%}"
        if step != told:
            told = step
            typer.echo(step, err=True)
        time.sleep(POLL_S)
        progress = call(data, "rekey_progress")
    if progress["state"] != "done":
        raise CannotOperate("it was not finished; the broker's log says why. Run it again")
    return progress


def _offline(store: Store, *, seal_topics: bool) -> dict[str, Any]:
    with as_one_line("stop the broker first"), progress_on_stderr() as progress:
        keyring = store.keys.read()
        if keyring is None:
            raise CannotOperate(
                f"no broker is running on {store.data}: name the keys with --key-file or --key-env"
            )
        done = rekey_directory(store.data, keyring, seal_topics=seal_topics, progress=progress)
    return {"online": False, **asdict(done), "key_ids": [done.key_id]}


def tell(done: dict[str, Any], *, as_json: bool) -> None:
    """Print what was done."""
    if as_json:
        typer.echo(json.dumps(done, indent=1))
        return
    typer.echo(
        f"everything is sealed with key {done['key_id']}, no other one is needed: "
        f"{done['written']} rows were sealed anew"
    )
    if done["unreadable"]:
        typer.echo(f"{done['unreadable']} rows do not open with any key: see `check`")
    if done["online"]:
        typer.echo(
            "free space may hold older rows until it is used again; `rekey` without a broker"
        )
        typer.echo("leaves none, since it writes the store anew")
