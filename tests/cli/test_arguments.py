"""What commands say of themselves, and of arguments that they cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from broker_ext.cli import app, outbox_app

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def commands() -> list[list[str]]:
    """Every command there is."""
    top = [[str(one.name or one.callback.__name__)] for one in app.registered_commands]  # type: ignore[union-attr]
    return [*top, *(["outbox", str(one.name)] for one in outbox_app.registered_commands)]


def run(*arguments: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, arguments)


@pytest.mark.parametrize("command", [[], ["outbox"], *commands()], ids=" ".join)
@pytest.mark.parametrize("columns", [40, 80])
def test_help_is_whole_and_plain(command: list[str], columns: int) -> None:
    told = run(*command, "--help", columns=columns)
    assert told.exit_code == 0
    assert "\x1b" not in told.output
    assert "…" not in told.output
    if columns == 80:
        assert "..." not in told.output.replace("[ID]...", "").replace("[ARGS]...", "")
        assert ("--data" in told.output) == ("default: amqtt-durable-data" in told.output)


def test_the_options_of_a_store_are_the_same_everywhere(tmp_path: Path) -> None:
    for command in commands():
        told = run(*command, "--help").output
        assert ("--key-env" in told) <= ("--key-file" in told) <= ("--data" in told)
    missing = str(tmp_path / "none")
    both = ("--data", missing, "--key-file", "k", "--key-env", "K")
    for arguments in (["check"], ["rekey"], ["outbox", "audit"], ["outbox", "show", "1"]):
        told = run(*arguments, *both).output
        assert "--key-file and --key-env are both given" in told


def test_the_version_is_told() -> None:
    told = run("--version")
    assert told.exit_code == 0
    assert told.output.startswith("amqtt-durable ")
    assert ", amqtt 0.12" in told.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--bind", "localhost:99999"],
        ["serve", "--bind", "::1:1883"],
        ["migrate", "--from", "lmdb", "--to", "lmdb"],
        ["check", "--key-file", "a", "--key-env", "b"],
        ["outbox", "reissue"],
        ["outbox", "reissue", "1", "--all", "hook"],
        ["outbox", "reissue", "one"],
        ["outbox", "show", "0"],
        ["outbox", "dead-letters", "--limit", "0"],
        ["kick"],
        ["demo", "--seconds", "0"],
        ["bogus"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_told_with_exit_code_2(arguments: list[str]) -> None:
    told = run(*arguments)
    assert told.exit_code == 2
    assert "Error: " in told.output
    assert "Traceback" not in told.output


@pytest.mark.parametrize(
    "arguments",
    [
        *(["check"], ["check", "--repair"], ["backup", "copy"], ["rekey", "--key-env", "NONE"]),
        *(["migrate", "--from", "lmdb", "--to", "sqlite"], ["sessions"], ["groups"], ["kick", "a"]),
        *(["outbox", name] for name in ("backlog", "dead-letters", "purge", "audit")),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_where_nothing_is_a_command_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NONE", "1 " + "A" * 43 + "=")
    data = tmp_path / "data"
    if kind == "empty":
        data.mkdir()
    elif kind == "file":
        data.write_text("no directory")
    told = run(*arguments, "--data", str(data))
    assert told.exit_code == 1
    assert told.output.count("\n") == 1
    assert told.output.startswith("amqtt-durable: ")
    assert str(data) in told.output
    assert "no broker is running" in told.output or "no database" in told.output
