"""Durable MQTT sessions for the amqtt broker."""

from broker_ext.plugin import DurableSessionPlugin

__all__ = ["DurableSessionPlugin"]
