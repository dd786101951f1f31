"""The broker of the demo: a real `amqtt -c broker.yaml` process, to be killed and started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import yaml

from broker_ext.demo.clock import now_ms, sleep_ms

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["HOST", "BrokerProcess", "DemoFailed", "answers"]

HOST = "127.0.0.1"
UP_MS = 20_000  # a start takes less than a second; a busy machine may need ten times as long
STOP_MS = 10_000
STARTS = 5  # a port that looked free may be taken by the time the broker binds it
PORTS = range(20_000, 32_000)  # below the ports that systems give to outgoing connections: one of
# those, dialled while nobody listens on it, can connect to itself and keep the broker out
LOG_TAIL_LINES = 15
PROBE_S = 1
CONNECT = b"\x10\x16\x00\x04MQTT\x04\x02\x00\x05\x00\x0ademo-probe"  # 3.1.1, clean session
CONNACK = b"\x20\x02\x00\x00"
DISCONNECT = b"\xe0\x00"


class DemoFailed(Exception):
    """The demo could not be carried out; the text is for a person."""


def answers(port: int) -> bool:
    """Whether a broker answers a CONNECT there now.

    That a connection is accepted proves nothing: a process that is being killed closes its
    sockets one by one, and the listening one may be the last.
    """
    try:
        with socket.create_connection((HOST, port), timeout=PROBE_S) as probe:
            probe.sendall(CONNECT)
            answer = probe.recv(len(CONNACK), socket.MSG_WAITALL)
            probe.sendall(DISCONNECT)
    except OSError:
        return False
    return answer == CONNACK


class BrokerProcess:
    """One broker on one directory and port, through as many processes as it takes.

    folder: where broker.yaml, broker.log and the data directory go. plugins: the `plugins`
    section, amqtt's own spelling. As a context manager it leaves no process behind.
    """

    def __init__(self, folder: Path, plugins: dict[str, Any], seed: int) -> None:
        self.log = folder / "broker.log"
        self.port = 0
        self._config = folder / "broker.yaml"
        self._plugins = plugins
        self._ports = random.Random(seed ^ os.getpid())  # noqa: S311 - no secret
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int | None:
        """The process that runs now, if one does."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start_on_a_free_port(self) -> None:
        """Start the first process. Raises DemoFailed with the end of the log when none comes up."""
        for start in range(STARTS):
            self.port = self._a_free_port()
            try:
                self.start()
            except DemoFailed:
                self.kill()
                if start == STARTS - 1 or "address already in use" not in self._log_tail():
                    raise
            else:
                return

    def start(self) -> int:
        """Start a process on the same port and data, wait until it answers; return after how long.

        unit: ms, from the start of the process to the first CONNACK. Raises DemoFailed.
        """
        self._config.write_text(
            yaml.safe_dump(
                {
                    "listeners": {"default": {"type": "tcp", "bind": f"{HOST}:{self.port}"}},
                    "plugins": self._plugins,
                },
                sort_keys=False,
            ),
            encoding="utf-8",
        )
        started_ms = now_ms()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
                [sys.executable, "-m", "amqtt.scripts.broker_script", "-c", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._config.parent,
                start_new_session=True,  # a Ctrl-C is ours to handle, and its group ours to kill
            )
        while not answers(self.port):
            if self._process.poll() is not None:
                raise DemoFailed(f"the broker ended at once; {self._log_tail()}")
            if now_ms() - started_ms > UP_MS or "Broker startup failed" in self._log_tail():
                # amqtt's script lives on after a failed start, without a listener
                raise DemoFailed(f"the broker does not answer; {self._log_tail()}")
            sleep_ms(10)
        return now_ms() - started_ms

    def kill(self) -> None:
        """SIGKILL the process and all it may have started, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Stop it as a user of amqtt does, with SIGINT; SIGKILL when that does not help."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                self._process.wait(STOP_MS / 1000)
        self.kill()

    def _a_free_port(self) -> int:
        for port in self._ports.sample(PORTS, k=50):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port
        raise DemoFailed(f"no free port from {PORTS.start} to {PORTS.stop - 1}")

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "its log ends:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
