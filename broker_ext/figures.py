"""Counts that are kept as work is done, never by scanning."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Figures", "SinkFigures"]


@dataclass(slots=True)
class SinkFigures:
    """What one sink did since the start. Counts of events.

    fed: messages moved from the history into the outbox. released: given back unsent. lost: claims
    that were no longer held when they were settled or extended. bytes: payloads delivered.
    last_done_ms: 0 = never. last_failure: class and our words for it, "" = none.
    """

    fed: int = 0
    done: int = 0
    retried: int = 0
    dead: int = 0
    expired: int = 0
    released: int = 0
    lost: int = 0
    resets: int = 0
    gaps: int = 0
    bytes: int = 0
    last_done_ms: int = 0
    last_failure: str = ""


@dataclass(slots=True)
class Figures:
    """What the broker did since it started. All are counts of events.

    connects_delayed: CONNECTs of a client id that came too often (max_connects_per_second).
    dropped_qos0: QoS 0 messages not written, because the client reads too slowly.
    queued_qos0: QoS 0 messages delivered that were published while their client was away.
    dropped_queue: QoS 1 and 2 messages that a transient session's full queue did not take.
    refused_retained: retained messages not stored, because of the limit.
    refused_quota: messages of MQTT 5 publishers refused with 0x97.
    expired_messages: copies of messages not delivered, or no longer retained, because their Message
        Expiry Interval had passed.
    feeds, feeds_refused: subscriptions that read the history from the client's own position.
    superseded: deliveries not made, because there is a newer message of the topic (``keep:
        latest``).
    undeliverable: dead letters of messages that made their client go again and again.
    too_large: deliveries not made, because the client takes no packet that large.
    gaps: losses of history that were skipped (``on_history_pruned: skip``).
    verified: sessions whose replay reached the end of the history.
    resets: reason -> sessions deleted because their position could not be resumed.
    sinks: name -> what it did.
    """

    connections: int = 0
    connects: int = 0
    connects_refused: int = 0
    connects_delayed: int = 0
    takeovers: int = 0
    malformed: int = 0
    published: int = 0
    logged: int = 0
    delivered: int = 0
    redelivered: int = 0
    settled: int = 0
    dropped_qos0: int = 0
    queued_qos0: int = 0
    dropped_queue: int = 0
    refused_retained: int = 0
    refused_quota: int = 0
    expired_messages: int = 0
    too_large: int = 0
    superseded: int = 0
    undeliverable: int = 0
    feeds: int = 0
    feeds_refused: int = 0
    resumed: int = 0
    rebound: int = 0
    fenced: int = 0
    claims_not_held: int = 0
    expired: int = 0
    pruned_blocks: int = 0
    wills: int = 0
    gaps: int = 0
    verified: int = 0
    resets: dict[str, int] = field(default_factory=dict)
    sinks: dict[str, SinkFigures] = field(default_factory=dict)
