"""What a sink is told in YAML, checked: one frozen value for each.

Rule 1. An option that is not known is refused by name, like those of the plugin.
Rule 2. A secret is never in the YAML: ``*_file`` names a file, which is read at each start.
        Every refusal is a ValueError: amqtt shows its text, and not that of others.
Rule 3. What is told about a destination is its scheme and host, never path, query or user.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from broker_ext.given import check_names, check_number, check_types, shown
from broker_ext.wire import valid_filter
from storage.outbox import QUEUE_BYTES_MAX, RETRY_DELAYS_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BridgeSettings",
    "SinkSettings",
    "TlsSettings",
    "WebhookSettings",
    "read_secret",
    "sinks_settings",
    "tls_context",
]

WORKERS_MAX: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OURS: Final = re.compile(
    r"(webhook-(id|timestamp|signature)|idempotency-key|amqtt-.*|content-(length|type|encoding)"
    r"|transfer-encoding|host|connection)",
    re.IGNORECASE,
)

Start: TypeAlias = Literal["head", "earliest"] | int


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """ca_file: certificates to trust instead of the system's. cert_file, key_file: our own.
    check_hostname: False trusts any host that has a certificate of ``ca_file``."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    check_hostname: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be. Raises ValueError."""
        if self.key_file and not self.cert_file:
            raise ValueError("tls has a key_file without a cert_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """What all sinks have.

    filters: topic filters. start: where a new sink begins: ``head`` (what comes from now on),
        ``earliest`` (what the history still has) or an offset; a sink that is known goes on.
    timeout: seconds that a send may take. retry: seconds until the 2nd, 3rd, ... attempt; the
        attempt after the last of them is the last.
    workers: sends under way at once. outstanding: messages in the outbox that are not ended.
    """

    type: ClassVar[str] = ""

    name: str
    filters: tuple[str, ...]
    start: Start = "head"
    timeout: float = 10.0
    retry: tuple[float, ...] = tuple(ms / 1000 for ms in RETRY_DELAYS_MS)
    outstanding: int = 1000
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be. Raises ValueError."""
        if not _NAME.fullmatch(self.name) or len(self.name) > QUEUE_BYTES_MAX:
            raise self.bad("a name is letters, digits, '.', '_' and '-'")
        if not self.filters:
            raise self.bad("filters are missing")
        for one in self.filters:
            if not valid_filter(one.encode()) or one.startswith("$share/"):
                raise self.bad(f"{one!r} in filters is no topic filter [MQTT-4.7.1]")
        if self.start not in ("head", "earliest") and not (
            isinstance(self.start, int) and self.start >= 0
        ):
            raise self.bad("start must be head, earliest or an offset")
        self.in_range("timeout", self.timeout, 0.1, 3600)
        self.in_range("outstanding", self.outstanding, 1, 1_000_000)
        if not self.retry:
            raise self.bad("retry has no delay")
        for delay in self.retry:
            self.in_range("retry", delay, 0.001, 30 * 86_400)

    @property
    def window(self) -> int:
        """Sends under way at once."""
        raise NotImplementedError

    @property
    def destination(self) -> str:
        """Scheme, host and port: what may be told."""
        raise NotImplementedError

    def bad(self, what: str) -> ValueError:
        """Give the error for something in this sink's options."""
        return ValueError(f"sinks.{self.name}: {what}")

    def in_range(self, name: str, value: float, low: float, high: float) -> None:
        """Raise ValueError unless it is a number from low to high."""
        try:
            check_number(name, value, low, high)
        except ValueError as error:
            raise self.bad(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings(SinkSettings):
    """HTTP POST. See README for what is sent.

    secret_file: a secret for HMAC-SHA256 in each line, all of them sign. header_files: header ->
    file with its value, for what is a secret (Authorization).
    """

    type: ClassVar[str] = "webhook"

    url: str = ""
    body: Literal["json", "raw"] = "json"
    workers: int = 4
    secret_file: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    header_files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # no zero-argument super(): a slotted dataclass is made twice
        SinkSettings.__post_init__(self)
        try:
            url = urlsplit(self.url)
            port = url.port
        except ValueError:
            raise self.bad("url is not a URL") from None
        if url.scheme not in {"http", "https"} or not url.hostname or port == 0:
            raise self.bad("url must be http://... or https://...")
        if url.username is not None or url.password is not None:
            raise self.bad("url has a user in it; put an Authorization header in header_files")
        if url.fragment:
            raise self.bad("url has a fragment, which is never sent")
        if self.tls is not None and url.scheme == "http":
            raise self.bad("tls is for an https:// url")
        if self.body not in {"json", "raw"}:
            raise self.bad(f"body is {self.body!r}; it must be json or raw")
        self.in_range("workers", self.workers, 1, WORKERS_MAX)
        for name, value in (*self.headers.items(), *self.header_files.items()):
            if not _HEADER.fullmatch(name) or not value.isprintable() or not value.isascii():
                raise self.bad(f"header {name!r} cannot be sent")
            if _OURS.fullmatch(name):
                raise self.bad(f"header {name!r} is set by us")
        if self.headers.keys() & self.header_files.keys():
            raise self.bad("a header is in headers and in header_files")

    @property
    def window(self) -> int:
        return self.workers

    @property
    def destination(self) -> str:
        url = urlsplit(self.url)
        return f"{url.scheme}://{url.hostname}{f':{url.port}' if url.port else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(SinkSettings):
    """Another MQTT broker.

    version: 5 or 4 (MQTT 3.1.1). client_id: by default made of the sink's name and the database's
    id, so that two brokers with the same configuration do not fight for one. qos: the highest;
    a message goes with its own if that is lower. retain: forward the RETAIN flag as published.
    inflight: messages under way to the other broker at once.
    """

    type: ClassVar[str] = "bridge"

    host: str = ""
    port: int = 0
    version: int = 5
    client_id: str = ""
    username: str = ""
    password_file: str = ""
    qos: int = 1
    retain: bool = True
    topic_prefix: str = ""
    keep_alive: int = 60
    inflight: int = 100

    def __post_init__(self) -> None:
        SinkSettings.__post_init__(self)
        if not self.host:
            raise self.bad("host is missing")
        self.in_range("port", self.port, 0, 65_535)
        if self.version not in {4, 5}:
            raise self.bad(f"version is {self.version}; it must be 4 (MQTT 3.1.1) or 5")
        if self.qos not in {1, 2} or isinstance(self.qos, bool):
            raise self.bad(f"qos is {self.qos}; it must be 1 or 2")
        self.in_range("keep_alive", self.keep_alive, 1, 65_535)
        self.in_range("inflight", self.inflight, 1, 10_000)
        if self.password_file and not self.username:
            raise self.bad("password_file without username")
        if set(self.topic_prefix) & set("+#\0"):
            raise self.bad("topic_prefix has a wildcard in it")

    @property
    def window(self) -> int:
        return self.inflight

    @property
    def destination(self) -> str:
        scheme = "mqtts" if self.tls else "mqtt"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port or (8883 if self.tls else 1883)}"


_TYPES: Final[dict[str, type[WebhookSettings | BridgeSettings]]] = {
    "webhook": WebhookSettings,
    "bridge": BridgeSettings,
}


def sinks_settings(configured: Mapping[str, Any]) -> tuple[SinkSettings, ...]:
    """Read the ``sinks`` section: name -> options. Raises ValueError."""
    return tuple(_sink(str(name), options) for name, options in configured.items())


def _sink(name: str, options: object) -> SinkSettings:
    if not isinstance(options, dict):
        raise ValueError(f"sinks.{name}: its options must be a mapping")  # noqa: TRY004
    given = dict(options)
    kind = _TYPES.get(str(given.pop("type", "")))
    if kind is None:
        raise ValueError(f"sinks.{name}: type must be one of {', '.join(_TYPES)}")
    known = {one.name: one for one in fields(kind) if one.name != "name"}
    try:
        check_names(given, known, f"a {kind.type}")
        tls = _tls(given.pop("tls", None))
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
        check_types(kind, given)
    except ValueError as error:
        raise ValueError(f"sinks.{name}: {error}") from None
    for option, one in known.items():
        if option not in given and one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"sinks.{name}: {option} is missing")
    return kind(name=name, tls=tls, **given)


