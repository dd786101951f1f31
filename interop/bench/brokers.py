"""The brokers that are compared: how each is started, and what its process costs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from interop.bench.client import HOST, Link, Lost
from storage.keyring import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["STORES", "Broker", "Kind", "fresh", "installed", "kind_of_store", "rss_bytes"]

STORES: Final = ("lmdb", "sqlite")
START_S: Final = 120.0
STOP_S: Final = 20.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SERVE: Final = (sys.executable, "-c", "from broker_ext.cli import main; main()", "serve")
_ROOT: Final = Path(__file__).resolve().parents[2]

_MOSQUITTO: Final = """\
listener {port} {host}
allow_anonymous true
persistence true
persistence_location {directory}/
max_queued_messages 0
max_queued_bytes 0
user root
"""


@dataclass(frozen=True)
class Kind:
    """One column of the table. note: its setting, in a few words.

    slow: it gets smaller sizes where its cost grows with what is queued.
    """

    name: str
    note: str
    program: str
    store: str = ""
    settings: str = ""
    slow: bool = False
    sealed: bool = False

    def command(self, directory: Path, port: int, options: dict[str, Any]) -> Sequence[str]:
        """What starts it. Writes its configuration into the directory."""
        if self.store:
            config = directory / "broker.yaml"
            plugins = {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
                "broker_ext.DurableSessionPlugin": options,
            }
            config.write_text(json.dumps({"plugins": plugins}))
            data = ["--data", str(directory / "data"), "--store", self.store]
            if self.sealed:
                keys = directory / "keys"
                if not keys.exists():
                    add_key(keys, "bench")
                data += ["--key-file", str(keys), "--seal-topics"]
            return (*_SERVE, *data, "--bind", f"{HOST}:{port}", "--config", str(config))
        if self.program == "amqtt":
            config = directory / "broker.yaml"
            auth = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False}}
            listeners = {"default": {"type": "tcp", "bind": f"{HOST}:{port}"}}
            config.write_text(json.dumps({"listeners": listeners, "plugins": auth}))
            return (sys.executable, "-m", "amqtt.scripts.broker_script", "-c", str(config))
        config = directory / "mosquitto.conf"
        text = _MOSQUITTO.format(port=port, host=HOST, directory=directory) + self.settings
        config.write_text(text)
        return (self.program, "-c", str(config))


def kind_of_store(store: str, *, sealed: bool = False) -> Kind:
    """Our broker on one of its stores."""
    name, note = f"durable {store}", "acknowledges after fsync"
    if sealed:
        name, note = f"{name} sealed", f"{note}; payloads and topics sealed"
    return Kind(name, note, sys.executable, store=store, sealed=sealed)


def installed(
    stores: Sequence[str], sqlite_plugin: str | None = None, *, sealed: bool = False
) -> list[Kind]:
    """Every broker that can be started here.

    sealed: ours once more, sealed.
    sqlite_plugin: of Mosquitto 2.1, its ``persist-sqlite`` library; then that is a column, too.
    """
    kinds = [kind_of_store(store) for store in stores]
    if sealed:
        kinds += [kind_of_store(store, sealed=True) for store in stores]
    mosquitto = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/sbin")
    if mosquitto:
        kinds.append(Kind("mosquitto", "in RAM, written at exit", mosquitto))
        autosave = "autosave_interval 1\n"
        note = "in RAM, written about once a second"
        kinds.append(Kind("mosquitto autosave", note, mosquitto, settings=autosave))
        if sqlite_plugin:
            durable = f"plugin {sqlite_plugin}\nplugin_opt_sync full\nplugin_opt_flush_period 0\n"
            note = "persist-sqlite, sync full, flush 0"
            kinds.append(Kind("mosquitto sqlite", note, mosquitto, settings=durable))
    if importlib.util.find_spec("amqtt"):
        kinds.append(Kind("amqtt", "in RAM, acknowledges before it routes", "amqtt", slow=True))
    return kinds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def rss_bytes(pid: int) -> tuple[int, int]:
    """Resident memory of a process: all of it; and without pages of files, which a store maps."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "RssAnon"):
            found[key] = int(value.split()[0]) * 1024
    return found["VmRSS"], found["RssAnon"]


class Broker:
    """A broker process on a data directory. start_s: until it answered a CONNECT."""

    def __init__(self, kind: Kind, directory: Path, options: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.port = _free_port()
        self._log = directory / "broker.log"
        command = kind.command(directory, self.port, options or {})
        began = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait(began + START_S)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - began

    def _wait(self, end: float) -> None:
        while True:
            if self._process.poll() is not None:
                last = self._log.read_text(errors="replace")[-500:]
                raise Lost(f"{self.kind.name} ended with {self._process.returncode}: {last}")
            try:
                Link(self.port, "probe", clean=True, timeout_s=5).leave()
            except Lost:
                if time.monotonic() > end:
                    raise Lost(f"{self.kind.name} does not listen") from None
                time.sleep(0.005)
            else:
                return

    def cpu_s(self) -> float:
        """CPU seconds it has used, user and system."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def rss(self) -> tuple[int, int]:
        """See rss_bytes."""
        return rss_bytes(self._process.pid)

    def kill(self) -> None:
        """SIGKILL, and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)

    def stop(self) -> None:
        """SIGTERM; SIGKILL if that does not help."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()


@contextlib.contextmanager
def fresh(kind: Kind, options: dict[str, Any] | None = None) -> Iterator[Broker]:
    """A broker with an empty data directory, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        broker = Broker(kind, Path(directory), options)
        try:
            yield broker
        finally:
            broker.kill()
