"""Properties of MQTT 5 packets."""

from dataclasses import dataclass
from typing import TypeAlias

PropertyValue: TypeAlias = int | bytes | tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, repr=False)
class Properties:
    """The properties of one packet, in the order they were sent. None stands for "none at all".

    pairs: (property id, value). A value is an int, bytes, or for a user property (name, value).
    """

    pairs: tuple[tuple[int, PropertyValue], ...] = ()

    def __repr__(self) -> str:
        # P13: correlation data, authentication data and user properties may hold secrets
        ids = ", ".join(f"0x{ident:02X}" for ident, _ in self.pairs)
        return f"Properties({ids})"
