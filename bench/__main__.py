"""`python -m bench [--quick] [--only S1,S2] [--json PATH]`: Shoal and its peers in one run, alternating.

Prints medians, spreads, ratios, what is required, and the share of what the machine allows. Exits with 1 if
something required was missed.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.plan import QUICK, Plan, note
from bench.report import Book, as_json, counts, render
from bench.workloads import (
    checkpoint,
    dense,
    failure,
    growth,
    idle,
    limits,
    moves,
    one_process,
    sparse,
    start,
    training,
)

WORKLOADS = (
    *("LIMITS", "S1", "S2", "S3", "D1", "P1", "MEM", "SCALE", "IDLE", "START"),
    *("CKPT", "MOVE", "FAIL", "E2E"),
)
_FAMILIES = (sparse, dense, one_process, growth, idle, start, checkpoint, moves, failure, training)
_PACKAGES = ("shoal", "torch", "numpy", "fbgemm-gpu-cpu", "ray")


def main() -> int:
    arguments = _parse()
    plan = QUICK if arguments.quick else Plan()
    plan = replace(
        plan,
        repetitions=arguments.repetitions or plan.repetitions,
        only=frozenset(arguments.only.upper().split(",")) if arguments.only else frozenset(),
        contenders=tuple(arguments.contenders.split(",")) if arguments.contenders else (),
    )
    if unknown := plan.only - set(WORKLOADS):
        raise SystemExit(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    book = Book()
    lines = [line for family in _FAMILIES for line in family.lines() if plan.wants(line.metric.split()[0])]
    environment = _environment(plan)
    note(json.dumps(environment))
    try:
        limits.run(book, plan)
        for family in _FAMILIES:
            family.run(book, plan)
    except KeyboardInterrupt:
        note("interrupted; what was measured so far:")
    environment["load_after"] = os.getloadavg()
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(book, lines, environment), indent=1) + "\n")
    print(render(book, lines))
    verdicts = counts(book, lines)
    print("  ".join(f"{word} {count}" for word, count in verdicts.items() if word != "-"))
    return 1 if verdicts["MISS"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Shoal and its peers, alternating.",
        epilog="Exit code 1: a verdict is MISS. Without peers, or with --quick, that says little.",
    )
    parser.add_argument("--quick", action="store_true", help="one short repetition of each, smaller tables")
    parser.add_argument("--only", metavar="S1,S2", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--contenders", metavar="PREFIXES", help='only these, such as "shoal,sockets"')
    parser.add_argument("--repetitions", type=int, help="rounds of alternation (3, with --quick 1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write samples and table there")
    return parser.parse_args()


def _environment(plan: Plan) -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg(),
        "repetitions": plan.repetitions,
        "window_s": plan.seconds,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
