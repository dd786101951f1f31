"""The vocabulary of the store: what is written, what is read, and what can go wrong.

The store knows nothing of MQTT packets or of amqtt. It keeps

* one *history*: entries with gapless offsets 1, 2, 3, ... assigned in commit order;
* *consumers*, each with subscriptions, a cursor, deliveries under claims and inbound ids;
* retained messages, wills and the identity of the database.

Rule 1. A write is a ``Batch``: entries to append and operations to apply. It is applied whole,
        in order, in one transaction, or not at all.
Rule 2. An operation that names an incarnation changes nothing unless that incarnation is on the
        record. A refused operation does not fail its batch: its outcome is the refusal.
Rule 3. No operation reads a clock. Times are parameters, integer milliseconds since the epoch of
        the clock that was handed to the store's opener.
Rule 4. Offsets are assigned before a batch is submitted, by the one writer, without gaps.

So every write is either an append to history or one compare-and-set of one consumer's record
together with its deliveries; several of them share a commit only because that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from storage.outbox.rights import Role
from storage.outbox.vocabulary import DeadLetter, Enqueue, OutboxOp, OutboxReads

__all__ = [
    "BLOCK_BYTES_MAX",
    "BLOCK_ENTRIES_MAX",
    "CLAIM_DELIVERIES_MAX",
    "ENTRY_BYTES_MAX",
    "GROUP",
    "HELD",
    "INCARNATION_BYTES",
    "NAME_BYTES_MAX",
    "RECEIVED",
    "RETAINED",
    "SENT",
    "UNCLAIMED",
    "UNRECORDED",
    "Acquire",
    "Acquired",
    "Advance",
    "Batch",
    "Bind",
    "Chunk",
    "Claim",
    "Consumer",
    "Delivery",
    "Detach",
    "Discard",
    "DropWill",
    "Entry",
    "Expire",
    "Expired",
    "FilterCount",
    "LogState",
    "Loss",
    "Op",
    "Opened",
    "Outcome",
    "Position",
    "Prune",
    "Pruned",
    "Retain",
    "Snapshot",
    "Store",
    "StoreWill",
    "Subscribe",
    "Subscription",
    "Unsubscribe",
    "Will",
]

INCARNATION_BYTES: Final = 16
"""An incarnation is 16 random bytes, minted for each owner of a consumer."""

NAME_BYTES_MAX: Final = 65_535
"""Longest client id, topic, filter or user name: a UTF-8 string has a 16-bit length [1.5.3]."""

ENTRY_BYTES_MAX: Final = 268_435_455
"""Largest body of an entry: MQTT's own largest packet."""

BLOCK_ENTRIES_MAX: Final = 512
BLOCK_BYTES_MAX: Final = 262_144
"""History is stored in blocks, as Kafka stores record batches: one row for up to 512 entries or
256 KiB, so that the cost of a row is shared; one entry larger than that has a block of its own."""

CLAIM_DELIVERIES_MAX: Final = 256
"""Deliveries in one claim row: rewriting a partly settled claim costs at most 3 KiB."""


UNCLAIMED: Final = b"\x00"
"""User of a record that nobody has connected to yet (amqtt's ``add_subscription``): the first user
who acquires it becomes its owner. No MQTT user name has a NUL [MQTT-1.5.3-2]."""


GROUP: Final = b"\x00share/"
"""What the client id of a consumer that is a group begins with; no MQTT client has such an id. What
follows is random: the name of the group is a subscription of it, with QoS 0."""

UNRECORDED: Final = 0xFFFF_FFFF_FFFF_FFFF
"""Claim.member: a member of the group that has no record of its own, so it cannot come back."""


# ---------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class Position:
    """How far a consumer got: everything that matches at or below ``offset`` was delivered or is
    recorded as a delivery.

    generation: of the database that assigned the offset (32 hex digits).
    offset: unit entries, 0 = before the first.
    """

    generation: str
    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            msg = f"a position counts entries from 0, not {self.offset}"
            raise ValueError(msg)


RETAINED: Final = 0x04
"""Entry.flags: the publisher set RETAIN (MQTT 5 Retain As Published needs to know)."""


