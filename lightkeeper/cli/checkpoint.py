"""`lightkeeper checkpoint`: what a folder of checkpoints holds, whether it is whole, and how old ones go."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from lightkeeper.cli.options import check_count
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.words import counted, shown

if TYPE_CHECKING:
    from lightkeeper.checkpoint.folder import Folder, Listed

NOT_WHOLE = 1
IN_RUN = "checkpoints"  # where a run's folder has them
REASON_CHARS_MAX = 200

Load: TypeAlias = Callable[[Path], dict[str, Any]]

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Dir = Annotated[
    Path, typer.Argument(metavar="DIR", help=f"The folder of the checkpoints, or a run's folder with {IN_RUN}/ in it.")
]


def build() -> typer.Typer:
    """The commands below `checkpoint`."""
    app = typer.Typer(help="See, check and delete the checkpoints of a run.", no_args_is_help=True)
    app.command("ls")(ls)
    app.command("verify")(verify)
    app.command("prune")(prune)
    return app


# ---------------------------------------------------------------- ls


def ls(folder: _Dir, json: _Json = False) -> int:
    """Show what is there, newest first: what counts, what does not and why, and what broke off.

    Only manifests and markers are read; `verify` reads the files.
    """
    place, listed = _open(folder)
    rows, entries = [_row(one) for one in listed], place.entries()
    rest = {
        kind: [one.name for one in entries if one.kind == known]
        for known, kind in (("saving", "half_written"), ("aside", "aside"), ("dropped", "dropped"), ("alien", "alien"))
    }
    if json:
        _print_json({"folder": str(place.path), "checkpoints": rows, **rest})
        return 0
    if not rows:
        typer.echo(f"no checkpoint in {place.path}")
    for row in rows:
        typer.echo(_line(row))
    texts = ((len(rest["half_written"]), "half-written"), (len(rest["aside"]), "put aside"))
    also = [f"{number} {what}" for number, what in (*texts, (len(rest["dropped"]), "half deleted")) if number]
    if also:
        typer.echo(f"not counted: {', '.join(also)}")
    return 0


def _row(one: Listed) -> dict[str, Any]:
    """What is known of a checkpoint; of one that does not count what its manifest says, if it has one."""
    from lightkeeper.checkpoint.manifest import Damaged, read_manifest

    manifest = one.manifest
    if manifest is None:
        try:
            manifest, _ = read_manifest(one.path)
        except Damaged:
            pass
    row: dict[str, Any] = {"step": one.step, "committed": one.manifest is not None, "reason": one.reason}
    if manifest is None:
        return {**row, "bytes": _size(one.path)}
    return {
        **row, "bytes": manifest.bytes, "wall": manifest.wall, "epoch": manifest.state.epoch,
        "term": manifest.state.term, "lighthouse": manifest.state.lighthouse, "group": manifest.group,
        "incarnation": manifest.incarnation, "ranks": manifest.ranks, "loaded": manifest.loaded,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["wall"])) if "wall" in row else "-"
    epoch = f"e{row['epoch']}/{row['term']}@{row['lighthouse']}" if "epoch" in row else "-"
    state = "committed" if row["committed"] else f"does not count: {row['reason']}"
    loaded = ", was loaded once" if row["committed"] and row.get("loaded") else ""
    text = (
        f"step {row['step']:<8} {when:19}  {epoch:<16} {_amount(row['bytes']):>10}  {row.get('group', '-'):<8} {state}"
    )
    return shown(text + loaded, 400)


# ---------------------------------------------------------------- verify


@dataclass
class Verdict:
    """What became of reading one checkpoint.

    Attributes:
        step: how many steps its state has behind it.
        state: ``whole``, ``damaged``, or ``uncommitted``: it has no marker, so it does not count anyway.
        reason: why it is not whole.
        bytes: that were read.
        seconds: that it took.
        loaded: names that were loaded; None if that was not asked for.
    """

    step: int
    state: str
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0
    loaded: int | None = None

    def line(self) -> str:
        """For a person."""
        if self.state != "whole":
            what = "damaged" if self.state == "damaged" else "not committed"
            return f"step {self.step}: {what}: {shown(self.reason, REASON_CHARS_MAX)}"
        loaded = "" if self.loaded is None else f", {counted(self.loaded, 'name')} loaded"
        return f"step {self.step}: whole ({_amount(self.bytes)} read{loaded}, {self.seconds:.2f} s)"


def verify(
    folder: _Dir,
    step: Annotated[int | None, typer.Option(help="Only the one with so many steps behind it.")] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Also load each with torch; that needs as much memory as one has bytes.")
    ] = False,
    json: _Json = False,
) -> int:
    """Read every file of every checkpoint and say whether it is what was written.

    Ends with 1 if one that was committed is damaged, or if none is whole.
    """
    place, listed = _open(folder)
    if step is not None:
        chosen = [one for one in listed if one.step == step]
        if not chosen:
            there = ", ".join(str(one.step) for one in listed[:10]) or "none"
            raise UsageError(f"--step {step}: there is no such checkpoint in {place.path} (there are: {there})")
        listed = chosen
    loader: Load | None = None
    if load:
        from lightkeeper.checkpoint.loading import load_fresh  # here: it imports torch, for seconds

        loader = load_fresh
    verdicts = []
    for one in listed:
        verdict = _read(one, loader)
        if verdict is None:
            continue
        verdicts.append(verdict)
        if not json:
            typer.echo(verdict.line())
    whole = sum(one.state == "whole" for one in verdicts)
    damaged = sum(one.state == "damaged" for one in verdicts)
    if json:
        fields = [vars(one) for one in verdicts]
        _print_json({"folder": str(place.path), "checkpoints": fields, "whole": whole, "damaged": damaged})
    elif not whole and step is None:
        typer.echo(f"no checkpoint in {place.path} is whole")
    return NOT_WHOLE if damaged or not whole else 0


def _read(one: Listed, load: Load | None) -> Verdict | None:
    """Reads a checkpoint; None if it was deleted meanwhile, as a running job does with old ones."""
    from lightkeeper.checkpoint.files import check_files
    from lightkeeper.checkpoint.manifest import Damaged
    from lightkeeper.checkpoint.names import MARKER

    if one.manifest is None:
        state = "damaged" if os.path.lexists(one.path / MARKER) else "uncommitted"
        return Verdict(one.step, state, one.reason) if os.path.lexists(one.path) else None
    begun = time.monotonic()
    try:
        check_files(one.path, one.manifest)
        loaded = None if load is None else len(load(one.path))
    except Damaged as error:
        return Verdict(one.step, "damaged", str(error)) if os.path.lexists(one.path) else None
    return Verdict(one.step, "whole", "", one.manifest.bytes, time.monotonic() - begun, loaded)


# ---------------------------------------------------------------- prune


def prune(
    folder: _Dir,
    keep: Annotated[
        int, typer.Option(help="How many of the newest stay that are committed and have all their files.")
    ] = 3,
    keep_every: Annotated[int, typer.Option(help="Also those stay whose step is a multiple of this; 0: none.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    older_half_written: Annotated[
        bool,
        typer.Option(
            "--older-half-written",
            help="Also what broke off: half-written ones that are not newer than the newest, and half-deleted ones.",
        ),
    ] = False,
    json: _Json = False,
) -> int:
    """Delete old checkpoints, and never so many that fewer than two are left which have all their files.

    A running job deletes its old ones itself.
    """
    from lightkeeper.checkpoint.folder import KEEP_MIN

    check_count(keep, "--keep", KEEP_MIN)
    check_count(keep_every, "--keep-every", 0, 10**12)
    place, _ = _open(folder)
    gone: dict[str, int] = {}
    try:
        going = place.superfluous(keep, keep_every)
        if older_half_written:
            going += place.broken_off(place.newest())
        for path in going:
            size = _size(path)
            if not dry_run:
                place.drop(path)
            gone[path.name] = size
            if not json:
                typer.echo(f"{'would delete' if dry_run else 'deleted'} {shown(path.name)} ({_amount(size)})")
    except OSError as error:
        raise ToldError(f"{error.filename or place.path}: {error.strerror or error}") from None
    left = sum(one.manifest is not None for one in place.listed())
    if json:
        _print_json({"folder": str(place.path), "deleted": gone, "bytes": sum(gone.values()), "dry_run": dry_run})
    else:
        done = f"{counted(len(gone), 'folder')}, {_amount(sum(gone.values()))}" if gone else "nothing to delete"
        typer.echo(f"{done}; {left} committed {'are there' if dry_run else 'stay'}")
    return 0


# ---------------------------------------------------------------- what they share


def _open(folder: Path) -> tuple[Folder, list[Listed]]:
    """The folder of checkpoints that is meant, and its checkpoints.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    from lightkeeper.checkpoint.folder import Folder
    from lightkeeper.checkpoint.names import MANIFEST, found

    try:
        names = os.listdir(folder)
        if found(folder.resolve().name).kind in ("step", "saving") and MANIFEST in names:
            parent = folder.resolve().parent
            raise UsageError(f"{folder} is one checkpoint: give the folder it is in, {parent}")
        if not any(found(name).kind == "step" for name in names) and (folder / IN_RUN).is_dir():
            folder = folder / IN_RUN
        place = Folder(folder)
        return place, place.listed()
    except OSError as error:
        raise UsageError(f"no folder of checkpoints at {folder}: {error.strerror or error}") from None


def _size(path: Path) -> int:
    """Bytes of all files of a folder, as far as they can be seen."""
    total = 0
    try:
        entries = list(os.scandir(path))
    except OSError:
        return path.lstat().st_size if path.is_file() else 0
    for entry in entries:
        try:
            total += _size(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else entry.stat().st_size
        except OSError:
            continue
    return total


def _amount(size: int) -> str:
    """``512 B``, ``1.5 MiB``."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"


def _print_json(value: dict[str, Any]) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
