"""The command `shoal`. torch is not imported here, so that commands answer at once."""

from shoal.cli.app import main

__all__ = ["main"]