class Entry(NamedTuple):
    """One message in the history. A NamedTuple, because one is made for every durable PUBLISH.

    offset: 1, 2, 3, ...; 0 for a message that is not in the history (retained, held, will).
    qos: as published, 0..2. Of one with QoS 0 the history has a copy for who is away; nothing that
        is promised of the history holds for it, and where it is gone nothing is lost.
    flags: RETAINED or 0.
    origin: client id of the publisher (MQTT 5 No Local), may be empty.
    expires_ms: deadline, 0 = never.
    properties: MQTT 5 properties to forward, as encoded on the wire without their length; opaque.
    """

    offset: int
    topic: bytes
    payload: bytes
    qos: int
    flags: int = 0
    origin: bytes = b""
    expires_ms: int = 0
    properties: bytes = b""

    def __repr__(self) -> str:
        """No payload in logs (P13)."""
        return f"Entry(offset={self.offset}, qos={self.qos}, payload_bytes={len(self.payload)})"


SENT: Final = 0
"""Delivery.state: claimed; the PUBLISH may have been written to the socket."""
RECEIVED: Final = 1
"""Delivery.state, QoS 2: PUBREC came; PUBREL is due, the PUBLISH must not be sent again."""
HELD: Final = 0x80
"""Bit in Delivery.state: ``offset`` numbers a message held for this consumer alone (a retained
message that is under way), not an entry of the history."""


class Delivery(NamedTuple):
    """One message under way to one consumer.

    offset: of the entry, or number of the held message when ``state & HELD``.
    packet_id: 1..65535, unique among the consumer's deliveries; of a group unique among those that
        are with one member, and 0 where that is none with a record.
    qos: 1 or 2, the QoS it is delivered with.
    state: SENT or RECEIVED, with HELD or without.
    attempts: connections that broke while it was the first delivery that they had sent and that was
        not acknowledged; of a group, members that left it. 0..255 (saturates).
    """

    offset: int
    packet_id: int
    qos: int
    state: int = SENT
    attempts: int = 0


class Claim(NamedTuple):
    """One acquisition of up to CLAIM_DELIVERIES_MAX deliveries, in the order they are sent.

    number: 1, 2, 3, ... per consumer, never used again.
    deliveries: those not settled yet.
    member: of a consumer that is a group: number of the consumer that the deliveries are with, or
        UNRECORDED; 0 = with the consumer itself.
    """

    number: int
    deliveries: tuple[Delivery, ...]
    member: int = 0


class Subscription(NamedTuple):
    """One topic filter of a consumer.

    filter: UTF-8 bytes. qos: granted, 0..2.
    options: MQTT 5 subscription options byte without the QoS bits; 0 with 3.1.1.
    identifier: MQTT 5 Subscription Identifier, 0 = none.
    from_offset: the head when it was first subscribed: nothing at or below it is delivered for it.
    A *shared* filter ($share/...) says that the consumer is a member of a group, a consumer of its
    own: it is counted (FilterCount), but what matches it is needed and lost by the group.
    """

    filter: bytes
    qos: int
    from_offset: int
    options: int = 0
    identifier: int = 0


@dataclass(frozen=True, slots=True)
class Consumer:
    """The record of one consumer, as stored.

    id: small integer, never used again. user: owner, b"" = anonymous.
    generation, cursor: its position as far as claims go; entries at or below the cursor that match
        are settled or in a claim.
    next_claim, next_held: numbers the next Claim and held message get.
    next_packet_id: where the search for a free packet id goes on; 0 in a new record, until its
        owner says otherwise: nobody may have been told of it.
    expiry_s: seconds a detached record is kept, None = for ever.
    detached_ms: when the last owner left; 0 = an owner is attached.
    qos0_after: what the history has with QoS 0 at or below this offset it was given, or may have
        been, or was not there for: it is not delivered (again) [MQTT-4.3.1-1].
    version: MQTT protocol level that created it (3, 4, 5); opaque here.
    """

    id: int
    client_id: bytes
    user: bytes
    incarnation: bytes
    generation: str
    cursor: int
    next_claim: int = 1
    next_held: int = 1
    next_packet_id: int = 1
    expiry_s: int | None = None
    detached_ms: int = 0
    created_ms: int = 0
    version: int = 4
    qos0_after: int = 0


@dataclass(frozen=True, slots=True)
class Will:
    """A will message under (client id, incarnation) [MQTT-3.1.2-8].

    delay_s: MQTT 5 Will Delay Interval. message.offset is 0, and message.expires_ms a time from its
    publication on. user: for the topic permission when it is published.
    due_ms: when to publish it, once its connection has ended; 0 = it has not.
    number: of two wills of one client, the later one has the higher.
    """

    client_id: bytes
    incarnation: bytes
    user: bytes
    message: Entry
    delay_s: int = 0
    due_ms: int = 0
    number: int = 0


