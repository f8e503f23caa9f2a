"""The commands of `shoal` and their arguments. What they do is in the files beside this one.

Errors of Shoal's are printed as one line to stderr, and the exit code is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import shoal
from shoal.cli import doctor as doctor_
from shoal.cli import serve, status_view
from shoal.errors import ShoalError

__all__ = ["app", "main"]

app = typer.Typer(
    name="shoal",
    help="A parameter server for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_AddressArgument = Annotated[
    str | None, typer.Argument(help="shoal://host:port; default: SHOAL_ADDRESS", show_default=False)
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token; default: SHOAL_TOKEN, SHOAL_TOKEN_FILE", show_default=False),
]
_Bind = Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a token.")]
_Port = Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")]
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
    threads: _Threads = 0,
) -> None:
    """Start a coordinator and servers on this machine; Ctrl-C stops them."""
    serve.up(servers=servers, bind=bind, port=port, token_file=token_file, shards=shards, threads=threads)


@app.command()
def server(
    join: Annotated[str, typer.Option(help="The coordinator: shoal://host:port.")],
    bind: _Bind = "127.0.0.1",
    port: _Port = 0,
    token_file: _TokenFile = None,
    advertise: Annotated[
        str | None, typer.Option(help="Name by which others reach this host.", show_default=False)
    ] = None,
    threads: _Threads = 0,
) -> None:
    """Run one server that joins a coordinator; SIGTERM or Ctrl-C stops it."""
    sys.exit(
        serve.server(
            join=join, bind=bind, port=port, token_file=token_file, advertise=advertise, threads=threads
        )
    )


@app.command()
def status(
    address: _AddressArgument = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    token_file: _TokenFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for answers.")] = 5.0,
) -> None:
    """Show the processes and tables of a cluster.

    Exit code: 0 if all is up, 2 if a server is missing or does not answer, 1 if nobody could be asked.
    """
    raise typer.Exit(status_view.show(address, as_json=json, token_file=token_file, timeout_s=timeout))


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
