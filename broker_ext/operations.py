"""What an operator can ask a running broker: the first table of ``broker_ext.control``.

Client ids are text: MQTT's are UTF-8. Answers tell them in full; who prints them masks them.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from broker_ext.reasons import Reason
from broker_ext.session import End

if TYPE_CHECKING:
    from broker_ext.hub import Hub
    from storage.api import Consumer

__all__ = [
    "OPERATIONS",
    "Operation",
    "RefusedError",
    "figures",
    "groups",
    "kick",
    "name_of",
    "sessions",
    "text_of",
]

Operation: TypeAlias = Callable[..., Awaitable[Any]]
"""See rule 5 of ``broker_ext.control``."""

PAGE_MAX: Final = 1000
KICKED: Final = End("kicked", reason=Reason.ADMINISTRATIVE)
"""An operator closed the connection; its will is published, as for every other close by the
server [MQTT-3.1.2-8]."""
STORED, TRANSIENT = "s", "t"


class RefusedError(Exception):
    """An operation says no. code: in the style of HTTP; message: our own words, for a person."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


async def sessions(hub: Hub, *, after: str = "", limit: int = 100) -> dict[str, Any]:
    """A page of sessions: those in the store, then the transient ones, which are all connected.

    after: ``next`` of the page before; ``next`` is "" when there are no more.
    lag: entries of the history behind the cursor, wanted or not: the backlog is at most that.
    """
    limit = min(max(limit, 1), PAGE_MAX)
    rows: list[dict[str, Any]] = []
    if not after.startswith(TRANSIENT):
        records = await hub.store.consumers(name_of(after[1:]) if after else None, limit)
        rows = [_stored(hub, record) for record in records if record.client_id[:1] != b"\x00"]
        if len(records) == limit:
            return {
                "sessions": rows,
                "next": STORED + records[-1].client_id.decode(),
            }
        after = TRANSIENT
    begin = name_of(after[1:])
    waiting = (
        client_id
        for client_id, session in hub.registry.owners.items()
        if not session.durable and client_id > begin
    )
    page = heapq.nsmallest(limit - len(rows) + 1, waiting)
    more = len(page) > limit - len(rows)
    page = page[: limit - len(rows)]
    rows += [_transient(hub, client_id) for client_id in page]
    last = page[-1].decode() if page else after[1:]
    return {"sessions": rows, "next": TRANSIENT + last if more else ""}


def _stored(hub: Hub, record: Consumer) -> dict[str, Any]:
    return {
        "client_id": text_of(record.client_id),
        "user": text_of(record.user),
        "kind": "durable",
        "connected": record.client_id in hub.registry.owners,
        "lag": max(hub.committer.head - record.cursor, 0),
        "version": record.version,
        "created_ms": record.created_ms,
        "detached_ms": record.detached_ms,
        "expiry_s": record.expiry_s,
    }


def _transient(hub: Hub, client_id: bytes) -> dict[str, Any]:
    return {
        "client_id": text_of(client_id),
        "user": text_of(hub.registry.owners[client_id].user),
        "kind": "transient",
        "connected": True,
    }


async def groups(hub: Hub, *, after: str = "", limit: int = 100) -> dict[str, Any]:
    """A page of the groups of shared subscriptions, by name (``$share/GROUP/filter``).

    members: sessions that are connected; durable_members: those that are stored, connected or not.
    lag: as of a session. waiting: messages that went back, or that nobody had room for; under_way:
    with connected members. after, next: as of ``sessions``.
    """
    limit = min(max(limit, 1), PAGE_MAX)
    begin = name_of(after)
    known = hub.shared.groups
    page = heapq.nsmallest(limit + 1, (name for name in known if name > begin))
    rows = [
        {
            "name": text_of(name),
            "durable": known[name].durable,
            "members": len(known[name].members),
            "durable_members": known[name].wanted,
            "lag": known[name].lag,
            "waiting": len(known[name].backlog.loose),
            "under_way": known[name].under_way,
        }
        for name in page[:limit]
    ]
    return {"groups": rows, "next": page[limit - 1].decode() if len(page) > limit else ""}


async def kick(hub: Hub, *, client_id: str) -> dict[str, Any]:
    """Close the connection of a client. kicked: False when it is not connected. A durable session
    is kept, and its client may come back at once."""
    session = hub.registry.owners.get(name_of(client_id))
    if session is not None:
        session.peer.finish(KICKED)
    return {"kicked": session is not None}


async def figures(hub: Hub) -> dict[str, Any]:
    """Counts since the start, and how things are."""
    owners = hub.registry.owners.values()
    durable = sum(session.durable for session in owners)
    log = await hub.store.log()
    return {
        "counts": asdict(hub.figures),
        "connections": len(hub.connections),
        "sessions_connected": {"durable": durable, "transient": len(owners) - durable},
        "history": {
            "generation": log.generation,
            "head": log.head,
            "floor": log.floor,
            "bytes": log.bytes,
        },
        "retained": len(hub.retained),
        "writing": hub.committer.failing_since is None,
        "waiting_bytes": hub.committer.waiting_bytes,
    }


def name_of(text: str) -> bytes:
    """A name as it came in JSON, as it is stored. Raises RefusedError."""
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write
        raise RefusedError(400, "that is no UTF-8") from None


def text_of(name: bytes) -> str:
    """A stored name, for JSON; bytes that are no UTF-8 are written out."""
    return name.decode("utf-8", "backslashreplace")


OPERATIONS: Final[dict[str, Operation]] = {
    "sessions": sessions,
    "groups": groups,
    "kick": kick,
    "figures": figures,
}
