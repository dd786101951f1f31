"""``python -m tests.crash``: a campaign by hand, or the replay of one."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.crash.campaign import run
from tests.crash.judge import PROMISES


def main() -> int:
    """Run it; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--store", choices=("lmdb", "sqlite"), default="lmdb")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keep the data and the broker's log there")
    parser.add_argument(
        "--sealed", action="store_true", help="seal the store, and rotate its keys meanwhile"
    )
    parser.add_argument("--full", action="store_true", help="have the disk full now and then")
    parser.add_argument("--quiet", action="store_true", help="no line for each death")
    options = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    say(f"store {options.store}, seed {options.seed}, kills {options.kills}")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        verdict = asyncio.run(
            run(
                options.folder or Path(temporary),
                options.store,
                options.seed,
                options.kills,
                None if options.quiet else say,
                is_sealed=options.sealed,
                is_short=options.full,
            )
        )
    for name, count in sorted(verdict.counts.items()):
        say(f"{count:8} {name}")
    for promise, count in verdict.violations.items():
        say(f"{count:8} violations: {PROMISES[promise]}")
    for example in verdict.examples:
        say(example)
    return 1 if verdict.total else 0


if __name__ == "__main__":
    sys.exit(main())