class FilterCount(NamedTuple):
    """A distinct durable filter (granted QoS >= 1) and how many consumers have it."""

    filter: bytes
    count: int  # type: ignore[assignment] # tuple.count is of no use here


@dataclass(frozen=True, slots=True)
class LogState:
    """The history as one transaction saw it. floor: nothing at or below is promised any more.

    bytes: what the history takes on disk; the rest of the database is not in it.
    """

    db_id: str
    generation: str
    boot: int
    head: int
    floor: int
    bytes: int = 0


class Loss(NamedTuple):
    """The highest pruned entry that a consumer would have received."""

    topic: bytes
    pruned_through: int


# ------------------------------------------------------------------------------ operations


@dataclass(frozen=True, slots=True)
class Acquire:
    """Make ``incarnation`` the owner of the consumer of a client id, and read its record.

    clean: delete what is stored for the id first (subscriptions, claims, held, inbound ids).
    create: make a record if there is none (after ``clean``); False leaves none.
    Outcome: Acquired, or NotOwner if the record belongs to another user; then nothing changes. A
    record whose user is UNCLAIMED becomes this user's.
    A record whose expiry is over at ``now_ms`` is deleted first, as with ``clean``, whoever it
    belonged to: an expired session is gone, swept or not.
    Sets expiry_s, version and detached_ms = 0; a will of an earlier incarnation is not touched.
    """

    client_id: bytes
    incarnation: bytes
    user: bytes
    now_ms: int
    clean: bool = False
    create: bool = True
    expiry_s: int | None = None
    version: int = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A consumer with all that is stored for it.

    held: number -> message. inbound: QoS 2 packet ids received and not released.
    loss: see Loss; None when every entry after the position that matches is still there. The
        position is the cursor, or just before the oldest unsettled delivery from the history.
    gone: members (Claim.member) whose record is not there any more.
    """

    consumer: Consumer
    subscriptions: tuple[Subscription, ...]
    claims: tuple[Claim, ...]
    held: dict[int, Entry]
    inbound: frozenset[int]
    loss: Loss | None = None
    gone: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Acquired:
    """Outcome of Acquire. existed: a record was there before (and was not cleaned away).
    snapshot: None when nothing was there and nothing was created.
    dropped, dropped_id: durable filters (QoS >= 1) and number of the record that ``clean`` or its
    expiry deleted; 0 = none was."""

    existed: bool
    snapshot: Snapshot | None
    log: LogState
    dropped: tuple[bytes, ...] = ()
    dropped_id: int = 0


@dataclass(slots=True)
class Advance:
    """Move one consumer on: the workhorse, one per consumer and batch. Fenced by ``incarnation``.

    cursor: new cursor, None = unchanged. May go back (unsent claims released at a disconnect).
    claims: rows to insert or to replace by number. A number below next_claim must still be there,
        else ClaimNotHeld; one at or above it is new and raises next_claim.
    settled: claim numbers to delete; each must still be there, else ClaimNotHeld.
    held: messages to hold, number -> message (raises next_held). unheld: numbers to delete.
    received / released: inbound QoS 2 packet ids to add / to delete (deleting none is no error).
    next_packet_id: to remember, None = unchanged.
    checkpoint: also bring the retention index up to this consumer's position (else it lags, which
        only holds pruning back).
    enqueue: messages for the outbox, and dead: deliveries that are given up, in the same operation
        (storage.outbox): so a sink moves its cursor and enqueues what it passed, a session settles
        and leaves a dead letter, or neither happens.
    Outcome: None, Fenced or ClaimNotHeld; refused whole: every claim is checked before the first
    change.
    """

    consumer_id: int
    incarnation: bytes
    cursor: int | None = None
    claims: Sequence[Claim] = ()
    settled: Sequence[int] = ()
    held: Sequence[tuple[int, Entry]] = ()
    unheld: Sequence[int] = ()
    received: Sequence[int] = ()
    released: Sequence[int] = ()
    next_packet_id: int | None = None
    checkpoint: bool = False
    enqueue: Sequence[Enqueue] = ()
    dead: Sequence[DeadLetter] = ()


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Add or replace subscriptions, and count durable filters (QoS >= 1) up and down.

    A filter the consumer has already keeps the lower from_offset, unless it was QoS 0 before.
    Outcome: None or Fenced. Fenced by ``incarnation``.
    """

    consumer_id: int
    incarnation: bytes
    subscriptions: tuple[Subscription, ...]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Remove subscriptions. Outcome: tuple[bool, ...], whether each filter was there; or Fenced."""

    consumer_id: int
    incarnation: bytes
    filters: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind the consumer to the current generation, at ``cursor`` (after a 409 that is resumed, or
    after a position ahead of the head). Outcome: None or Fenced."""

    consumer_id: int
    incarnation: bytes
    cursor: int


