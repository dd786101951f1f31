"""Where a command finds the store it is about: ``--data``, ``--key-file``, ``--key-env``.

What cannot be done is told in one line, with exit code 1; wrong arguments have 2.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, NamedTuple, ParamSpec

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.keyring import Keyring

__all__ = ["DEFAULT_DATA", "DataOption", "Keys", "Store", "at_store", "told"]

P = ParamSpec("P")

DEFAULT_DATA = Path("amqtt-durable-data")

DataOption = Annotated[Path, typer.Option("--data", help="Data directory.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(help="Keys of a sealed store, in a file (see `keygen`).", show_default=False),
]
KeyEnvOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Its keys, in an environment variable.", show_default=False),
]


class Keys(NamedTuple):
    """Where the keys of a sealed store are, if they are anywhere."""

    file: Path | None = None
    variable: str | None = None

    def read(self) -> Keyring | None:
        """Raises KeysUnusable."""
        from storage.keyring import read_keys  # noqa: PLC0415 - not for `--help`

        return read_keys(file=self.file, variable=self.variable or "")


class Store(NamedTuple):
    """A data directory, and the keys of what is in it."""

    data: Path
    keys: Keys


def at_store(command: Callable[Concatenate[Store, P], None]) -> Callable[..., None]:
    """Give a command the three options, and hand it the Store that they name."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with told():
            given: dict[str, Any] = {name: kwargs.pop(name) for name in shared}
            command(_store(**given), *args, **kwargs)

    shared = inspect.signature(_store, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [*own, *shared.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _store(
    data: DataOption = DEFAULT_DATA,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> Store:
    if key_file is not None and key_env:
        raise typer.BadParameter("--key-file and --key-env are both given; give one")
    return Store(data, Keys(key_file, key_env))


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Tell what cannot be done in one line, with exit code 1."""
    from broker_ext.cli.errors import CannotOperate  # noqa: PLC0415

    try:
        yield
    except CannotOperate as exc:
        typer.echo(f"amqtt-durable: {exc}", err=True)
        raise typer.Exit(1) from exc
