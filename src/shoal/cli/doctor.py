"""`shoal doctor`: what this machine offers to Shoal. Changes nothing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

import shoal
from shoal import _core
from shoal.errors import ShoalError

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FILES_MIN = 1024
_MIB = 1 << 20


def findings() -> list[tuple[str, str, bool]]:
    """(what, what was found, whether it is well), in the order in which they are shown."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    huge = _read(_HUGE_PAGES)
    shm_free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return [
        ("shoal", shoal.__version__, True),
        ("python", platform.python_version(), True),
        *[(package, _installed(package), True) for package in ("numpy", "torch", "msgspec")],
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}", _is_supported()),
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}", True),
        ("kernels", ", ".join(_core.kernel_names()), True),
        ("memory", f"{_memory_bytes() // _MIB:,} MiB", True),
        ("memfd (shm lane)", "yes" if _has_memfd() else "no: unix and tcp are used", _has_memfd()),
        ("/dev/shm", f"{shm_free // _MIB:,} MiB free", True),
        ("huge pages", huge or "not known", huge is not None and "[never]" not in huge),
        ("open files", f"{files:,} allowed", files >= _FILES_MIN),
        ("embedded store", *_try_store()),
    ]


def show() -> None:
    """Print the findings."""
    table = Table("", "found", "", box=None, pad_edge=False, show_header=False)
    for what, found, well in findings():
        table.add_row(what, found.replace("[", r"\["), "[green]ok[/]" if well else "[yellow]look[/]")
    Console(highlight=False).print(table)


def _installed(package: str) -> str:
    # By its metadata: importing torch takes seconds.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _is_supported() -> bool:
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("shoal-doctor"))
    except OSError:
        return False
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _try_store() -> tuple[str, bool]:
    try:
        with shoal.connect("memory://") as client:
            table = client.table("doctor", dim=2, optimizer=shoal.optim.SGD(lr=1.0))
            table.push([1], [[1.0, 2.0]])
            good = table.pull([1]).tolist() == [[-1.0, -2.0]]
    except ShoalError as error:
        return str(error), False
    return ("works", True) if good else ("gives wrong numbers", False)
