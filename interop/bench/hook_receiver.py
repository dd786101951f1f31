"""The receiver of `hooking`: answers each POST with 204, in a process of its own."""

from __future__ import annotations

import asyncio
import re
from typing import Final

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_DONE: Final = b"HTTP/1.1 204 No Content\r\n\r\n"


class _Peer(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._buffer, 0, end + 2)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            self._buffer = self._buffer[size:]
            self._transport.write(_DONE)


async def _main() -> None:
    server = await asyncio.get_running_loop().create_server(_Peer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
