"""The commands of `shoal` and their arguments. What they do is in the files beside this one.

The longer ones hand their arguments on as they are (`locals()`), under the names of the options behind them.
Errors of Shoal's are printed as one line to stderr, and the exit code is 1 (of `shoal run`: 2).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import shoal
from shoal.cli import ckpt as ckpt_
from shoal.cli import compare as compare_
from shoal.cli import doctor as doctor_
from shoal.cli import job_logs, job_scale, job_status, job_stop, run_command, serve, status_view
from shoal.errors import ShoalError

app = typer.Typer(
    name="shoal",
    help="A parameter server for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(ckpt_.app, name="ckpt")

_Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB|ADDRESS]",
        help="A job's name or directory, or shoal://host:port; default: SHOAL_ADDRESS, then the newest job",
        show_default=False,
    ),
]
_JobArgument = Annotated[
    str | None, typer.Argument(help="A job's name or directory; default: the newest", show_default=False)
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token; default: SHOAL_TOKEN, SHOAL_TOKEN_FILE", show_default=False),
]
_Bind = Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a token.")]
_Port = Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")]
_Straggler = Annotated[
    str,
    typer.Option(
        help="Make workers slow: 1:5x (rank 1, five times), 1:50ms, all:50ms@20% (in 20% of steps).",
        show_default=False,
    ),
]
_Coordinators = Annotated[int, typer.Option(help="Coordinators; more than one need --etcd.")]
_Replication = Annotated[
    str, typer.Option(help="strong: a push is acknowledged when all copies have it; weak: before.")
]
_Etcd = Annotated[
    str | None,
    typer.Option(help="URL of etcd, or of its members with commas: http://host:2379.", show_default=False),
]
_OnTrouble = Annotated[
    str,
    typer.Option(
        help="kind=policy,...: exploding, flat, stuck, slow, nan; report, scale, refuse, replace.",
        show_default=False,
    ),
]
_Threads = Annotated[int, typer.Option(help="Threads of a server; 0: by the number of cores.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=run_command.RunCommand, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT ARGS... | -m MODULE ARGS...", help="What each worker runs."),
    ],
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes.")] = 1,
    replicas: Annotated[int, typer.Option(help="Further servers that hold a copy of each row.")] = 0,
    replication: _Replication = "strong",
    coordinators: _Coordinators = 1,
    etcd: _Etcd = None,
    sync: Annotated[
        str | None,
        typer.Option(help="How workers synchronise: bsp, ssp:3, asp, ...", show_default="bsp"),
    ] = None,
    batch: Annotated[str, typer.Option(help="split: a batch is cut over the workers; or each.")] = "split",
    on: Annotated[str, typer.Option(help="Where processes run: local, on this machine.")] = "local",
    seed: Annotated[int, typer.Option(help="Of initial values and the order of data.")] = 0,
    straggler: _Straggler = "",
    max_restarts: Annotated[
        int, typer.Option(help="Workers and servers that die are replaced, so many in all.")
    ] = 3,
    on_trouble: _OnTrouble = "",
    autoscale: Annotated[
        str,
        typer.Option(
            help="2:8: say which number of workers would be fastest; 2:8,apply: go there; every=30s.",
            show_default=False,
        ),
    ] = "",
    name: Annotated[str | None, typer.Option(help="The job's name.", show_default=False)] = None,
    directory: Annotated[
        Path | None, typer.Option(help="The job's directory: logs, progress.", show_default=False)
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Stop the job after so many seconds.", show_default=False),
    ] = None,
    join_timeout_s: Annotated[
        float,
        typer.Option("--join-timeout", help="A worker that has not joined after so many seconds is named."),
    ] = 60.0,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Save to this URL, and go on from what is there.", show_default=False),
    ] = None,
    every: Annotated[str, typer.Option(help="How often: 30s, 5m, 1h.")] = "5m",
) -> None:
    """Run a script on several workers, with servers of their own.

    Exit code: 0 if all workers ended well, else that of the first that failed, 128 + signal if killed.

    130 after Ctrl-C, 124 after --timeout, 2 if the job cannot be run as it is given.
    """
    raise typer.Exit(run_command.run(**locals()))


@app.command(cls=run_command.RunCommand, context_settings={"allow_interspersed_args": False})
def compare(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT ARGS... | -m MODULE ARGS...",
            help="What each worker runs; {seed} in ARGS is the seed, as SHOAL_SEED and worker.seed are.",
        ),
    ],
    sync: Annotated[str, typer.Option(help="Words to compare, with commas; the first is the measure.")],
    target: Annotated[
        str | None,
        typer.Option(help="loss=0.3 or accuracy>=0.9: how soon is it reached?", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each word, with seeds from 0.")] = 3,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    servers: Annotated[int, typer.Option(help="Server processes.")] = 1,
    batch: Annotated[str, typer.Option(help="split: a batch is cut over the workers; or each.")] = "split",
    straggler: _Straggler = "",
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Stop each run after so many seconds.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of logs, results and plot; default: a new one here.", show_default=False
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Also write the results to this file.", show_default=False)
    ] = None,
) -> None:
    """Run a script under several sync words, and show how soon and how well each of them trains.

    Exit code: 0, 1 if a run failed, 2 if nothing could be compared, 130 after Ctrl-C.
    """
    raise typer.Exit(compare_.compare(**locals()))


@app.command()
def up(
    servers: Annotated[int, typer.Option(help="Server processes to start.")] = 1,
    bind: _Bind = "127.0.0.1",
    port: _Port = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token; written if it does not exist.", show_default=False),
    ] = None,
    shards: Annotated[int, typer.Option(help="Logical parts of the store.")] = 64,
    replicas: Annotated[int, typer.Option(help="Further servers that hold a copy of each row.")] = 0,
    replication: _Replication = "strong",
    coordinators: _Coordinators = 1,
    etcd: _Etcd = None,
    threads: _Threads = 0,
) -> None:
    """Start a coordinator and servers on this machine; Ctrl-C stops them."""
    serve.up(**locals())


@app.command()
def server(
    join: Annotated[str, typer.Option(help="The coordinator: shoal://host:port, or several with commas.")],
    bind: _Bind = "127.0.0.1",
    port: _Port = 0,
    token_file: _TokenFile = None,
    advertise: Annotated[
        str | None, typer.Option(help="Name by which others reach this host.", show_default=False)
    ] = None,
    threads: _Threads = 0,
) -> None:
    """Run one server that joins a coordinator; SIGTERM or Ctrl-C stops it."""
    sys.exit(serve.server(**locals()))


@app.command()
def status(
    target: _Target = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    token_file: _TokenFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for answers.")] = 5.0,
) -> None:
    """Show the processes and tables of a cluster, or of a job with its workers.

    Exit code: 0 if all is up, 2 if a server is missing or does not answer, 1 if nobody could be asked.

    Of a job that has ended: 0 if it ended well, else 2.
    """
    if job_status.is_cluster(target, token_file):
        code = status_view.show(target, as_json=json, token_file=token_file, timeout_s=timeout)
    else:
        code = job_status.show(target, as_json=json, timeout_s=timeout)
    raise typer.Exit(code)


@app.command()
def logs(
    job: _JobArgument = None,
    worker: Annotated[int | None, typer.Option(help="Only this worker's.", show_default=False)] = None,
    server: Annotated[int | None, typer.Option(help="Only this server's.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Print what a job has shown, or the log of one of its processes."""
    job_logs.show(job, worker=worker, server=server, follow=follow)


@app.command()
def stop(job: _JobArgument = None) -> None:
    """Stop a job: SIGTERM to its workers, SIGKILL after five seconds, then its servers."""
    job_stop.stop(job)


@app.command()
def scale(
    job: _JobArgument = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes from now on.", show_default=False)
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Server processes from now on.", show_default=False)
    ] = None,
) -> None:
    """Change the number of workers or servers of a job that runs."""
    job_scale.scale(job, workers=workers, servers=servers)


@app.command()
def doctor() -> None:
    """Show what this machine offers, and what is missing."""
    doctor_.show()


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except ShoalError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print("error:", str(error), markup=False)
        sys.exit(1)