@dataclass(frozen=True, slots=True)
class Detach:
    """The last save of an owner: it leaves at ``now_ms``; the expiry of the record starts.

    expiry_s: a new expiry (MQTT 5 DISCONNECT), or None with keep_expiry. Also a checkpoint.
    qos0_after: of the record, None = unchanged. An owner that dies instead leaves the head there:
        what it was given with QoS 0 nobody knows.
    Outcome: None or Fenced. The incarnation stays on the record; nothing may be written under it
    after this (the session's own rule: it is sealed).
    """

    consumer_id: int
    incarnation: bytes
    now_ms: int
    expiry_s: int | None = None
    keep_expiry: bool = True
    qos0_after: int | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete a consumer with everything only it holds. Fenced by ``incarnation``; outcome None or
    Fenced. Filter counts go down."""

    consumer_id: int
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Expire:
    """Delete up to ``limit`` detached consumers whose expiry is over at ``now_ms``.
    Outcome: tuple of Expired."""

    now_ms: int
    limit: int


class Expired(NamedTuple):
    """A consumer that was deleted. filters: its durable ones (QoS >= 1)."""

    client_id: bytes
    filters: tuple[bytes, ...]
    consumer_id: int


@dataclass(frozen=True, slots=True)
class Retain:
    """Store the retained message of its topic; an empty payload removes it [MQTT-3.3.1-10].
    Outcome: None."""

    message: Entry


@dataclass(frozen=True, slots=True)
class StoreWill:
    """Outcome: None. Replaces a will of the same incarnation only."""

    will: Will


@dataclass(frozen=True, slots=True)
class DropWill:
    """Delete the will of ``incarnation``. Outcome: bool, whether it was there.
    A will that is published is appended to the history in the same batch."""

    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete history from the old end, at most ``blocks_max`` blocks, moving floor and each
    topic's pruned_through in the same transaction. It stops, too, after the block with which more
    than ``topics_max`` topics, those of each block counted, were looked up: that is what it costs.

    through: forced: delete entries at or below it even if a consumer still needs them (hard caps);
        0 = none forced.
    older_than_ms: forced: delete blocks stored before it, likewise; 0 = none forced.
    bytes_max: forced: delete the oldest blocks while the history takes more (LogState.bytes),
        likewise; 0 = none forced.
    before_ms: of what no consumer needs, keep blocks stored at or after it (retain_for).
    now_ms: what has expired by then is lost to nobody, and leaves no mark; 0 = everything does.
    marks_max: topics that have nothing left keep their pruned_through mark until there are more
        than this many marks; then the lowest ones fold into the coarse floor.
    Outcome: Pruned.
    """

    through: int
    before_ms: int
    blocks_max: int
    marks_max: int = 100_000
    older_than_ms: int = 0
    bytes_max: int = 0
    now_ms: int = 0
    topics_max: int = 500


class Pruned(NamedTuple):
    """Outcome of Prune. more: another call would delete more."""

    floor: int
    blocks: int
    payload_bytes: int
    more: bool


Op: TypeAlias = (
    Acquire
    | Advance
    | Subscribe
    | Unsubscribe
    | Bind
    | Detach
    | Discard
    | Expire
    | Retain
    | StoreWill
    | DropWill
    | Prune
    | OutboxOp
)

Outcome: TypeAlias = object
"""What an operation returned, or the StoreRefusal (storage.errors) that it met."""


@dataclass(slots=True)
class Batch:
    """One transaction: entries are appended first, then the operations in order.

    entries: offsets run on from the head; anything else is a bug in the caller (AssertionError).
    stored_ms: when, for retention by age.
    role: in whose name; a batch with anything that is not the role's is refused whole (RoleRefused,
        storage.outbox.rights). Batches of one role are applied in order.
    """

    entries: list[Entry] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    stored_ms: int = 0
    role: Role = Role.BROKER


# ------------------------------------------------------------------------------------ reads


