"""Packets and their bytes, and bytes that are no packets: one table serves both directions.

The bytes are written out by hand from the specification, not by the encoder.
"""

from typing import NamedTuple

from broker_ext.wire import (
    Auth,
    Connack,
    Connect,
    ConnectWill,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
)


class Case(NamedTuple):
    """raw: the shortest bytes that say `packet`. server: whether a server may receive it."""

    name: str
    raw: bytes
    packet: Packet
    version: int = 4
    server: bool = True


class Malformed(NamedTuple):
    """One broken rule. version 0: the first bytes of a connection."""

    name: str
    raw: bytes
    clause: str
    reason_code: int = 0x81
    version: int = 4
    server: bool = True


def packet(first: int, *fields: bytes) -> bytes:
    """Put a packet below 128 bytes together."""
    body = b"".join(fields)
    assert len(body) < 128
    return bytes((first, len(body))) + body


_CONNECT = b"\x00\x04MQTT\x04"

CASES = [
    Case(
        "connect with nothing but a client id",
        packet(0x10, b"\x00\x04MQTT\x04\x02\x00\x3c\x00\x01a"),
        Connect(4, b"a", True, 60),
        0,
    ),
    Case(
        "connect with an empty client id and a kept session",
        packet(0x10, b"\x00\x04MQTT\x04\x00\x00\x00\x00\x00"),
        Connect(4, b"", False, 0),
        0,
    ),
    Case(
        "connect with everything",
        packet(
            0x10,
            b"\x00\x04MQTT\x04\xf6\xff\xff",
            b"\x00\x02id",
            b"\x00\x04will\x00\x02\xff\x00",
            b"\x00\x04user\x00\x02\x00\xff",
        ),
        Connect(
            4, b"id", True, 65_535, b"user", b"\x00\xff", ConnectWill(b"will", b"\xff\x00", 2, True)
        ),
        0,
    ),
    Case(
        "connect of MQTT 3.1",
        packet(0x10, b"\x00\x06MQIsdp\x03\x80\x00\x0a\x00\x01a\x00\x00"),
        Connect(3, b"a", False, 10, b""),
        0,
    ),
    Case(
        "connect with a will that is empty and a multi-byte client id",
        packet(0x10, b"\x00\x04MQTT\x04\x04\x00\x0a\x00\x03\xe2\x82\xac\x00\x01w\x00\x00"),
        Connect(4, "\u20ac".encode(), False, 10, will=ConnectWill(b"w", b"", 0, False)),
        0,
    ),
    Case("connack", b"\x20\x02\x00\x00", Connack(False), server=False),
    Case("connack of a resumed session", b"\x20\x02\x01\x00", Connack(True), server=False),
    Case("connack of a refusal", b"\x20\x02\x00\x05", Connack(False, 5), server=False),
    Case("publish QoS 0", b"\x30\x05\x00\x01a\xff\x00", Publish(0, b"a", 0, b"\xff\x00")),
    Case("publish QoS 0 retained", b"\x31\x04\x00\x01ax", Publish(1, b"a", 0, b"x")),
    Case("publish QoS 0 without payload", b"\x31\x03\x00\x01a", Publish(1, b"a", 0, b"")),
    Case(
        "publish QoS 1",
        b"\x32\x09\x00\x03a/b\x01\x02\xff\x00",
        Publish(2, b"a/b", 0x102, b"\xff\x00"),
    ),
    Case("publish QoS 1 without payload", b"\x32\x05\x00\x01a\x00\x07", Publish(2, b"a", 7, b"")),
    Case("publish QoS 1 again", b"\x3b\x06\x00\x01a\xff\xffx", Publish(11, b"a", 65_535, b"x")),
    Case("publish QoS 2", b"\x34\x06\x00\x01a\x00\x07x", Publish(4, b"a", 7, b"x")),
    Case("publish QoS 2 again", b"\x3d\x06\x00\x01a\x00\x07x", Publish(13, b"a", 7, b"x")),
    Case(
        "publish of 127 remaining bytes",
        b"\x32\x7f\x00\x01a\x00\x07" + bytes(122),
        Publish(2, b"a", 7, bytes(122)),
    ),
    Case(
        "publish of 128 remaining bytes",
        b"\x32\x80\x01\x00\x01a\x00\x07" + bytes(123),
        Publish(2, b"a", 7, bytes(123)),
    ),
    Case(
        "publish of 16383 remaining bytes",
        b"\x30\xff\x7f\x00\x01a" + bytes(16_380),
        Publish(0, b"a", 0, bytes(16_380)),
    ),
    Case(
        "publish of 16384 remaining bytes",
        b"\x34\x80\x80\x01\x00\x01a\x00\x07" + bytes(16_379),
        Publish(4, b"a", 7, bytes(16_379)),
    ),
    Case("puback", b"\x40\x02\x01\x02", Puback(0x102)),
    Case("pubrec", b"\x50\x02\x00\x07", Pubrec(7)),
    Case("pubrel", b"\x62\x02\x00\x07", Pubrel(7)),
    Case("pubcomp", b"\x70\x02\xff\xff", Pubcomp(65_535)),
    Case(
        "subscribe",
        packet(0x82, b"\x00\x07\x00\x01#\x01\x00\x03a/+\x02\x00\x05a/#/b\x00"),
        Subscribe(
            7, (SubscribeFilter(b"#", 1), SubscribeFilter(b"a/+", 2), SubscribeFilter(b"a/#/b", 0))
        ),
    ),
    Case("suback", b"\x90\x06\x00\x07\x00\x01\x02\x80", Suback(7, b"\0\1\2\x80"), server=False),
    Case(
        "unsubscribe",
        packet(0xA2, b"\x00\x07\x00\x01#\x00\x03a/+"),
        Unsubscribe(7, (b"#", b"a/+")),
    ),
    Case("unsuback", b"\xb0\x02\x00\x07", Unsuback(7), server=False),
    Case("pingreq", b"\xc0\x00", Pingreq()),
    Case("pingresp", b"\xd0\x00", Pingresp(), server=False),
    Case("disconnect", b"\xe0\x00", Disconnect()),
]

