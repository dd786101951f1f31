"""Durable MQTT sessions for the amqtt broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker_ext.plugin import DurableSessionPlugin

__all__ = ["DurableSessionPlugin"]


def __getattr__(name: str) -> object:
    """Load the plugin, and amqtt with it, when it is asked for: the codec needs neither."""
    if name == "DurableSessionPlugin":
        from broker_ext.plugin import DurableSessionPlugin  # noqa: PLC0415

        return DurableSessionPlugin
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
