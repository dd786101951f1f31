"""Settings of the broker's durable half, checked. One value for everything that has a limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from broker_ext.rules import FilterRule
    from broker_ext.sinks.settings import SinkSettings

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``DurableSessionPlugin.Config`` and amqtt's own configuration come to.

    Times: seconds (``_s``). Sizes: bytes. session_expiry_interval_s: None = for ever. max_age_s,
    max_bytes, max_messages: hard caps of the history, None = none. max_keep_alive_s: 0 = none.
    max_delivery_attempts: 0 = as often as it takes.
    """

    max_inflight: int = 100
    max_packet_bytes: int = 16 << 20
    max_client_id_bytes: int = 1024
    queue_qos0: bool = True
    max_queued_messages: int = 1000
    max_queued_bytes: int = 16 << 20
    max_retained_messages: int = 100_000
    max_retained_bytes: int = 64 << 20
    max_qos: int = 2
    receive_maximum: int = 1000
    topic_alias_maximum: int = 16
    max_keep_alive_s: int = 0
    response_information: str = ""
    wildcard_subscriptions: bool = True
    subscription_identifiers: bool = True
    shared_subscriptions: bool = True
    shared_order: Literal["free", "topic"] = "free"
    commit_bytes_max: int = 16 << 20
    connect_timeout_s: float = 10.0
    takeover_timeout_s: float = 10.0
    max_connects_per_second: float = 100.0
    checkpoint_interval_s: float = 5.0
    prune_interval_s: float = 1.0
    retain_for_s: float = 0.0
    session_expiry_interval_s: int | None = None
    timeout_disconnect_delay_s: float = 0.0
    publish_wills_after_crash: bool = True
    will_recovery_delay_s: float = 10.0
    on_generation_change: Literal["resume", "reset"] = "resume"
    on_history_pruned: Literal["reset", "skip"] = "reset"
    history_filters: tuple[str, ...] = ()
    max_age_s: float | None = None
    max_bytes: int | None = None
    max_messages: int | None = None
    versions: frozenset[int] = field(default_factory=lambda: frozenset({3, 4, 5}))
    sinks: tuple[SinkSettings, ...] = ()
    keep_done_s: float = 30 * 86_400
    keep_dead_s: float = 90 * 86_400
    filters: tuple[FilterRule, ...] = ()
    max_delivery_attempts: int = 0

    @property
    def retain_available(self) -> bool:
        """Whether anything is retained."""
        return self.max_retained_messages > 0