class Chunk(NamedTuple):
    """A piece of history, read in one transaction with the marks it was checked against.

    entries: (entry, qos) in offset order: those accepted, with what ``accept`` returned.
    through: everything up to here was read, decoded and offered to ``accept``; equals the head
        that the transaction saw when the end was reached.
    head: as this transaction saw it. loss: an accepted topic lost an entry above ``after``.
    """

    entries: list[tuple[Entry, int]]
    through: int
    head: int
    loss: Loss | None


@dataclass(frozen=True, slots=True)
class Opened:
    """What the broker must know to start: independent of the number of sessions and messages.

    log: identity and ends. filters: distinct durable filters. wills: left by owners that died.
    minted: why a generation was minted at this opening, "" if it was not.
    seen_ms: the latest time the store knows of: ``now_ms``, or later if the clock was set back.
    """

    log: LogState
    filters: tuple[FilterCount, ...]
    wills: tuple[Will, ...]
    minted: str = ""
    seen_ms: int = 0


Accept: TypeAlias = Callable[[bytes], int]
"""topic -> highest granted QoS of the filters that match, 0 = none. Called in the store's reader
thread, once per distinct topic of a block: it must be pure over an immutable snapshot."""

Missed: TypeAlias = Callable[[bytes, int], bool]
"""(topic, pruned offset) -> whether the reader would have received that entry. Topic b"" = one that
is no longer known. Called as ``Accept`` is."""


@runtime_checkable
class Store(Protocol):
    """A durable store. All methods are called from one event loop.

    Guarantee: when ``submit`` calls back with outcomes, the batch is on disk (durability "fsync")
    or with the operating system ("os"); with an exception, nothing of it is and nothing changed.
    Batches are applied in the order they were submitted. Reads see committed batches only.
    """

    name: str

    @property
    def outbox(self) -> OutboxReads:
        """Reads of the outbox; what is written to it are operations of batches."""
        ...

    async def open(self, *, now_ms: int) -> Opened:
        """Open or create. Raises StoreLocked, StoreTooNew, StoreCorrupt, StoreUnavailable.
        Owners that died with the last process are detached at ``now_ms``, or at the latest time the
        store has seen if that is later."""
        ...

    def submit(self, batch: Batch, done: Callable[[list[Outcome] | BaseException], None]) -> None:
        """Apply a batch in the writer; ``done`` runs in the event loop, with one outcome for each
        operation, or with the error that the whole batch met (StoreFull, StoreUnavailable)."""
        ...

    async def read(
        self,
        after: int,
        accept: Accept,
        *,
        filters: Sequence[bytes] = (),
        entries_max: int,
        bytes_max: int,
        missed: Missed | None = None,
    ) -> Chunk:
        """Read entries with offset > after that ``accept`` takes, in order.

        filters: the filters behind ``accept``, for the planner (by topic or by scan); empty = scan.
        missed: which pruned entries count as a loss; None = those whose topic ``accept`` takes.
        A chunk has at least one entry if there is one, however large; at most entries_max.
        Raises EntryDamaged (offset, topic if known) when a matching entry, or one whose topic
        cannot be told, fails its checksum; StoreUnavailable when the disk does not answer.
        """
        ...

    async def fetch(self, offsets: Sequence[int]) -> list[Entry]:
        """The entries at these offsets, in the order asked. Raises EntryGone (pruned) or
        EntryDamaged."""
        ...

    async def newest(self, topics: Sequence[bytes]) -> list[int]:
        """The offset of the newest entry of each topic with QoS >= 1; 0 = there is none, or it
        cannot be told: damage or a newer one with QoS 0 hides it. Costs a look at the index and a
        block for each topic, whatever is stored."""
        ...

    async def snapshot(self, client_id: bytes) -> Snapshot | None:
        """Read a consumer without owning it. None if there is none."""
        ...

    async def consumers(self, after: bytes | None = None, limit: int = 1000) -> list[Consumer]:
        """Records in a stable order, a page at a time (``after``: client id of the last one)."""
        ...

    async def retained(self, after: bytes | None = None, limit: int = 1000) -> list[Entry]:
        """Retained messages in a stable order, a page at a time (``after``: topic of the last)."""
        ...

    async def log(self) -> LogState:
        """Identity and ends of the history, as committed."""
        ...

    async def check(self) -> list[str]:
        """Walk every stored invariant; one sentence for each violation, empty = sound."""
        ...

    async def close(self) -> None:
        """Finish what was submitted, then close. Idempotent."""
        ...
