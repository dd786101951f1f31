"""MQTT.js, in one node process for all devices."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from base64 import b64decode, b64encode
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from interop.mqtt5.device import PATIENCE_S, Answer, Device, Got, Options, until

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["MqttjsDevice", "Node", "NotInstalled"]

MQTTJS: Final = "mqtt@5.16.0"
SCRIPT: Final = Path(__file__).with_name("mqttjs.js")
INSTALL_S: Final = 60.0


class NotInstalled(Exception):
    """There is no node, no npm, or npm cannot get MQTT.js; the text says which."""


class Node:
    """A node process that runs ``mqttjs.js``. folder: gets MQTT.js, and keeps it."""

    def __init__(self, folder: Path) -> None:
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            raise NotInstalled("node and npm are not installed")
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", MQTTJS]
        try:
            subprocess.run(
                command, cwd=folder, check=True, capture_output=True, timeout=INSTALL_S, text=True
            )
        except subprocess.CalledProcessError as error:
            raise NotInstalled(f"npm cannot install {MQTTJS}: {error.stderr[-500:]}") from error
        except subprocess.TimeoutExpired as error:
            raise NotInstalled(f"npm does not install {MQTTJS} in {INSTALL_S} s") from error
        script = shutil.copy(SCRIPT, folder)  # node looks for packages beside the script
        self._devices: list[MqttjsDevice] = []
        self._process = subprocess.Popen(
            [node, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._said.wait(PATIENCE_S), "node does not start"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def add(self, device: MqttjsDevice) -> int:
        """Give a device its number."""
        self._devices.append(device)
        return len(self._devices) - 1

    def tell(self, **command: Any) -> None:
        """Have the script do something."""
        into: IO[str] | None = self._process.stdin
        assert into is not None
        into.write(json.dumps(command) + "\n")
        into.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if said["is"] == "ready":
                self._said.set()
            else:
                self._devices[said["id"]].heard(said)


class MqttjsDevice(Device):
    """One of the script's clients."""

    def __init__(self, node: Node, port: int, client_id: str) -> None:
        super().__init__(port, client_id)
        self._node = node
        self._id = node.add(self)
        self._is_up = False
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()

    def heard(self, said: dict[str, Any]) -> None:
        """What the script says of this device (in the thread that reads it)."""
        match said["is"]:
            case "connack":
                self.answers.append(
                    Answer(said["present"], said["reason"], said["text"], dict(said["user"]))
                )
            case "message":
                self.got.append(
                    Got(
                        said["topic"],
                        b64decode(said["payload"]),
                        said["qos"],
                        said["retain"],
                        tuple((k, v) for k, v in said["user"]),
                        said["expiry"],
                    )
                )
            case "end":
                self.ends.append(said["reason"])
            case "closed":
                self._is_up = False
            case "error":
                if said.get("code") is not None:
                    self.answers.append(Answer(False, said["code"], said["text"], {}))
            case _:
                self._replies.put(said)

    def connect(self, options: Options) -> None:
        will = None
        if options.will is not None:
            topic, payload, delay_s = options.will
            will = {"topic": topic, "payload": b64encode(payload).decode(), "delay": delay_s}
        self._node.tell(
            do="connect",
            id=self._id,
            port=self.port,
            clientId=self.client_id,
            clean=options.clean,
            expiry=options.expiry_s,
            window=options.window,
            will=will,
        )
        self._is_up = True

    def _reply(self, kind: str) -> dict[str, Any]:
        reply = self._replies.get(timeout=PATIENCE_S)
        assert reply["is"] == kind
        return reply

    def subscribe(self, topic_filter: str, qos: int) -> int:
        self._node.tell(do="subscribe", id=self._id, filter=topic_filter, qos=qos)
        return int(self._reply("suback")["reason"])

    def publish(
        self,
        topic: str,
        *payloads: bytes,
        qos: int = 1,
        expiry_s: int | None = None,
        user: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._node.tell(
            do="publish",
            id=self._id,
            topic=topic,
            payloads=[b64encode(payload).decode() for payload in payloads],
            qos=qos,
            expiry=expiry_s,
            user=user,
        )
        self._reply("published")

    def down(self) -> None:
        if self._is_up:
            self._node.tell(do="down", id=self._id)
            self._reply("down")
            self._is_up = False

    def cut(self) -> None:
        self._node.tell(do="cut", id=self._id)
        until(lambda: not self._is_up, "the connection is still there")
