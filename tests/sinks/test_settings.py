"""The YAML of sinks: what is taken, and what is refused by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.sinks.settings import (
    BridgeSettings,
    TlsSettings,
    WebhookSettings,
    read_secret,
    sinks_settings,
    tls_context,
)

if TYPE_CHECKING:
    from pathlib import Path

HOOK = {"type": "webhook", "filters": ["alerts/#"], "url": "https://example.org/hook"}
BRIDGE = {"type": "bridge", "filters": ["up/#"], "host": "example.org"}


def read(options: dict[str, Any], name: str = "alerts") -> Any:
    return sinks_settings({name: options})[0]


def test_a_webhook_is_read() -> None:
    settings = read(
        {
            **HOOK,
            "url": "https://example.org:8443/hook?token=1",
            "workers": 8,
            "start": 17,
            "timeout": 3,
            "retry": [1, 2.5],
            "headers": {"X-Site": "north"},
            "header_files": {"Authorization": "/etc/token"},
            "secret_file": "/etc/secret",
            "tls": {"ca_file": "/etc/ca.pem"},
            "body": "raw",
        }
    )
    assert isinstance(settings, WebhookSettings)
    assert (settings.name, settings.filters, settings.start) == ("alerts", ("alerts/#",), 17)
    assert settings.retry == (1, 2.5)
    assert settings.window == 8
    assert settings.tls == TlsSettings(ca_file="/etc/ca.pem")
    assert settings.destination == "https://example.org:8443"


def test_a_bridge_is_read() -> None:
    settings = read({**BRIDGE, "tls": True, "qos": 2, "version": 4, "host": "::1"}, "up.stream-1")
    assert isinstance(settings, BridgeSettings)
    assert settings.destination == "mqtts://[::1]:8883"
    assert read(BRIDGE).destination == "mqtt://example.org:1883"
    assert read({**BRIDGE, "tls": False}).tls is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("http://x", "its options must be a mapping"),
        ({"type": "kafka"}, "type must be one of webhook, bridge"),
        ({"filters": ["a"]}, "type must be one of"),
        ({**HOOK, "colour": "red"}, "a webhook has no option 'colour'"),
        ({**HOOK, "name": "x"}, "a webhook has no option 'name'"),
        ({**HOOK, "qos": 1}, "a webhook has no option 'qos'"),
        ({k: v for k, v in HOOK.items() if k != "filters"}, "filters is missing"),
        ({**HOOK, "filters": []}, "filters are missing"),
        ({**HOOK, "filters": "alerts/#"}, "filters is 'alerts/#'; it must be a list of texts"),
        ({**HOOK, "filters": ["a/#/b"]}, "is no topic filter"),
        ({**HOOK, "filters": ["$share/g/a"]}, "is no topic filter"),
        ({**HOOK, "filters": [1]}, "filters is a list with something else in it"),
        ({**HOOK, "start": "middle"}, "start must be"),
        ({**HOOK, "start": -1}, "start must be"),
        ({**HOOK, "start": True}, "start is True; it must be head, earliest or an offset"),
        ({**HOOK, "timeout": 0}, "timeout is 0"),
        ({**HOOK, "timeout": "soon"}, "timeout is 'soon'; it must be a number"),
        ({**HOOK, "timeout": float("nan")}, "timeout is nan"),
        ({**HOOK, "retry": []}, "retry has no delay"),
        ({**HOOK, "retry": [0]}, "retry is 0"),
        (
            {**HOOK, "retry": ["5s"]},
            "something else in it; it must be a list of numbers",
        ),
        ({**HOOK, "outstanding": 0}, "outstanding is 0"),
        ({**HOOK, "workers": 0}, "workers is 0"),
        ({**HOOK, "workers": True}, "workers is True; it must be a whole number"),
        ({**HOOK, "url": "ftp://example.org"}, "url must be"),
        ({**HOOK, "url": "https://"}, "url must be"),
        ({**HOOK, "url": "https://u:p@example.org"}, "url has a user in it"),
        ({**HOOK, "url": "https://example.org/#x"}, "url has a fragment"),
        ({**HOOK, "url": "https://[::1"}, "url is not a URL"),
        ({**HOOK, "url": "https://example.org:99999"}, "url is not a URL"),
        ({**HOOK, "body": "xml"}, "body is 'xml'"),
        ({**HOOK, "headers": {"a b": "c"}}, "header 'a b' cannot be sent"),
        ({**HOOK, "headers": {"x": "a\r\nb: c"}}, "header 'x' cannot be sent"),
        ({**HOOK, "headers": {"Webhook-Id": "1"}}, "is set by us"),
        ({**HOOK, "headers": {"content-type": "a/b"}}, "is set by us"),
        (
            {**HOOK, "headers": {"x": 1}},
            "headers is a mapping with something else in it",
        ),
        ({**HOOK, "headers": {"x": "1"}, "header_files": {"x": "/f"}}, "in headers and in"),
        ({**HOOK, "tls": "yes"}, "tls is 'yes'; it must be true, false or a mapping"),
        (
            {**HOOK, "tls": {"insecure": True}},
            "tls has no option 'insecure'; there are",
        ),
        ({**HOOK, "tls": {"key_file": "/k"}}, "tls has a key_file without a cert_file"),
        ({**HOOK, "url": "http://a/", "tls": True}, "tls is for an https:// url"),
        ({k: v for k, v in BRIDGE.items() if k != "host"}, "host is missing"),
        ({**BRIDGE, "port": 70_000}, "port is 70000"),
        ({**BRIDGE, "version": 3}, "version is 3"),
        ({**BRIDGE, "qos": 0}, "qos is 0"),
        ({**BRIDGE, "qos": 3}, "qos is 3"),
        ({**BRIDGE, "password_file": "/f"}, "password_file without username"),
        ({**BRIDGE, "topic_prefix": "a/#"}, "topic_prefix has a wildcard"),
        ({**BRIDGE, "inflight": 0}, "inflight is 0"),
        ({**BRIDGE, "keep_alive": 0}, "keep_alive is 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"^sinks.alerts: ") as refused:
        read(options)
    assert told in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "$sessions", "\x00", ".x", "x" * 300, "ä"])
def test_a_name_is_plain(name: str) -> None:
    with pytest.raises(ValueError, match="a name is"):
        read(HOOK, name)


def test_a_secret_is_the_file_without_the_end_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b" s3cret \r\n")
    assert read_secret("secret_file", str(path)) == b" s3cret "
    path.write_bytes(b"\n")
    with pytest.raises(ValueError, match="is empty"):
        read_secret("secret_file", str(path))
    with pytest.raises(ValueError, match=r"^secret_file .*none: No such file or directory$"):
        read_secret("secret_file", str(tmp_path / "none"))


def test_a_file_for_tls_that_is_no_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    text, none = str(tmp_path / "text"), str(tmp_path / "none")
    for settings, told in (
        (TlsSettings(ca_file=none), f"tls: ca_file {none}: No such file or directory"),
        (TlsSettings(ca_file=text), f"tls: ca_file {text}: no certificate in it"),
        (TlsSettings(cert_file=none), f"tls: cert_file, key_file {none}: No such file"),
        (TlsSettings(cert_file=text, key_file=text), f"{text}, {text}: no certificate and its key"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            tls_context(settings)
    assert tls_context(None).check_hostname
    assert not tls_context(TlsSettings(check_hostname=False)).check_hostname
