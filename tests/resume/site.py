"""A broker process on a data directory, from one death to the next, and paho clients for it.

The broker is what a user runs: ``amqtt -c broker.yaml`` (as a module), with the plugin's options
in the YAML. Between two processes the data directory may be changed, copied and put back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import paho.mqtt.client as mqtt
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from tests.storage.engine.raw import Files

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

    from tests.storage.engine.raw import Kind

__all__ = ["HOST", "Device", "Got", "Site", "until"]

HOST: Final = "127.0.0.1"
PATIENCE_S: Final = 20.0
WITNESS: Final = Path(__file__).with_name("witness.py")
PORTS: Final = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections."""


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that another process or thread does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def free_port() -> int:
    """Give a port that nobody listens on."""
    for port in random.SystemRandom().sample(PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise AssertionError("no free port")


class Site:
    """One broker's place on the disk: configuration, data, log, and what the witness wrote."""

    def __init__(self, folder: Path, kind: Kind, **options: Any) -> None:
        self.folder = folder
        self.kind: Kind = kind
        self.options = options
        self.port = free_port()
        self.devices: list[Device] = []
        self._process: subprocess.Popen[bytes] | None = None
        shutil.copy(WITNESS, folder / "witness.py")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for device in self.devices:
            device.down()
        self.kill()

    # ------------------------------------------------------------------------ the process

    def start(self, **options: Any) -> Self:
        """Start a process and wait until it listens. options: replace those of before."""
        self.options |= options
        amqtt = {k: v for k, v in self.options.items() if k == "session_expiry_interval"}
        witness = {k: v for k, v in self.options.items() if k == "prune_often"}
        durable = {k: v for k, v in self.options.items() if k not in amqtt | witness}
        config = self.folder / "broker.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "listeners": {"default": {"type": "tcp", "bind": f"{HOST}:{self.port}"}},
                    "plugins": {
                        "amqtt.plugins.authentication.AnonymousAuthPlugin": {
                            "allow_anonymous": True
                        },
                        "broker_ext.DurableSessionPlugin": {
                            "data": str(self.data),
                            "store": self.kind,
                            **durable,
                        },
                        "witness.Witness": witness,
                    },
                    **amqtt,
                }
            )
        )
        (self.folder / "figures.json").unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "amqtt.scripts.broker_script", "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )
        until(self._listens, "the broker does not listen")
        return self

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
            return (self.folder / "figures.json").exists()
        return False

    def stop(self) -> Self:
        """In good order (SIGINT, all that amqtt's script knows)."""
        return self._end(signal.SIGINT)

    def kill(self) -> Self:
        """SIGKILL."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> Self:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
            self._process = None
        return self

    def restart(self, **options: Any) -> Self:
        return self.stop().start(**options)

    # --------------------------------------------------------------------------- the data

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def files(self) -> Files:
        """The rows, while no process runs."""
        assert self._process is None
        return Files(self.kind, self.data)

    def back_up(self) -> Path:
        """Copy the data directory of a stopped broker."""
        assert self._process is None
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.data, copy)
        return copy

    def restore(self, copy: Path) -> None:
        """Put a copy of the database in the place of what is there, as an operator does with
        ``cp``: the sidecar, which is not the database, stays."""
        assert self._process is None
        sidecar = self.files.sidecar.read_bytes()
        shutil.rmtree(self.data)
        shutil.copytree(copy, self.data)
        self.files.sidecar.write_bytes(sidecar)

    # ------------------------------------------------------------------------- what is told

    @property
    def log_file(self) -> Path:
        return self.folder / "broker.log"

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def logged(self, *words: str) -> int:
        """Lines of the log that have all these words."""
        return sum(all(word in line for word in words) for line in self.log().splitlines())

    @property
    def figures(self) -> dict[str, Any]:
        """Counters of the process that runs."""
        figures: dict[str, Any] = json.loads((self.folder / "figures.json").read_text())
        return figures

    def resets(self) -> list[dict[str, Any]]:
        """What ``on_durable_session_reset`` was called with, over all processes."""
        file = self.folder / "resets.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def counted(self, **expected: Any) -> None:
        """Wait until the counters are as expected."""
        until(
            lambda: expected.items() <= self.figures.items(),
            f"{self.figures} is not {expected}",
        )

    # ------------------------------------------------------------------------- the clients

    def device(self, client_id: str, *, clean: bool = False) -> Device:
        device = Device(self.port, client_id, clean=clean)
        self.devices.append(device)
        return device

    def sleeper(self, client_id: str, *filters: str, qos: int = 1) -> Device:
        """A session at rest."""
        device = self.device(client_id).up()
        device.subscribe(*filters, qos=qos)
        return device.down()

    def publish(self, topic: str, *payloads: str, qos: int = 1) -> None:
        """Publish, and wait for every acknowledgement."""
        sensor = self.device("sensor", clean=True).up()
        for payload in payloads:
            sensor.paho.publish(topic, payload, qos)
            # one by one: each is a commit, and a block, of its own
            until(lambda: not sensor.paho._out_messages, "no acknowledgement")
        sensor.down()


class Got(NamedTuple):
    """A message as paho handed it over."""

    topic: str
    payload: str
    dup: bool


class Device:
    """A paho client that notes what it sees. It comes back only when it is told to."""

    def __init__(self, port: int, client_id: str, *, clean: bool = False) -> None:
        self.port = port
        self.client_id = client_id
        self.got: list[Got] = []
        self.present: bool | None = None
        self.reason = -1
        self._answered = threading.Event()
        self._granted = threading.Event()
        self._gone = threading.Event()
        self._is_up = False
        self.paho = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=clean,
            protocol=mqtt.MQTTv311,
            reconnect_on_failure=False,
        )
        self.paho.on_connect = self._on_connect
        self.paho.on_disconnect = self._on_disconnect
        self.paho.on_message = self._on_message
        self.paho.on_subscribe = lambda *_: self._granted.set()

    def _on_connect(
        self,
        _client: mqtt.Client,
        _userdata: Any,
        flags: mqtt.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        self.reason = reason.value
        self.present = flags.session_present
        self._answered.set()

    def _on_disconnect(self, *_: Any) -> None:
        self._gone.set()

    def _on_message(self, _client: mqtt.Client, _userdata: Any, message: mqtt.MQTTMessage) -> None:
        self.got.append(Got(message.topic, message.payload.decode(), message.dup))

    def up(self) -> Device:
        """Connect, and wait for the answer."""
        self.down()
        self._answered.clear()
        self._gone.clear()
        self.got.clear()
        self.paho.connect(HOST, self.port, keepalive=60)
        self.paho.loop_start()
        assert self._answered.wait(PATIENCE_S), "no CONNACK"
        self._is_up = True
        return self

    def down(self) -> Device:
        """DISCONNECT, if connected."""
        if self._is_up:
            self._is_up = False
            self.paho.disconnect()
            self.paho.loop_stop()
        return self

    def cut_off(self) -> Device:
        """Wait until the broker has closed the connection."""
        assert self._gone.wait(PATIENCE_S), "the broker does not close the connection"
        self._is_up = False
        self.paho.loop_stop()
        return self

    def subscribe(self, *filters: str, qos: int = 1) -> Device:
        self._granted.clear()
        self.paho.subscribe([(name, qos) for name in filters])
        assert self._granted.wait(PATIENCE_S), "no SUBACK"
        return self

    def payloads(self, count: int) -> list[str]:
        """What was got since it connected: ``count`` messages, and not one more."""
        until(lambda: len(self.got) >= count, f"{self.client_id}: {len(self.got)} of {count}")
        self.settled()
        return [got.payload for got in self.got]

    def settled(self) -> Device:
        """Wait for the answer to a SUBSCRIBE, so that what was under way has arrived."""
        return self.subscribe(f"settled/{self.client_id}", qos=0)