_PAIR = b"\x26\x00\x01k\x00\x01v"
_PAIRED = (38, (b"k", b"v"))

CASES_5 = [
    Case(
        "MQTT 5 connect",
        packet(0x10, b"\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x01a"),
        Connect(5, b"a", True, 60),
        0,
    ),
    Case(
        "MQTT 5 connect with everything",
        packet(
            0x10,
            b"\x00\x04MQTT\x05\xee\x00\x00",
            b"\x2b\x11\xff\xff\xff\xff\x21\x00\x01\x27\x00\x00\x10\x00\x22\xff\xff\x19\x01\x17\x00",
            _PAIR,
            _PAIR,
            b"\x15\x00\x01m\x16\x00\x02\xff\x00",
            b"\x00\x00",
            b"\x0b\x18\x00\x00\x00\x05\x01\x01\x03\x00\x01c",
            b"\x00\x01w\x00\x02\xff\x00",
            b"\x00\x01u\x00\x01p",
        ),
        Connect(
            5,
            b"",
            True,
            0,
            b"u",
            b"p",
            ConnectWill(b"w", b"\xff\x00", 1, True, Properties(((24, 5), (1, 1), (3, b"c")))),
            Properties(
                (
                    (17, 0xFFFF_FFFF),
                    (33, 1),
                    (39, 4_096),
                    (34, 65_535),
                    (25, 1),
                    (23, 0),
                    _PAIRED,
                    _PAIRED,
                    (21, b"m"),
                    (22, b"\xff\x00"),
                )
            ),
        ),
        0,
    ),
    Case(
        "MQTT 5 connect with a password and no user name",
        packet(0x10, b"\x00\x04MQTT\x05\x42\x00\x3c\x00\x00\x01a\x00\x01p"),
        Connect(5, b"a", True, 60, None, b"p"),
        0,
    ),
    Case("MQTT 5 connack", b"\x20\x03\x01\x00\x00", Connack(True), 5, False),
    Case(
        "MQTT 5 connack with everything",
        packet(
            0x20,
            b"\x00\x87\x36",
            b"\x11\x00\x00\x00\x0a\x21\x00\x0a\x24\x01\x25\x00\x27\x00\x00\xff\xff\x12\x00\x02id",
            b"\x22\x00\x00\x1f\x00\x02no\x28\x01\x29\x00\x2a\x01\x13\x00\x1e\x1a\x00\x01r",
            b"\x1c\x00\x01s\x15\x00\x01m\x16\x00\x00",
        ),
        Connack(
            False,
            0x87,
            Properties(
                (
                    (17, 10),
                    (33, 10),
                    (36, 1),
                    (37, 0),
                    (39, 0xFFFF),
                    (18, b"id"),
                    (34, 0),
                    (31, b"no"),
                    (40, 1),
                    (41, 0),
                    (42, 1),
                    (19, 30),
                    (26, b"r"),
                    (28, b"s"),
                    (21, b"m"),
                    (22, b""),
                )
            ),
        ),
        5,
        False,
    ),
    Case("MQTT 5 publish QoS 0", b"\x30\x05\x00\x01a\x00x", Publish(0, b"a", 0, b"x"), 5),
    Case("MQTT 5 publish QoS 0, no payload", b"\x31\x04\x00\x01a\x00", Publish(1, b"a", 0, b""), 5),
    Case(
        "MQTT 5 publish QoS 1",
        b"\x32\x07\x00\x01a\x00\x07\x00\xff",
        Publish(2, b"a", 7, b"\xff"),
        5,
    ),
    Case("MQTT 5 publish QoS 2", b"\x34\x06\x00\x01a\x00\x07\x00", Publish(4, b"a", 7, b""), 5),
    Case(
        "MQTT 5 publish with everything that a client may send",
        packet(
            0x3D,
            b"\x00\x01a\x00\x07",
            b"\x1e\x01\x00\x02\x00\x00\x00\x3c\x23\x00\x01\x08\x00\x01r\x09\x00\x02\xff\x00",
            _PAIR,
            b"\x03\x00\x01c",
            b"\xff\x00",
        ),
        Publish(
            13,
            b"a",
            7,
            b"\xff\x00",
            Properties(((1, 0), (2, 60), (35, 1), (8, b"r"), (9, b"\xff\x00"), _PAIRED, (3, b"c"))),
        ),
        5,
    ),
    Case(
        "MQTT 5 publish to an alias",
        b"\x30\x07\x00\x00\x03\x23\xff\xffx",
        Publish(0, b"", 0, b"x", Properties(((35, 65_535),))),
        5,
    ),
    Case(
        "MQTT 5 publish for two subscriptions",
        b"\x30\x0b\x00\x01a\x07\x0b\x01\x0b\xff\xff\xff\x7f",
        Publish(0, b"a", 0, b"", Properties(((11, 1), (11, 268_435_455)))),
        5,
        False,
    ),
    Case("MQTT 5 puback", b"\x40\x02\x00\x07", Puback(7), 5),
    Case("MQTT 5 puback with a reason", b"\x40\x03\x00\x07\x10", Puback(7, 0x10), 5),
    Case(
        "MQTT 5 pubrec with a reason and properties",
        packet(0x50, b"\x00\x07\x91\x07", _PAIR),
        Pubrec(7, 0x91, Properties((_PAIRED,))),
        5,
    ),
    Case(
        "MQTT 5 pubrel with properties",
        packet(0x62, b"\x00\x07\x00\x05\x1f\x00\x02no"),
        Pubrel(7, 0, Properties(((31, b"no"),))),
        5,
    ),
    Case("MQTT 5 pubcomp with a reason", b"\x70\x03\x00\x07\x92", Pubcomp(7, 0x92), 5),
    Case(
        "MQTT 5 subscribe",
        packet(0x82, b"\x00\x07\x02\x0b\x05\x00\x01#\x2e\x00\x0a$share/g/a\x19"),
        Subscribe(
            7,
            (SubscribeFilter(b"#", 0x2E), SubscribeFilter(b"$share/g/a", 0x19)),
            Properties(((11, 5),)),
        ),
        5,
    ),
    Case(
        "MQTT 5 suback",
        packet(0x90, b"\x00\x07\x00\x00\x01\x02\xa2"),
        Suback(7, b"\0\1\2\xa2"),
        5,
        False,
    ),
    Case("MQTT 5 unsubscribe", packet(0xA2, b"\x00\x07\x00\x00\x01#"), Unsubscribe(7, (b"#",)), 5),
    Case(
        "MQTT 5 unsuback",
        packet(0xB0, b"\x00\x07\x07", _PAIR, b"\x00\x11"),
        Unsuback(7, b"\0\x11", Properties((_PAIRED,))),
        5,
        False,
    ),
    Case("MQTT 5 pingreq", b"\xc0\x00", Pingreq(), 5),
    Case("MQTT 5 disconnect", b"\xe0\x00", Disconnect(), 5),
    Case("MQTT 5 disconnect with a reason", b"\xe0\x01\x04", Disconnect(4), 5),
    Case(
        "MQTT 5 disconnect by a server",
        packet(0xE0, b"\x8e\x05\x1f\x00\x02no"),
        Disconnect(0x8E, Properties(((31, b"no"),))),
        5,
        False,
    ),
    Case("MQTT 5 auth", b"\xf0\x00", Auth(), 5),
    Case(
        "MQTT 5 auth by a server",
        packet(0xF0, b"\x18\x08\x15\x00\x01m\x16\x00\x01d"),
        Auth(0x18, Properties(((21, b"m"), (22, b"d")))),
        5,
        False,
    ),
]

