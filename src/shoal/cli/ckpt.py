"""`shoal ckpt`: look at checkpoints, without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint import shards, states
from shoal.checkpoint.client import split
from shoal.checkpoint.export import export as export_
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.place import Place
from shoal.config import counted
from shoal.errors import BadInput, Refused, ShoalError

app = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)
_Url = Annotated[str, typer.Argument(help="Where they were saved, or one of them: URL/NAME.")]
_console = Console(soft_wrap=True, highlight=False)


@contextmanager
def _chosen(url: str) -> Iterator[tuple[Place, Manifest]]:
    """The checkpoint of a URL/NAME, or else the newest there; if that is damaged, it is said what to try."""
    place, name = split(url)
    try:
        yield place, manifest_.latest(place) if name is None else manifest_.find(place, name)
    except Refused as error:
        raise Refused(f"{error}{_instead(place) if name is None else ''}") from None


def _instead(place: Place) -> str:
    with suppress(ShoalError):
        older = manifest_.newest(place, before=manifest_.newest(place))
        return f"; an older one may be whole, name it: {place.url}/{older}"
    return "; there is no older one"


@app.command()
def ls(url: _Url) -> None:
    """List the checkpoints there, the oldest first."""
    place, _ = split(url)
    table = Table("name", "made", "rows", "bytes", "base", box=None)
    if not (names := manifest_.names(place)):
        raise BadInput(f"there is no checkpoint at {place.url}")
    for name in names:
        try:
            found = manifest_.find(place, name)
        except ShoalError as error:
            table.add_row(name, f"[red]{str(error).rpartition(': ')[2]}[/red]")
            continue
        made = manifest_.describe_time(found)
        rows = f"{found.rows:,}{' changed' if found.base else ''}"
        table.add_row(name, made, rows, f"{found.bytes:,}", found.base or "")
    _console.print(table)


@app.command()
def show(url: _Url) -> None:
    """Show what a checkpoint holds; of several the newest."""
    with _chosen(url) as (_, found):
        _show(found)


def _show(found: Manifest) -> None:
    whole = f"changes alone, based on {found.base}" if found.base else "all rows"
    _console.print(f"{found.name}, made {manifest_.describe_time(found)}: {whole}")
    parts = f"{found.rows:,} rows, {found.bytes:,} bytes in {counted(len(found.parts), 'part')}"
    _console.print(f"{parts}: what changed since {found.base}" if found.base else parts)
    if found.clocks:
        _console.print(f"steps of the workers: {', '.join(map(str, found.clocks))}")
    for state in found.workers:
        of = f"that of {state.since}, no step since" if state.since else f"of step {state.clock}"
        what = f"not here: {state.why}" if state.why else f"{of}, {state.bytes:,} bytes"
        _console.print(f"state of worker {state.rank}: {what}")
    if found.clocks and not found.workers:
        _console.print("no state of workers: the store alone was saved")
    table = Table("name", "shape", "optimizer", box=None)
    for entry in (entry for entry in found.tables if not entry.is_own):
        shape = f"rows of {entry.dim}" if entry.shape is None else str(list(entry.shape))
        table.add_row(entry.name, shape, str(entry.optimizer))
    _console.print(table)


@app.command()
def verify(url: _Url) -> None:
    """Read every byte of a checkpoint; of several the newest. Exit code 1 if it is damaged."""
    with _chosen(url) as (place, found):
        shards.check(place, found.name)
        states.check(place, found)
    _console.print(f"{found.name}: all is as it was written")


@app.command()
def export(url: _Url, out: Annotated[Path, typer.Argument(help="The safetensors file to write.")]) -> None:
    """Write the values of all tables and tensors to one file, of several checkpoints those of the newest;
    optimizer state stays behind."""
    with _chosen(url) as (place, found):
        written = export_(place, found, out)
    _console.print(f"{found.name}, made {manifest_.describe_time(found)}:")
    for name, shape in written.items():
        _console.print(f"{name} {list(shape)}")
