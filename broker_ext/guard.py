"""What a connection has on its two sides: a transport, and amqtt's plugins behind a guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from broker_ext.authentication import Exchange
    from broker_ext.session import End, Session
    from broker_ext.wire import Connect, Packet, Publish

__all__ = ["Guard", "Transport"]


class Transport(Protocol):
    """What a connection needs of an asyncio transport (or of an adapter that looks like one)."""

    def write(self, data: bytes) -> None: ...
    def can_write_eof(self) -> bool: ...
    def write_eof(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Guard(Protocol):
    """What is asked outside: amqtt's plugins, through the seam. One for each connection."""

    slow: bool
    """Some plugin listens to packets or filters topics: every packet goes through the lane."""

    async def authenticate(self, connect: Connect) -> bytes | None:
        """The user name of an accepted client (b"" = anonymous), None if it is refused."""
        ...

    def exchange(self, method: bytes, client_id: bytes) -> Exchange | None:
        """An exchange of enhanced authentication, None if nobody provides the method."""
        ...

    async def may_publish(self, topic: bytes) -> bool:
        """Whether the topic plugins permit it."""
        ...

    async def may_subscribe(self, topic_filter: bytes) -> bool:
        """Whether the topic plugins permit it."""
        ...

    async def may_receive(self, topic: bytes) -> bool:
        """Whether the topic plugins permit it."""
        ...

    def packet_received(self, packet: Packet) -> None:
        """Tell the plugins that listen."""
        ...

    def packet_sent(self, data: bytes) -> None:
        """Tell the plugins that listen. data: whole packets."""
        ...

    def message_received(self, packet: Publish, *, permitted: bool | None) -> None:
        """Tell the plugins that listen. permitted: None before the topic plugins were asked."""
        ...

    def subscribed(self, topic_filter: bytes, qos: int) -> None:
        """Tell the plugins that listen."""
        ...

    def unsubscribed(self, topic_filter: bytes) -> None:
        """Tell the plugins that listen."""
        ...

    def connected(self, session: Session) -> None:
        """The client is a session now."""
        ...

    def disconnected(self, session: Session, end: End) -> None:
        """It no longer is."""
        ...

    def closed(self) -> None:
        """The connection is gone; give back what the listener counts."""
        ...
