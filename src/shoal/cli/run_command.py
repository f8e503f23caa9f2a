"""`shoal run`: how its command line is read. The job itself is `shoal.launch`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from typer.core import TyperCommand

from shoal.errors import BadInput
from shoal.launch.options import JobOptions
from shoal.launch.supervisor import run_job

_CODE_MISUSE = 2


class RunCommand(TyperCommand):
    """A command whose options end where the script, or `-m`, begins: what follows belongs to the script."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]  # as the base class has it
        """Mark the place of `-m`, which would otherwise look like an option of this command's."""
        takes_value = {
            name: not getattr(option, "is_flag", False) for option in self.params for name in option.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 2 if takes_value.get(args[at], False) else 1
        if args[at : at + 1] == ["-m"]:
            args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


def run(command: Sequence[str], **options: Any) -> int:
    """Run the job of these `JobOptions`; its exit code. What cannot be run is one sentence, and code 2."""
    try:
        return run_job(JobOptions(command=tuple(command), **options))
    except BadInput as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print("error:", str(error), markup=False)
        return _CODE_MISUSE
