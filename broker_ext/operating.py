"""The operator's view of the outbox: figures, dead letters, one message, reissue, purge, audit.

The same coroutines answer on the control socket of a running broker and, without one, in the
process of the command line over the store itself. They hold an operator's and a janitor's handle,
and nothing else of the store (storage.roles). Times are milliseconds since the epoch.

Answers tell names in full, and never a payload that was not asked for.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final, Protocol

from broker_ext.operations import Operation, RefusedError, name_of, text_of
from storage.errors import MessageDamaged, ReissueRefused

if TYPE_CHECKING:
    from storage.clock import Clock
    from storage.outbox import Message
    from storage.roles import Handles

__all__ = [
    "OPERATING",
    "Place",
    "outbox_audit",
    "outbox_backlog",
    "outbox_dead_letters",
    "outbox_purge",
    "outbox_reissue",
    "outbox_show",
]

PAGE_MAX: Final = 1000
STEP_MAX: Final = 200
"""Messages that one commit of a purge deletes at most: traffic beside it waits for no more."""
STEPS_MAX: Final = 20
"""Commits of one purge request."""
ACTOR_BYTES_MAX: Final = 255


class Place(Protocol):
    """A running broker (its hub), or a store that the command line has opened."""

    handles: Handles
    clock: Clock

    def outbox_changed(self) -> None:
        """Something is due that was not before."""
        ...

    def destinations(self) -> dict[str, str]:
        """Queue -> where its sink sends; what is not known is not there."""
        ...


async def outbox_backlog(place: Place) -> list[dict[str, Any]]:
    """Figures of each queue, and of each sink that has had nothing to send. oldest_ms: how long the
    first in line has been due, 0 = it is not."""
    now_ms = place.clock.now_ms()
    destinations = place.destinations()
    told = {
        name: {
            "queue": name,
            "destination": destination,
            **dict.fromkeys(_COUNTED, 0),
            "oldest_ms": 0,
            "next_due_ms": 0,
        }
        for name, destination in destinations.items()
    }
    for one in await place.handles.operator().backlog():
        name = text_of(one.queue)
        is_due = 0 < one.oldest_due_ms <= now_ms
        told[name] = {
            "queue": name,
            "destination": destinations.get(name, ""),
            **{state: getattr(one, state) for state in _COUNTED},
            "oldest_ms": now_ms - one.oldest_due_ms if is_due else 0,
            "next_due_ms": one.oldest_due_ms if one.oldest_due_ms > now_ms else 0,
        }
    return [told[name] for name in sorted(told)]


_COUNTED: Final = ("waiting", "claimed", "done", "dead", "superseded", "expired", "reissued")


async def outbox_dead_letters(
    place: Place, *, queue: str, after: str = "", limit: int = 100
) -> dict[str, Any]:
    """A page of the dead letters of one queue, in the order they died. after: ``next`` of the page
    before; ``next`` is "" when there are no more."""
    limit = min(max(limit, 1), PAGE_MAX)
    page = await place.handles.operator().dead_letters(name_of(queue), _after(after), limit)
    last = page[-1] if len(page) == limit else None
    return {
        "dead_letters": [_told(message) for message in page],
        "next": f"{last.ended_ms}-{last.id}" if last is not None else "",
    }


async def outbox_show(place: Place, *, message_id: int, payload: bool = False) -> dict[str, Any]:
    """One message. payload: its payload as well, as base64."""
    try:
        message = await place.handles.operator().show(message_id)
    except MessageDamaged:
        raise RefusedError(410, f"message {message_id} is damaged") from None
    if message is None:
        raise RefusedError(404, f"there is no message {message_id}")
    told = _told(message)
    if payload and message.message is not None:
        told["payload"] = base64.b64encode(message.message.payload).decode()
    return told


async def outbox_reissue(place: Place, *, message_id: int, actor: str) -> dict[str, Any]:
    """A fresh message in the place of a dead letter, due at once. actor: who asks (audit)."""
    try:
        operator = place.handles.operator()
        reissued = await operator.reissue(message_id, name_of(actor)[:ACTOR_BYTES_MAX])
    except ReissueRefused as error:
        raise RefusedError(404 if error.found == "gone" else 409, str(error)) from None
    place.outbox_changed()
    return {"message_id": message_id, "new_id": reissued.id, "queue": text_of(reissued.queue)}


async def outbox_purge(
    place: Place, *, done_kept_ms: int, dead_kept_ms: int, queue: str = ""
) -> dict[str, Any]:
    """Delete what ended longer ago than it is to be kept, in bounded steps. more: ask again."""
    janitor = place.handles.janitor()
    messages = 0
    more = True
    for _ in range(STEPS_MAX):
        purged = await janitor.purge(
            done_kept_ms=max(done_kept_ms, 0),
            dead_kept_ms=max(dead_kept_ms, 0),
            queue=name_of(queue),
            limit=STEP_MAX,
        )
        messages += purged.messages
        more = purged.more
        if not more:
            break
    return {"messages": messages, "more": more}


async def outbox_audit(place: Place, *, after: int = 0, limit: int = 100) -> dict[str, Any]:
    """Who had what reissued: a page, above a number."""
    limit = min(max(limit, 1), PAGE_MAX)
    page = await place.handles.operator().audit(after, limit)
    records = [
        {
            "number": record.number,
            "at_ms": record.at_ms,
            "actor": text_of(record.actor),
            "queue": text_of(record.queue),
            "message_id": record.message_id,
            "new_id": record.new_id,
        }
        for record in page
    ]
    return {"records": records, "next": page[-1].number if len(page) == limit else 0}


def _told(message: Message) -> dict[str, Any]:
    body = message.message
    told: dict[str, Any] = {
        "id": message.id,
        "queue": text_of(message.queue),
        "state": message.state.name.lower(),
        "failure": message.failure.name.lower() if message.failure else "",
        "attempts": message.attempts,
        "attempts_max": message.attempts_max,
        "destination": text_of(message.destination),
        "offset": message.offset,
        "created_ms": message.created_ms,
        "due_ms": message.due_ms,
        "until_ms": message.until_ms,
        "ended_ms": message.ended_ms,
        "reissue_of": message.reissue_of,
        "reissued_as": message.reissued_as,
        "has_body": body is not None,
    }
    if body is not None:
        told |= {
            "topic": text_of(body.topic),
            "qos": body.qos,
            "payload_bytes": len(body.payload),
            "expires_ms": body.expires_ms,
        }
    return told


def _after(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    ended_ms, _, number = text.partition("-")
    if not (ended_ms.isdecimal() and number.isdecimal() and text.isascii()):
        raise RefusedError(400, "that is not the end of a page")
    return int(ended_ms), int(number)


OPERATING: Final[dict[str, Operation]] = {
    "outbox_backlog": outbox_backlog,
    "outbox_dead_letters": outbox_dead_letters,
    "outbox_show": outbox_show,
    "outbox_reissue": outbox_reissue,
    "outbox_purge": outbox_purge,
    "outbox_audit": outbox_audit,
}
