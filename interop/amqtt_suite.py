"""amqtt's own test suite, without and with this plugin in every broker that it starts.

    python -m interop.amqtt_suite PATH_TO_AMQTT_CHECKOUT [-- pytest arguments]

It tests the *installed* amqtt (the checkout gives the tests; its own ``amqtt/`` is left out), in
this interpreter's environment, which needs what those tests need (see ``amqtt_suite.md``). Fixed
ports (1883, 1884, 8080 ...) must be free. Prints the tests whose outcome differs, and exits 1 if
one of them is not in ``amqtt_suite.md``.

How the plugin gets in: a ``sitecustomize`` on PYTHONPATH watches for the import of
``amqtt.broker``, in pytest and in every process that a test starts, and wraps ``Broker.__init__``.
A broker whose plugins come from a configuration loads ours like any other. One with entry point
plugins (deprecated), or with a plugin manager that a test has mocked, gets ours tied to its start
and stop.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["main", "watch"]

PLUGIN: Final = "broker_ext.DurableSessionPlugin"
STORE: Final = "AMQTT_SUITE_STORE"
DATA: Final = "AMQTT_SUITE_DATA"
HERE: Final = Path(__file__).resolve().parent
PYTEST: Final = (
    *("-q", "-p", "no:cacheprovider", "-o", "addopts="),  # amqtt's own ask for coverage
    *("--timeout", "60", "--tb", "short", "--mock-docker", "true"),
    *("--continue-on-collection-errors", "-o", "junit_family=xunit1"),
)
LEFT_OUT: Final = ("amqtt", ".git")
"""Parts of the checkout that are not shown to its tests: they test the installed amqtt."""


# --------------------------------------------------------- inside the processes under test


class _Watcher(MetaPathFinder):
    """Wraps ``amqtt.broker`` when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != "amqtt.broker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _wrap(module.Broker)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Have every broker of this process use the plugin (called by ``sitecustomize``)."""
    sys.meta_path.insert(0, _Watcher())


