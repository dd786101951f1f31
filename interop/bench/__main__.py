"""``python -m interop.bench``: see the package."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from interop.bench import brokers, hooking, queueing, resuming, storing
from interop.bench.comparing import compare, goals, is_chosen, overview, tell
from interop.bench.scenarios import FULL, TINY

_QUICK: Final = 1
_REPEAT: Final = 3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m interop.bench",
        description="Durable MQTT brokers, measured beside others in one run on this machine. "
        "Everything listens on loopback. Data goes to the temporary directory (TMPDIR), which has "
        "to be on a disk if a sync is to cost anything.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("brokers", "resume", "store", "outbox", "webhook"),
        default="brokers",
        help="brokers: every broker that is installed (default); resume: what coming back and "
        "pruning cost; store: the store alone; outbox: claims and settlements; "
        "webhook: deliveries of a sink",
    )
    parser.add_argument("--stores", default="lmdb,sqlite", help="which of ours  [lmdb,sqlite]")
    parser.add_argument(
        "--only", default="", help="comma list: brokers whose name has one of these words"
    )
    parser.add_argument(
        "--scenarios", default="", help="comma list: scenarios whose name has one of these words"
    )
    parser.add_argument(
        "--sealed", action="store_true", help="each of ours once more, with payloads sealed"
    )
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    parser.add_argument("--repeat", type=int, default=_REPEAT, help="medians of so many  [3]")
    parser.add_argument("--quick", action="store_true", help="once; resume with less history")
    parser.add_argument("--tiny", action="store_true", help="only look whether it works")
    parser.add_argument("--size", type=int, help="resume: entries of the largest history")
    parser.add_argument(
        "--mosquitto-sqlite",
        metavar="PLUGIN",
        help="Mosquitto's persist-sqlite library (2.1): makes durable Mosquitto one more column",
    )
    arguments = parser.parse_args()
    arguments.repeat = _QUICK if arguments.quick or arguments.tiny else arguments.repeat
    arguments.stores = _words(arguments.stores)
    unknown = set(arguments.stores) - set(brokers.STORES)
    if unknown:
        parser.error(f"no such store: {', '.join(sorted(unknown))}")
    return arguments


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _brokers(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    sizes = TINY if arguments.tiny else FULL
    only = _words(arguments.only)
    kinds = [
        kind
        for kind in brokers.installed(
            arguments.stores, arguments.mosquitto_sqlite, sealed=arguments.sealed
        )
        if is_chosen(kind.name, only)
    ]
    runs = compare(kinds, sizes, arguments.repeat, _words(arguments.scenarios))
    settings = "\n".join(f"{kind.name}: {kind.note}" for kind in kinds)
    return [overview(kinds, sizes, runs), goals(kinds, sizes, runs), settings], runs


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes are cleaned up
    host = (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}, "
        f"data in {tempfile.gettempdir()}"
    )
    tell(host)
    if arguments.what == "resume":
        texts, figures = resuming.run(
            arguments.stores,
            sizes=_sizes(arguments),
            repeat=arguments.repeat,
            seconds=resuming.TINY_S if arguments.tiny else resuming.FULL_S,
            chosen=_words(arguments.scenarios),
        )
    elif arguments.what == "store":
        seconds = storing.TINY_S if arguments.tiny else storing.FULL_S
        texts, figures = storing.run(arguments.stores, arguments.repeat, seconds)
    elif arguments.what == "outbox":
        messages = queueing.TINY if arguments.tiny else queueing.FULL
        texts, figures = queueing.run(arguments.stores, arguments.repeat, messages)
    elif arguments.what == "webhook":
        messages = hooking.TINY if arguments.tiny else hooking.FULL
        texts, figures = hooking.run(arguments.stores, arguments.repeat, messages)
    else:
        texts, figures = _brokers(arguments)
    print("\n\n".join([host, *texts]))
    if arguments.json:
        found = {"host": host, "what": arguments.what, "figures": figures}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _sizes(arguments: argparse.Namespace) -> list[int]:
    """Sizes of history, each ten times the one before."""
    if arguments.tiny:
        return [100, 1000]
    largest = arguments.size or (100_000 if arguments.quick else 1_000_000)
    return [largest // 100, largest // 10, largest]


if __name__ == "__main__":
    main()
