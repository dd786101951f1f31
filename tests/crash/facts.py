"""What happened, as the clients saw it: the judge's only evidence.

A history is a list of these in the order they happened, from one event loop; an index in it is a
time. "Sent" facts are noted just before the bytes go out, "arrived" facts when they were read, so
if one fact's consequence is another, their indexes have that order. Now and then there is a
``Ticked``: what comes behind it happened at or after that time of the clock.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = [
    "Accepted",
    "Acknowledged",
    "Completed",
    "Connected",
    "Connecting",
    "Delivered",
    "Died",
    "Drained",
    "Fact",
    "Failed",
    "Found",
    "Left",
    "Message",
    "Pinging",
    "Ponged",
    "Publishing",
    "Released",
    "Releasing",
    "Retained",
    "Stored",
    "Subscribed",
    "Subscribing",
    "Ticked",
    "Unsubscribed",
    "Unsubscribing",
]


class Message(NamedTuple):
    """One message. number: counts the publisher's messages, so it orders them.

    empty: it has no payload to carry its identity. A retained one clears its topic.
    expiry_s: its Message Expiry Interval, 0 = none.
    """

    publisher: str
    number: int
    topic: str
    qos: int
    retain: bool = False
    empty: bool = False
    expiry_s: int = 0

    @property
    def id(self) -> str:
        """Name it."""
        return f"{self.publisher}-{self.number}"


class Connecting(NamedTuple):
    """CONNECT is sent. link: number of the connection, unique in the history; later ones are
    higher. clean: Clean Start. expiry_s: how long the session is kept, None = for ever."""

    client: str
    link: int
    clean: bool
    expiry_s: int | None = None


class Connected(NamedTuple):
    """CONNACK 0 arrived."""

    client: str
    link: int
    clean: bool
    present: bool
    expiry_s: int | None = None


class Left(NamedTuple):
    """A connection ends: the client ends it, or saw that it had ended. expiry_s: as ``Connecting``,
    if its DISCONNECT changes it."""

    client: str
    link: int
    expiry_s: int | None = None


class Publishing(NamedTuple):
    """PUBLISH is sent, for the first time or again."""

    client: str
    link: int
    message: Message
    packet_id: int


class Accepted(NamedTuple):
    """PUBACK, or the first PUBREC, arrived: the broker has the message."""

    client: str
    link: int
    message: Message
    packet_id: int


class Released(NamedTuple):
    """PUBREL is sent by the publisher."""

    client: str
    message: Message
    packet_id: int


class Completed(NamedTuple):
    """PUBCOMP arrived at the publisher."""

    client: str
    link: int
    message: Message
    packet_id: int


class Subscribing(NamedTuple):
    """SUBSCRIBE is sent. ticket: names the request. filters: (filter, QoS)."""

    client: str
    link: int
    ticket: int
    filters: tuple[tuple[str, int], ...]


class Subscribed(NamedTuple):
    """SUBACK arrived. codes: in the order of the filters."""

    client: str
    ticket: int
    codes: tuple[int, ...]


class Unsubscribing(NamedTuple):
    """UNSUBSCRIBE is sent."""

    client: str
    link: int
    ticket: int
    filters: tuple[str, ...]


class Unsubscribed(NamedTuple):
    """UNSUBACK arrived. codes: in the order of the filters; MQTT 3.1.1 has none."""

    client: str
    ticket: int
    codes: tuple[int, ...] = ()


class Delivered(NamedTuple):
    """PUBLISH arrived at a subscriber. message_id: "" = a message without identity (a clear)."""

    client: str
    link: int
    message_id: str
    packet_id: int
    qos: int
    dup: bool
    retain: bool


class Acknowledged(NamedTuple):
    """The subscriber sends PUBACK, PUBREC or PUBCOMP. kind: "puback", "pubrec", "pubcomp"."""

    client: str
    link: int
    packet_id: int
    kind: str


class Releasing(NamedTuple):
    """PUBREL arrived at a subscriber."""

    client: str
    link: int
    packet_id: int


class Pinging(NamedTuple):
    """PINGREQ is sent."""

    client: str
    link: int


class Ponged(NamedTuple):
    """PINGRESP arrived. asked: index of its Pinging."""

    client: str
    link: int
    asked: int


class Ticked(NamedTuple):
    """The clock. now_ms: milliseconds since the epoch, as the broker counts them."""

    now_ms: int


class Died(NamedTuple):
    """The broker's process is gone. how: a crash point, "random", "stop"."""

    how: str


class Stored(NamedTuple):
    """A client's record, read while no broker ran. subscriptions: None = no record."""

    client: str
    subscriptions: dict[str, int] | None
    inbound: frozenset[int]


class Retained(NamedTuple):
    """All retained messages: topic -> message id. by: "store" or "client"."""

    by: str
    messages: dict[str, str]


class Found(NamedTuple):
    """What an opening of the store while no broker ran said. minted: a new generation, why."""

    problems: tuple[str, ...]
    minted: str


class Drained(NamedTuple):
    """At the end, this subscriber got everything there was for it, and acknowledged it all."""

    client: str


class Failed(NamedTuple):
    """Something never came that must. promise: under which it counts."""

    promise: str
    what: str


Fact: TypeAlias = (
    Connecting
    | Connected
    | Left
    | Publishing
    | Accepted
    | Released
    | Completed
    | Subscribing
    | Subscribed
    | Unsubscribing
    | Unsubscribed
    | Delivered
    | Acknowledged
    | Releasing
    | Pinging
    | Ponged
    | Ticked
    | Died
    | Stored
    | Retained
    | Found
    | Drained
    | Failed
)
