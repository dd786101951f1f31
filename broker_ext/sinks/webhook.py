"""Webhooks: each message is one HTTP POST.

Headers, beside those of the configuration::

    webhook-id          the same for every attempt: what repetitions are found by
    webhook-timestamp   seconds since the epoch, of this attempt
    webhook-signature   "v1,<base64>" for each secret, separated by spaces; not there without one
    idempotency-key     webhook-id again, for receivers that know this header
    amqtt-message-id    of the outbox; a reissue has another one
    amqtt-attempt       1, 2, 3, ...
    amqtt-topic         percent-encoded UTF-8
    amqtt-qos, amqtt-retain   as published

The signature is HMAC-SHA256 over "<id>.<timestamp>.<body>", as Standard Webhooks have it
(https://www.standardwebhooks.com), so that any of its libraries verifies it. A secret that begins
with "whsec_" is the base64 that follows; any other is the bytes of its line.

| the receiver | is |
|---|---|
| 2xx | done |
| 408, 425, 500 and above | indeterminate: it may have been taken; retried |
| 429 | throttled; retried |
| any other 4xx, any 3xx: a redirect is refused | rejected: dead at once |
| no connection (refused, no name, no TLS) | unavailable: nothing was sent |
| a connection that broke or timed out after the request began | indeterminate; retried |

``Retry-After`` of what is retried counts, as seconds and as a date.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from broker_ext.sinks.sender import DONE, Outgoing, Sent
from broker_ext.sinks.settings import read_secret, tls_context
from broker_ext.wire import MalformedPacket, read_forwarded
from broker_ext.wire.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    RESPONSE_TOPIC,
    USER_PROPERTY,
)
from storage.api import RETAINED
from storage.outbox import Failure

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from types import SimpleNamespace

    from broker_ext.sinks.settings import WebhookSettings
    from storage.api import Entry
    from storage.clock import Clock

__all__ = ["Webhook", "failure_of", "json_body", "retry_after_ms", "sign", "signing_key"]

SECRET_BYTES_MIN: Final = 16
"""Shorter ones can be guessed from one signed message."""
ANSWER_BYTES_MAX: Final = 64 << 10
"""So much of an answer's body is read, and thrown away, so that the connection can be used again;
behind a longer one it is closed."""
IDLE_S: Final = 15.0
"""Shorter than common servers keep a connection: one that they close in the moment we use it makes
a delivery indeterminate."""
_BINARY: Final = "application/octet-stream"


def failure_of(status: int) -> Failure:
    """What a status code says about a message. Pure."""
    if 200 <= status < 300:
        return Failure.NONE
    if status == 429:
        return Failure.THROTTLED
    if status in {408, 425} or status >= 500:
        return Failure.INDETERMINATE
    return Failure.REJECTED


def retry_after_ms(value: str | None, now_ms: int) -> int | None:
    """The time that a Retry-After names [RFC 9110, 10.2.3], None = none. Pure."""
    if not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return now_ms + int(text[:12]) * 1000
    try:
        date = parsedate_to_datetime(text)
        if date.tzinfo is None:  # "-0000": the sender's zone is not known, HTTP's is UTC
            date = date.replace(tzinfo=UTC)
        return int(date.timestamp() * 1000)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def signing_key(line: bytes) -> bytes:
    """The key that a line of a secret file stands for. Raises ValueError."""
    key = line
    if line.startswith(b"whsec_"):
        try:
            key = base64.b64decode(line.removeprefix(b"whsec_"), validate=True)
        except binascii.Error:
            raise ValueError(
                "secret_file: a secret that begins with whsec_ goes on with base64"
            ) from None
    if len(key) < SECRET_BYTES_MIN:
        raise ValueError(f"secret_file: a secret has {SECRET_BYTES_MIN} bytes or more")
    return key


def sign(keys: Sequence[bytes], event_id: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature. Pure."""
    signed = f"{event_id}.{timestamp}.".encode() + body
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys
    )


def json_body(out: Outgoing) -> bytes:
    """A message as JSON. The payload is text where it is UTF-8, else base64. Pure."""
    message = out.message
    payload, encoding = _text(message.payload)
    fields: dict[str, Any] = {
        "id": out.event_id,
        "topic": message.topic.decode(),
        "payload": payload,
        "encoding": encoding,
        "qos": message.qos,
        "retain": bool(message.flags & RETAINED),
        "time_ms": out.created_ms,
    }
    fields |= _properties(message)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _text(data: bytes) -> tuple[str, str]:
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def _properties(message: Entry) -> dict[str, Any]:
    """What an application wants of the MQTT 5 properties."""
    found: dict[str, Any] = {}
    users: list[list[str]] = []
    for ident, value in _pairs(message):
        if ident == USER_PROPERTY:
            assert isinstance(value, tuple)
            users.append([part.decode() for part in value])
        elif ident in {CONTENT_TYPE, RESPONSE_TOPIC} and isinstance(value, bytes):
            name = "content_type" if ident == CONTENT_TYPE else "response_topic"
            found[name] = value.decode()
        elif ident == CORRELATION_DATA and isinstance(value, bytes):
            found["correlation_data"] = base64.b64encode(value).decode()
    if users:
        found["user_properties"] = users
    return found