# Not the shortest bytes, or bytes that only MQTT 3.1 wrote: decoded, never encoded.
LENIENT = [
    Case("pubrel of MQTT 3.1 again", b"\x6a\x02\x00\x07", Pubrel(7), 3),
    Case(
        "subscribe of MQTT 3.1 again",
        b"\x8a\x06\x00\x07\x00\x01a\x01",
        Subscribe(7, (SubscribeFilter(b"a", 1),)),
        3,
    ),
    Case("unsubscribe of MQTT 3.1 again", b"\xaa\x05\x00\x07\x00\x01a", Unsubscribe(7, (b"a",)), 3),
    Case("pingreq with a length of four bytes", b"\xc0\x80\x80\x80\x00", Pingreq()),
    Case("MQTT 5 puback, reason 0 and no properties", b"\x40\x04\x00\x07\x00\x00", Puback(7), 5),
    Case("MQTT 5 puback with reason 0", b"\x40\x03\x00\x07\x00", Puback(7), 5),
    Case("MQTT 5 disconnect, no properties", b"\xe0\x02\x00\x00", Disconnect(), 5),
    Case("MQTT 5 auth, no properties", b"\xf0\x02\x00\x00", Auth(), 5),
    Case("puback with a length of two bytes", b"\x40\x82\x00\x00\x07", Puback(7)),
]

