"""What is to be served: a file's configuration and the options, put together.

Rule 1  A file is amqtt's own YAML. Options override it, and what is missing is inserted: our
        plugin, a default listener on loopback, authentication on loopback.
Rule 2  Any user is accepted on loopback only. Elsewhere the file must name an authentication
        plugin, or `serve` refuses.
Rule 3  Every `bind` is checked and rewritten as amqtt can use it.
Rule 4  What amqtt would refuse in words that name nothing is refused here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from broker_ext.cli.errors import CannotServe, root_cause
from broker_ext.cli.store import DEFAULT_DATA
from broker_ext.given import check_names, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "PLUGIN",
    "Bind",
    "bound",
    "our_plugin",
    "parse_bind",
    "plugin_defaults",
    "read_yaml",
    "serving_config",
]

PLUGIN = "broker_ext.DurableSessionPlugin"
PLUGIN_NAMES = (PLUGIN, "broker_ext.plugin.DurableSessionPlugin")
ANONYMOUS = "amqtt.plugins.authentication.AnonymousAuthPlugin"
DEFAULT_BIND = "127.0.0.1:1883"
DEFAULT_PORT = 1883


class Bind(NamedTuple):
    """Where a listener listens. host "": every interface; port 0..65535, 0 = a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def for_amqtt(self) -> str:
        """Write it as amqtt 0.12 can use it: IPv6 without brackets.

        amqtt hands the brackets of "[::1]" to the resolver, which fails; it splits at the last
        colon, so that without them IPv6 works.
        """
        return f"{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name counts when all its addresses do."""
        if not self.host:
            return False
        try:
            return _is_loopback_address(self.host)
        except ValueError:
            pass  # a name, not an address
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise CannotServe(f"cannot listen on {self}: {root_cause(exc)}") from exc
        return all(_is_loopback_address(str(sockaddr[0])) for *_, sockaddr in found)


def parse_bind(text: str) -> Bind:
    """Read HOST:PORT, [IPV6]:PORT, :PORT, PORT or HOST (port 1883). Pure.

    Raises CannotServe for anything else, IPv6 without brackets included: in "::1:1883" nobody
    can tell where the port begins.
    """
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise CannotServe(f"'{text}' is not an address: expected [IPV6]:PORT")
        try:
            ipaddress.IPv6Address(host)
        except ValueError as exc:
            raise CannotServe(f"'{host}' is not an IPv6 address") from exc
        return Bind(host, _port(rest[1:], text) if rest else DEFAULT_PORT)
    if text.count(":") > 1:
        raise CannotServe(f"'{text}': write IPv6 in brackets, as in [::1]:{DEFAULT_PORT}")
    host, colon, port = text.rpartition(":")
    if colon:
        return Bind(host, _port(port, text))
    if text.isdecimal():
        return Bind("", _port(text, text))
    if not text:
        raise CannotServe("an empty address: expected HOST:PORT")
    return Bind(text, DEFAULT_PORT)


def _port(digits: str, text: str) -> int:
    if digits.isascii() and digits.isdecimal() and int(digits) <= 0xFFFF:
        return int(digits)
    raise CannotServe(f"'{text}': the port must be a number from 0 to 65535")


def _is_loopback_address(host: str) -> bool:
    """Raise ValueError when host is a name."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file; an empty one is {}. Raises CannotServe."""
    import yaml  # noqa: PLC0415 - only with --config

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise CannotServe(f"cannot read the configuration: {root_cause(exc)}") from exc
    except yaml.YAMLError as exc:
        raise CannotServe(f"{path} is not YAML: {root_cause(exc)}") from exc
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise CannotServe(f"{path} is not an amqtt configuration: it must be a mapping")
    return loaded


def serving_config(
    loaded: Mapping[str, Any],
    *,
    data: Path | None = None,
    bind: Bind | None = None,
    store: str | None = None,
    durability: str | None = None,
    key_file: Path | None = None,
    seal_topics: bool = False,
) -> dict[str, Any]:
    """Put a file's configuration and the options together: what amqtt's Broker is given.

    loaded: the file as read, {} without one; it is not changed. Options that are None leave the
    file's word. Raises CannotServe when a rule of this module refuses. Does no more than that,
    except that a host name is resolved, a free port looked for, and a plugin of the file
    imported to know whether it authenticates.
    """
    plugins = _plugins(loaded)
    listeners = _listeners(loaded, bind)
    try:
        _check_amqtt(loaded, listeners)
    except ValueError as exc:
        raise CannotServe(str(exc)) from exc
    name = our_plugin(plugins)
    ours = dict(plugins.get(name) or {})
    if data is not None or "data" not in ours:
        ours["data"] = str((data or DEFAULT_DATA).absolute())
    ours |= {key: word for key, word in (("store", store), ("durability", durability)) if word}
    if key_file is not None:
        ours["seal_key_file"] = str(key_file.absolute())
        ours.pop("seal_key_env", None)
    if seal_topics:
        ours["seal_topics"] = True
    if not any(map(_is_authentication, plugins)):
        _require_loopback(listeners)
        plugins = {ANONYMOUS: {"allow_anonymous": True}} | plugins
    plugins[name] = ours
    return {**loaded, "listeners": listeners, "plugins": plugins}


def our_plugin(plugins: Mapping[str, Any]) -> str:
    """Give the name under which a `plugins` section has our plugin, or should have it."""
    return next((name for name in PLUGIN_NAMES if name in plugins), PLUGIN)


