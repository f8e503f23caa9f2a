"""Replay a seed, or hunt through a range of them: `python -m tests.sim --help`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
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
    parser.add_argument("seeds", help="one seed, or FIRST:END")
    parser.add_argument("--core", type=Path, help="the extension module to simulate, in place of Shoal's own")
    parser.add_argument("--mutant", default="", help="the deliberate bug to switch on (builds with mutants)")
    parser.add_argument("--rounds", action="store_true", help="workers that stage, finish and commit")
    parser.add_argument("--chains", action="store_true", help="servers with copies, that die, come and go")
    parser.add_argument("--no-shrink", action="store_true", help="show a failing seed, not its smallest plan")
    return parser.parse_args()


def main() -> int:
    """1 when a seed failed."""
    options = arguments()
    if options.core is not None:
        use_core(options.core)
    from shoal import _core

    from . import chain_rounds, chains, rounds, simulator
    from .plan import make_plan

    if options.mutant:
        _core.protocol.set_mutant(options.mutant)
    first, colon, end = options.seeds.partition(":")
    seeds = range(int(first), int(end)) if colon else range(int(first), int(first) + 1)
    began = time.perf_counter()
    run: Callable[[int], object] = {
        (False, False): simulator.run_seed,
        (True, False): rounds.run_round_seed,
        (False, True): chains.run_chain_seed,
        (True, True): chain_rounds.run_chain_round_seed,
    }[options.rounds, options.chains]
    found = simulator.first_failure(seeds, run)
    if found is None:
        if len(seeds) == 1:
            print(run(seeds[0]))
        print(f"{len(seeds)} seeds passed, {len(seeds) / (time.perf_counter() - began):.0f} a second")
        return 0
    print(f"seed {found[0]} failed: {found[1]}")
    if not options.no_shrink and not options.rounds:
        again = chains.run_chain_plan if options.chains else simulator.run_plan
        plan = chains.make_chain_plan(found[0]) if options.chains else make_plan(found[0])
        plan = simulator.shrink(plan, again)
        print(f"smallest plan: {plan}\nfails with: {simulator.fails(plan, again)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
