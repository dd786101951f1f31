"""Asking a running broker through its control socket (``broker_ext.control``)."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING, Any, Final

from broker_ext.cli.errors import CannotOperate, NoAnswer, NoBroker, Refused
from broker_ext.control import SOCKET_NAME, address

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ANSWER_S", "call"]

ANSWER_S: Final = 30.0
"""How long a broker may take to answer."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self._timeout_s)
        with address(self._path) as where:
            self.sock.connect(where)


def call(data: Path, name: str, *, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
    """Carry out one operation in the broker that serves ``data``, and return its result.

    Raises NoBroker, NoAnswer, Refused; CannotOperate when the socket may not be used.
    """
    path = data.absolute() / SOCKET_NAME
    connection = _Connection(path, timeout_s)
    try:
        try:
            connection.connect()
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            raise NoBroker(f"no broker is running on {data}") from error
        except PermissionError as error:
            raise CannotOperate(f"{path}: permission denied: ask as the broker's user") from error
        connection.request(
            "POST", f"/{name}", json.dumps(arguments), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        told = json.loads(answer.read())
        if answer.status == http.client.OK:
            return told["result"]
        raise Refused(told["error"]["code"], told["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"the broker on {data} does not answer on {path}") from error
    finally:
        connection.close()