def _pairs(message: Entry) -> Sequence[tuple[int, Any]]:
    try:
        properties = read_forwarded(message.properties)
    except MalformedPacket:  # of another version of us; the message itself is sound
        return ()
    return properties.pairs if properties is not None else ()


def _content_type(message: Entry) -> str:
    """The publisher's, if it can be a header."""
    for ident, value in _pairs(message):
        if ident == CONTENT_TYPE and isinstance(value, bytes):
            text = value.decode()
            return text if text.isascii() and text.isprintable() and text else _BINARY
    return _BINARY


class Webhook:
    """The sender of one webhook sink."""

    ordered = False

    def __init__(self, settings: WebhookSettings, clock: Clock) -> None:
        self.window = settings.workers
        self._settings = settings
        self._clock = clock
        self._url = URL(settings.url)
        self._keys: tuple[bytes, ...] = ()
        self._headers: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        settings = self._settings
        if settings.secret_file:
            lines = read_secret("secret_file", settings.secret_file).splitlines()
            self._keys = tuple(signing_key(line.strip()) for line in lines if line.strip())
        self._headers = dict(settings.headers)
        for name, path in settings.header_files.items():
            self._headers[name] = _header(name, read_secret(f"header_files: {name}", path))
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_begun)
        context: ssl.SSLContext | bool = True
        if self._url.scheme == "https":
            context = tls_context(settings.tls)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=settings.workers, ssl=context, keepalive_timeout=IDLE_S
            ),
            timeout=aiohttp.ClientTimeout(total=settings.timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"user-agent": "amqtt-durable"},
            auto_decompress=False,
            trace_configs=[trace],
        )

    async def ready(self) -> None:
        """There is no connection to wait for."""

    async def send(self, out: Outgoing) -> Sent:
        assert self._session is not None
        begun: dict[str, bool] = {}
        body = json_body(out) if self._settings.body == "json" else out.message.payload
        try:
            async with self._session.post(
                self._url,
                data=body,
                headers=self._told(out, body),
                allow_redirects=False,
                trace_request_ctx=begun,
            ) as answer:
                failure = failure_of(answer.status)
                retry_at_ms = None
                if failure not in {Failure.NONE, Failure.REJECTED}:
                    wall_ms = self._clock.wall_ms()
                    told_ms = retry_after_ms(answer.headers.get("retry-after"), wall_ms)
                    if told_ms is not None:
                        retry_at_ms = told_ms - wall_ms + self._clock.now_ms()
                await _drained(answer)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            what = "timed out" if isinstance(error, TimeoutError) else "the connection broke"
            if begun:
                return Sent(Failure.INDETERMINATE, what)
            if isinstance(error, aiohttp.ClientSSLError):
                what = "TLS failed"
            elif isinstance(error, aiohttp.ClientConnectorDNSError):
                what = "its name was not found"
            elif not isinstance(error, TimeoutError):
                what = "no connection"
            return Sent(Failure.UNAVAILABLE, what)
        return Sent(failure, f"HTTP {answer.status}", retry_at_ms) if failure else DONE

    def _told(self, out: Outgoing, body: bytes) -> dict[str, str]:
        message = out.message
        timestamp = self._clock.wall_ms() // 1000  # its receiver compares it with its own clock
        is_json = self._settings.body == "json"
        headers = {
            "content-type": "application/json" if is_json else _content_type(message),
            "webhook-id": out.event_id,
            "webhook-timestamp": str(timestamp),
            "idempotency-key": out.event_id,
            "amqtt-message-id": str(out.id),
            "amqtt-attempt": str(out.attempt),
            "amqtt-topic": quote(message.topic, safe="/"),
            "amqtt-qos": str(message.qos),
            "amqtt-retain": "1" if message.flags & RETAINED else "0",
        } | self._headers
        if self._keys:
            headers["webhook-signature"] = sign(self._keys, out.event_id, timestamp, body)
        return headers

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _header(name: str, value: bytes) -> str:
    text = value.decode("ascii", "replace")
    if not text.isprintable() or not text.isascii():
        raise ValueError(f"the file of header {name!r} has more than printable ASCII in it")
    return text


async def _begun(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    """The request begins to be written: from now on nobody can know what arrived."""
    del session, params
    context.trace_request_ctx["begun"] = True


async def _drained(answer: aiohttp.ClientResponse) -> None:
    """Read the body of an answer, so that the connection can be used again; what cannot be read
    does not matter, the status has said it."""
    read = 0
    try:
        async for chunk in answer.content.iter_chunked(16 << 10):
            read += len(chunk)
            if read > ANSWER_BYTES_MAX:
                answer.close()
                return
    except (aiohttp.ClientError, OSError):
        answer.close()
