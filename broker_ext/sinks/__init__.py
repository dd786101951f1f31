"""Sinks: durable consumers whose transport is not an MQTT client.

    settings      the YAML of a sink, checked
    sender        what a transport has to do; what it says about a message
    webhook       HTTP POST
    bridge        another MQTT broker
    pace          when a destination that fails is tried again
    dispatcher    the outbox of one sink: claims, leases, settlements
    feeder        the history behind its cursor, into the outbox
    sink          one consumer: acquired, checked, fed and worked off; all sinks of a broker

A message goes history -> (feeder: one fenced operation moves the cursor and enqueues) -> outbox ->
(dispatcher: claim, send, settle) -> done or dead letter. So it is delivered at least once, and what
waits for a sink that is down is history behind its cursor.
"""
