"""`shoal status`: the processes and tables of a cluster, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.config import TOKEN_SOURCES, check_timeout, read_environment
from shoal.errors import BadInput, Internal, ShoalError, Timeout, Unavailable
from shoal.fleet.losses import describe
from shoal.store.catalogue import TableEntry
from shoal.store.connect import connect
from shoal.store.control import Address, ControlClient, list_tables
from shoal.store.messages import (
    GetStatus,
    Lost,
    NotLeader,
    PlacementNews,
    StatusInfo,
    WatchPlacement,
)

# A coordinator that is being restarted answers within this.
_PATIENCE_S = 1.0
# A line for each table, however long: cut or wrapped it could be neither read nor searched.
WIDTH = 4096


def show(address: str | None, *, as_json: bool, token_file: Path | None, timeout_s: float) -> int:
    """Print the status of the cluster at `address`. The exit code: 0, or 2 if a server is missing."""
    check_timeout(timeout_s)
    environment = read_environment()
    address = address or environment.address
    if address is None:
        raise BadInput("which cluster? Give its address (shoal://host:port), or set SHOAL_ADDRESS")
    token = environment.find_token(file=token_file)
    if token is None:
        raise BadInput(f"no token for {address}. {TOKEN_SOURCES}")
    report = collect(Address.parse(address), token, timeout_s)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, Console(highlight=False, width=WIDTH))
    return 0 if report["state"] == "up" and report["problem"] is None else 2


def collect(address: Address, token: str, timeout_s: float) -> dict[str, Any]:
    """What is known, as plain data. Rows are None where the servers could not be asked."""
    with closing(ControlClient(address, token)) as control:
        status = control.ask(GetStatus(), StatusInfo, timeout_s, _PATIENCE_S)
        news = control.ask(WatchPlacement(after=0, wait_s=0.0), PlacementNews, timeout_s)
        entries = list_tables(control, timeout_s)
    entries = [entry for entry in entries if not entry.is_own]
    shards = Counter(i for chain in news.placement.chains for i in chain) if news.placement else Counter()
    processes = [_coordinator(index, one, token, status.pid) for index, one in enumerate(address.all)]
    for server in status.servers:
        where = f"{server.host}:{server.port}"
        row = {"role": "server", "index": server.index, "pid": server.pid, "address": where}
        processes.append({**row, "state": server.state, "shards": shards[server.index]})
    processes += [
        {"role": "server", "index": index, "pid": None, "address": None, "state": "awaited"}
        for index in status.waiting_for
    ]
    rows, problem = _rows(address, token, timeout_s, entries, status)
    return {
        "address": str(address),
        "state": _state(status),
        "shards": status.shards,
        "replicas": status.replicas,
        "degraded": status.degraded,  # shards with fewer copies than that
        "filling": status.filling,
        "lost": [msgspec.to_builtins(one) for one in status.lost],  # with servers, by shard
        "still": [{"rank": r, "clock": c, "seconds": s} for r, c, s in status.still],  # without progress
        "clients_granted": status.clients,
        "processes": processes,
        "tables": [_describe(entry, rows.get(entry.name)) for entry in entries],
        "problem": problem,
    }


def _coordinator(index: int, address: Address, token: str, leader_pid: int) -> dict[str, Any]:
    row = {"role": "coordinator", "index": index, "address": str(address)}
    try:
        with closing(ControlClient(address, token)) as control:
            standing_by = control.ask(GetStatus(), NotLeader, _PATIENCE_S, 0.0)
        return {**row, "pid": standing_by.pid, "state": "standby"}
    except Internal:  # it has answered like one that leads
        return {**row, "pid": leader_pid, "state": "up"}
    except (Unavailable, Timeout):
        return {**row, "pid": None, "state": "gone"}


def _state(status: StatusInfo) -> str:
    if status.waiting_for:
        return "starting"
    there = all(server.state in ("up", "leaving", "evicted", "left") for server in status.servers)
    return "up" if there and status.degraded == 0 else "degraded"


def _describe(entry: TableEntry, rows: int | None) -> dict[str, Any]:
    dense = entry.shape is not None
    return {
        "name": entry.name,
        "kind": "tensor" if dense else "table",
        "dim": None if dense else entry.dim,
        "shape": None if entry.shape is None else list(entry.shape),
        "optimizer": str(entry.optimizer),
        "rows": None if dense else rows,
    }


def _rows(
    address: Address, token: str, timeout_s: float, entries: list[TableEntry], status: StatusInfo
) -> tuple[dict[str, int], str | None]:
    """Rows by table, and why they are not complete."""
    names = [entry.name for entry in entries if entry.shape is None]
    if not names or status.waiting_for:
        return {}, None
    rows: dict[str, int] = {}
    try:
        with connect(str(address), token=token, timeout=timeout_s) as client:
            for name in names:
                rows[name] = len(client.table(name))
    except ShoalError as error:
        return rows, str(error)
    return rows, None


def _print(report: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{report['address']}[/] is {report['state']}, {report['shards']} shards")
    processes = Table("role", "index", "pid", "address", "state", "shards", box=None, pad_edge=False)
    for process in report["processes"]:
        state = process["state"]
        colour = "green" if state in ("up", "standby") else "dim" if state == "left" else "red"
        cells = [str("" if process[key] is None else process[key]) for key in ("index", "pid", "address")]
        processes.add_row(process["role"], *cells, f"[{colour}]{state}[/]", str(process.get("shards", "")))
    console.print(processes)
    if report["lost"]:
        console.print(describe(msgspec.convert(report["lost"], list[Lost])), style="yellow")
    for one in report["still"]:
        said = f"no push, pull or step for {one['seconds']:.0f} s (clock {one['clock']})"
        console.print(f"worker {one['rank']} is there, and has made {said}", style="yellow")
    if report["tables"]:
        console.print()
        print_tables(report["tables"], console)
    if report["problem"]:
        console.print("rows could not be counted:", report["problem"], style="red", markup=False)


def print_tables(descriptions: list[dict[str, Any]], console: Console) -> None:
    """A line for each table of a report."""
    tables = Table("name", "kind", "shape", "rows", "optimizer", box=None, pad_edge=False)
    for table in descriptions:
        shape = f"(*, {table['dim']})" if table["shape"] is None else str(tuple(table["shape"]))
        unknown = "" if table["kind"] == "tensor" else "?"
        rows = unknown if table["rows"] is None else f"{table['rows']:,}"
        tables.add_row(escape(table["name"]), table["kind"], shape, rows, table["optimizer"])
    console.print(tables)