def _wrap(broker_class: Any) -> None:
    construct: Callable[..., None] = broker_class.__init__

    def __init__(self: Any, config: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from amqtt.contexts import BrokerConfig  # noqa: PLC0415 - amqtt is being imported

        given = config
        if not isinstance(config, BrokerConfig):
            config = BrokerConfig.from_dict(config)
        _close_leftovers()
        _made.append(weakref.ref(self))
        options = {"data": _data_for(given), "store": os.environ[STORE]}
        if isinstance(config.plugins, dict):
            config = copy.copy(config)
            config.plugins = {**config.plugins, PLUGIN: options}
        construct(self, config, *args, **kwargs)
        loaded: Any = getattr(self.plugins_manager, "plugins", ())
        if not any(type(p).__name__ == "DurableSessionPlugin" for p in _listed(loaded)):
            _tie(self, options)

    broker_class.__init__ = __init__


_made: list[weakref.ref[Any]] = []


def _close_leftovers() -> None:
    """Close what earlier tests left listening: one that fails does not shut its broker down, and
    the tests after it would find their port taken."""
    for left in _made:
        broker = left()
        if broker is None or not broker._loop.is_closed():
            continue
        for server in broker._servers.values():
            for shared in getattr(server.instance, "sockets", None) or ():
                shared._sock.close()
    _made[:] = [left for left in _made if left() is not None]


_data: dict[tuple[str, int], tuple[str, object]] = {}


def _data_for(config: object) -> str:
    """A directory for each test, and in it for each configuration: as in YAML, a broker that is
    made again from the same one finds what the first has stored."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    key = (test, id(config))
    if config is None or key not in _data:
        _data[key] = tempfile.mkdtemp(dir=os.environ[DATA]), config
    return _data[key][0]


def _listed(plugins: Any) -> list[Any]:
    return list(plugins) if isinstance(plugins, list) else []


def _tie(broker: Any, options: dict[str, str]) -> None:
    """Tie a plugin to a broker whose plugin manager does not load it."""
    from amqtt.broker import BrokerContext  # noqa: PLC0415 - amqtt is being imported

    from broker_ext import DurableSessionPlugin  # noqa: PLC0415

    context = BrokerContext(broker)
    config: Any = DurableSessionPlugin.Config(data=options["data"], store=options["store"])
    context.config = config
    plugin = DurableSessionPlugin(context)
    start_listeners, shutdown = broker._start_listeners, broker.shutdown

    async def start_after_plugin() -> None:
        await plugin.on_broker_pre_start()
        await start_listeners()
        await plugin.on_broker_post_start()

    async def shutdown_after_plugin() -> None:
        await plugin.on_broker_pre_shutdown()
        await shutdown()

    broker._start_listeners = start_after_plugin
    broker.shutdown = shutdown_after_plugin


# --------------------------------------------------------------------------- the comparison


class Suite:
    """The tests of a checkout. work: a directory for what comes of running them."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.work = work
        self.shown = _shown(checkout, work)
        self._runs = 0

    def run(self, arguments: list[str], store: str | None) -> dict[str, str]:
        """Run tests, with this plugin if a store is named. Returns test id -> outcome."""
        self._runs += 1
        report = self.work / f"{self._runs}.xml"
        with (self.work / f"{self._runs}.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "pytest", *PYTEST, f"--junitxml={report}", *arguments],
                cwd=self.shown,
                env=self._environment(store),
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return _outcomes(report)

    def _environment(self, store: str | None) -> dict[str, str]:
        path = [str(self.shown)]
        env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
        if store is not None:
            data = self.work / f"data-{self._runs}"
            data.mkdir()
            inject = self.work / "inject"
            inject.mkdir(exist_ok=True)
            (inject / "sitecustomize.py").write_text(
                "from interop.amqtt_suite import watch\n\nwatch()\n"
            )
            env |= {STORE: store, DATA: str(data)}
            path += [str(inject), str(HERE.parent)]
        env["PYTHONPATH"] = os.pathsep.join(path)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        return env


def _outcomes(report: Path) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest's
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[_node(case)] = ", ".join(sorted(bad)) or "passed"
    return outcomes


def _node(case: ET.Element) -> str:
    """What pytest takes to run this test again."""
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    owner = case.get("classname", "").removeprefix(module).strip(".").split(".")
    return "::".join(part for part in (file, *owner, case.get("name", "")) if part)


def _shown(checkout: Path, work: Path) -> Path:
    """A copy of the checkout without its ``amqtt/``, since some tests write beside themselves. Its
    ``tests`` becomes a package: others of that name are about where this plugin was installed from
    its sources."""
    shown = work / "checkout"
    shutil.copytree(checkout, shown, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (shown / "tests" / "__init__.py").touch()
    return shown


def _compare(suite: Suite, plain: dict[str, str], store: str, arguments: list[str]) -> int:
    """Run with the plugin. Prints what differs, and returns how many are not explained."""
    ours = suite.run(arguments, store)
    for number, outcomes in (("as they are", plain), (f"with this plugin on {store}", ours)):
        passed = sum(outcome == "passed" for outcome in outcomes.values())
        print(f"{number}: {passed} of {len(outcomes)} passed", flush=True)
    known = (HERE / "amqtt_suite.md").read_text(encoding="utf-8")
    unexplained = 0
    for name in sorted(plain.keys() | ours.keys()):
        before, after = plain.get(name, "not run"), ours.get(name, "not run")
        if before == after:
            continue
        # alone: a test that fails leaves its broker running, and its port taken for the next
        after = suite.run([name], store).get(name, "not run")
        if before != after:
            explained = name.partition("[")[0] in known
            unexplained += not explained
            print(f"  {name}: {before} -> {after}{'' if explained else '  NOT EXPLAINED'}")
    return unexplained


def main() -> int:
    """Run and compare. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m interop.amqtt_suite", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--store", action="append", choices=("sqlite", "lmdb"))
    parser.add_argument("--keep", type=Path, help="a new directory for the logs and reports")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, arguments = sys.argv[1:at], sys.argv[at + 1 :]
    options = parser.parse_args(given)
    # started in the background, this process ignores SIGINT, and so would what the tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = arguments or ["tests"]
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.keep or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        suite = Suite(options.checkout, work)
        plain = suite.run(arguments, store=None)
        stores = options.store or ["sqlite"]
        unexplained = sum(_compare(suite, plain, store, arguments) for store in stores)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
