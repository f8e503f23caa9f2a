"""Replay a seed, or hunt through a range of them: `python -m tests.sim --help`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path


def use_core(path: Path) -> None:
    """Take `shoal._core` from another build; only before anything of Shoal is imported."""
    spec = importlib.util.spec_from_file_location("shoal._core", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["shoal._core"] = module
    spec.loader.exec_module(module)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="The protocol, simulated.")
    parser.add_argument("kind", help="which simulator, as tests/sim/kinds.py calls it")
    parser.add_argument("seeds", help="one seed, or FIRST:END")
    parser.add_argument("--core", type=Path, help="the extension module to simulate, in place of Shoal's own")
    parser.add_argument("--mutant", default="", help="the deliberate bug to switch on")
    parser.add_argument("--no-shrink", action="store_true", help="show a failing seed, not its smallest plan")
    return parser.parse_args()


def main() -> int:
    """1 when a seed failed."""
    options = arguments()
    if options.core is not None:
        use_core(options.core)
    from .kinds import KINDS, fails, first_failure, run_seed, shrink
    from .mutants import switch_on

    if options.kind not in KINDS:
        raise SystemExit(f"{options.kind} is none of {', '.join(KINDS)}")
    if options.mutant:
        switch_on(options.mutant)
    first, colon, end = options.seeds.partition(":")
    seeds = range(int(first), int(end)) if colon else range(int(first), int(first) + 1)
    began = time.perf_counter()
    found = first_failure(options.kind, seeds)
    if found is None:
        if len(seeds) == 1:
            print(run_seed(options.kind, seeds[0]))
        print(f"{len(seeds)} seeds passed, {len(seeds) / (time.perf_counter() - began):.0f} a second")
        return 0
    print(f"seed {found[0]} failed: {found[1]}")
    if not options.no_shrink:
        plan = shrink(options.kind, KINDS[options.kind].make(found[0]))
        print(f"smallest plan: {plan}\nfails with: {fails(options.kind, plan)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