MALFORMED = [
    # fixed header
    Malformed("packet type 0", b"\x00\x00", "MQTT-4.8.0-1"),
    Malformed("packet type 15 before MQTT 5", b"\xf0\x00", "MQTT-4.8.0-1"),
    Malformed("a length of five bytes", b"\x30\x80\x80\x80\x80\x01", "MQTT-4.8.0-1"),
    Malformed("puback flags", b"\x42\x02\x00\x07", "MQTT-2.2.2-2"),
    Malformed("pubrec flags", b"\x52\x02\x00\x07", "MQTT-2.2.2-2"),
    Malformed("pubrel flags", b"\x60\x02\x00\x07", "MQTT-3.6.1-1"),
    Malformed("pubrel of MQTT 3.1 in 3.1.1", b"\x6a\x02\x00\x07", "MQTT-3.6.1-1"),
    Malformed("pubcomp flags", b"\x71\x02\x00\x07", "MQTT-2.2.2-2"),
    Malformed("subscribe flags", b"\x80\x06\x00\x07\x00\x01a\x01", "MQTT-3.8.1-1"),
    Malformed("unsubscribe flags", b"\xa0\x05\x00\x07\x00\x01a", "MQTT-3.10.1-1"),
    Malformed("pingreq flags", b"\xc1\x00", "MQTT-2.2.2-2"),
    Malformed("disconnect flags", b"\xe8\x00", "MQTT-2.2.2-2"),
    Malformed("connack flags", b"\x21\x02\x00\x00", "MQTT-2.2.2-2", server=False),
    # direction and order
    Malformed("connack to a server", b"\x20\x02\x00\x00", "MQTT-4.8.0-1", 0x82),
    Malformed("suback to a server", b"\x90\x03\x00\x07\x00", "MQTT-4.8.0-1", 0x82),
    Malformed("unsuback to a server", b"\xb0\x02\x00\x07", "MQTT-4.8.0-1", 0x82),
    Malformed("pingresp to a server", b"\xd0\x00", "MQTT-4.8.0-1", 0x82),
    Malformed("subscribe to a client", b"\x82\x00", "MQTT-4.8.0-1", 0x82, server=False),
    Malformed("disconnect to a client", b"\xe0\x00", "MQTT-4.8.0-1", 0x82, server=False),
    Malformed("publish before connect", b"\x30\x03\x00\x01a", "MQTT-3.1.0-1", 0x82, 0),
    Malformed(
        "a second connect",
        packet(0x10, _CONNECT, b"\x02\x00\x3c\x00\x01a") * 2,
        "MQTT-3.1.0-2",
        0x82,
        0,
    ),
    # connect
    Malformed("connect flags of the fixed header", packet(0x11, _CONNECT), "MQTT-3.1.0-1", 0x82, 0),
    Malformed(
        "protocol name", packet(0x10, b"\x00\x04mqtt\x04\x02"), "MQTT-3.1.2-1", 0x84, version=0
    ),
    Malformed(
        "protocol level", packet(0x10, b"\x00\x04MQTT\x06\x02"), "MQTT-3.1.2-2", 0x84, version=0
    ),
    Malformed(
        "level of 3.1.1 under the name of 3.1",
        packet(0x10, b"\x00\x06MQIsdp\x04\x02\x00\x3c\x00\x01a"),
        "MQTT-3.1.2-2",
        0x84,
        0,
    ),
    Malformed(
        "level of 3.1 under the name of 3.1.1",
        packet(0x10, b"\x00\x04MQTT\x03\x02\x00\x3c\x00\x01a"),
        "MQTT-3.1.2-2",
        0x84,
        0,
    ),
    Malformed(
        "reserved connect flag",
        packet(0x10, _CONNECT, b"\x03\x00\x3c\x00\x01a"),
        "MQTT-3.1.2-3",
        version=0,
    ),
    Malformed(
        "will QoS 3",
        packet(0x10, _CONNECT, b"\x1e\x00\x3c\x00\x01a\x00\x01w\x00\x00"),
        "MQTT-3.1.2-14",
        version=0,
    ),
    Malformed(
        "will QoS without a will",
        packet(0x10, _CONNECT, b"\x0a\x00\x3c\x00\x01a"),
        "MQTT-3.1.2-13",
        version=0,
    ),
    Malformed(
        "will retain without a will",
        packet(0x10, _CONNECT, b"\x22\x00\x3c\x00\x01a"),
        "MQTT-3.1.2-15",
        version=0,
    ),
    Malformed(
        "password without user name",
        packet(0x10, _CONNECT, b"\x42\x00\x3c\x00\x01a\x00\x01p"),
        "MQTT-3.1.2-22",
        version=0,
    ),
    Malformed(
        "client id that is not UTF-8",
        packet(0x10, _CONNECT, b"\x02\x00\x3c\x00\x01\xff"),
        "MQTT-1.5.3-1",
        version=0,
    ),
    Malformed(
        "user name with NUL",
        packet(0x10, _CONNECT, b"\x82\x00\x3c\x00\x01a\x00\x01\x00"),
        "MQTT-1.5.3-2",
        version=0,
    ),
    Malformed(
        "will topic with a wildcard",
        packet(0x10, _CONNECT, b"\x06\x00\x3c\x00\x01a\x00\x01#\x00\x00"),
        "MQTT-3.3.2-2",
        0x90,
        0,
    ),
    Malformed(
        "will topic that is empty",
        packet(0x10, _CONNECT, b"\x06\x00\x3c\x00\x01a\x00\x00\x00\x00"),
        "MQTT-4.7.3-1",
        0x90,
        0,
    ),
    Malformed(
        "connect cut short",
        packet(0x10, _CONNECT, b"\x82\x00\x3c\x00\x01a"),
        "MQTT-4.8.0-1",
        version=0,
    ),
    Malformed("connect without a level", packet(0x10, b"\x00\x04MQTT"), "MQTT-4.8.0-1", version=0),
    Malformed("connect without a body", b"\x10\x00", "MQTT-4.8.0-1", version=0),
    Malformed(
        "connect that goes on",
        packet(0x10, _CONNECT, b"\x02\x00\x3c\x00\x01a\x00"),
        "MQTT-4.8.0-1",
        version=0,
    ),
    # connack
    Malformed("reserved connack flags", b"\x20\x02\x02\x00", "MQTT-4.8.0-1", server=False),
    Malformed("reserved connack code", b"\x20\x02\x00\x06", "MQTT-4.8.0-1", server=False),
    Malformed("session present if refused", b"\x20\x02\x01\x05", "MQTT-3.2.2-4", 0x82, 4, False),
    Malformed("connack cut short", b"\x20\x01\x00", "MQTT-4.8.0-1", server=False),
    Malformed("connack that goes on", b"\x20\x03\x00\x00\x00", "MQTT-4.8.0-1", server=False),
    # publish
    Malformed("publish QoS 3", b"\x36\x06\x00\x01a\x00\x07x", "MQTT-3.3.1-4"),
    Malformed("publish QoS 0 again", b"\x38\x04\x00\x01ax", "MQTT-3.3.1-2"),
    Malformed("publish without a body", b"\x30\x00", "MQTT-4.8.0-1"),
    Malformed("publish with half a topic length", b"\x30\x01\x00", "MQTT-4.8.0-1"),
    Malformed("publish with half a topic", b"\x30\x03\x00\x02a", "MQTT-4.8.0-1"),
    Malformed("publish QoS 1 with half a topic", b"\x32\x05\x00\x04abc", "MQTT-4.8.0-1"),
    Malformed("publish without a packet id", b"\x32\x03\x00\x01a", "MQTT-4.8.0-1"),
    Malformed("publish with half a packet id", b"\x34\x04\x00\x01a\x07", "MQTT-4.8.0-1"),
    Malformed("publish with packet id 0", b"\x32\x06\x00\x01a\x00\x00x", "MQTT-2.3.1-1", 0x82),
    Malformed("publish QoS 2, packet id 0", b"\x34\x05\x00\x01a\x00\x00", "MQTT-2.3.1-1", 0x82),
    Malformed("publish to an empty topic", b"\x30\x03\x00\x00x", "MQTT-4.7.3-1", 0x90),
    Malformed("publish to #", b"\x30\x03\x00\x01#", "MQTT-3.3.2-2", 0x90),
    Malformed("publish to a/+", b"\x32\x07\x00\x03a/+\x00\x07", "MQTT-3.3.2-2", 0x90),
    Malformed("topic with NUL", b"\x30\x04\x00\x02a\x00", "MQTT-1.5.3-2"),
    Malformed("topic cut within a character", b"\x30\x04\x00\x02\xe2\x82", "MQTT-1.5.3-1"),
    Malformed("topic with a surrogate", b"\x30\x05\x00\x03\xed\xa0\x80", "MQTT-1.5.3-1"),
    Malformed("topic with an overlong NUL", b"\x30\x04\x00\x02\xc0\x80", "MQTT-1.5.3-1"),
    # acknowledgements
    Malformed("puback 0", b"\x40\x02\x00\x00", "MQTT-2.3.1-1", 0x82),
    Malformed("pubrec 0", b"\x50\x02\x00\x00", "MQTT-2.3.1-1", 0x82),
    Malformed("pubrel 0", b"\x62\x02\x00\x00", "MQTT-2.3.1-1", 0x82),
    Malformed("pubcomp 0", b"\x70\x02\x00\x00", "MQTT-2.3.1-1", 0x82),
    Malformed("puback cut short", b"\x40\x01\x07", "MQTT-4.8.0-1"),
    Malformed("puback with a reason before MQTT 5", b"\x40\x03\x00\x07\x00", "MQTT-4.8.0-1"),
    Malformed("pubcomp without a body", b"\x70\x00", "MQTT-4.8.0-1"),
    # subscribe and unsubscribe
    Malformed("subscribe without a filter", b"\x82\x02\x00\x07", "MQTT-3.8.3-3", 0x82),
    Malformed("subscribe 0", b"\x82\x06\x00\x00\x00\x01a\x01", "MQTT-2.3.1-1", 0x82),
    Malformed("subscribe QoS 3", b"\x82\x06\x00\x07\x00\x01a\x03", "MQTT-3.8.3-4"),
    Malformed("subscribe options of MQTT 5", b"\x82\x06\x00\x07\x00\x01a\x05", "MQTT-3.8.3-4"),
    Malformed("subscribe without a QoS", b"\x82\x05\x00\x07\x00\x01a", "MQTT-4.8.0-1"),
    Malformed("subscribe to nothing", b"\x82\x05\x00\x07\x00\x00\x01", "MQTT-4.7.3-1", 0x8F),
    Malformed("subscribe to NUL", b"\x82\x06\x00\x07\x00\x01\x00\x01", "MQTT-1.5.3-2"),
    Malformed("subscribe to no UTF-8", b"\x82\x06\x00\x07\x00\x01\xff\x01", "MQTT-1.5.3-1"),
    Malformed("unsubscribe without a filter", b"\xa2\x02\x00\x07", "MQTT-3.10.3-2", 0x82),
    Malformed("unsubscribe 0", b"\xa2\x05\x00\x00\x00\x01a", "MQTT-2.3.1-1", 0x82),
    Malformed("unsubscribe from nothing", b"\xa2\x04\x00\x07\x00\x00", "MQTT-4.7.3-1", 0x8F),
    Malformed("unsubscribe cut short", b"\xa2\x05\x00\x07\x00\x02a", "MQTT-4.8.0-1"),
    Malformed("suback without codes", b"\x90\x02\x00\x07", "MQTT-3.8.4-5", 0x82, 4, False),
    Malformed("suback with code 3", b"\x90\x03\x00\x07\x03", "MQTT-3.9.3-2", server=False),
    Malformed("unsuback that goes on", b"\xb0\x03\x00\x07\x00", "MQTT-4.8.0-1", server=False),
    # packets without a body
    Malformed("pingreq with a body", b"\xc0\x01\x00", "MQTT-4.8.0-1"),
    Malformed("pingresp with a body", b"\xd0\x01\x00", "MQTT-4.8.0-1", server=False),
    Malformed("disconnect with a body", b"\xe0\x01\x00", "MQTT-4.8.0-1"),
]

