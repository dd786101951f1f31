"""Operations on a broker that runs, with real processes and real clients: who is resumed, who is
reset, and what nobody lost."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from storage.backup import MANIFEST
from storage.files import database_file, open_database
from storage.inspection import inspect
from storage.kv import U64, Space
from storage.names import key_of
from storage.records import Record
from tests.cli.processes import Ended, Serving, run, serving
from tests.operations.devices import Flood, device, publish
from tests.operations.stores import Files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from storage.files import Kind
    from storage.kv import WriteTxn


@contextmanager
def broker(
    data: Path, kind: str, *, on_change: str = "resume", durability: str = "os"
) -> Iterator[Serving]:
    """A broker process on a data directory; killed when the block ends."""
    config = data.parent / f"{on_change}.yaml"
    config.write_text(
        f"plugins: {{broker_ext.DurableSessionPlugin: {{on_generation_change: {on_change}}}}}"
    )
    with serving(
        *("--config", str(config), "--data", str(data), "--bind", "127.0.0.1:0"),
        *("--store", kind, "--durability", durability),
    ) as process:
        yield process


def sleeper(process: Serving, client_id: str, topic_filter: str) -> None:
    """A session that is there and has had nothing."""
    with device(process, client_id) as client:
        client.subscribe(topic_filter)


def present(process: Serving, client_id: str) -> bool:
    with device(process, client_id) as client:
        return client.session_present


def ok(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    return ended


def figures(data: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(ok(run("check", "--data", str(data), "--json")).out)
    return found


# --------------------------------------------------------------------------------- backup


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_backup_under_full_traffic_is_sound_and_the_broker_goes_on(
    tmp_path: Path, kind: Kind, durability: str
) -> None:
    data = tmp_path / "data"
    with broker(data, kind, durability=durability) as process:
        sleeper(process, "sleeper", "flood")
        flood = Flood(process, b"flood")
        flood.start()
        heads = []
        for number in range(3):
            flood.wait_for(flood.acked + 2000)
            acked_before = flood.acked
            target = tmp_path / f"backup-{number}"
            ended = ok(run("backup", str(target), "--data", str(data)))
            assert "the copy is sound" in ended.out
            acked_after = flood.acked
            assert acked_after > acked_before, "the broker went on meanwhile"
            head = json.loads((target / MANIFEST).read_text())["head"]
            assert head >= acked_before
            heads.append(head)
        flood.wait_for(flood.acked + 2000)
        flood.stop()
        assert flood.error is None
        assert heads == sorted(set(heads))
        assert process.signal(signal.SIGTERM) == 0
        assert process.process.stderr is not None
        lines = process.process.stderr.read().splitlines()
        warnings = [
            line for line in lines if " INFO " not in line and "minted: created" not in line
        ]
        assert warnings == []
    for number, head in enumerate(heads):
        found = inspect(tmp_path / f"backup-{number}")
        assert found.violations == []
        assert found.figures is not None
        assert found.figures.entries == head


def test_a_backup_of_a_broker_that_was_killed_has_what_it_acknowledged(
    tmp_path: Path, kind: Kind
) -> None:
    data = tmp_path / "data"
    with broker(data, kind) as process:
        sleeper(process, "sleeper", "t")
        publish(process, "t", b"1", b"2", b"3")
    ok(run("backup", str(tmp_path / "backup"), "--data", str(data)))
    ok(run("restore", str(tmp_path / "backup"), "--data", str(tmp_path / "new")))
    with broker(tmp_path / "new", kind) as process, device(process, "sleeper") as client:
        assert client.session_present
        assert client.payloads(3) == [b"1", b"2", b"3"]


# ------------------------------------------------------------------ restore, copy, sidecar


def move_ahead(data: Path, kind: Kind, client_id: bytes) -> None:
    """Give a session a position that the log does not reach."""
    database = open_database(database_file(data, kind), kind)

    def work(txn: WriteTxn) -> None:
        packed_id = txn.get(Space.CLIENT, key_of(client_id)) or b""
        number = int.from_bytes(packed_id, "big")
        record = Record.unpack(number, txn.get(Space.CONSUMER, packed_id) or b"")
        record.cursor += 1000
        txn.put(Space.CONSUMER, U64.pack(number), record.pack())

    database.write(work)
    database.close()


def test_after_a_restore_sessions_resume_within_it_and_are_reset_beyond_it(
    tmp_path: Path, kind: Kind
) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with broker(data, kind) as process:
        sleeper(process, "within", "t")
        sleeper(process, "ahead", "t")
        publish(process, "t", b"1", b"2")
        ok(run("backup", str(backup), "--data", str(data)))
        sleeper(process, "later", "t")
        publish(process, "t", b"3")
        refused = run("restore", str(backup), "--data", str(data), "--force")
        assert refused.code == 1
        assert refused.err.splitlines()[-1] == (
            f"amqtt-durable: {data} is in use by process {process.process.pid}: "
            "stop the broker first"
        )
    refused = run("restore", str(backup), "--data", str(data))
    assert refused.code == 1
    assert "--force sets it aside" in refused.err
    ok(run("restore", str(backup), "--data", str(data), "--force"))
    (kept,) = tmp_path.glob("data.replaced-*")
    move_ahead(data, kind, b"ahead")
    with broker(data, kind) as process:
        publish(process, "t", b"new")
        with device(process, "within") as client:
            assert client.session_present
            assert client.payloads(3) == [b"1", b"2", b"new"]
        with device(process, "ahead") as client:
            assert not client.session_present
            assert client.is_quiet()
        assert not present(process, "later")
        assert present(process, "within")  # it is bound to the new generation
    with broker(kept, kind) as process, device(process, "within") as client:
        assert client.session_present
        assert client.payloads(3) == [b"1", b"2", b"3"]  # what was replaced is all there


def test_after_a_restore_the_strict_choice_resets_every_session(tmp_path: Path, kind: Kind) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with broker(data, kind) as process:
        sleeper(process, "within", "t")
        publish(process, "t", b"1")
        ok(run("backup", str(backup), "--data", str(data)))
    ok(run("restore", str(backup), "--data", str(data), "--force"))
    with broker(data, kind, on_change="reset") as process:
        with device(process, "within") as client:
            assert not client.session_present
            assert client.is_quiet()
            client.subscribe("t")
        assert present(process, "within")  # the fresh session is of this generation


@pytest.mark.parametrize("what", ["copied", "sidecar deleted"])
def test_a_copy_and_a_lost_sidecar_are_told_as_another_generation(
    tmp_path: Path, kind: Kind, what: str
) -> None:
    data = tmp_path / "data"
    with broker(data, kind) as process:
        sleeper(process, "lenient", "t")
        sleeper(process, "strict", "t")
        publish(process, "t", b"1")
        assert process.signal(signal.SIGTERM) == 0
    if what == "copied":
        shutil.copytree(data, tmp_path / "copy")
        data = tmp_path / "copy"
    else:
        (data / f"{database_file(data, kind).name}.identity.json").unlink()
    assert figures(data)["mints"]
    with broker(data, kind) as process, device(process, "lenient") as client:
        assert client.session_present
        assert client.payloads(1) == [b"1"]
    with broker(data, kind, on_change="reset") as process:
        assert not present(process, "strict")
        assert present(process, "lenient")  # it was bound to this generation


# ------------------------------------------------------------------------------ migration


def test_a_migrated_broker_goes_on_where_it_was(tmp_path: Path, kind: Kind) -> None:
    data = tmp_path / "data"
    other = "sqlite" if kind == "lmdb" else "lmdb"
    arguments = ("migrate", "--from", kind, "--to", other, "--data", str(data))
    with broker(data, kind) as process:
        sleeper(process, "sleeper", "t")
        publish(process, "t", b"1", b"2")
        refused = run(*arguments)
        assert refused.code == 1
        assert "stop the broker first" in refused.err
        assert process.signal(signal.SIGTERM) == 0
    ended = ok(run(*arguments))
    assert f"configure `store: {other}`" in ended.out
    assert figures(data)["kind"] == other
    with broker(data, other) as process, device(process, "sleeper") as client:
        assert client.session_present
        assert client.payloads(2) == [b"1", b"2"]


# ---------------------------------------------------------------------------------- check


def test_after_a_repair_only_who_lost_something_is_reset_before_connack(
    tmp_path: Path, kind: Kind
) -> None:
    files = Files(tmp_path, kind)
    data = files.data
    with broker(data, kind) as process:
        sleeper(process, "on-a", "a")
        sleeper(process, "on-b", "b")
        with device(process, "has-a") as client:
            client.subscribe("a")
            publish(process, "a", b"a1")
            assert client.payloads(1) == [b"a1"]
        publish(process, "b", b"b1")
        publish(process, "a", b"a2")
        refused = run("check", "--data", str(data))
        assert refused.code == 1
        assert "take a backup of it and check that" in refused.err
    assert ok(run("check", "--data", str(data))).out.startswith(f"{kind} store in {data}: sound")
    files.flip_block(1, -1)
    ended = run("check", "--data", str(data))
    assert ended.code == 1
    assert "entry 1 is damaged" in ended.out
    ended = ok(run("check", "--repair", "--data", str(data)))
    assert "'on-a': history it had not had is gone, through 1" in ended.out
    assert "'on-b'" not in ended.out
    ok(run("check", "--data", str(data)))
    with broker(data, kind, on_change="reset") as process:
        with device(process, "on-a") as client:
            assert not client.session_present
        with device(process, "on-b") as client:
            assert client.session_present
            assert client.payloads(1) == [b"b1"]
        with device(process, "has-a") as client:
            assert client.session_present
            assert client.payloads(1) == [b"a2"]


def test_a_file_that_cannot_be_opened_stops_the_broker_until_it_is_repaired(
    tmp_path: Path, kind: Kind
) -> None:
    files = Files(tmp_path, kind)
    with broker(files.data, kind) as process:
        sleeper(process, "sleeper", "t")
        publish(process, "t", b"1")
        assert process.signal(signal.SIGTERM) == 0
    files.database.write_bytes(b"")
    refused = run("serve", "--data", str(files.data), "--store", kind, "--bind", "127.0.0.1:0")
    assert refused.code == 1
    assert run("check", "--data", str(files.data)).code == 1
    ok(run("check", "--repair", "--data", str(files.data)))
    with broker(files.data, kind) as process, device(process, "sleeper") as client:
        assert not client.session_present
        client.subscribe("t")
        publish(process, "t", b"2")
        assert client.payloads(1) == [b"2"]
