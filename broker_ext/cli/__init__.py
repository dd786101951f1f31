"""The command line `amqtt-durable`: `serve` runs a durable broker, `demo` shows what it is for.

`backup`, `restore`, `migrate`, `check` and `rekey` are what an operator does to a data directory;
`sessions`, `groups`, `figures` and `kick` ask the broker that serves it; `outbox ...` asks it, or
the store itself.

Each command is declared here and imports what it needs when it runs: `serve` must listen soon,
so it never pays for paho or rich, and `--help` pays for neither. A further command is one more
`@app.command()` whose body imports its own module.

Exit codes: 0 done; 1 it could not be done, a check found damage (and did not repair it), or the
demo counted a broken promise; 2 wrong arguments; 3 the demo could not be carried out; 130
interrupted.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from broker_ext.cli.store import DEFAULT_DATA, DataOption, Store, at_store, told

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # which cuts words off on a narrow terminal, and eats "[default: ...]"
    pretty_exceptions_enable=False,  # a traceback with local variables could show a payload (P13)
)


class Kind(StrEnum):
    """Where history is kept."""

    LMDB = "lmdb"
    SQLITE = "sqlite"


class Durability(StrEnum):
    """What a commit waits for: the disk, or the operating system."""

    FSYNC = "fsync"
    OS = "os"


class LogLevel(StrEnum):
    """Levels of Python's logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"amqtt-durable {version('amqtt-durable')}, amqtt {version('amqtt')}")
        raise typer.Exit


