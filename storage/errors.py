"""Errors of the store.

StoreError
+-- StoreRefusal            an operation's condition did not hold; its batch went on without it
|   +-- Fenced              409 the incarnation is no longer on the record
|   +-- ClaimNotHeld        409 the claim was settled, reaped or never made
|   +-- NotOwner            403 the record belongs to another user
|   +-- RecordDamaged       410 what is stored for a consumer fails its checksum
|   +-- MessageDamaged      410 what is stored for a message of the outbox fails its checksum
|   +-- ReissueRefused      409 no dead letter, or a newer message is in its place
+-- RoleRefused             403 a batch has an operation in it that its role may not do
+-- ResumeRefused           a position that cannot be resumed
|   +-- DatabaseGenerationChanged   409
|   +-- ResumeHistoryUnavailable    410
+-- EntryDamaged            410 an entry fails its checksum or cannot be decoded
+-- EntryGone               410 an entry was pruned
+-- StoreUnavailable        503 the disk or the database does not answer; try again
|   +-- StoreFull           507 no space (disk, LMDB map)
+-- KeysUnusable            the keys in a file or a variable cannot be read
+-- StoreUnusable           the store cannot be opened, and trying again does not help
    +-- StoreLocked         another process has it
    +-- StoreTooNew         written by a newer version
    +-- StoreCorrupt        what is on disk is not what was written
    +-- SealKeyMissing      403 it is sealed with a key that was not given
    +-- SealKeyWrong        403 the key of this id is another one

Fields first, then the text; callers match class or ``code``, never the text. No payload, no
password and no key is ever a field.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import ClassVar, Final

__all__ = [
    "NO_SPACE",
    "ClaimNotHeld",
    "DatabaseGenerationChanged",
    "EntryDamaged",
    "EntryGone",
    "Fenced",
    "KeysUnusable",
    "MessageDamaged",
    "NotOwner",
    "RecordDamaged",
    "ReissueRefused",
    "ResumeHistoryUnavailable",
    "ResumeRefused",
    "RoleRefused",
    "SealKeyMissing",
    "SealKeyWrong",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreRefusal",
    "StoreTooNew",
    "StoreUnavailable",
    "StoreUnusable",
]


NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a file cannot grow."""


class StoreError(Exception):
    """Root of all errors of the store. code: stable number in the style of HTTP. text: what it says
    of its fields."""

    code: ClassVar[int] = 500
    text: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.text.format_map(vars(self)) if self.text else super().__str__()


class StoreRefusal(StoreError):
    """An operation's condition did not hold; nothing of it was applied."""

    code = 409


@dataclass
class Fenced(StoreRefusal):
    """The incarnation is no longer on the record (or the record is gone)."""

    consumer_id: int
    text = "consumer {consumer_id}: the incarnation is no longer on the record"


@dataclass
class ClaimNotHeld(StoreRefusal):
    """A claim that is settled under must exist; this one does not.

    consumer_id: of a session's delivery; message_id: of a message of the outbox; the other is 0.
    found: what the message is instead: a state ("waiting", "done", ...), "claimed" under another
        acquisition, "lapsed", "gone", or "incomplete": the credential has a part missing.
    """

    consumer_id: int
    claim: int
    message_id: int = 0
    found: str = ""

    def __str__(self) -> str:
        if self.message_id:
            return f"message {self.message_id}: claim {self.claim} is no longer held ({self.found})"
        return f"consumer {self.consumer_id}: claim {self.claim} is no longer held"


@dataclass
class ReissueRefused(StoreRefusal):
    """A message cannot be reissued.

    found: "live": ``live`` is a newer one for its key; "erased": it has no body; else its state, or
        "gone".
    """

    message_id: int
    found: str
    live: int = 0

    def __str__(self) -> str:
        if self.live:
            return f"message {self.message_id} has a newer one in its place: {self.live}"
        if self.found == "gone":
            return f"there is no message {self.message_id}"
        return f"message {self.message_id} cannot be reissued: it is {self.found}"


