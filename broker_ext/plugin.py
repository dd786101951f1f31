"""The plugin that users name in YAML."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amqtt.plugins.base import BasePlugin

from broker_ext.control import Control
from broker_ext.given import check_names, check_number, check_types, shown
from broker_ext.hub import Hub
from broker_ext.operating import OPERATING
from broker_ext.rekeying import REKEYING, Rekeying
from broker_ext.rules import filter_rules
from broker_ext.seam import Seam, SeamError, broker_of, read_by
from broker_ext.settings import Settings
from broker_ext.sinks.settings import sinks_settings
from broker_ext.wire import valid_filter
from storage import open_store
from storage.clock import SystemClock
from storage.durable import DurableStore
from storage.errors import StoreError
from storage.keyring import looks_like_a_key, read_keys
from storage.outbox import QUEUE_BYTES_MAX
from storage.roles import LEASE_MS

if TYPE_CHECKING:
    from amqtt.broker import BrokerContext

    from broker_ext.history import History
    from storage.keyring import Keyring
    from storage.outbox import Schedule
    from storage.roles import Producer, Worker

__all__ = ["DurableSessionPlugin"]

log = logging.getLogger("amqtt_durable")


class DurableSessionPlugin(BasePlugin[Any]):
    """Makes the sessions of an amqtt broker durable.

    Life cycle: ``__init__`` checks configuration and amqtt (what it raises stops the broker);
    ``on_broker_pre_start`` opens the store and takes over the connections, before the listeners
    bind; ``on_broker_pre_shutdown`` ends every session, writes everything and closes the store.
    """

    @dataclass
    class Config:
        """Options in YAML. Names are written with '_': amqtt takes them as they stand, so that
        'max-inflight' is refused as unknown, like any other option that is not here."""

        data: str = "amqtt-durable-data"
        """Directory of the database; made if it is not there."""
        store: str = "sqlite"
        """`sqlite` or `lmdb`."""
        durability: str = "fsync"
        """What an acknowledgement means: `fsync`, on disk; `os`, with the operating system: it
        survives kill -9 and may lose the last moments at power loss."""
        map_bytes_max: int | None = None
        """lmdb: how far the map may grow; default: see README."""
        max_inflight: int = 100
        """Deliveries to one client that are sent and not acknowledged, 1..65535."""
        max_packet_bytes: int = 16 << 20
        """Largest packet a client may send, 1024..268435455."""
        max_client_id_bytes: int = 1024
        """Longest client id, 23..65535; a longer one is refused with CONNACK 2 (MQTT 5: 0x85)."""
        max_qos: int = 2
        """Highest QoS, 0..2. Subscriptions are granted no more; an MQTT 5 client may send no more,
        and is told so (Maximum QoS)."""
        receive_maximum: int = 1000
        """MQTT 5: messages (QoS >= 1) that a client may send and that are not acknowledged,
        1..65535; one more ends its connection with 0x93."""
        topic_alias_maximum: int = 16
        """MQTT 5: topic aliases that a client may use, 0..65535, 0 = none."""
        max_keep_alive: int = 0
        """MQTT 5: seconds; a client that asks for a longer keep alive, or for none, is told this
        one (Server Keep Alive). 0 = each has what it asks for."""
        response_information: str = ""
        """MQTT 5: Response Information for clients that ask; `{client_id}` is replaced."""
        wildcard_subscriptions: bool = True
        """Whether filters with `+` and `#` are granted (else 0xA2, before MQTT 5 0x80)."""
        subscription_identifiers: bool = True
        """MQTT 5: whether filters with a Subscription Identifier are granted (else 0xA1)."""
        queue_qos0: bool = True
        """Whether what is published with QoS 0 is kept for sessions that are away and subscribed to
        it with QoS 1 or 2, as amqtt does; they are sent it with QoS 0, at most once."""
        max_queued_messages: int = 1000
        """Messages that wait for a transient (clean) session; more are dropped and counted."""
        max_queued_bytes: int = 16 << 20
        """Payload bytes that wait for a transient session."""
        max_retained_messages: int = 100_000
        """Retained messages; more are delivered but not retained. 0 = none, and an MQTT 5 client
        is told so (Retain Available)."""
        max_retained_bytes: int = 64 << 20
        """Bytes of retained messages, topics included."""
        commit_bytes_max: int = 16 << 20
        """Bytes that wait for the disk; then publishers are not read from."""
        connect_timeout: float = 10.0
        """Seconds a connection may take to send its CONNECT."""
        takeover_timeout: float = 10.0
        """Seconds a CONNECT waits for its predecessor with the same client id, and for the store;
        then CONNACK 3."""
        max_connects_per_second: float = 100.0
        """CONNECTs of one client id a second, in the long run (two seconds' worth at once); more
        wait in its own line, so that a client in a tight loop does not cost the others."""
        checkpoint_interval: float = 5.0
        """Seconds between checkpoints of quiet sessions."""
        retain_for: float = 0.0
        """Seconds that history is kept even when every session has it."""
        history_filters: list[str] = field(default_factory=list)
        """Topic filters that are always logged (QoS >= 1), so that `plugin.history` can resume."""
        max_age: float | None = None
        """Hard cap: seconds after which history is deleted even if a session still needs it."""
        max_bytes: int | None = None
        """Hard cap: bytes of history on disk; 0 = none; default: half of what the disk has free."""
        max_messages: int | None = None
        """Hard cap: messages in the history."""
        on_history_pruned: str = "reset"
        """A session that needs what a cap deleted: `reset` (and told so), or `skip` the gap."""
        publish_wills_after_crash: bool = True
        """Publish the wills of connections that died with the broker."""
        will_recovery_delay: float = 10.0
        """Seconds after the start in which their clients may come back first."""
        on_generation_change: str = "resume"
        """A session of another database generation: `resume` (replay, unchecked) or `reset`."""
        shared_order: str = "free"
        """Of a shared subscription: `free` (whoever has most room) or `topic` (a topic stays with
        one member while it keeps up)."""
        filters: dict[str, Any] = field(default_factory=dict)
        """Topic filter -> `expire_after` (seconds), `keep: latest`: of what waits for a session."""
        max_delivery_attempts: int = 0
        """A message under way during which a client's connection broke so often is a dead letter;
        0 = it is delivered as often as it takes."""
        seal_key_file: str = ""
        """File with the keys that messages on disk are sealed with; default: they are not."""
        seal_key_env: str = ""
        """Environment variable with the keys, instead of a file."""
        seal_topics: bool = False
        """Seal the names of topics, and topic filters, too."""
        seal_key: Any = None
        """Never: it is here to be refused."""

        sinks: dict[str, Any] = field(default_factory=dict)
        """Webhooks and bridges, by name; see README."""
        keep_done: float = 30 * 86_400
        """Seconds that the row of a message which a sink delivered is kept."""
        keep_dead: float = 90 * 86_400
        """Seconds that a dead letter is kept."""

        def __post_init__(self) -> None:
            """Refuse what cannot be. Raises ValueError."""
            if self.seal_key is None:  # what stands there is not looked at
                check_types(type(self), vars(self))
            if not self.data:
                msg = "data is empty; it must name a directory"
                raise ValueError(msg)
            _one_of("store", self.store, ("lmdb", "sqlite"))
            _one_of("durability", self.durability, ("fsync", "os"))
            _one_of("on_generation_change", self.on_generation_change, ("resume", "reset"))
            _one_of("shared_order", self.shared_order, ("free", "topic"))
            _one_of("on_history_pruned", self.on_history_pruned, ("reset", "skip"))
            sinks_settings(self.sinks)
            filter_rules(self.filters)
            _no_key_in_yaml(self.seal_key, self.seal_key_file, self.seal_key_env)
            if self.seal_topics and not (self.seal_key_file or self.seal_key_env):
                msg = "seal_topics needs keys: name them with seal_key_file or seal_key_env"
                raise ValueError(msg)
            for name in self.history_filters:
                if not valid_filter(name.encode()):
                    msg = f"history_filters has {name!r}, which is no topic filter [MQTT-4.7.1]"
                    raise ValueError(msg)
            for name, low, high in (
                ("max_inflight", 1, 65_535),
                ("max_packet_bytes", 1024, 268_435_455),
                ("max_client_id_bytes", 23, 65_535),
                ("max_qos", 0, 2),
                ("receive_maximum", 1, 65_535),
                ("topic_alias_maximum", 0, 65_535),
                ("max_keep_alive", 0, 65_535),
                ("max_queued_messages", 1, None),
                ("max_queued_bytes", 1, None),
                ("max_retained_messages", 0, None),
                ("max_retained_bytes", 0, None),
                ("commit_bytes_max", 65_536, None),
                ("connect_timeout", 0.1, None),
                ("takeover_timeout", 0.1, None),
                ("max_connects_per_second", 0.1, None),
                ("checkpoint_interval", 0.1, None),
                ("retain_for", 0, None),
                ("max_age", 1, None),
                ("max_bytes", 0, None),
                ("max_messages", 1, None),
                ("max_delivery_attempts", 0, 255),
                ("will_recovery_delay", 0, None),
                ("keep_done", 0, None),
                ("keep_dead", 0, None),
                ("map_bytes_max", 1 << 20, None),
            ):
                check_number(name, getattr(self, name), low, high)

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self.hub: Hub | None = None
        self._control: Control | None = None
        self._data = Path(self.config.data).expanduser()
        try:
            self._seam = Seam(context)
        except SeamError as error:  # amqtt tells that a plugin failed, and not why
            log.critical("the broker does not start: %s", error)
            raise

    @classmethod
    def of(cls, context: BrokerContext) -> DurableSessionPlugin:
        """The one of the broker whose context another plugin has, from on_broker_pre_start on.

        Raises LookupError where the broker has none.
        """
        found: DurableSessionPlugin | None
        found = broker_of(context).plugins_manager.get_plugin(cls.__name__)
        if found is None:
            msg = "the broker has no DurableSessionPlugin"
            raise LookupError(msg)
        return found

    @property
    def history(self) -> History:
        """The history, to read on from a position of your own; while the broker runs."""
        return self._running().history

    def producer(self, queue: str) -> Producer:
        """Enqueue to a queue of your own in the outbox; while the broker runs.

        Raises ValueError for a queue that is a sink's or the broker's.
        """
        return self._running().handles.producer(self._own_queue(queue))

    def worker(
        self, queue: str, *, lease_ms: int = LEASE_MS, schedule: Schedule | None = None
    ) -> Worker:
        """Work off a queue of your own; while the broker runs. Lapsed leases are reaped and what
        ended is purged by the broker. Raises ValueError as ``producer``."""
        handles = self._running().handles
        return handles.worker(self._own_queue(queue), lease_ms=lease_ms, schedule=schedule)

    def _running(self) -> Hub:
        if self.hub is None:
            msg = "the broker is not running"
            raise RuntimeError(msg)
        return self.hub

    def _own_queue(self, queue: str) -> bytes:
        name = queue.encode()
        if not 0 < len(name) <= QUEUE_BYTES_MAX or queue.startswith("$"):
            msg = f"{queue!r} is no name for a queue: 1 to {QUEUE_BYTES_MAX} bytes, not with $"
            raise ValueError(msg)
        if queue in {sink.name for sink in self._running().settings.sinks}:
            msg = f"the queue {queue!r} is a sink's"
            raise ValueError(msg)
        return name

    async def on_broker_pre_start(self) -> None:
        """Open the store and take over the connections."""
        config = self.config
        hub: Hub | None = None
        try:
            store = open_store(
                config.store,
                self._data,
                durability=config.durability,
                map_bytes_max=config.map_bytes_max,
                keyring=self._keys(),
                seal_topics=config.seal_topics,
            )
            starting = Hub(store, self._settings(), SystemClock())
            if self._has_keys:
                assert isinstance(store, DurableStore), "lmdb and sqlite are"
                starting.rekeying = Rekeying(store, starting.clock, self._some_keys)
            await starting.start()
            hub = starting
            self._seam.install(hub)
            await hub.load()
        except Exception as error:
            # amqtt would drop it, and start without us: a quiet fallback to memory
            if not isinstance(error, (StoreError, OSError)):
                log.exception("the plugin cannot start")
            if hub is not None:
                await hub.stop()
            self._seam.refuse_to_start(error)
            return
        self.hub = hub
        self._control = Control(hub, self._data, OPERATING | REKEYING)
        self._control.start()
        self._seam.watch_listeners(self.on_broker_pre_shutdown)

    async def on_broker_post_start(self) -> None:
        """The listeners are bound."""
        self._seam.listening()

    async def on_broker_pre_shutdown(self) -> None:
        """End every session, write everything, close the store."""
        hub, self.hub = self.hub, None
        control, self._control = self._control, None
        if control is not None:
            await control.stop()
        if hub is not None:
            await hub.stop()

    async def close(self) -> None:
        """Called by amqtt at the very end."""
        await self.on_broker_pre_shutdown()

    @property
    def _has_keys(self) -> bool:
        return bool(self.config.seal_key_file or self.config.seal_key_env)

    def _keys(self) -> Keyring | None:
        """Read the keys; None = nothing is sealed. Raises KeysUnusable."""
        name = self.config.seal_key_file
        file = Path(name).expanduser() if name else None
        return read_keys(file=file, variable=self.config.seal_key_env)

    def _some_keys(self) -> Keyring:
        keyring = self._keys()
        assert keyring is not None, "it is asked only where there are keys"
        return keyring

    def _settings(self) -> Settings:
        """An option is the setting of its name (seconds have ``_s`` there), but for a few."""
        config = self.config
        broker_config = self._seam.broker.config
        options = vars(config)
        names = {one.name: one.name.removesuffix("_s") for one in fields(Settings)}
        same = {name: options[option] for name, option in names.items() if option in options}
        others = {
            "session_expiry_interval_s": broker_config.session_expiry_interval,
            "timeout_disconnect_delay_s": float(broker_config.timeout_disconnect_delay or 0),
            "history_filters": tuple(config.history_filters),
            "max_bytes": self._max_bytes(),
            "filters": filter_rules(config.filters),
            "sinks": sinks_settings(config.sinks),
        }
        return Settings(**same | others)

    def _max_bytes(self) -> int | None:
        """The cap on history: as configured, else half of what it may become on this disk."""
        if self.config.max_bytes is not None:
            return self.config.max_bytes or None
        data = self._data
        while not data.exists():
            data = data.parent
        used = sum(f.stat().st_size for f in data.glob("history.*") if f.is_file())
        return (shutil.disk_usage(data).free + used) // 2


def _no_key_in_yaml(key: object, file: str, variable: str) -> None:
    """Keys are not written into a configuration, which is read, copied and shown by many. What was
    written there is not repeated here (P13)."""
    if key is not None or looks_like_a_key(file) or looks_like_a_key(variable):
        msg = (
            "a key does not belong into a configuration file: put it into a file of its own that "
            "others cannot read (`amqtt-durable keygen FILE`) and name that with seal_key_file, or "
            "name an environment variable with seal_key_env. Make a new key: this one was seen"
        )
        raise ValueError(msg)
    if file and variable:
        msg = "seal_key_file and seal_key_env are both given; keys come from one place"
        raise ValueError(msg)
    if variable and not (variable.isascii() and variable.isidentifier()):
        msg = "seal_key_env is not the name of an environment variable"
        raise ValueError(msg)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        msg = f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}"
        raise ValueError(msg)


def _read(given: object) -> DurableSessionPlugin.Config:
    """The options as YAML has them. Raises ValueError."""
    if not isinstance(given, dict):
        msg = f"its options are {shown(given)}, not a mapping"
        raise ValueError(msg)  # noqa: TRY004 - see broker_ext.given
    check_names(given, [one.name for one in fields(DurableSessionPlugin.Config)])
    return DurableSessionPlugin.Config(**given)


read_by("broker_ext.DurableSessionPlugin", DurableSessionPlugin.Config, _read)