_CONNECT_5 = b"\x00\x04MQTT\x05\x02\x00\x3c"


def _publish_5(*properties: bytes) -> bytes:
    body = b"".join(properties)
    return packet(0x30, b"\x00\x01a", bytes((len(body),)), body)


def _connect_5(*properties: bytes) -> bytes:
    body = b"".join(properties)
    return packet(0x10, _CONNECT_5, bytes((len(body),)), body, b"\x00\x01a")


_TABLE = "MQTT5-2.2.2.2"

MALFORMED_5 = [
    # lengths and properties as such
    Malformed("puback length too long", b"\x40\x82\x00\x00\x07", "MQTT5-1.5.5-1", version=5),
    Malformed("property length too long", b"\x30\x05\x00\x01a\x80\x00", "MQTT5-1.5.5-1", version=5),
    Malformed("no property length", b"\x30\x03\x00\x01a", "MQTT-4.8.0-1", version=5),
    Malformed("properties cut short", b"\x30\x06\x00\x01a\x03\x01\x00", "MQTT-4.8.0-1", version=5),
    Malformed("property value cut short", _publish_5(b"\x02\x00\x00"), "MQTT-4.8.0-1", version=5),
    Malformed("property value beyond", _publish_5(b"\x03\x00\x02c"), "MQTT-4.8.0-1", version=5),
    Malformed("property id 0", _publish_5(b"\x00"), _TABLE, version=5),
    Malformed("property id 43", _publish_5(b"\x2b\x00"), _TABLE, version=5),
    Malformed("property id 128", _publish_5(b"\x80\x01\x00"), _TABLE, version=5),
    Malformed("property of another packet", _publish_5(b"\x21\x00\x01"), _TABLE, version=5),
    Malformed(
        "will delay outside the will", _connect_5(b"\x18\x00\x00\x00\x05"), _TABLE, version=0
    ),
    Malformed("property twice", _publish_5(b"\x03\x00\x01c" * 2), _TABLE, 0x82, 5),
    Malformed("alias twice", _publish_5(b"\x23\x00\x01" * 2), _TABLE, 0x82, 5),
    Malformed(
        "subscription id twice",
        packet(0x82, b"\x00\x07\x04\x0b\x05\x0b\x06\x00\x01#\x01"),
        _TABLE,
        0x82,
        5,
    ),
    Malformed("flag of 2", _publish_5(b"\x01\x02"), _TABLE, 0x82, 5),
    Malformed("maximum QoS 2", b"\x20\x05\x00\x00\x02\x24\x02", _TABLE, 0x82, 5, False),
    Malformed("receive maximum 0", _connect_5(b"\x21\x00\x00"), _TABLE, 0x82, 0),
    Malformed("maximum packet size 0", _connect_5(b"\x27\x00\x00\x00\x00"), _TABLE, 0x82, 0),
    Malformed("topic alias 0", _publish_5(b"\x23\x00\x00"), _TABLE, 0x94, 5),
    Malformed(
        "subscription id 0",
        packet(0x82, b"\x00\x07\x02\x0b\x00\x00\x01#\x01"),
        _TABLE,
        0x82,
        5,
    ),
    Malformed("content type no UTF-8", _publish_5(b"\x03\x00\x01\xff"), "MQTT-1.5.3-1", version=5),
    Malformed(
        "user property with NUL", _publish_5(b"\x26\x00\x00\x00\x01\x00"), "MQTT-1.5.3-2", 0x81, 5
    ),
    Malformed("response topic with +", _publish_5(b"\x08\x00\x01+"), "MQTT-3.3.2-2", 0x90, 5),
    Malformed("response topic empty", _publish_5(b"\x08\x00\x00"), "MQTT-4.7.3-1", 0x90, 5),
    Malformed(
        "authentication data alone", _connect_5(b"\x16\x00\x01d"), "MQTT5-3.1.2.11.10", 0x82, 0
    ),
    # packets
    Malformed("neither topic nor alias", b"\x30\x03\x00\x00\x00", "MQTT5-3.3.2.1", 0x82, 5),
    Malformed("subscription id by a client", _publish_5(b"\x0b\x01"), "MQTT5-3.3.4-6", 0x82, 5),
    Malformed("publish packet id 0", b"\x32\x06\x00\x01a\x00\x00\x00", "MQTT-2.3.1-1", 0x82, 5),
    Malformed(
        "publish without properties", b"\x32\x05\x00\x01a\x00\x07", "MQTT-4.8.0-1", version=5
    ),
    Malformed("puback reason", b"\x40\x03\x00\x07\x92", "MQTT5-3.4.2-1", 0x82, 5),
    Malformed("pubrec reason", b"\x50\x03\x00\x07\x01", "MQTT5-3.5.2-1", 0x82, 5),
    Malformed("pubrel reason", b"\x62\x03\x00\x07\x80", "MQTT5-3.6.2-1", 0x82, 5),
    Malformed("pubcomp reason", b"\x70\x03\x00\x07\x10", "MQTT5-3.7.2-1", 0x82, 5),
    Malformed("puback that goes on", b"\x40\x05\x00\x07\x00\x00\x00", "MQTT-4.8.0-1", version=5),
    Malformed("connack reason", b"\x20\x03\x00\x05\x00", "MQTT5-3.2.2-8", 0x82, 5, False),
    Malformed("connack of 3.1.1", b"\x20\x02\x00\x00", "MQTT-4.8.0-1", 0x81, 5, False),
    Malformed("reserved options", b"\x82\x07\x00\x07\x00\x00\x01a\x40", "MQTT5-3.8.3-5", version=5),
    Malformed("options QoS 3", b"\x82\x07\x00\x07\x00\x00\x01a\x03", "MQTT5-3.8.3.1", 0x82, 5),
    Malformed("retain handling 3", b"\x82\x07\x00\x07\x00\x00\x01a\x31", "MQTT5-3.8.3.1", 0x82, 5),
    Malformed(
        "no local, shared",
        packet(0x82, b"\x00\x07\x00\x00\x0a$share/g/a\x05"),
        "MQTT5-3.8.3-4",
        0x82,
        5,
    ),
    Malformed("subscribe to none", b"\x82\x03\x00\x07\x00", "MQTT-3.8.3-3", 0x82, 5),
    Malformed("unsubscribe from none", b"\xa2\x03\x00\x07\x00", "MQTT-3.10.3-2", 0x82, 5),
    Malformed("suback reason", b"\x90\x04\x00\x07\x00\x10", "MQTT-3.9.3-2", 0x82, 5, False),
    Malformed("unsuback reason", b"\xb0\x04\x00\x07\x00\x01", "MQTT5-3.11.3-2", 0x82, 5, False),
    Malformed("unsuback of 3.1.1", b"\xb0\x02\x00\x07", "MQTT-4.8.0-1", 0x81, 5, False),
    Malformed("unsuback of none", b"\xb0\x03\x00\x07\x00", "MQTT5-3.11.3-1", 0x82, 5, False),
    Malformed("disconnect reason", b"\xe0\x01\x01", "MQTT5-3.14.2-1", 0x82, 5),
    Malformed("disconnect that goes on", b"\xe0\x03\x00\x00\x00", "MQTT-4.8.0-1", version=5),
    Malformed("auth reason", b"\xf0\x02\x01\x00", "MQTT5-3.15.2-1", 0x82, 5),
    Malformed("auth cut short", b"\xf0\x01\x18", "MQTT-4.8.0-1", version=5),
    Malformed("auth flags", b"\xf1\x00", "MQTT-2.2.2-2", version=5),
    Malformed("pingreq with a body in MQTT 5", b"\xc0\x01\x00", "MQTT-4.8.0-1", version=5),
    Malformed("a second connect of MQTT 5", _connect_5() * 2, "MQTT-3.1.0-2", 0x82, 0),
]

CASES += CASES_5
MALFORMED += MALFORMED_5