def _tls(given: object) -> TlsSettings | None:
    if given is None or isinstance(given, bool):
        return TlsSettings() if given else None
    if not isinstance(given, dict):
        raise ValueError(f"tls is {shown(given)}; it must be true, false or a mapping")  # noqa: TRY004
    check_names(given, [one.name for one in fields(TlsSettings)], "tls")
    check_types(TlsSettings, given)
    return TlsSettings(**given)


def tls_context(settings: TlsSettings | None) -> ssl.SSLContext:
    """The context of a client. Raises ValueError for a file that is no use, and names it."""
    if settings is None:
        return ssl.create_default_context()
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    except OSError as error:
        raise _no_use("tls: ca_file", settings.ca_file, error, "no certificate in it") from None
    if settings.cert_file:
        key_file = settings.key_file or None
        try:
            context.load_cert_chain(settings.cert_file, key_file, password="")  # nobody to ask
        except OSError as error:
            files = ", ".join(filter(None, (settings.cert_file, key_file)))
            why = "no certificate and its key, in PEM, without a pass phrase"
            raise _no_use("tls: cert_file, key_file", files, error, why) from None
    context.check_hostname = settings.check_hostname
    return context


def read_secret(option: str, path: str) -> bytes:
    """Read a secret from the file of an option, without the end of its line. Raises ValueError,
    which names both, when it cannot be read or is empty."""
    try:
        secret = Path(path).expanduser().read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise _no_use(option, path, error, "it cannot be read") from None
    if not secret:
        raise ValueError(f"{option} {path}: it is empty")
    return secret


def _no_use(option: str, path: str, error: OSError, otherwise: str) -> ValueError:
    """TLS says nothing that a person could use; the system does."""
    why = otherwise if isinstance(error, ssl.SSLError) else error.strerror or otherwise
    return ValueError(f"{option} {path}: {why}")
