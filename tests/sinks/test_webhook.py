"""The webhook's transport alone, against a real HTTP server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.sinks.sender import DONE, Outgoing
from broker_ext.sinks.settings import WebhookSettings
from broker_ext.sinks.webhook import (
    Webhook,
    failure_of,
    json_body,
    retry_after_ms,
    sign,
    signing_key,
)
from broker_ext.wire import Properties
from broker_ext.wire.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    RESPONSE_TOPIC,
    USER_PROPERTY,
    encode_properties,
)
from storage.api import RETAINED, Entry
from storage.clock import ManualClock
from storage.outbox import Failure
from tests.sinks.receiver import Answer, Receiver, answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOW_MS = 1_700_000_000_000
PUBLISH = 3


def outgoing(payload: bytes = b"hot", **fields: Any) -> Outgoing:
    attempt = fields.pop("attempt", 1)
    entry = Entry(7, fields.pop("topic", b"alerts/a"), payload, fields.pop("qos", 1), **fields)
    return Outgoing(17, "gen-7", attempt, NOW_MS - 5, entry)


def properties(*pairs: tuple[int, Any]) -> bytes:
    encoded = encode_properties(Properties(pairs), PUBLISH)
    return encoded[1:]  # without the length, which is one byte here


@asynccontextmanager
async def webhook(
    url: str, *, clock: ManualClock | None = None, **options: Any
) -> AsyncIterator[Webhook]:
    settings = WebhookSettings(name="alerts", filters=("alerts/#",), url=url, **options)
    sender = Webhook(settings, clock or ManualClock(NOW_MS))
    await sender.open()
    try:
        yield sender
    finally:
        await sender.close()


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        *((status, Failure.NONE) for status in (200, 201, 202, 204, 299)),
        *((status, Failure.REJECTED) for status in (300, 301, 302, 307, 308, 304)),
        *((status, Failure.REJECTED) for status in (400, 401, 403, 404, 409, 410, 413, 422, 499)),
        (408, Failure.INDETERMINATE),
        (425, Failure.INDETERMINATE),
        (429, Failure.THROTTLED),
        *((status, Failure.INDETERMINATE) for status in (500, 501, 502, 503, 504, 599)),
    ],
)
async def test_a_status_is_a_class_of_failure(status: int, failure: Failure) -> None:
    assert failure_of(status) is failure
    if status in {304, 204}:
        return
    async with (
        answering(Answer(status, {"location": "/elsewhere"}, b"a text")) as receiver,
        webhook(receiver.url) as sender,
    ):
        sent = await sender.send(outgoing())
    assert sent.failure is failure
    assert len(receiver.requests) == 1, "a redirect was followed"
    assert "a text" not in sent.detail
    if failure:
        assert sent.detail == f"HTTP {status}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("7", NOW_MS + 7_000),
        (" 7 ", NOW_MS + 7_000),
        ("0", NOW_MS),
        ("-1", None),
        ("7.5", None),
        ("soon", None),
        ("٣", None),
        ("9" * 40, NOW_MS + 999_999_999_999_000),
        ("Tue, 14 Nov 2023 22:13:27 GMT", NOW_MS + 7_000),
        ("Tuesday, 14-Nov-23 22:13:27 GMT", NOW_MS + 7_000),
        ("Tue, 14 Nov 2023 22:13:27 -0000", NOW_MS + 7_000),
        ("Tue, 14 Nov 2023 23:13:27 +0100", NOW_MS + 7_000),
        ("Tue, 99 Nov 2023 22:13:27 GMT", None),
        ("Tue, 14 Nov 99999999 22:13:27 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, expected: int | None) -> None:
    assert retry_after_ms(value, NOW_MS) == expected


@pytest.mark.parametrize("status", [429, 503, 408])
async def test_retry_after_is_told_with_what_is_retried(status: int) -> None:
    async with (
        answering(Answer(status, {"retry-after": "9"})) as receiver,
        webhook(receiver.url) as sender,
    ):
        assert (await sender.send(outgoing())).retry_at_ms == NOW_MS + 9_000


@pytest.mark.parametrize("ms", [3_600_000, -3_600_000])
async def test_the_time_that_is_told_and_heard_is_the_one_that_others_have(ms: int) -> None:
    """The wall clock was wrong when the broker started, and was set right since."""
    clock = ManualClock(NOW_MS - ms)
    clock.set_right(ms=ms)
    later = {"retry-after": "Tue, 14 Nov 2023 22:13:27 GMT"}
    async with (
        answering(Answer(503, later)) as receiver,
        webhook(receiver.url, clock=clock) as sender,
    ):
        assert (await sender.send(outgoing())).retry_at_ms == clock.now_ms() + 7_000
        told = receiver.requests[0].headers["webhook-timestamp"]
    assert told == str(NOW_MS // 1000)
    assert clock.now_ms() == NOW_MS - ms, "no deadline has moved"


async def test_what_is_sent() -> None:
    message = outgoing("grün".encode(), topic="alerts/küche 1".encode(), attempt=3, flags=RETAINED)
    async with answering() as receiver:
        async with webhook(receiver.url, headers={"X-Site": "north"}) as sender:
            assert await sender.send(message) == DONE
        request = receiver.requests[0]
    expected = {
        "content-type": "application/json",
        "webhook-id": "gen-7",
        "webhook-timestamp": str(NOW_MS // 1000),
        "idempotency-key": "gen-7",
        "amqtt-message-id": "17",
        "amqtt-attempt": "3",
        "amqtt-topic": "alerts/k%C3%BCche%201",
        "amqtt-qos": "1",
        "amqtt-retain": "1",
        "x-site": "north",
        "user-agent": "amqtt-durable",
    }
    assert request.headers.items() >= expected.items()
    assert "webhook-signature" not in request.headers
    assert json.loads(request.body) == {
        "id": "gen-7",
        "topic": "alerts/küche 1",
        "payload": "grün",
        "encoding": "utf-8",
        "qos": 1,
        "retain": True,
        "time_ms": NOW_MS - 5,
    }


def test_what_is_no_text_is_base64_and_properties_are_told() -> None:
    raw = properties(
        (CONTENT_TYPE, b"application/cbor"),
        (RESPONSE_TOPIC, b"r/1"),
        (CORRELATION_DATA, b"\xff\x00"),
        (USER_PROPERTY, (b"k", b"1")),
        (USER_PROPERTY, (b"k", b"2")),
    )
    told = json.loads(json_body(outgoing(b"\xff\xfe", properties=raw)))
    assert told["encoding"] == "base64"
    assert base64.b64decode(told["payload"]) == b"\xff\xfe"
    assert told["content_type"] == "application/cbor"
    assert told["response_topic"] == "r/1"
    assert base64.b64decode(told["correlation_data"]) == b"\xff\x00"
    assert told["user_properties"] == [["k", "1"], ["k", "2"]]
    assert json.loads(json_body(outgoing(properties=b"\xff\xff")))["payload"] == "hot"


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"image/png", "image/png"),
        ("töxt".encode(), "application/octet-stream"),
        (b"a\r\nx: y", "application/octet-stream"),
        (None, "application/octet-stream"),
    ],
)
async def test_a_raw_body_is_the_payload(content_type: bytes | None, expected: str) -> None:
    raw = properties((CONTENT_TYPE, content_type)) if content_type is not None else b""
    async with answering() as receiver, webhook(receiver.url, body="raw") as sender:
        for payload in (b"\x00\xff" * 500, b""):
            assert await sender.send(outgoing(payload, properties=raw)) == DONE
            assert receiver.requests[-1].body == payload
            assert receiver.requests[-1].headers["content-type"] == expected


async def test_a_request_is_signed_by_every_secret(tmp_path: Path) -> None:
    """Verified as the README says, and as Standard Webhooks has it."""
    key = b"0123456789abcdef0123456789abcdef"
    secrets = tmp_path / "secrets"
    secrets.write_bytes(b"the first secret\nwhsec_" + base64.b64encode(key) + b"\n")
    async with (
        answering() as receiver,
        webhook(receiver.url, secret_file=str(secrets)) as sender,
    ):
        assert await sender.send(outgoing()) == DONE
    headers, body = receiver.requests[0].headers, receiver.requests[0].body
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = [
        "v1," + base64.b64encode(hmac.new(k, signed, hashlib.sha256).digest()).decode()
        for k in (b"the first secret", key)
    ]
    assert headers["webhook-signature"].split(" ") == expected


def test_the_example_of_standard_webhooks_is_signed_as_there() -> None:
    key = signing_key(b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert (
        sign([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
        == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )
    with pytest.raises(ValueError, match="base64"):
        signing_key(b"whsec_???")
    for short in (b"0123456789abcde", b"whsec_MfKQ"):
        with pytest.raises(ValueError, match="16 bytes or more"):
            signing_key(short)


async def test_a_secret_that_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    for options in (
        {"secret_file": str(tmp_path / "none")},
        {"header_files": {"Authorization": str(tmp_path / "none")}},
    ):
        with pytest.raises(ValueError, match="none: No such file"):
            async with webhook("http://127.0.0.1:1/", **options):
                pass
    (tmp_path / "bad").write_bytes(b"a\r\nb: c\r\n")
    with pytest.raises(ValueError, match="Authorization"):
        async with webhook(
            "http://127.0.0.1:1/", header_files={"Authorization": str(tmp_path / "bad")}
        ):
            pass


async def test_a_header_from_a_file_is_sent(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"Bearer abc\n")
    async with (
        answering() as receiver,
        webhook(receiver.url, header_files={"Authorization": str(tmp_path / "token")}) as sender,
    ):
        await sender.send(outgoing())
    assert receiver.requests[0].headers["authorization"] == "Bearer abc"


async def test_without_a_connection_nothing_was_sent() -> None:
    async with answering() as receiver:
        pass
    async with webhook(receiver.url) as sender:
        sent = await sender.send(outgoing())
        assert (sent.failure, sent.detail) == (Failure.UNAVAILABLE, "no connection")
    async with webhook("http://name.invalid/") as sender:
        sent = await sender.send(outgoing())
        assert sent.failure is Failure.UNAVAILABLE


async def test_a_peer_that_does_not_speak_tls_is_unavailable() -> None:
    async with (
        answering() as receiver,
        webhook(receiver.url.replace("http:", "https:")) as sender,
    ):
        sent = await sender.send(outgoing())
    assert sent.failure is Failure.UNAVAILABLE
    assert receiver.requests == []


async def test_a_listener_that_accepts_and_says_nothing_may_have_taken_it() -> None:
    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    gone = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with webhook(f"http://127.0.0.1:{port}/", timeout=0.2) as sender:
            sent = await sender.send(outgoing())
            assert (sent.failure, sent.detail) == (Failure.INDETERMINATE, "timed out")
        gone.set()


async def test_a_connection_that_is_cut_after_the_request_may_have_taken_it() -> None:
    async with answering(Answer(0)) as receiver, webhook(receiver.url) as sender:
        sent = await sender.send(outgoing())
        assert (sent.failure, sent.detail) == (Failure.INDETERMINATE, "the connection broke")
        assert await sender.send(outgoing()) == DONE


async def test_a_stalled_answer_may_have_taken_it() -> None:
    gate = asyncio.Event()
    async with (
        answering(Answer(stall=gate)) as receiver,
        webhook(receiver.url, timeout=0.2) as sender,
    ):
        assert (await sender.send(outgoing())).failure is Failure.INDETERMINATE
        gate.set()


async def test_a_long_answer_is_not_read_to_its_end() -> None:
    async with (
        answering(Answer(200, body=b"x" * (8 << 20))) as receiver,
        webhook(receiver.url) as sender,
    ):
        assert await sender.send(outgoing()) == DONE
        assert await sender.send(outgoing()) == DONE


async def test_cookies_are_not_kept() -> None:
    async with (
        answering(Answer(200, {"set-cookie": "a=b"})) as receiver,
        webhook(receiver.url) as sender,
    ):
        await sender.send(outgoing())
        await sender.send(outgoing())
    assert "cookie" not in receiver.requests[1].headers


async def test_a_receiver_that_restarts_is_found_again() -> None:
    receiver = await Receiver().start()
    async with webhook(receiver.url) as sender:
        assert await sender.send(outgoing()) == DONE
        await receiver.stop()
        assert (await sender.send(outgoing())).failure is not Failure.NONE
        await receiver.start()
        assert await sender.send(outgoing()) == DONE
    await receiver.stop()


async def test_tls_is_verified_with_the_given_certificates(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    from broker_ext.sinks.settings import TlsSettings  # noqa: PLC0415

    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with webhook(url) as sender:
            sent = await sender.send(outgoing())
            assert (sent.failure, sent.detail) == (Failure.UNAVAILABLE, "TLS failed")
        async with webhook(url, tls=TlsSettings(ca_file=str(certificate))) as sender:
            assert await sender.send(outgoing()) == DONE


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority."""
    import datetime as dt  # noqa: PLC0415
    import ipaddress  # noqa: PLC0415

    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
