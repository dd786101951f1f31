"""Who may do what to the outbox: roles, their operations, and the rows that these need.

A batch says in whose name it is submitted (Batch.role), and every store refuses it whole
(RoleRefused) if an operation of it is not the role's. On SQLite each role has a connection of its
own besides, whose authorizer lets it touch what TABLES says and nothing else: a bug, or a handle
that somebody reached into, cannot read a session or write a body there.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import TYPE_CHECKING, Final

from storage.errors import RoleRefused
from storage.kv import Space
from storage.outbox.vocabulary import (
    ClaimNext,
    Enqueue,
    ExpireMessages,
    Extend,
    Purge,
    Reap,
    Reissue,
    Release,
    Settle,
)

if TYPE_CHECKING:
    from storage.api import Batch

__all__ = ["OPERATIONS", "TABLES", "Role", "refusal"]


@unique
class Role(Enum):
    """In whose name a batch is submitted. BROKER: the broker itself, which may do everything."""

    BROKER = "broker"
    PRODUCER = "producer"
    WORKER = "worker"
    OPERATOR = "operator"
    JANITOR = "janitor"
    READER = "reader"


OPERATIONS: Final[dict[Role, tuple[type, ...]]] = {
    Role.PRODUCER: (Enqueue,),
    Role.WORKER: (ClaimNext, Extend, Settle, Release),
    Role.OPERATOR: (Reissue,),
    Role.JANITOR: (Reap, ExpireMessages, Purge),
    Role.READER: (),
}

_WRITE: Final = "rw"
_ALL: Final = "rwd"

TABLES: Final[dict[Role, dict[Space, str]]] = {
    Role.PRODUCER: {
        Space.OUTBOX: _WRITE,
        Space.OUTBOX_BODY: "wd",  # a body that is superseded goes; none is read
        Space.OUTBOX_QUEUE: _WRITE,
        Space.OUTBOX_DUE: "wd",
        Space.OUTBOX_LEASE: "d",
        Space.OUTBOX_EXPIRY: "wd",
        Space.OUTBOX_ENDED: "w",
        Space.OUTBOX_KEY: _ALL,
    },
    Role.WORKER: {
        Space.OUTBOX: _WRITE,
        Space.OUTBOX_BODY: "rd",  # it reads and erases, and cannot write one
        Space.OUTBOX_QUEUE: _WRITE,
        Space.OUTBOX_DUE: _ALL,
        Space.OUTBOX_LEASE: "wd",
        Space.OUTBOX_EXPIRY: "wd",
        Space.OUTBOX_ENDED: "w",
        Space.OUTBOX_KEY: "d",
    },
    Role.OPERATOR: {
        Space.OUTBOX: _WRITE,
        Space.OUTBOX_BODY: _ALL,
        Space.OUTBOX_QUEUE: _WRITE,
        Space.OUTBOX_DUE: "w",
        Space.OUTBOX_EXPIRY: "w",
        Space.OUTBOX_ENDED: "wd",
        Space.OUTBOX_KEY: _ALL,
        Space.AUDIT: "w",  # what is recorded stays until a janitor purges it
    },
    Role.JANITOR: {
        Space.OUTBOX: _ALL,
        Space.OUTBOX_BODY: "d",
        Space.OUTBOX_QUEUE: _WRITE,
        Space.OUTBOX_DUE: "wd",
        Space.OUTBOX_LEASE: "rd",
        Space.OUTBOX_EXPIRY: _ALL,
        Space.OUTBOX_ENDED: _ALL,
        Space.OUTBOX_KEY: "d",
        Space.AUDIT: "rd",
    },
    Role.READER: {
        Space.OUTBOX: "r",
        Space.OUTBOX_BODY: "r",
        Space.OUTBOX_QUEUE: "r",
        Space.OUTBOX_DUE: "r",
        Space.OUTBOX_ENDED: "r",
        Space.AUDIT: "r",
    },
}
"""r: values may be read, w: rows inserted and replaced, d: deleted; with any of these keys may be
read. What is not named is out of reach. READER is who serves Store.outbox."""


def refusal(batch: Batch) -> RoleRefused | None:
    """Why a batch is not what its role may do, None = it is."""
    if batch.role is Role.BROKER:
        return None
    if batch.entries:
        return RoleRefused(batch.role.value, "append")
    allowed = OPERATIONS[batch.role]
    for op in batch.ops:
        if type(op) not in allowed:
            return RoleRefused(batch.role.value, type(op).__name__)
    return None
