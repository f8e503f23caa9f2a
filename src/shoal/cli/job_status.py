"""`shoal status` of a job: its supervisor, coordinator, servers and workers, and the job's counters."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli import status_view
from shoal.config import check_timeout, read_environment, read_token_file
from shoal.errors import ShoalError
from shoal.launch.board import Board, WorkerView
from shoal.launch.records import JobRecord, WorkerRecord, find_job
from shoal.store.control import Address
from shoal.train.progress import BETWEEN_PASSES, DataUse

_WELL = ("up", "joined", "training", "waiting", BETWEEN_PASSES)
# How many shards a server has, what a worker says of itself, and the heads of their columns.
_SAID = {name: name for name in ("shards", "clock", "samples", "loss", "staleness")} | {
    "waiting_for": "waits for"
}


def is_cluster(target: str | None, token_file: Path | None) -> bool:
    """Whether `shoal status` was asked about a cluster by its address, rather than about a job."""
    if target is not None:
        return "://" in target or token_file is not None
    return read_environment().address is not None or token_file is not None


def show(job: str | None, *, as_json: bool, timeout_s: float) -> int:
    """Print the job's status. The exit code: 0, or 2 if something is missing or the job did not end well."""
    check_timeout(timeout_s)
    report = collect(find_job(job), timeout_s)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, Console(highlight=False, width=status_view.WIDTH))
    if report["state"] == "ended":
        return 0 if report["code"] == 0 else 2
    return 0 if report["state"] == "running" and report["problem"] is None else 2


def collect(record: JobRecord, timeout_s: float) -> dict[str, Any]:
    """What is known, as plain data."""
    board = Board.of_all(record.path)
    board.grow(1 + max((worker.rank for worker in record.workers), default=-1))
    board.refresh()
    for gone in {view.rank for view in board.views} - {worker.rank for worker in record.workers}:
        board.views[gone].departed = board.views[gone].ended = True
    running = record.state in ("starting", "running")
    cluster, problem = _cluster(record, timeout_s) if running else ({}, None)
    supervisor = {"role": "supervisor", "index": 0, "pid": record.pid, "address": None}
    workers = [_worker(worker, board.views[worker.rank], record) for worker in record.workers]
    waits, waits_for_servers = board.waits(), board.waits_for_servers()
    for worker in workers:
        worker["waiting_for"] = waits.get(worker["index"], [])
        worker["waiting_for_servers"] = list(waits_for_servers.get(worker["index"], ()))
    absent = [w["index"] for w in workers if w["state"] == "not joined"]
    if absent and problem is None:
        problem = f"worker {', '.join(map(str, absent))} has not called shoal.join()"
    return {
        "job": record.name,
        "directory": record.directory,
        "command": list(record.command),
        "state": record.state,
        "code": record.code,
        "reason": record.reason,
        "address": record.address,
        "sync": record.sync,
        "batch": record.batch,
        "seed": record.seed,
        "started": record.started,
        "seconds": (record.ended or time.time()) - record.started,
        "processes": [
            {**supervisor, "state": "up" if running else "gone", "clock": None},
            *({**process, "clock": None} for process in cluster.get("processes", _known(record))),
            *workers,
        ],
        "counters": board.counters(),
        "data": None if board.data is None else msgspec.to_builtins(board.data),
        "tables": cluster.get("tables", []),
        "replicas": cluster.get("replicas", 0),
        "degraded": cluster.get("degraded", 0),
        "filling": cluster.get("filling", 0),
        "lost": cluster.get("lost", []),
        "checkpoint": None if record.checkpoint is None else msgspec.to_builtins(record.checkpoint),
        "events": [msgspec.to_builtins(event) for event in record.events],
        "problem": problem,
    }


def _cluster(record: JobRecord, timeout_s: float) -> tuple[dict[str, Any], str | None]:
    """The status of the job's cluster, and why it is not all well."""
    if record.address is None or record.token_file is None:
        return {}, None  # it has not started yet
    try:
        token = read_token_file(Path(record.token_file))
        report = status_view.collect(Address.parse(record.address), token, timeout_s)
    except ShoalError as error:
        return {}, str(error)
    problem = report["problem"]
    if problem is None and report["state"] != "up":
        problem = f"the cluster is {report['state']}"
    return report, problem


def _known(record: JobRecord) -> list[dict[str, Any]]:
    """Coordinator and servers by the record alone, where they cannot be asked."""
    processes = []
    if record.coordinator is not None:
        coordinator = {"role": "coordinator", "index": 0, "pid": record.coordinator}
        processes.append({**coordinator, "address": record.address, "state": "gone"})
    for server in record.servers:
        row = {"role": "server", "index": server.index, "pid": server.pid, "address": server.address}
        processes.append({**row, "state": "gone"})
    return processes


def _worker(worker: WorkerRecord, view: WorkerView, record: JobRecord) -> dict[str, Any]:
    view.since = worker.started
    view.overdue = time.time() > record.join_until
    view.ended = worker.code is not None or record.state in ("ended", "lost")
    said = view.progress
    return {
        "role": "worker",
        "index": worker.rank,
        "pid": worker.pid,
        "address": None,
        "state": view.state,
        "clock": None if said is None else said.clock,
        "code": worker.code,
        "restarts": worker.restarts,
        "step": None if said is None else said.step,
        "epoch": None if said is None else said.epoch,
        "samples": None if said is None else said.samples,
        "loss": None if said is None else said.loss,
        "staleness": None if said is None else said.staleness,
        "metrics": {} if said is None else said.metrics,
    }


def _print(report: dict[str, Any], console: Console) -> None:
    how = f" with code {report['code']}" if report["code"] is not None else ""
    sync = escape(f"sync {report['sync']}, {report['seconds']:.0f} s, in {report['directory']}")
    console.print(f"job [bold]{escape(report['job'])}[/] is {report['state']}{how}, {sync}")
    if report["reason"]:
        console.print(report["reason"], style="red", markup=False)
    table = Table("role", "index", "pid", "address", "state", *_SAID.values(), box=None, pad_edge=False)
    for process in report["processes"]:
        state = process["state"]
        colour = "green" if state in _WELL else "dim"
        colour = "red" if state in ("gone", "not joined") and report["state"] == "running" else colour
        cells = [_cell(process.get(name)) for name in _SAID]
        if servers := process.get("waiting_for_servers"):
            cells[-1] = ", ".join(filter(None, [cells[-1], f"server {_cell(servers)}"]))
        where = [_cell(process[name]) for name in ("index", "pid", "address")]
        table.add_row(process["role"], *where, f"[{colour}]{state}[/]", *cells)
    console.print(table)
    for event in report["events"]:
        console.print(
            f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} {event['text']}", markup=False
        )
    if report["data"] and report["data"]["passes"]:
        console.print(f"data: {DataUse(**report['data'])}")
    if saved := report["checkpoint"]:
        console.print(_saved(saved), style="red" if saved["problem"] else None, markup=False, soft_wrap=True)
    if report["tables"]:
        console.print()
        status_view.print_tables(report["tables"], console)
    if report["problem"]:
        console.print(report["problem"], style="red", markup=False)


def _saved(saved: dict[str, Any]) -> str:
    last = f"{saved['name']}, made {time.time() - saved['time']:.0f} s ago" if saved["time"] else "none yet"
    return f"last checkpoint: {last}" + (f"; {saved['problem']}" if saved["problem"] else "")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
