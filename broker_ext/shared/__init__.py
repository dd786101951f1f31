"""Shared subscriptions: subscribers that share what matches one filter, $share/GROUP/filter.

A group is a consumer of its own (DESIGN.md, Shared subscriptions): it follows the history as a
session does, but what it claims is *with* one of its members. A delivery of it goes

    claimed for a member -> committed -> sent -> [received, QoS 2] -> settled
            ^------- goes back: its member left before it had it -----'

Rule 1. A message is claimed only for a member that has a free place in its window. When nobody has,
        the cursor stays: a slow member holds its window and nothing else.
Rule 2. What went back comes before anything new, in its order.
Rule 3. What a client may have had with QoS 2 is for nobody else [MQTT-4.8.2-4, MQTT-4.8.2-5].
Rule 4. Everything is written as one ``Advance`` of the group's record per batch (P3, P4). A packet
        id that goes back to its session is in no row any more when that can use it again.

Without a durable member nothing is stored: its messages come from memory and have offsets below 0.

    groups     all groups of a broker: who is a member of which, and what waits for whom
    group      one group: its members come and go, and a delivery's way between them
    turns      who gets the next message
    backlog    what waits for room: what went back, and the history behind the cursor
    fetching   messages of deliveries that an earlier connection left, read again
    record     the group's record in the store, from the first durable member to the last
    rows       the claims in it
    handed     one delivery
    member     a session, as a member
"""

from __future__ import annotations

from broker_ext.shared.group import Group
from broker_ext.shared.groups import Shared, filter_of

__all__ = ["Group", "Shared", "filter_of"]
