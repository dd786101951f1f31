"""What a transport of a sink has to do, and what it says about a message it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from storage.outbox import Failure

if TYPE_CHECKING:
    from storage.api import Entry

__all__ = ["DONE", "Outgoing", "Sender", "Sent"]


class Outgoing(NamedTuple):
    """A message as a transport gets it.

    id: of the outbox; a reissue has another one. event_id: the same for every attempt and every
    reissue of a message, and of no other: what a receiver finds repetitions by. attempt: 1, 2, ...
    created_ms: when it left the history.
    """

    id: int
    event_id: str
    attempt: int
    created_ms: int
    message: Entry

    def __repr__(self) -> str:
        """No payload in logs (P13)."""
        return f"Outgoing({self.id}, attempt {self.attempt})"


class Sent(NamedTuple):
    """What became of a send.

    failure: NONE = the receiver has it. UNAVAILABLE only if certainly nothing was sent.
    detail: our own words for the log ("HTTP 503", "timed out"): no payload, no text of the
    receiver's. retry_at_ms: when it wants to be asked again, None = it did not say.
    """

    failure: Failure = Failure.NONE
    detail: str = ""
    retry_at_ms: int | None = None


DONE = Sent()


class Sender(Protocol):
    """A transport. ``send`` is called for up to ``window`` messages at once."""

    window: int
    """Sends under way at once, at most; may change."""
    ordered: bool
    """Messages are begun in the order of the history, one acquisition at a time."""

    async def open(self) -> None:
        """Make what is needed; connects to nobody yet. Raises ValueError, which names a
        file that is no use: the broker does not start."""
        ...

    async def ready(self) -> None:
        """Return when it makes sense to claim messages (a connection is there)."""
        ...

    async def send(self, out: Outgoing) -> Sent:
        """Send one message, and wait for what the receiver says. What it raises is a bug.

        A transport that keeps order writes before its first await. When it is cancelled the message
        may have been sent.
        """
        ...

    async def close(self) -> None:
        """Close connections. Idempotent."""
        ...
