"""The same MQTT 5 device on four client libraries."""