def plugin_defaults() -> dict[str, Any]:
    """Give the defaults of our plugin's settings: what a file and the options leave open."""
    from broker_ext import DurableSessionPlugin  # noqa: PLC0415 - imports all of amqtt

    return {
        field.name: field.default
        for field in dataclasses.fields(DurableSessionPlugin.Config)
        if field.default is not dataclasses.MISSING
    }


def _plugins(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give the plugins of a file as amqtt reads them: a mapping, or a list of names and mappings.

    A file of amqtt's older style (`auth:`, no `plugins:`) is refused: as soon as one plugin is
    named, amqtt ignores `auth:`, and the file's authentication would silently be gone.
    """
    if not config.get("plugins"):
        old = [key for key in ("auth", "topic-check", "topic_check") if config.get(key)]
        if old:
            raise CannotServe(
                f"the configuration uses amqtt's old '{old[0]}' section, which amqtt ignores "
                "once a plugin is named; write it as entries of 'plugins'"
            )
    plugins: dict[str, Any] = {}
    section = config.get("plugins") or {}
    parts = section if isinstance(section, list) else [section]
    for part in parts:
        if not isinstance(part, dict) and not (isinstance(part, str) and parts is section):
            raise CannotServe("'plugins' must map the name of each plugin to its settings")
        plugins |= {part: {}} if isinstance(part, str) else part
    for name, settings in plugins.items():
        if not isinstance(name, str) or not isinstance(settings, (dict, type(None))):
            raise CannotServe(f"the settings of plugin '{name}' must be a mapping")
    return plugins


def _listeners(config: Mapping[str, Any], bind: Bind | None) -> dict[str, dict[str, Any]]:
    """Give the listeners with every `bind` as amqtt can use it, and the default one bound."""
    section = config.get("listeners") or {}
    if not isinstance(section, dict) or not all(isinstance(one, dict) for one in section.values()):
        raise CannotServe("'listeners' must map the name of each listener to its settings")
    listeners = {name: dict(one) for name, one in section.items()}
    default = listeners.setdefault("default", {"type": "tcp"})
    if bind is not None:
        default["bind"] = str(bind)
    elif "bind" not in default and default.get("type") != "external":
        default["bind"] = DEFAULT_BIND  # amqtt's own default is every interface
    for listener in listeners.values():
        if listener.get("bind") is not None:
            listener["bind"] = _with_a_port(parse_bind(str(listener["bind"]))).for_amqtt()
    return listeners


def _check_amqtt(loaded: Mapping[str, Any], listeners: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for an option that amqtt does not have, and for what a listener lacks."""
    from amqtt.contexts import BrokerConfig, ListenerConfig, ListenerType  # noqa: PLC0415

    known = [one.name for one in dataclasses.fields(BrokerConfig)]
    check_names(loaded, [*known, "topic-check"], "amqtt's configuration")
    kinds = [str(kind) for kind in ListenerType]
    for name, listener in listeners.items():
        whose = f"listener {name!r}"
        check_names(listener, [one.name for one in dataclasses.fields(ListenerConfig)], whose)
        kind = listener.get("type", "tcp")
        if kind not in kinds:
            msg = f"{whose}: type is {shown(kind)}; it must be one of {', '.join(kinds)}"
            raise ValueError(msg)
        given = {**listeners["default"], **listener}  # as amqtt inherits
        if listener.get("ssl") and not (given.get("certfile") and given.get("keyfile")):
            msg = f"{whose}: ssl needs a certfile and a keyfile"
            raise ValueError(msg)


def _with_a_port(bind: Bind) -> Bind:
    """Choose the free port that port 0 asks for, so that it can be told.

    It may be taken again before amqtt binds it; then `serve` says so, and can be asked again.
    """
    if bind.port:
        return bind
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((bind.host, 0))
            return Bind(bind.host, probe.getsockname()[1])
    except OSError as exc:
        raise CannotServe(f"cannot listen on {bind}: {root_cause(exc)}") from exc


def bound(listeners: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Bind]]:
    """Give (type, where) of each listener of a serving_config that opens a socket."""
    for listener in listeners.values():
        kind = str(listener.get("type", "tcp"))
        if listener.get("bind") is not None and kind != "external":
            host, _, port = str(listener["bind"]).rpartition(":")
            yield kind, Bind(host, int(port))


def _require_loopback(listeners: Mapping[str, Mapping[str, Any]]) -> None:
    for _, bind in bound(listeners):
        if not bind.is_loopback():
            raise CannotServe(
                f"refusing to listen on {bind}, where others can connect, without "
                "authentication: give a --config whose 'plugins' name an authentication plugin "
                "(such as amqtt.plugins.authentication.FileAuthPlugin), or bind to loopback with "
                f"--bind {DEFAULT_BIND}"
            )


def _is_authentication(plugin: str) -> bool:
    if plugin in PLUGIN_NAMES:
        return False
    from amqtt.plugins.base import BaseAuthPlugin  # noqa: PLC0415 - imports all of amqtt
    from amqtt.utils import import_string  # noqa: PLC0415

    try:
        found = import_string(plugin)
    except ImportError as exc:
        raise CannotServe(f"cannot import plugin '{plugin}': {exc}") from exc
    return isinstance(found, type) and issubclass(found, BaseAuthPlugin)
