"""When a message is tried again, and what becomes of each class of failure. Pure.

Rule 1. A receiver's own Retry-After wins over the schedule when it is valid (at most
        RETRY_AFTER_MS_MAX ahead) and in the future.
Rule 2. Attempts count settlements and lapsed leases, never claims: a worker that gives a message
        back unsent has not tried it.
Rule 3. The store decides exhaustion (Enqueue.attempts_max): RETRY of the last attempt is a dead
        letter. So a message that kills the process each time ends, too: the reap of its lapsed
        lease charges it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from storage.outbox.moves import Failure, Verdict
from storage.outbox.vocabulary import RETRY_DELAYS_MS, Settle

if TYPE_CHECKING:
    from storage.outbox.vocabulary import Message

__all__ = ["BECOMES", "RETRY_AFTER_MS_MAX", "Schedule"]

RETRY_AFTER_MS_MAX: Final = 24 * 3600 * 1000
"""A receiver that asks for more than a day is not believed: a typo must not park a queue."""

BECOMES: Final[dict[Failure, Verdict]] = {
    Failure.REJECTED: Verdict.DEAD,  # it will say the same tomorrow
    Failure.THROTTLED: Verdict.RETRY,
    Failure.UNAVAILABLE: Verdict.RETRY,
    Failure.INDETERMINATE: Verdict.RETRY,  # it may have been taken: at least once
    Failure.EXPIRED: Verdict.EXPIRED,
    Failure.UNREADABLE: Verdict.DEAD,  # no attempt can read it
    Failure.UNEXPECTED: Verdict.RETRY,  # our own bug: counted, so that it cannot loop for ever
}
"""Class of a failure -> how its message is settled."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a message waits after its 1st, 2nd, ... attempt failed; the last one repeats.

    jitter: a delay is multiplied by 1 - jitter .. 1 + jitter, so that what failed together does not
        come back together; 0..1.
    """

    delays_ms: tuple[int, ...] = RETRY_DELAYS_MS
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if not self.delays_ms or min(self.delays_ms) <= 0:
            msg = "a schedule needs delays above 0"
            raise ValueError(msg)
        if not 0 <= self.jitter <= 1:
            msg = f"jitter is 0 to 1, not {self.jitter}"
            raise ValueError(msg)

    def due_ms(
        self, attempts: int, now_ms: int, *, chance: float, retry_at_ms: int | None = None
    ) -> int:
        """When the next attempt is due.

        attempts: that failed before this one (Message.attempts). chance: 0..1, drawn by the caller.
        retry_at_ms: what the receiver asked for (Rule 1), as a time, None = nothing.
        """
        if retry_at_ms is not None and now_ms < retry_at_ms <= now_ms + RETRY_AFTER_MS_MAX:
            return retry_at_ms
        delay_ms = self.delays_ms[min(attempts, len(self.delays_ms) - 1)]
        return now_ms + max(1, round(delay_ms * (1 + self.jitter * (2 * chance - 1))))

    def settlement(
        self,
        message: Message,
        failure: Failure,
        now_ms: int,
        *,
        chance: float = 0.5,
        retry_at_ms: int | None = None,
        erase: bool = False,
    ) -> Settle:
        """How a failed message is settled. Raises KeyError for a class that is no worker's."""
        verdict = BECOMES[failure]
        due_ms = 0
        if verdict is Verdict.RETRY:
            due_ms = self.due_ms(message.attempts, now_ms, chance=chance, retry_at_ms=retry_at_ms)
        return Settle(message.credential, now_ms, verdict, failure, due_ms, erase)
