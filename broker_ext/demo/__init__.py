"""`amqtt-durable demo`: a real broker is killed in mid-traffic, and what was lost is counted.

script plays it, on broker (the process), fleet and gateway (paho clients); readings are what is
published, facts the judge (pure), show the display. In act two a webhook's receiver goes away and
comes back: receiver, watch (a paho client) and hooks (the judge).

Exit codes: 0 every promise kept; 1 one broken, with the reasons; 3 the demo could not be carried
out; 130 or 143 ended by SIGINT or SIGTERM. The temporary directory with the broker's log, its
configuration, its data and findings.txt stays when the code is 1 or 3, and is named.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from broker_ext.cli.serving import ANONYMOUS, PLUGIN, plugin_defaults
from broker_ext.demo.broker import DemoFailed
from broker_ext.demo.receiver import PREFIX, Receiver
from broker_ext.demo.script import SINK, Outcome, Stage, play
from broker_ext.demo.show import Lines, LiveScreen, Nothing, as_json, facts_table

if TYPE_CHECKING:
    from broker_ext.demo.show import Screen

__all__ = ["Options", "run"]

BROKEN = 1
NOT_CARRIED_OUT = 3
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is asked to do. store: None is the plugin's default; seed: None is a new one."""

    store: str | None
    seconds: float
    sensors: int
    rate: int
    seed: int | None
    as_json: bool
    plain: bool


def run(options: Options) -> int:
    """Play the demo, print the facts, return the exit code."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    err = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="amqtt-durable-demo-"))
    code = INTERRUPTED
    try:
        code = _play_and_print(options, folder, Console(), err)
    except KeyboardInterrupt:
        err.print("interrupted")
    finally:
        if code in {BROKEN, NOT_CARRIED_OUT}:
            err.print(f"Log, findings and data: {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _play_and_print(options: Options, folder: Path, out: Console, err: Console) -> int:
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    try:
        outcome = _play(options, seed, folder, _screen(out, options))
    except DemoFailed as exc:
        text = f"The demo could not be carried out (seed {seed}): {exc}"
        err.print(text, highlight=False, markup=False, soft_wrap=True)
        return NOT_CARRIED_OUT
    if options.as_json:
        asked = asdict(options) | {"seed": seed, "store": _store(options)}
        sys.stdout.write(as_json(outcome, asked) + "\n")
    else:
        out.print()
        out.print(facts_table(outcome, f"{_name(options)}, seed {seed}"))
    if not outcome.reasons():
        return 0
    findings = "\n".join([*outcome.reasons(), *outcome.facts.findings])
    (folder / "findings.txt").write_text(findings + "\n", encoding="utf-8")
    return BROKEN


def _play(options: Options, seed: int, folder: Path, screen: Screen) -> Outcome:
    receiver = None
    if not options.plain:
        receiver = Receiver(secrets.token_hex(16).encode())
        receiver.start()
        (folder / "secret").write_bytes(receiver.secret)
    with (
        screen,
        Stage(
            folder,
            _plugins(options, folder, receiver),
            screen,
            sensors=options.sensors,
            rate=options.rate,
            seed=seed,
            receiver=receiver,
        ) as stage,
    ):
        return play(stage, sensors=options.sensors, duration_ms=int(options.seconds * 1000))


def _plugins(options: Options, folder: Path, receiver: Receiver | None) -> dict[str, Any]:
    """Give the `plugins` section that a user of `amqtt -c broker.yaml` would write."""
    plugins: dict[str, Any] = {ANONYMOUS: {"allow_anonymous": True}}
    if receiver is not None:
        sink = {
            "type": "webhook",
            "filters": [f"{PREFIX}#"],
            "url": receiver.url,
            "secret_file": str(folder / "secret"),
        }
        ours = {"data": str(folder / "data"), "sinks": {SINK: sink}}
        plugins[PLUGIN] = ours | ({"store": options.store} if options.store else {})
    return plugins


def _screen(out: Console, options: Options) -> Screen:
    if options.as_json:
        return Nothing()
    return LiveScreen(out) if out.is_terminal else Lines(out)


def _store(options: Options) -> str | None:
    return None if options.plain else options.store or str(plugin_defaults().get("store"))


def _name(options: Options) -> str:
    return (
        "amqtt without our plugin" if options.plain else f"amqtt-durable, store {_store(options)}"
    )


def _on_sigterm(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(TERMINATED)  # so that the processes are cleaned up on the way out
