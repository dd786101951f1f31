"""The amqtt that we know: what we rely on and it does not document for plugins."""

from __future__ import annotations

from typing import Any, Final

import amqtt
from amqtt.broker import Broker, Server
from amqtt.plugins.manager import PluginManager
from amqtt.session import Session as AmqttSession

__all__ = [
    "RELIES_ON",
    "RELIES_ON_INSTANCE",
    "RELIES_ON_MANAGER",
    "RELIES_ON_SERVER",
    "SeamError",
    "broker_of",
    "check",
    "check_manager",
]

RELIES_ON: Final[tuple[tuple[object, str], ...]] = (
    (Broker, "stream_connected"),
    (Broker, "ws_connected"),
    (Broker, "external_connected"),
    (Broker, "internal_message_broadcast"),
    (Broker, "retain_message"),
    (Broker, "add_subscription"),
    (Broker, "create_offline_session"),
    (Broker, "_cleanup_session"),
    (Broker, "_start_listeners"),
    (Broker, "_authenticate"),
    (Broker, "_topic_filtering"),
    (Broker, "sessions"),
    (Broker, "subscriptions"),
    (Broker, "retained_messages"),
    (Server, "acquire_connection"),
    (Server, "release_connection"),
    (PluginManager, "fire_event"),
    (AmqttSession, "_init_states"),
    (AmqttSession, "_on_enter_connected"),
    (AmqttSession, "_on_enter_disconnected"),
)
"""What must exist on amqtt's classes (read in 0.12.1)."""

RELIES_ON_INSTANCE: Final = (
    "_servers",
    "_sessions",
    "_subscriptions",
    "_retained_messages",
    "_loop",
    "config",
    "listeners_config",
)
"""What must exist on a broker object when it makes its plugins (read in 0.12.1)."""

RELIES_ON_SERVER: Final = ("instance", "semaphore", "listener_name")
"""What must exist on a listener's Server object (read in 0.12.1)."""

RELIES_ON_MANAGER: Final = (
    "_auth_plugins",
    "_topic_plugins",
    "_event_plugin_callbacks",
    "plugins",
)
"""What must exist on its plugin manager, once there is one (read in 0.12.1)."""


class SeamError(RuntimeError):
    """The installed amqtt lacks something this plugin relies on."""


def broker_of(context: object) -> Any:
    """The broker behind a plugin's context. Raises SeamError if this is not the amqtt we know."""
    if not hasattr(context, "_broker_instance"):
        _complain(["BrokerContext()._broker_instance"])
    broker = context._broker_instance  # type: ignore[attr-defined]
    check(broker)
    return broker


def check(broker: Any) -> None:
    """Compare what we rely on with the installed amqtt. Raises SeamError, naming what it lacks."""
    missing = [
        f"{getattr(o, '__name__', o)}.{name}" for o, name in RELIES_ON if not hasattr(o, name)
    ]
    missing += [f"Broker().{name}" for name in RELIES_ON_INSTANCE if not hasattr(broker, name)]
    server = Server("", None)  # type: ignore[arg-type]
    missing += [f"Server().{name}" for name in RELIES_ON_SERVER if not hasattr(server, name)]
    _complain(missing)


def check_manager(manager: object) -> None:
    """The same for its plugin manager, which it has only when all its plugins are made."""
    _complain(
        [f"PluginManager().{name}" for name in RELIES_ON_MANAGER if not hasattr(manager, name)]
    )


def _complain(missing: list[str]) -> None:
    if missing:
        msg = (
            f"amqtt {amqtt.__version__} is not the amqtt this version of amqtt-durable knows "
            f"(>=0.12,<0.13): it lacks {', '.join(missing)}. Install a matching pair."
        )
        raise SeamError(msg)
