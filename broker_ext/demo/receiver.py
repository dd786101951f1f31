"""The webhook receiver of act two: an HTTP server that goes away, comes back busy, and has a bug.

Everything it is asked and answers is recorded; broker_ext.demo.hooks judges it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from broker_ext.demo.broker import HOST
from broker_ext.demo.clock import now_ms
from broker_ext.demo.hooks import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BUSY_S", "POISON", "PREFIX", "Receiver"]

PREFIX = "alerts/"  # what the sink subscribes to: alerts/#
POISON = "an alert that the receiver does not understand"
BUSY_S = 2  # what it asks for when it has just come back
NO_CONTENT, UNPROCESSABLE, TOO_MANY = 204, 422, 429


class Receiver:
    """One receiver on one port, through as many servers as it takes. secret: of the signatures."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.port = 0
        self.is_busy = False
        self.understands = False
        self._requests: list[Request] = []
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where alerts are posted to."""
        return f"http://{HOST}:{self.port}/alerts"

    @property
    def requests(self) -> Sequence[Request]:
        """All of them, in the order they were answered."""
        with self._lock:
            return list(self._requests)

    @property
    def delivered(self) -> int:
        """Distinct alerts that it took."""
        return len({one.event_id for one in self.requests if one.is_taken})

    def start(self) -> None:
        """Listen, on the same port as before."""
        server = _Server((HOST, self.port), _Handler)
        server.receiver = self
        self.port = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Go away: nobody listens any more. Idempotent."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            self._thread.join()
            server.server_close()

    def answer(self, headers: Any, body: bytes) -> tuple[int, dict[str, str]]:
        """Decide, and record."""
        alert = json.loads(body)
        status, more = NO_CONTENT, {}
        with self._lock:
            if self.is_busy:
                self.is_busy = False
                status, more = TOO_MANY, {"retry-after": str(BUSY_S)}
            elif alert["payload"] == POISON and not self.understands:
                status = UNPROCESSABLE
            self._requests.append(
                Request(
                    headers["webhook-id"],
                    alert["topic"].removeprefix(PREFIX),
                    int(headers["amqtt-attempt"]),
                    status,
                    now_ms(),
                    is_signed=self._is_signed(headers, body),
                )
            )
        return status, more

    def _is_signed(self, headers: Any, body: bytes) -> bool:
        """As README has it."""
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        mac = base64.b64encode(hmac.digest(self.secret, signed, hashlib.sha256)).decode()
        return hmac.compare_digest(f"v1,{mac}", str(headers["webhook-signature"]))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    receiver: Receiver


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"  # a connection each: who goes away leaves none behind

    def do_POST(self) -> None:
        """Answer one alert."""
        body = self.rfile.read(int(self.headers["content-length"]))
        status, headers = self.server.receiver.answer(self.headers, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Keep the terminal for the demo."""
