"""`outbox ...` against a real broker process with a sink, and against its store alone."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from broker_ext.cli.watching import masked
from tests.cli.processes import START_S, run, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01a"
SECRET = "hunter2-the-secret"  # noqa: S105 - what must not be told


class Hook(BaseHTTPRequestHandler):
    """Rejects what has ``poison`` in it, as long as the server is strict."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        strict = self.server.strict  # type: ignore[attr-defined]
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(422 if strict and b"poison" in body else 204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.strict, server.bodies = True, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def publish(broker: Any, *payloads: bytes) -> None:
    """Each at QoS 1, acknowledged."""
    with broker.connect() as client:
        client.sendall(CONNECT)
        assert client.recv(4) == b"\x20\x02\x00\x00"
        for number, payload in enumerate(payloads, 1):
            body = b"\x00\x08alerts/a" + number.to_bytes(2, "big") + payload
            client.sendall(bytes([0x32, len(body)]) + body)
            assert client.recv(4) == b"\x40\x02" + number.to_bytes(2, "big")


@pytest.mark.parametrize("store", ["lmdb", "sqlite"])
@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_dead_letters_are_seen_and_reissued_with_a_broker_and_without(  # noqa: PLR0915 - one story
    tmp_path: Path, store: str, sealed: bool
) -> None:
    data = tmp_path / "data"
    keys: tuple[str, ...] = ()
    if sealed:
        assert run("keygen", str(tmp_path / "keys")).code == 0
        keys = ("--key-file", str(tmp_path / "keys"))
    at = ("--data", str(data))
    with receiving() as server:
        config = tmp_path / "broker.yaml"
        url = f"http://127.0.0.1:{server.server_address[1]}/hook?token={SECRET}"
        sinks = {"alerts": {"type": "webhook", "filters": ["alerts/#"], "url": url}}
        config.write_text(
            yaml.safe_dump({"plugins": {"broker_ext.DurableSessionPlugin": {"sinks": sinks}}})
        )
        served = (*at, "--config", str(config), "--bind", "127.0.0.1:0", "--store", store, *keys)

        def figures(*more: str) -> dict[str, Any]:
            ended = run("outbox", "backlog", *at, "--json", *more)
            assert ended.code == 0, ended.err
            found: list[dict[str, Any]] = json.loads(ended.out)
            return found[0] if found else {"done": 0, "dead": 0}

        with serving(*served) as broker:
            publish(broker, b"1", b"poison-1", b"poison-2", b"2")
            until(lambda: figures()["dead"] == 2)
            told = figures()
            assert (told["queue"], told["done"]) == ("alerts", 2)
            assert told["destination"] == "http://" + masked(url[7:].partition("/")[0])
            assert url[7:].partition("/")[0] in run("outbox", "backlog", *at, "--unmask").out
            listed = run("outbox", "dead-letters", *at)
            assert "rejected" in listed.out
            first, second = json.loads(run("outbox", "dead-letters", *at, "--json").out)
            server.strict = False
            ended = run("outbox", "reissue", str(first["id"]), *at)
            assert (ended.code, ended.out.startswith(f"message {first['id']} is reissued as ")) == (
                0,
                True,
            )
            until(lambda: figures()["done"] == 3)
            again = run("outbox", "reissue", str(first["id"]), *at)
            assert (again.code, again.err) == (
                1,
                f"amqtt-durable: message {first['id']} cannot be reissued: it is reissued\n",
            )
            assert broker.signal(signal.SIGTERM) == 0
            assert broker.process.stderr is not None
            log = broker.process.stderr.read()
        assert "is a dead letter after attempt 1: rejected (HTTP 422)" in log
        assert SECRET not in log
        assert "poison" not in log
        shown = run("outbox", "show", str(second["id"]), *at, "--json", "--payload", *keys)
        assert json.loads(shown.out)["state"] == "dead"
        if sealed:
            refused = run("outbox", "backlog", *at)
            assert refused.code == 1
            assert refused.err.count("\n") == 1
        ended = run("outbox", "reissue", "--all", "alerts", *at, *keys, "--json")
        assert [one["message_id"] for one in json.loads(ended.out)["reissued"]] == [second["id"]]
        records = json.loads(run("outbox", "audit", *at, *keys, "--json").out)
        assert [one["message_id"] for one in records] == [first["id"], second["id"]]
        assert all(one["actor"] for one in records)
        with serving(*served) as broker:
            until(lambda: figures()["done"] == 4)
        assert len(server.bodies) == 6
    assert figures(*keys)["waiting"] == 0
    assert (
        "there is nothing to reissue" in run("outbox", "reissue", "--all", "alerts", *at, *keys).out
    )
    purged = run("outbox", "purge", *at, *keys, "--done-days", "0", "--dead-days", "0", "--json")
    assert json.loads(purged.out) == {"messages": 6}


@pytest.mark.parametrize("content", [None, b"", b"whsec_???", b"short"])
def test_a_secret_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, content: bytes | None
) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    sink = {
        "type": "webhook",
        "filters": ["a"],
        "url": "http://127.0.0.1:1/",
        "secret_file": str(secret),
    }
    config = tmp_path / "broker.yaml"
    ours = {"broker_ext.DurableSessionPlugin": {"sinks": {"alerts": sink}}}
    config.write_text(yaml.safe_dump({"plugins": ours}))
    ended = run(
        *("serve", "--config", str(config), "--bind", "127.0.0.1:0"),
        *("--data", str(tmp_path / "data")),
    )
    assert ended.code == 1
    assert "Traceback" not in ended.err
    told = ended.err.splitlines()[-1]
    assert told.startswith("amqtt-durable: the broker cannot start: sinks.alerts: secret_file")
    assert str(secret) in told or "whsec_" in told or "16 bytes or more" in told


def test_where_there_is_nothing_it_says_so(tmp_path: Path) -> None:
    ended = run("outbox", "backlog", "--data", str(tmp_path / "none"))
    assert ended.code == 1
    assert "no broker is running on" in ended.err
    assert not (tmp_path / "none").exists()
    assert run("outbox", "reissue", "--data", str(tmp_path)).code == 2
    assert run("outbox", "show", "0", "--data", str(tmp_path)).code == 2


def test_a_queue_that_there_is_not_is_told_by_name(tmp_path: Path) -> None:
    with serving("--data", str(tmp_path), "--bind", "127.0.0.1:0"):
        pass
    for arguments in (["dead-letters", "--queue"], ["purge", "--queue"], ["reissue", "--all"]):
        ended = run("outbox", *arguments, "alrts", "--data", str(tmp_path))
        assert ended.code == 1
        assert ended.err == "amqtt-durable: there is no queue 'alrts'; there is none\n"


def test_a_backup_is_not_opened(tmp_path: Path) -> None:
    data, backup = str(tmp_path / "data"), str(tmp_path / "backup")
    with serving("--data", data, "--bind", "127.0.0.1:0"):
        ended = run("backup", backup, "--data", data)
        assert (ended.code, ", no entries (head 0), " in ended.out) == (0, True)
    ended = run("outbox", "backlog", "--data", backup)
    assert ended.code == 1
    assert "it is a backup" in ended.err
    assert run("restore", backup, "--data", str(tmp_path / "again")).code == 0