@app.callback()
def _amqtt_durable(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions.", callback=_tell_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Durable MQTT sessions for the amqtt broker."""


@app.command()
def serve(
    data: Annotated[
        Path | None,
        typer.Option(help=f"Data directory.  [default: {DEFAULT_DATA}]", show_default=False),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen: 127.0.0.1:1883, [::1]:1883, or :1883 for every interface. "
            "Port 0 takes a free one.  [default: 127.0.0.1:1883]",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Kind | None,
        typer.Option(help="Store of the history.  [default: sqlite]", show_default=False),
    ] = None,
    durability: Annotated[
        Durability | None,
        typer.Option(
            help="What a commit waits for: the disk (fsync) or the system (os).  [default: fsync]",
            show_default=False,
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Seal messages on disk with the keys in this file (see `keygen`)."),
    ] = None,
    seal_topics: Annotated[
        bool, typer.Option("--seal-topics", help="Seal the names of topics, too.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="An amqtt YAML file; the options above override it."),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="Level of every logger. By default amqtt's own chatter is kept quiet."),
    ] = None,
) -> None:
    """Run the broker until SIGTERM or SIGINT.

    Without --config any user is accepted, therefore on loopback only.
    """
    from broker_ext.cli import running, serving  # noqa: PLC0415 - not for `--help`
    from broker_ext.cli.errors import CannotServe  # noqa: PLC0415

    running.set_up_logging(log_level.value if log_level else None)
    try:
        where = serving.parse_bind(bind) if bind is not None else None
    except CannotServe as exc:
        raise typer.BadParameter(str(exc), param_hint="--bind") from exc
    try:
        wanted = serving.serving_config(
            serving.read_yaml(config) if config else {},
            data=data,
            bind=where,
            store=store.value if store else None,
            durability=durability.value if durability else None,
            key_file=key_file,
            seal_topics=seal_topics,
        )
        running.run(wanted)
    except CannotServe as exc:
        typer.echo(f"amqtt-durable: {exc}", err=True)
        raise typer.Exit(1) from exc


@app.command()
def demo(
    store: Annotated[Kind | None, typer.Option(help="Store of the broker.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="How long the sensors publish.")
    ] = 12,
    sensors: Annotated[int, typer.Option(min=1, max=200, help="How many sensors.")] = 20,
    rate: Annotated[
        int, typer.Option(min=1, max=10_000, help="Readings a second of the whole fleet.")
    ] = 1000,
    seed: Annotated[
        int | None, typer.Option(help="Repeats the readings and the moments of an earlier run.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the facts as one JSON object, and nothing else.")
    ] = False,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Without our plugin, to see what amqtt does by itself."),
    ] = False,
) -> None:
    """Kill a real broker in mid-traffic and count what was lost.

    A fleet of sensors publishes at QoS 1 and 2 to a gateway that is cut off; the broker is
    killed with SIGKILL and started again on its data; the gateway comes back. Exits with 1 when
    anything acknowledged was lost, duplicated after acknowledgement or out of order, or when the
    gateway's session was not there.
    """
    from broker_ext import demo as the_demo  # noqa: PLC0415 - paho and rich are for the demo only

    options = the_demo.Options(
        store=store.value if store else None,
        seconds=seconds,
        sensors=sensors,
        rate=rate,
        seed=seed,
        as_json=as_json,
        plain=plain,
    )
    raise typer.Exit(the_demo.run(options))


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LimitOption = Annotated[int, typer.Option(min=1, help="How many at most.")]


@app.command()
@at_store
def backup(
    store: Store,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the copy.")],
    check_copy: Annotated[
        bool, typer.Option("--check/--no-check", help="Check the copy before it is reported.")
    ] = True,
) -> None:
    """Copy the store to DIR, also while a broker serves it.

    The copy is one committed state. DIR appears when it is complete and on disk.
    """
    from broker_ext.cli import operations  # noqa: PLC0415 - not for `--help`

    if not operations.backup(store, target, is_checked=check_copy):
        raise typer.Exit(1)


@app.command()
def restore(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="What `backup` has made.")],
    data: DataOption = DEFAULT_DATA,
    force: Annotated[
        bool,
        typer.Option("--force", help="Set a store that is there aside, as DATA.replaced-<time>."),
    ] = False,
) -> None:
    """Put a backup in the place of the store, while no broker runs.

    It is in a new generation then: sessions are resumed unchecked from where the backup has them.
    """
    with told():
        from broker_ext.cli import operations  # noqa: PLC0415 - not for `--help`

        operations.restore(backup, data, is_forced=force)


@app.command()
@at_store
def migrate(
    store: Store,
    source: Annotated[Kind, typer.Option("--from", help="What the store is.")],
    target: Annotated[Kind, typer.Option("--to", help="What it is to be.")],
    to_data: Annotated[
        Path | None,
        typer.Option(help="Put the new store there, and leave the old one.", show_default=False),
    ] = None,
) -> None:
    """Move the store to the other backend, while no broker runs.

    The new one is compared with the old one and checked. The old files are kept beside it. A crash
    in the middle leaves them untouched.
    """
    from broker_ext.cli import operations  # noqa: PLC0415 - not for `--help`

    if source == target:
        raise typer.BadParameter("--from and --to must differ")
    operations.migrate(store, source.value, target.value, to_data)


@app.command()
@at_store
def check(
    store: Store,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Set aside what is damaged, and say who will be reset."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a store that no broker serves, and print its figures.

    Exits with 0 if it is sound (or was repaired), else 1.
    """
    from broker_ext.cli import operations  # noqa: PLC0415 - not for `--help`

    if not operations.check(store, is_repaired=repair, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Key file, made if it is missing.")],
    key_id: Annotated[
        str | None,
        typer.Option("--id", help="Id of the key, no secret.  [default: the time]"),
    ] = None,
) -> None:
    """Make a key and put it first in FILE.

    What is stored from then on is sealed with it. Keys that are in FILE stay: they are needed until
    `rekey` is done. Only its owner can read it.
    """
    with told():
        from broker_ext.cli import sealing  # noqa: PLC0415 - not for `--help`

        typer.echo(f"key {sealing.keygen(file, key_id)} is the first one in {file}")


@app.command()
@at_store
def rekey(
    store: Store,
    seal_topics: Annotated[
        bool, typer.Option("--seal-topics", help="Seal the names of topics, too, from now on.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Seal everything in the store with the first of its keys.

    A running broker reads its keys again from where its configuration has them. Without a broker,
    name them with --key-file or --key-env; the store is then written anew. When it is done, no
    other key is needed any more.
    """
    from broker_ext.cli import sealing  # noqa: PLC0415 - not for `--help`

    sealing.tell(sealing.rekey(store, seal_topics=seal_topics), as_json=as_json)


UnmaskOption = Annotated[
    bool, typer.Option("--unmask", help="Print client ids, users and destinations in full.")
]


@app.command()
def sessions(
    data: DataOption = DEFAULT_DATA,
    unmask: UnmaskOption = False,
    limit: LimitOption = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the sessions of a running broker.

    lag: entries of the history behind its cursor; since: when it was left, or made.
    """
    with told():
        from broker_ext.cli import watching  # noqa: PLC0415 - not for `--help`

        watching.sessions(data, is_unmasked=unmask, as_json=as_json, limit=limit)


@app.command()
def groups(
    data: DataOption = DEFAULT_DATA,
    limit: LimitOption = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the groups of shared subscriptions of a running broker.

    connected, stored: members that are connected, and whose session is stored; lag: entries of the
    history behind its cursor; waiting: messages that nobody has room for; under way: with members.
    """
    with told():
        from broker_ext.cli import watching  # noqa: PLC0415 - not for `--help`

        watching.groups(data, as_json=as_json, limit=limit)


@app.command()
def figures(data: DataOption = DEFAULT_DATA, as_json: JsonOption = False) -> None:
    """Print what a running broker has counted since its start.

    writing: False while the store cannot write; waiting_bytes: what waits for the disk.
    """
    with told():
        from broker_ext.cli import watching  # noqa: PLC0415 - not for `--help`

        watching.figures(data, as_json=as_json)


@app.command()
def kick(
    client_id: Annotated[str, typer.Argument(metavar="CLIENT_ID")],
    data: DataOption = DEFAULT_DATA,
) -> None:
    """Close a client's connection. Its session is kept, and it may come back at once.

    Exits with 1 if it is not connected.
    """
    with told():
        from broker_ext.cli import watching  # noqa: PLC0415 - not for `--help`

        if not watching.kick(data, client_id):
            raise typer.Exit(1)


outbox_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(outbox_app, name="outbox")


@outbox_app.callback()
def _outbox() -> None:
    """What sinks have to send, and dead letters.

    It is told by the broker, or read from the store where none runs. Destinations and client ids
    are masked. Without a broker, a sealed store needs its keys.
    """


QueueOption = Annotated[str | None, typer.Option("--queue", help="Of this sink only.")]


@outbox_app.command("backlog")
@at_store
def outbox_backlog(store: Store, unmask: UnmaskOption = False, as_json: JsonOption = False) -> None:
    """Count messages by state, and how long the oldest has been due."""
    from broker_ext.cli import outbox  # noqa: PLC0415 - not for `--help`

    with outbox.Desk(store) as desk:
        outbox.backlog(desk, is_unmasked=unmask, as_json=as_json)


@outbox_app.command("dead-letters")
@at_store
def outbox_dead_letters(
    store: Store,
    queue: QueueOption = None,
    limit: LimitOption = 1000,
    unmask: UnmaskOption = False,
    as_json: JsonOption = False,
) -> None:
    """List messages that are not tried again."""
    from broker_ext.cli import outbox  # noqa: PLC0415 - not for `--help`

    with outbox.Desk(store) as desk:
        outbox.dead_letters(desk, queue, limit=limit, is_unmasked=unmask, as_json=as_json)


@outbox_app.command("show")
@at_store
def outbox_show(
    store: Store,
    message_id: Annotated[int, typer.Argument(metavar="ID", min=1)],
    payload: Annotated[bool, typer.Option("--payload", help="Its payload, too: base64.")] = False,
    unmask: UnmaskOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell everything about one message."""
    from broker_ext.cli import outbox  # noqa: PLC0415 - not for `--help`

    with outbox.Desk(store) as desk:
        outbox.show(desk, message_id, has_payload=payload, is_unmasked=unmask, as_json=as_json)


@outbox_app.command("reissue")
@at_store
def outbox_reissue(
    store: Store,
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID")] = None,
    all_of: Annotated[
        str | None, typer.Option("--all", metavar="SINK", help="Every dead letter of a sink.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Have dead letters sent again, each as a fresh message.

    The audit has who asked. Exits with 1 if one of them was refused.
    """
    from broker_ext.cli import outbox  # noqa: PLC0415 - not for `--help`

    if bool(ids) == (all_of is not None):
        raise typer.BadParameter("name the messages, or a sink with --all")
    with outbox.Desk(store) as desk:
        if not outbox.reissue(desk, ids or [], all_of, as_json=as_json):
            raise typer.Exit(1)


@outbox_app.command("purge")
@at_store
def outbox_purge(
    store: Store,
    queue: QueueOption = None,
    done_days: Annotated[
        float, typer.Option(min=0, help="Keep what was delivered or expired for so long.")
    ] = 30,
    dead_days: Annotated[float, typer.Option(min=0, help="Keep dead letters for so long.")] = 90,
    as_json: JsonOption = False,
) -> None:
    """Delete messages that ended long ago."""
    from broker_ext.cli import outbox  # noqa: PLC0415 - not for `--help`

    with outbox.Desk(store) as desk:
        outbox.purge(desk, queue, done_days=done_days, dead_days=dead_days, as_json=as_json)


@outbox_app.command("audit")
@at_store
def outbox_audit(store: Store, as_json: JsonOption = False) -> None:
    """List who had which dead letter reissued."""
    from broker_ext.cli import outbox  # noqa: PLC0415 - not for `--help`

    with outbox.Desk(store) as desk:
        outbox.audit(desk, as_json=as_json)


def main() -> None:
    """Entry point of the console script `amqtt-durable`."""
    app()
