"""Sealed stores under real broker processes and real clients."""

from __future__ import annotations

import base64
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from broker_ext.cli.calling import call
from storage.files import KINDS
from tests.cli.processes import Ended, Serving, run, serving
from tests.operations.devices import Flood, device, publish

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from storage.files import Kind

SECRET = b"a-payload-that-nobody-may-read"
TOPIC = "plans/that-nobody-may-know"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A key file with one key."""
    file = tmp_path / "keys"
    assert run("keygen", str(file), "--id", "first").code == 0
    return file


def broker(data: Path, kind: str, *arguments: str) -> AbstractContextManager[Serving]:
    return serving(
        *("--data", str(data), "--bind", "127.0.0.1:0", "--store", kind, "--durability", "os"),
        *arguments,
    )


def refused(data: Path, kind: str, *arguments: str) -> Ended:
    ended = run(
        *("serve", "--data", str(data), "--bind", "127.0.0.1:0", "--store", kind), *arguments
    )
    assert ended.code == 1
    assert "Traceback" not in ended.err
    return ended


def ok(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    return ended


def everything_in(data: Path) -> bytes:
    return b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())


def secret_of(keys: Path, line: int = 0) -> str:
    return keys.read_text().splitlines()[line].split()[1]


def test_messages_survive_a_kill_and_nobody_can_read_them_on_disk(
    tmp_path: Path, kind: Kind, keys: Path
) -> None:
    data = tmp_path / "data"
    arguments = ("--key-file", str(keys), "--seal-topics")
    with broker(data, kind, *arguments) as process:
        with device(process, "sleeper") as client:
            client.subscribe("plans/#")
            client.subscribe(TOPIC)
        publish(process, TOPIC, *[SECRET + b"%d" % n for n in range(50)])
        with device(process, "retains") as client:
            info = client.client.publish(TOPIC + "/kept", SECRET, qos=1, retain=True)
            info.wait_for_publish(20)
        assert SECRET not in everything_in(data), "with its write-ahead log"
        process.signal(signal.SIGKILL)
    raw = everything_in(data)
    assert SECRET not in raw
    assert b"that-nobody-may-know" not in raw
    with broker(data, kind, *arguments) as process:
        with device(process, "sleeper") as client:
            assert client.session_present
            assert client.payloads(51) == [*[SECRET + b"%d" % n for n in range(50)], SECRET]
        with device(process, "other") as client:
            client.subscribe("plans/#")
            assert client.payloads(1) == [SECRET]
        process.signal(signal.SIGTERM)
        assert process.process.stderr is not None
        said = process.process.stderr.read()
    assert SECRET not in said.encode()
    assert secret_of(keys) not in said


def test_a_wrong_or_missing_key_refuses_to_start_and_names_it(
    tmp_path: Path, kind: Kind, keys: Path
) -> None:
    data = tmp_path / "data"
    with broker(data, kind, "--key-file", str(keys)) as process:
        with device(process, "sleeper") as client:
            client.subscribe("t")
        publish(process, "t", b"1")
        process.signal(signal.SIGTERM)
    other = tmp_path / "other"
    ok(run("keygen", str(other), "--id", "second"))
    ended = refused(data, kind, "--key-file", str(other))
    assert "key 'first' is missing" in ended.err
    other.unlink()
    ok(run("keygen", str(other), "--id", "first"))
    ended = refused(data, kind, "--key-file", str(other))
    assert "key 'first' is wrong" in ended.err
    for said in (ended.err, ended.out):
        assert secret_of(keys) not in said
        assert secret_of(other) not in said
    ended = refused(data, kind)
    assert "key 'first' is missing" in ended.err
    assert "seal_key_file" in ended.err
    keys.chmod(0o644)
    assert "chmod 600" in refused(data, kind, "--key-file", str(keys)).err
    keys.chmod(0o600)
    with broker(data, kind, "--key-file", str(keys)) as process, device(process, "sleeper") as c:
        assert c.payloads(1) == [b"1"]


def yaml(tmp_path: Path, data: Path, *options: str) -> str:
    file = tmp_path / "broker.yaml"
    lines = [f"    data: {data}", *[f"    {option}" for option in options]]
    file.write_text("plugins:\n  broker_ext.DurableSessionPlugin:\n" + "\n".join(lines) + "\n")
    return str(file)


def test_a_key_in_the_configuration_is_refused_and_not_repeated(tmp_path: Path, keys: Path) -> None:
    secret = secret_of(keys)
    bare = secret.rstrip("=")
    plain = base64.b64decode(secret).hex()
    for option in (
        f"seal_key: {secret}",
        f"seal_key: first {secret}",
        f"seal_key_file: {secret}",
        f"seal_key_file: first {secret}",
        f"seal_key_env: {bare}",
        f"seal_key_env: {plain}",
    ):
        config = yaml(tmp_path, tmp_path / "data", option)
        ended = refused(tmp_path / "data", "sqlite", "--config", config)
        assert "a key does not belong into a configuration file" in ended.err
        for said in (ended.err, ended.out):
            assert bare not in said
            assert plain not in said
    for option, why in (
        ("seal_topics: true", "seal_topics needs keys"),
        (f"seal_key_file: {keys}\n    seal_key_env: KEYS", "both given"),
        ("seal_key_env: not a name", "not the name of an environment variable"),
        ("seal_key_env: AMQTT_DURABLE_NO_SUCH_KEYS", "no such environment variable"),
    ):
        config = yaml(tmp_path, tmp_path / "data", option)
        assert why in refused(tmp_path / "data", "sqlite", "--config", config).err
    assert not (tmp_path / "data" / "history.sqlite").exists()


def test_keys_come_from_the_environment(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "AMQTT_DURABLE_TEST_KEYS", keys.read_text().strip())
    data = tmp_path / "data"
    config = yaml(tmp_path, data, "seal_key_env: AMQTT_DURABLE_TEST_KEYS")
    with serving("--config", config, "--bind", "127.0.0.1:0") as process:
        with device(process, "sleeper") as client:
            client.subscribe("t")
        publish(process, "t", SECRET)
        process.signal(signal.SIGTERM)
    assert SECRET not in everything_in(data)
    found = json.loads(ok(run("check", "--data", str(data), "--json")).out)
    assert found["key_ids"] == ["first"]
    assert found["unseen"] > 0
    arguments = ("--data", str(data), "--json", "--key-env", "AMQTT_DURABLE_TEST_KEYS")
    assert json.loads(ok(run("check", *arguments)).out)["unseen"] == 0


def test_keys_are_rotated_under_traffic_and_the_old_one_is_not_needed(
    tmp_path: Path, kind: Kind, keys: Path
) -> None:
    data = tmp_path / "data"
    with broker(data, kind, "--key-file", str(keys), "--seal-topics") as process:
        with device(process, "sleeper") as client:
            client.subscribe("flood")
        flood = Flood(process, b"flood")
        flood.start()
        flood.wait_for(20_000)
        ok(run("keygen", str(keys), "--id", "second"))
        done = json.loads(ok(run("rekey", "--data", str(data), "--json")).out)
        assert done["online"] is True
        assert (done["state"], done["key_id"], done["key_ids"]) == ("done", "second", ["second"])
        assert done["unreadable"] == 0
        assert done["written"] > 20
        flood.wait_for(flood.acked + 2000)
        flood.stop()
        assert flood.error is None
        acked = flood.acked
        assert process.signal(signal.SIGTERM) == 0
    old = keys.read_text().splitlines()[1]
    keys.write_text(keys.read_text().splitlines()[0] + "\n")
    with broker(data, kind, "--key-file", str(keys)) as process:
        with device(process, "sleeper") as client:
            assert client.session_present
            payloads = client.payloads(acked)
        numbers = [int(payload.split()[0]) for payload in payloads]
        assert numbers == list(range(1, acked + 1))
    keys.write_text(old + "\n")
    assert "key 'second' is missing" in refused(data, kind, "--key-file", str(keys)).err


def test_a_rekey_that_was_killed_goes_on(tmp_path: Path, kind: Kind, keys: Path) -> None:
    data = tmp_path / "data"
    with broker(data, kind, "--key-file", str(keys)) as process:
        with device(process, "sleeper") as client:
            client.subscribe("flood")
        flood = Flood(process, b"flood")
        flood.start()
        flood.wait_for(30_000)
        flood.stop()
        acked = flood.acked
        ok(run("keygen", str(keys), "--id", "second"))
        assert call(data, "rekey")["state"] == "running"
        process.signal(signal.SIGKILL)
    with broker(data, kind, "--key-file", str(keys)) as process:
        done = json.loads(ok(run("rekey", "--data", str(data), "--json")).out)
        assert done["key_ids"] == ["second"]
        process.signal(signal.SIGTERM)
    keys.write_text(keys.read_text().splitlines()[0] + "\n")
    ended = ok(run("check", "--data", str(data), "--key-file", str(keys)))
    assert "sound" in ended.out
    with broker(data, kind, "--key-file", str(keys)) as process, device(process, "sleeper") as c:
        assert len(c.payloads(acked)) == acked


def test_a_store_from_before_sealing_is_sealed_without_a_broker(
    tmp_path: Path, kind: Kind, keys: Path
) -> None:
    data = tmp_path / "data"
    with broker(data, kind) as process:
        with device(process, "sleeper") as client:
            client.subscribe(TOPIC)
        publish(process, TOPIC, SECRET)
        process.signal(signal.SIGTERM)
    assert SECRET in everything_in(data)
    assert "name the keys" in run("rekey", "--data", str(data)).err
    ok(run("rekey", "--data", str(data), "--key-file", str(keys), "--seal-topics"))
    raw = everything_in(data)
    assert SECRET not in raw
    assert TOPIC.encode() not in raw
    with broker(data, kind, "--key-file", str(keys)) as process, device(process, "sleeper") as c:
        assert c.session_present
        assert c.payloads(1) == [SECRET]


def test_a_broker_without_keys_cannot_rekey(tmp_path: Path) -> None:
    with broker(tmp_path / "data", "sqlite"):
        ended = run("rekey", "--data", str(tmp_path / "data"))
        assert ended.code == 1
        assert "the broker has no keys" in ended.err


def test_a_running_broker_refuses_a_key_file_that_lacks_a_key(tmp_path: Path, keys: Path) -> None:
    data = tmp_path / "data"
    with broker(data, "sqlite", "--key-file", str(keys)):
        first = keys.read_text()
        keys.unlink()
        ok(run("keygen", str(keys), "--id", "second"))
        ended = run("rekey", "--data", str(data))
        assert ended.code == 1
        assert "key 'first' is missing" in ended.err
        with keys.open("a") as out:
            out.write(first)
        ok(run("rekey", "--data", str(data)))
