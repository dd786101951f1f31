"""The demo as a user runs it: real broker processes, real clients, and an honest verdict."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.processes import COMMAND, run

if TYPE_CHECKING:
    from pathlib import Path

SHORT = ("--seconds", "3", "--sensors", "5", "--rate", "300", "--seed", "7")


@pytest.fixture(autouse=True)
def _temporary_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "0"],
        ["--sensors", "0"],
        ["--sensors", "1000"],
        ["--rate", "0"],
        ["--store", "memory"],
        ["--seed", "x"],
    ],
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str]) -> None:
    assert run("demo", *arguments).code == 2


@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
def test_a_killed_broker_loses_nothing(tmp_path: Path, store: str) -> None:
    ended = run("demo", "--store", store, "--json", *SHORT)
    facts = json.loads(ended.out)
    assert facts["reasons"] == []
    assert ended.code == 0
    for qos in ("qos1", "qos2"):
        counted = facts[qos]
        assert counted["published"] == counted["acknowledged"] == counted["delivered"] > 200
        assert counted["lost"] == counted["duplicated"] == counted["out_of_order"] == 0
    assert facts["session_present"] is True
    assert facts["sensor_returns"] == 5
    assert facts["backlog"] > 100
    assert facts["run"]["store"] == store
    hooks = facts["webhook"]
    assert hooks["published"] == hooks["acknowledged"] == hooks["delivered"] == 301
    assert hooks["waited"] > 100
    assert hooks["throttled"] == hooks["dead_letters"] == hooks["reissued"] == 1
    assert hooks["lost"] == hooks["delivered_again"] == hooks["too_early"] == 0
    assert list(tmp_path.iterdir()) == []


def test_without_the_plugin_the_loss_is_counted_and_the_log_is_kept(tmp_path: Path) -> None:
    ended = run("demo", "--plain", *SHORT)
    assert ended.code == 1
    assert "acknowledged and lost" in ended.out
    assert "session present was 0" in ended.out
    (folder,) = tmp_path.iterdir()
    assert str(folder) in ended.err
    assert (folder / "broker.log").stat().st_size > 0
    assert "lost: sensor " in (folder / "findings.txt").read_text()


def test_a_broker_that_cannot_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'amqtt.scripts.broker_script' in sys.orig_argv:\n"
        "    print('no broker today', flush=True)\n"
        "    os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = run("demo", "--plain", *SHORT)
    assert ended.code == 3
    assert "could not be carried out (seed 7): the broker ended at once" in ended.err
    assert "no broker today" in ended.err
    assert "Log, findings and data: " in ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_broker_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--plain", *SHORT], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "the sensors publish" in line:
                break
        demo.send_signal(number)
        assert demo.wait(20) == 128 + number
    assert list(tmp_path.iterdir()) == []
