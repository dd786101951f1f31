"""Fields of a packet -> bytes (section 1.5). What does not fit raises UnencodablePacket."""

from typing import Final

from broker_ext.wire.errors import UnencodablePacket

__all__ = [
    "BYTE",
    "PACKET_ID",
    "REMAINING_BYTES_MAX",
    "binary",
    "byte",
    "four",
    "packet_id",
    "two",
    "variable_length",
]

PACKET_ID: Final[tuple[bytes, ...]] = tuple(number.to_bytes(2, "big") for number in range(65_536))
"""Every two byte number, big-endian: an acknowledgement is `PUBACK_HEAD + PACKET_ID[id]`."""

BYTE: Final[tuple[bytes, ...]] = tuple(bytes((number,)) for number in range(256))
"""Every byte; below 128 it is also that number as a Variable Byte Integer."""

REMAINING_BYTES_MAX: Final = 268_435_455
"""The largest Variable Byte Integer: what four bytes can say."""


def variable_length(number: int) -> bytes:
    """Return a Variable Byte Integer, 0..268435455, as short as can be [MQTT5-1.5.5-1]."""
    if not 0 <= number <= REMAINING_BYTES_MAX:
        raise UnencodablePacket(f"length {number} is out of range")
    if number < 128:
        return BYTE[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def byte(number: int) -> bytes:
    """Return one byte."""
    if not 0 <= number <= 255:
        raise UnencodablePacket(f"{number} does not fit into one byte")
    return BYTE[number]


def two(number: int) -> bytes:
    """Return a Two Byte Integer."""
    if not 0 <= number <= 65_535:
        raise UnencodablePacket(f"{number} does not fit into two bytes")
    return PACKET_ID[number]


def four(number: int) -> bytes:
    """Return a Four Byte Integer."""
    if not 0 <= number <= 0xFFFF_FFFF:
        raise UnencodablePacket(f"{number} does not fit into four bytes")
    return number.to_bytes(4, "big")


def packet_id(number: int) -> bytes:
    """Return a packet identifier, 1..65535 [MQTT-2.3.1-1]."""
    if not 1 <= number <= 65_535:
        raise UnencodablePacket(f"{number} is no packet identifier")
    return PACKET_ID[number]


def binary(data: bytes) -> bytes:
    """Return binary data or an encoded string with its two byte length before it."""
    if len(data) > 65_535:
        raise UnencodablePacket("a field is longer than 65535 bytes")
    return PACKET_ID[len(data)] + data
