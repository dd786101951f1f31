"""What is served, from a file and options; and what is refused before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.cli.errors import CannotServe, root_cause
from broker_ext.cli.serving import (
    ANONYMOUS,
    PLUGIN,
    Bind,
    bound,
    parse_bind,
    read_yaml,
    serving_config,
)

if TYPE_CHECKING:
    from pathlib import Path

FILE_AUTH = "amqtt.plugins.authentication.FileAuthPlugin"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:1884", "127.0.0.1", 1884),
        ("127.0.0.1", "127.0.0.1", 1883),
        ("localhost:0", "localhost", 0),
        (" localhost ", "localhost", 1883),
        (":1884", "", 1884),
        ("1884", "", 1884),
        ("[::1]:1884", "::1", 1884),
        ("[::1]", "::1", 1883),
        ("[::]:1884", "::", 1884),
    ],
)
def test_parse_bind_reads(text: str, host: str, port: int) -> None:
    assert parse_bind(text) == Bind(host, port)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty address"),
        ("127.0.0.1:", "port must be"),
        ("127.0.0.1:mqtt", "port must be"),
        ("127.0.0.1:-1", "port must be"),
        ("127.0.0.1:65536", "port must be"),
        ("127.0.0.1:١٢", "port must be"),
        ("::1:1883", r"in brackets, as in \[::1\]"),
        ("[::1", "IPV6"),
        ("[::1]1883", "IPV6"),
        ("[127.0.0.1]:1883", "not an IPv6 address"),
    ],
)
def test_parse_bind_refuses(text: str, why: str) -> None:
    with pytest.raises(CannotServe, match=why):
        parse_bind(text)


def test_bind_is_told_with_brackets_and_given_to_amqtt_without() -> None:
    bind = Bind("::1", 1883)
    assert str(bind) == "[::1]:1883"
    assert bind.for_amqtt() == "::1:1883"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_is_loopback(host: str) -> None:
    assert Bind(host, 1883).is_loopback()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1", "2001:db8::1"])  # noqa: S104
def test_what_others_can_reach_is_not_loopback(host: str) -> None:
    assert not Bind(host, 1883).is_loopback()


def test_without_a_file_any_user_is_accepted_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert serving_config({}) == {
        "listeners": {"default": {"type": "tcp", "bind": "127.0.0.1:1883"}},
        "plugins": {
            ANONYMOUS: {"allow_anonymous": True},
            PLUGIN: {"data": str(tmp_path / "amqtt-durable-data")},
        },
    }


def test_options_override_the_file_and_leave_it_as_it_is(tmp_path: Path) -> None:
    loaded: dict[str, Any] = {
        "listeners": {"default": {"type": "tcp", "bind": "127.0.0.1:1", "max_connections": 5}},
        "plugins": {PLUGIN: {"data": "there", "store": "lmdb", "durability": "fsync"}},
    }
    config = serving_config(
        loaded, data=tmp_path, bind=Bind("::1", 2), store="sqlite", durability="os"
    )
    assert config["plugins"][PLUGIN] == {
        "data": str(tmp_path),
        "store": "sqlite",
        "durability": "os",
    }
    assert config["listeners"]["default"] == {
        "type": "tcp",
        "bind": "::1:2",
        "max_connections": 5,
    }
    assert loaded["plugins"][PLUGIN]["data"] == "there"
    assert loaded["listeners"]["default"]["bind"] == "127.0.0.1:1"


def test_what_the_file_says_stays_without_an_option() -> None:
    settings = {"data": "there", "store": "sqlite"}
    config = serving_config({"plugins": {PLUGIN: settings}, "sys_interval": 3})
    assert config["plugins"][PLUGIN] == settings
    assert config["sys_interval"] == 3


@pytest.mark.parametrize(
    "plugins",
    [
        pytest.param({f"{FILE_AUTH}": {"password_file": "x"}}, id="mapping"),
        pytest.param([FILE_AUTH], id="list of names"),
        pytest.param([{FILE_AUTH: {"password_file": "x"}}], id="list of mappings"),
        pytest.param({FILE_AUTH: None}, id="without settings"),
    ],
)
def test_a_file_with_authentication_gets_our_plugin_and_may_listen_anywhere(plugins: Any) -> None:
    config = serving_config({"plugins": plugins}, bind=Bind("", 1883))
    assert list(config["plugins"]) == [FILE_AUTH, PLUGIN]
    assert [str(bind) for _, bind in bound(config["listeners"])] == [":1883"]


def test_our_plugin_under_its_longer_name_is_not_added_twice(tmp_path: Path) -> None:
    name = "broker_ext.plugin.DurableSessionPlugin"
    config = serving_config({"plugins": {name: {}}}, data=tmp_path)
    assert config["plugins"][name] == {"data": str(tmp_path)}
    assert PLUGIN not in config["plugins"]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1"])  # noqa: S104 - it is refused
def test_any_user_from_anywhere_is_refused(host: str) -> None:
    with pytest.raises(CannotServe, match="without authentication: give a --config"):
        serving_config({}, bind=Bind(host, 1883))


def test_every_listener_of_the_file_must_be_on_loopback() -> None:
    loaded = {"listeners": {"default": {}, "web": {"type": "ws", "bind": ":8080"}}}
    with pytest.raises(CannotServe, match="refusing to listen on :8080"):
        serving_config(loaded)


def test_a_plugin_that_does_not_authenticate_is_no_authentication() -> None:
    loaded: dict[str, Any] = {"plugins": {"amqtt.plugins.logging_amqtt.EventLoggerPlugin": {}}}
    assert ANONYMOUS in serving_config(loaded)["plugins"]
    with pytest.raises(CannotServe, match="without authentication"):
        serving_config(loaded, bind=Bind("", 1883))


@pytest.mark.parametrize("old", ["auth", "topic-check"])
def test_the_old_sections_that_amqtt_would_ignore_are_refused(old: str) -> None:
    with pytest.raises(CannotServe, match=f"old '{old}' section"):
        serving_config({old: {"plugins": ["auth_file"]}})


@pytest.mark.parametrize(
    ("loaded", "why"),
    [
        ({"plugins": "name"}, "'plugins' must map"),
        ({"plugins": [1]}, "'plugins' must map"),
        ({"plugins": {PLUGIN: "data"}}, "settings of plugin"),
        ({"plugins": {"no_such_module.Plugin": {}}}, "cannot import plugin"),
        ({"listeners": ["default"]}, "'listeners' must map"),
        ({"listeners": {"default": "127.0.0.1"}}, "'listeners' must map"),
        ({"listeners": {"default": {"bind": "127.0.0.1:x"}}}, "port must be"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(loaded: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotServe, match=why):
        serving_config(loaded)


def test_a_listener_without_a_socket_needs_no_loopback() -> None:
    loaded: dict[str, Any] = {"listeners": {"default": {"type": "external"}, "off": {"bind": None}}}
    assert list(bound(serving_config(loaded)["listeners"])) == []


def test_port_0_is_a_free_port() -> None:
    config = serving_config({}, bind=Bind("127.0.0.1", 0))
    ((kind, bind),) = bound(config["listeners"])
    assert kind == "tcp"
    assert bind.port > 0


@pytest.mark.parametrize(
    ("text", "why"),
    [("plugins: [", "is not YAML"), ("- 1", "must be a mapping"), ("\x00", "is not YAML")],
)
def test_read_yaml_refuses(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "broker.yaml"
    file.write_text(text)
    with pytest.raises(CannotServe, match=why) as caught:
        read_yaml(file)
    assert "\n" not in str(caught.value)


def test_read_yaml_reads_nothing_as_nothing(tmp_path: Path) -> None:
    file = tmp_path / "broker.yaml"
    file.write_text("# empty\n")
    assert read_yaml(file) == {}
    with pytest.raises(CannotServe, match="No such file"):
        read_yaml(tmp_path / "missing.yaml")


def test_root_cause_is_the_innermost_and_one_line() -> None:
    inner = OSError(98, "address already in use")
    outer = RuntimeError("wrapped")
    outer.__cause__ = inner
    assert root_cause(outer) == "address already in use"
    assert root_cause(ValueError("two\n  lines")) == "two lines"
    assert root_cause(KeyError("default")) == "KeyError 'default'"
    assert root_cause(FileNotFoundError(2, "No such file", "/x")) == "/x: No such file"
    assert root_cause(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize(
    ("loaded", "told"),
    [
        ({"listenrs": {}}, "has no option 'listenrs'; did you mean 'listeners'?"),
        ({"listeners": {"default": {"type": "tpc"}}}, "listener 'default': type is 'tpc'; it must"),
        ({"listeners": {"a": {"bnd": ":1"}}}, "listener 'a' has no option 'bnd'; did you mean 'bi"),
        ({"listeners": {"default": {"ssl": True}}}, "listener 'default': ssl needs a certfile"),
    ],
)
def test_what_amqtt_would_not_name_is_named(loaded: dict[str, Any], told: str) -> None:
    with pytest.raises(CannotServe) as refused:
        serving_config(loaded)
    assert told in str(refused.value)
