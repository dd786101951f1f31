"""The control socket of one broker, in process: what it answers, and what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import socket
import stat
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.cli.calling import _Connection, call
from broker_ext.cli.errors import CannotOperate, NoAnswer, NoBroker, Refused
from broker_ext.control import SOCKET_NAME, Control
from broker_ext.operations import OPERATIONS
from storage.errors import NotOwner, StoreUnavailable
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker_ext.hub import Hub
    from tests.broker.mqtt import Broker

SECRET = "hunter2-the-secret"  # noqa: S105 - what must not be told


async def echo(hub: Hub, *, word: str, times: int = 1, loud: bool = False) -> str:
    del hub
    return (word.upper() if loud else word) * times


async def maybe(hub: Hub, *, word: str | None = None) -> str | None:
    del hub
    return word


async def fails(hub: Hub, *, kind: str) -> None:
    del hub
    raise {
        "bug": RuntimeError(SECRET),
        "store": NotOwner(7),
        "disk": StoreUnavailable(SECRET),
        "argument": ValueError(SECRET),
    }[kind]


TABLE = {"echo": echo, "maybe": maybe, "fails": fails}


@asynccontextmanager
async def controlled(broker: Broker, folder: Path) -> AsyncIterator[Control]:
    control = Control(broker.hub, folder, TABLE)
    control.start()
    try:
        yield control
    finally:
        await control.stop()


async def ask(folder: Path, name: str, **arguments: Any) -> Any:
    return await asyncio.to_thread(partial(call, folder, name, timeout_s=10, **arguments))


async def post(folder: Path, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
    def do() -> tuple[int, dict[str, Any]]:
        connection = _Connection(folder / SOCKET_NAME, 10)
        try:
            connection.request("POST", f"/{name}", body)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    return await asyncio.to_thread(do)


async def test_an_operation_gets_its_arguments_and_its_result_comes_back(
    broker: Broker, tmp_path: Path
) -> None:
    async with controlled(broker, tmp_path):
        assert await ask(tmp_path, "echo", word="a", times=3) == "aaa"
        assert await ask(tmp_path, "echo", word="ä€😀", loud=True) == "Ä€😀"
        assert await ask(tmp_path, "maybe") is None
        assert await ask(tmp_path, "maybe", word="x") == "x"


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("no-such", {}, 404, "there is no operation 'no-such'"),
        ("echo", {}, 400, "argument 'word' is missing"),
        ("echo", {"word": "a", "more": 1}, 400, "there is no argument 'more'"),
        ("echo", {"hub": "a", "word": "a"}, 400, "there is no argument 'hub'"),
        ("echo", {"word": 1}, 400, "argument 'word' must be str"),
        ("echo", {"word": None}, 400, "argument 'word' must be str"),
        ("echo", {"word": "a", "times": True}, 400, "argument 'times' must be int"),
        ("echo", {"word": "a", "loud": 1}, 400, "argument 'loud' must be bool"),
        ("maybe", {"word": 1}, 400, "argument 'word' must be str or null"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    broker: Broker, tmp_path: Path, name: str, arguments: dict[str, Any], code: int, message: str
) -> None:
    async with controlled(broker, tmp_path):
        with pytest.raises(Refused) as refused:
            await ask(tmp_path, name, **arguments)
    assert (refused.value.code, str(refused.value)) == (code, message)


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b"\xff", b"null"])
async def test_what_is_no_object_is_refused(broker: Broker, tmp_path: Path, body: bytes) -> None:
    async with controlled(broker, tmp_path):
        status, answer = await post(tmp_path, "echo", body)
    assert status == answer["error"]["code"] == 400


@pytest.mark.parametrize(
    ("kind", "code"), [("bug", 500), ("argument", 500), ("store", 403), ("disk", 503)]
)
async def test_no_answer_has_the_text_of_an_exception(
    broker: Broker, tmp_path: Path, kind: str, code: int
) -> None:
    async with controlled(broker, tmp_path):
        status, answer = await post(tmp_path, "fails", json.dumps({"kind": kind}).encode())
        assert (await ask(tmp_path, "echo", word="on")) == "on"  # and it goes on
    assert status == answer["error"]["code"] == code
    assert SECRET not in json.dumps(answer)


async def test_a_request_that_is_too_large_is_refused(broker: Broker, tmp_path: Path) -> None:
    async with controlled(broker, tmp_path):
        with pytest.raises(NoAnswer):
            await ask(tmp_path, "echo", word="x" * (2 << 20))
        assert await ask(tmp_path, "echo", word="on") == "on"


async def test_only_its_user_may_use_the_socket(broker: Broker, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with controlled(broker, tmp_path) as control:
            assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_nobody_answers_when_it_has_stopped(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(NoBroker):
        await ask(tmp_path, "echo", word="a")
    async with controlled(broker, tmp_path):
        pass
    async with controlled(broker, tmp_path):
        await ask(tmp_path, "echo", word="a")
    with pytest.raises(NoBroker):
        await ask(tmp_path, "echo", word="a")


async def test_a_socket_that_was_left_is_replaced_and_one_that_answers_is_not(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / SOCKET_NAME))
    left.close()
    with pytest.raises(NoBroker):
        await ask(tmp_path, "echo", word="a")
    async with controlled(broker, tmp_path):
        assert await ask(tmp_path, "echo", word="a") == "a"
        async with controlled(broker, tmp_path):
            assert "another process answers there" in caplog.text
        assert await ask(tmp_path, "echo", word="b") == "b"


async def test_a_file_of_its_name_is_left_alone(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SOCKET_NAME).write_text("mine")
    async with controlled(broker, tmp_path):
        pass
    assert (tmp_path / SOCKET_NAME).read_text() == "mine"
    assert "no control socket" in caplog.text


async def test_a_path_longer_than_an_address_will_do(broker: Broker, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    async with controlled(broker, deep):
        assert await ask(deep, "echo", word="a") == "a"
        assert stat.S_IMODE((deep / SOCKET_NAME).stat().st_mode) == 0o600
    assert os.listdir(deep) == []  # noqa: PTH208


async def test_where_such_a_path_cannot_be_used_it_is_told_and_the_broker_starts(
    broker: Broker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setattr(Path, "is_dir", lambda _: False)  # no /proc
    async with controlled(broker, deep):
        pass
    assert [r.levelno for r in caplog.records if "no control socket" in r.message] == [
        logging.WARNING
    ]
    with pytest.raises(CannotOperate):
        await ask(deep, "echo", word="a")


async def test_who_asks_at_the_stop_is_not_answered(broker: Broker, tmp_path: Path) -> None:
    async with controlled(broker, tmp_path) as control:
        early = _Connection(tmp_path / SOCKET_NAME, 10)
        early.request("POST", "/echo", b"{}")
        await control.stop()
        with pytest.raises((http.client.HTTPException, OSError)):
            await asyncio.to_thread(early.getresponse)
        early.close()


# ------------------------------------------------------------------------ the operations


async def test_sessions_are_told_a_page_at_a_time(tmp_path: Path) -> None:
    async with running(history_filters=("kept/#",)) as broker, controlled(broker, tmp_path):
        for number in range(5):
            await broker.sleeper(b"s%d" % number, b"a/#")
        await broker.subscriber(b"s1", b"a/#", user=b"")
        await broker.connect(b"t1", clean=True)
        await broker.connect(b"t2", clean=True)
        publisher = await broker.connect(b"t3", clean=True)
        await publisher.deliver(b"a/b", b"1", b"2")
        await broker.hub.committer.drain()
        for limit in (1, 2, 3, 8, 100):
            found: list[dict[str, Any]] = []
            after = ""
            while True:
                page = await ask(tmp_path, "sessions", after=after, limit=limit)
                assert len(page["sessions"]) <= limit
                found += page["sessions"]
                after = page["next"]
                if not after:
                    break
            assert [row["client_id"] for row in found] == [
                *("s0", "s1", "s2", "s3", "s4"),
                *("t1", "t2", "t3"),
            ]
        assert [row["connected"] for row in found] == [False, True] + 3 * [False] + 3 * [True]
        assert [row["kind"] for row in found] == 5 * ["durable"] + 3 * ["transient"]
        assert found[0]["lag"] == 2
        with pytest.raises(Refused):
            await ask(tmp_path, "sessions", after="s\ud800")


async def test_kick_ends_the_connection_and_keeps_the_session(tmp_path: Path) -> None:
    async with running() as broker, controlled(broker, tmp_path):
        client = await broker.subscriber(b"c", b"a")
        assert await ask(tmp_path, "kick", client_id="c") == {"kicked": True}
        await client.closed()
        await client.gone()
        assert (b"c", "kicked") in broker.ends
        assert await ask(tmp_path, "kick", client_id="c") == {"kicked": False}
        again = await broker.connect(b"c")
        assert again.connack.session_present


async def test_figures_are_those_that_are_kept(tmp_path: Path) -> None:
    async with running() as broker, controlled(broker, tmp_path):
        await broker.subscriber(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1")
        await broker.hub.committer.drain()
        told = await ask(tmp_path, "figures")
        assert told["counts"]["published"] == 1
        assert told["connections"] == 2
        assert told["sessions_connected"] == {"durable": 1, "transient": 1}
        assert told["history"]["head"] == 1
        assert told["writing"] is True


def test_every_operation_has_arguments_that_can_be_checked() -> None:
    import inspect  # noqa: PLC0415

    for operation in OPERATIONS.values():
        for name, parameter in inspect.signature(operation).parameters.items():
            if name != "hub":
                assert parameter.kind is parameter.KEYWORD_ONLY
                assert str(parameter.annotation).removesuffix(" | None") in {"str", "int", "bool"}
