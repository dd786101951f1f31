"""Real `amqtt-durable` processes for the tests."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 30
COMMAND = (sys.executable, "-c", "from broker_ext.cli import main; main()")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Serving:
    """A running `serve`. line: what it said when it listened."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process = process
        self.line = line

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.line.removeprefix("listening on ").split(" ")[0].rpartition(":")
        return host.strip("[]"), int(port)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=START_S)

    def signal(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(START_S)


def run(*arguments: str) -> Ended:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    """Run `serve` until the block ends; it listens when the block begins."""
    process = subprocess.Popen(
        [*COMMAND, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda out: lines.put(out.readline()), args=[process.stdout])
    reader.start()
    try:
        line = lines.get(timeout=START_S)
        if not line:
            raise AssertionError(process.communicate(timeout=START_S)[1])
        yield Serving(process, line.strip())
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()