@dataclass
class MessageDamaged(StoreRefusal):
    """What is stored for a message of the outbox fails its checksum."""

    message_id: int
    code = 410
    text = "message {message_id} of the outbox is damaged"


@dataclass
class NotOwner(StoreRefusal):
    """The record belongs to another user (P14)."""

    consumer_id: int
    code = 403
    text = "the session (consumer {consumer_id}) belongs to another user"


@dataclass
class RecordDamaged(StoreRefusal):
    """What is stored for a consumer fails its checksum: its owner cannot be told (P14), so it is
    neither resumed nor replaced. consumer_id: 0 when it cannot be told."""

    consumer_id: int
    code = 410
    text = "the record of the session (consumer {consumer_id}) is damaged"


@dataclass
class RoleRefused(StoreError):
    """A batch has an operation in it that its role may not do; nothing of it was applied."""

    role: str
    operation: str
    code = 403
    text = "a {role} may not do {operation}"


class ResumeRefused(StoreError):
    """A position that cannot be resumed."""

    code = 410


@dataclass
class DatabaseGenerationChanged(ResumeRefused):
    """The position was given by another generation of the database, or is ahead of its head."""

    held: str
    current: str
    position: int
    head: int
    code = 409

    def __str__(self) -> str:
        if self.held == self.current:
            return f"position {self.position} is ahead of the head {self.head}"
        return f"position {self.position} is of generation {self.held}, now {self.current}"


@dataclass
class ResumeHistoryUnavailable(ResumeRefused):
    """An entry after the position that matches was pruned, or is damaged."""

    position: int
    floor: int
    topic: bytes = b""
    code = 410
    text = "history after {position} is no longer complete (lost through {floor})"


@dataclass
class EntryDamaged(StoreError):
    """An entry fails its checksum or cannot be decoded. topic: b"" when it cannot be told."""

    offset: int
    topic: bytes = b""
    code = 410
    text = "entry {offset} is damaged"


@dataclass
class EntryGone(StoreError):
    """An entry was pruned."""

    offset: int
    code = 410
    text = "entry {offset} was pruned"


@dataclass
class StoreUnavailable(StoreError):
    """The disk or the database does not answer; nothing was written; trying again may help."""

    reason: str
    code = 503
    text = "{reason}"

    @staticmethod
    def of(error: OSError) -> StoreUnavailable:
        """What an error of the system means."""
        kind = StoreFull if error.errno in NO_SPACE else StoreUnavailable
        return kind(f"{error.filename or 'the disk'}: {error.strerror or error}")


@dataclass
class StoreFull(StoreUnavailable):
    """No space is left on the disk, or the LMDB map is at its maximum."""

    code = 507


@dataclass
class StoreUnusable(StoreError):
    """The store cannot be opened. path: of the data directory."""

    path: str
    reason: str
    text = "{path}: {reason}"


@dataclass
class StoreLocked(StoreUnusable):
    """Another process has the data directory. pid: 0 when it cannot be told."""

    pid: int
    text = "{path} is in use by process {pid}: {reason}"


@dataclass
class SealKeyMissing(StoreUnusable):
    """Something in the database is sealed with a key that was not given."""

    key_id: str
    code = 403
    text = "{path}: key {key_id!r} is missing: {reason}"


@dataclass
class SealKeyWrong(StoreUnusable):
    """The key that was given under this id is not the one that the database was sealed with."""

    key_id: str
    code = 403
    text = "{path}: key {key_id!r} is wrong: {reason}"


@dataclass
class KeysUnusable(StoreError):
    """Keys cannot be read. source: the file or $VARIABLE. Nothing of a key is in it (P13)."""

    source: str
    reason: str
    text = "the keys in {source} cannot be used: {reason}"


class StoreTooNew(StoreUnusable):
    """Written by a newer version of amqtt-durable. found, known: formats."""

    def __init__(self, path: str, found: int, known: int) -> None:
        super().__init__(
            path,
            f"it has format {found}, this version of amqtt-durable knows {known}:"
            " use the version that wrote it, or a newer one",
        )
        self.found = found
        self.known = known


class StoreCorrupt(StoreUnusable):
    """What is on disk is not what was written."""
