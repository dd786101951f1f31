"""Whose database is this, and is it the one we closed last time?

A database carries ``db_id`` (for ever), ``generation`` (random, stated in every position) and
``boot`` (openings). A small JSON file beside it, the *sidecar*, repeats them, with the place the
database was in and the head it had reached. When the two disagree the database was replaced,
restored from a backup, copied or moved: offsets may mean other entries than they did, so a new
generation is minted, and every position that was given before is told so (409).

The order of an opening, so that a crash at any step does not look like a restore:

    1. read both, and decide;
    2. if the last opening died between 3 and 4 (sidecar one boot behind), write the sidecar as
       the database is: so the sidecar is never more than one boot behind;
    3. commit boot + 1 (and a new generation, if one is minted) in the database;
    4. write the sidecar with boot + 1; only then is the store open.

So after a crash the sidecar says the same boot, or one less. A backup has a lower boot than the
sidecar; one that was taken since the last opening has the same, and then the head tells: the
sidecar holds one that was on disk (written every WITNESS_MS and at closing), so a database whose
head is lower lost its tail. That is also true when the machine lost power under durability "os":
offsets that were given out will be used again, and a new generation says so.

What cannot be told: database and sidecar both put back together, in place, into the same files on
the same machine, or a machine cloned with its disk. A copy of the directory is found by the inode.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from storage.meta import Identity

__all__ = [
    "WITNESS_MS",
    "Place",
    "Sidecar",
    "changed",
    "mint",
    "new_identity",
    "place_of",
    "sync_directory",
]

WITNESS_MS: Final = 10_000
"""How often the sidecar's head follows: a backup younger than that is not made and restored."""

_MACHINE_ID: Final = Path("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a database file is. machine: "" = cannot be told. inode: of the database file."""

    machine: str
    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The sidecar's content. head: at least this much was on disk."""

    db_id: str
    generation: str
    boot: int
    head: int
    machine: str
    path: str
    inode: int

    @classmethod
    def of(cls, identity: Identity, head: int, place: Place) -> Sidecar:
        """What is to be written for a database."""
        return cls(
            identity.db_id,
            identity.generation,
            identity.boot,
            head,
            place.machine,
            place.path,
            place.inode,
        )

    def write(self, path: Path) -> None:
        """Replace the file, so that a crash leaves the old one or the new one. Raises OSError."""
        temporary = path.with_name(path.name + ".new")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)

    @classmethod
    def read(cls, path: Path) -> Sidecar | None:
        """None if there is no file. Raises ValueError if it is not a sidecar, OSError."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(path)) from error


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def place_of(database: Path) -> Place:
    """Raises OSError."""
    try:
        machine = _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""  # not every system has one; inode and path are compared all the same
    return Place(machine, str(database.resolve()), database.stat().st_ino)


def new_identity() -> Identity:
    """Of a database that is being created; its first opening makes it boot 1."""
    return Identity(uuid.uuid4().hex, uuid.uuid4().hex, 0)


def mint(identity: Identity) -> Identity:
    """The same database in a new generation, at its next boot."""
    return Identity(identity.db_id, uuid.uuid4().hex, identity.boot + 1)


def changed(identity: Identity, head: int, sidecar: Sidecar | None, place: Place) -> str:
    """Why the database is not the one that was closed, in a few words; "" = it is. Pure."""
    if sidecar is None:
        return "sidecar missing"
    was, boot = sidecar, identity.boot
    findings = {
        "replaced: the sidecar is of another database": was.db_id != identity.db_id,
        f"restored from a backup: boot {boot}, the sidecar says {was.boot}": boot < was.boot,
        f"sidecar is old: boot {boot}, the sidecar says {was.boot}": boot > was.boot + 1,
        "replaced: the sidecar is of another generation": was.generation != identity.generation,
        f"restored from a backup: head {head}, the sidecar says {was.head}": head < was.head,
        "copied: from another machine": "" != was.machine != place.machine != "",
        "copied: the database is another file than before": was.inode != place.inode,
        f"moved: it was {was.path}": was.path != place.path,
    }
    return next((finding for finding, is_true in findings.items() if is_true), "")
