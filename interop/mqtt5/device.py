"""What the scenarios ask of a client library, and what they see through it.

A device is somebody's gadget: an id, and sessions on the broker that outlive its connections. Each
``up`` is a new client of the library, as after a reboot: what the library itself remembers is gone.
"""

from __future__ import annotations

import abc
import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

__all__ = ["HOST", "NEVER", "PATIENCE_S", "Answer", "Device", "Got", "Loop", "Options", "Will"]

HOST: Final = "127.0.0.1"
PATIENCE_S: Final = 20.0
"""A busy machine may need it."""
NEVER: Final = 0xFFFF_FFFF
"""Session Expiry Interval: never [MQTT5 3.1.2.11.2]."""

T = TypeVar("T")


class Will(NamedTuple):
    """delay_s: Will Delay Interval."""

    topic: str
    payload: bytes
    delay_s: int


class Options(NamedTuple):
    """Of one CONNECT. window: Receive Maximum, 0 = not said."""

    clean: bool = False
    expiry_s: int = NEVER
    window: int = 0
    will: Will | None = None


class Answer(NamedTuple):
    """A CONNACK. user: User Properties."""

    present: bool
    reason: int
    text: str
    user: Mapping[str, str]


class Got(NamedTuple):
    """A message. user: its User Properties, in order. expiry_s: what is left of it, if it has."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    user: tuple[tuple[str, str], ...] = ()
    expiry_s: int | None = None


def until(condition: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for what another process or thread does."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"in {within_s} s: {what}"
        time.sleep(0.005)


class Device(abc.ABC):
    """got: messages since it was made. ends: reason codes of the DISCONNECTs that it was sent."""

    def __init__(self, port: int, client_id: str) -> None:
        self.port = port
        self.client_id = client_id
        self.got: list[Got] = []
        self.answers: list[Answer] = []
        self.ends: list[int] = []

    def up(self, options: Options = Options()) -> Answer:  # noqa: B008 - immutable
        """Connect; what the broker says."""
        before = len(self.answers)
        self.connect(options)
        until(lambda: len(self.answers) > before, f"{self.client_id}: no CONNACK")
        return self.answers[-1]

    @abc.abstractmethod
    def connect(self, options: Options) -> None:
        """Begin to connect; ``answers`` gets the CONNACK."""

    @abc.abstractmethod
    def subscribe(self, topic_filter: str, qos: int) -> int:
        """Subscribe; the reason code of the SUBACK."""

    @abc.abstractmethod
    def publish(
        self,
        topic: str,
        *payloads: bytes,
        qos: int = 1,
        expiry_s: int | None = None,
        user: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Publish, and wait until all is acknowledged."""

    @abc.abstractmethod
    def down(self) -> None:
        """DISCONNECT, if it is connected."""

    @abc.abstractmethod
    def cut(self) -> None:
        """Lose the connection."""

    @property
    def payloads(self) -> list[bytes]:
        return [got.payload for got in self.got]

    def has(self, *payloads: bytes) -> None:
        """Wait until as many messages arrived, then until none does any more; they are these.

        Not in their order between QoS 1 and QoS 2: most libraries hand over a QoS 2 message at its
        PUBREL.
        """
        until(lambda: len(self.got) >= len(payloads), f"{self.client_id}: not everything arrived")
        self.quiet()
        for qos in range(3):
            of_qos = [got.payload for got in self.got if got.qos == qos]
            in_order = [payload for payload in payloads if payload in of_qos]
            assert of_qos == in_order, f"{self.client_id}: {of_qos} is not {in_order}"
        assert sorted(self.payloads) == sorted(payloads), f"{self.payloads} is not {payloads}"

    def quiet(self) -> None:
        """Wait until nothing more arrives: what comes behind the answer to a SUBSCRIBE came after
        all that was under way."""
        before = -1
        while len(self.got) != before:
            before = len(self.got)
            self.subscribe(f"quiet/{self.client_id}", 0)


class Loop:
    """An event loop in a thread of its own, for libraries of coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        """Stop it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()
