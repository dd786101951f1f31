"""The control socket: what an operator asks a running broker, and what it does for him.

An HTTP application on the Unix socket ``control.sock`` in the data directory. ``POST /<operation>``
with a JSON object as arguments is answered with ``{"result": ...}``, or with ``{"error": {"code",
"message"}}``. ``broker_ext.cli.calling`` is the other side.

Rule 1. Who may read the data may ask: the socket has mode 0600 from its first moment.
Rule 2. It never costs the broker its start: what cannot be opened is one line in the log.
Rule 3. A socket of a broker that was killed is replaced, one that answers never.
Rule 4. An answer has our own words, never the text of an exception (P13).
Rule 5. A further operation is one coroutine in a table that is handed to ``Control``:
        ``async def name(hub, *, argument: str = "") -> JSON``. Arguments are keywords, annotated
        str, int, bool or one of these with ``| None``; they are checked before it is called.

aiohttp is imported (in a thread) when the first request arrives; until then it waits in the
socket's backlog, so that no start pays for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import inspect
import json
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_ext.operations import OPERATIONS, Operation, RefusedError
from storage.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiohttp import web

    from broker_ext.hub import Hub

__all__ = ["SOCKET_NAME", "Control", "address"]

log = logging.getLogger("amqtt_durable.control")

SOCKET_NAME: Final = "control.sock"
ADDRESS_BYTES_MAX: Final = 103
"""Longest path of a Unix socket that every POSIX system takes (Linux: 107)."""
REQUEST_BYTES_MAX: Final = 1 << 20
BACKLOG: Final = 16
GRACE_S: Final = 1.0
"""How long a stop waits for operations that are under way."""


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """The address of a Unix socket at ``path``, also where the path is longer than addresses may
    be: then by way of its directory's descriptor. Raises OSError where that is not possible."""
    if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Control:
    """The control socket of one broker. ``start`` when the hub has loaded, ``stop`` before it
    stops. operations: name -> coroutine, beside those of ``broker_ext.operations``."""

    def __init__(
        self, hub: Hub, directory: Path, operations: Mapping[str, Operation] | None = None
    ) -> None:
        self.hub = hub
        self.path = directory.absolute() / SOCKET_NAME
        self.operations: dict[str, Operation] = {**OPERATIONS, **(operations or {})}
        self._socket: socket.socket | None = None
        self._inode = 0
        self._serving: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    def start(self) -> None:
        """Open the socket; requests may come from now on."""
        try:
            self._socket = self._open()
        except OSError as error:
            log.warning("no control socket at %s: %s", self.path, error.strerror or error)
            return
        asyncio.get_running_loop().add_reader(self._socket, self._first_request)

    def _open(self) -> socket.socket:
        path = self.path
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is something else of this name")
        if _answers(path):
            raise OSError(errno.EADDRINUSE, "another process answers there")
        fresh = path.with_name(f"{SOCKET_NAME}.new")
        fresh.unlink(missing_ok=True)
        opened = socket.socket(socket.AF_UNIX)
        try:
            with address(fresh) as where:
                opened.bind(where)
            fresh.chmod(0o600)  # nobody can connect before `listen`
            self._inode = fresh.lstat().st_ino
            fresh.replace(path)
            opened.listen(BACKLOG)
        except BaseException:
            opened.close()
            raise
        opened.setblocking(False)
        return opened

    def _first_request(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._serving = asyncio.ensure_future(self._serve(self._socket))

    async def _serve(self, opened: socket.socket) -> None:
        try:
            await asyncio.to_thread(importlib.import_module, "aiohttp.web")
            from aiohttp import web  # noqa: PLC0415 - a tenth of a second, see above

            application = web.Application(client_max_size=REQUEST_BYTES_MAX)
            application.router.add_post("/{name}", self._answer)
            runner = web.AppRunner(
                application, access_log=None, shutdown_timeout=GRACE_S, handle_signals=False
            )
            self._runner = runner
            await runner.setup()
            await web.SockSite(runner, opened, backlog=BACKLOG).start()
        except Exception:
            log.exception("the control socket cannot be served")
            self._close()

    async def stop(self) -> None:
        """Take no more requests, end those under way. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if self._socket is not None and serving is None:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _close(self) -> None:
        opened, self._socket = self._socket, None
        if opened is None:
            return
        with contextlib.suppress(OSError):  # it is gone already, or the disk is
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        if self._runner is None:
            opened.close()  # else it is the runner's

    # ----------------------------------------------------------------------- a request

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            result = await self._operate(name, await request.read())
            return _response(200, {"result": result})
        except RefusedError as refusal:
            code, message = refusal.code, refusal.message
        except StoreUnavailable:
            code, message = 503, "the store does not answer; try again"
        except StoreError as error:
            log.warning("control: %s was refused: %s", name, error)
            code, message = error.code, "the store refused it; the broker's log says why"
        except Exception as error:
            if type(error).__module__.startswith("aiohttp"):
                raise  # its own answer, such as 413
            log.exception("control: %s failed", name)
            code, message = 500, "it failed; the broker's log says why"
        return _response(code, {"error": {"code": code, "message": message}})

    async def _operate(self, name: str, body: bytes) -> Any:
        operation = self.operations.get(name)
        if operation is None:
            raise RefusedError(404, f"there is no operation {name[:100]!r}")
        try:
            given = json.loads(body) if body else {}
        except ValueError:
            raise RefusedError(400, "the arguments are not JSON") from None
        if not isinstance(given, dict):
            raise RefusedError(400, "the arguments must be one JSON object")
        _check(operation, given)
        return await operation(self.hub, **given)


_KINDS: Final[dict[str, tuple[type, ...]]] = {"str": (str,), "int": (int,), "bool": (bool,)}


def _check(operation: Operation, given: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit the operation's signature."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(operation).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name in given:
        if name not in parameters:
            raise RefusedError(400, f"there is no argument {name[:100]!r}")
    for name, parameter in parameters.items():
        if name not in given:
            if parameter.default is parameter.empty:
                raise RefusedError(400, f"argument {name!r} is missing")
            continue
        kind, _, optional = str(parameter.annotation).partition(" | ")
        value = given[name]
        if optional and value is None:
            continue
        # a bool is an int in Python, and in no operation
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise RefusedError(
                400, f"argument {name!r} must be {kind}{' or null' * bool(optional)}"
            )


def _answers(path: Path) -> bool:
    """Whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            with address(path) as where:
                probe.connect(where)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True  # its backlog is full
        return True


def _response(status: int, answer: object) -> web.Response:
    from aiohttp import web  # noqa: PLC0415 - it is loaded when this is called

    return web.json_response(answer, status=status)
