"""The public list of names."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import shoal

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(shoal.__path__, "shoal.")
    if not info.name.endswith(("_core", "__main__"))
]


def test_the_list_is_sorted_short_and_real() -> None:
    assert shoal.__all__ == sorted(shoal.__all__)
    assert len(shoal.__all__) <= 25
    assert all(hasattr(shoal, name) for name in shoal.__all__)


def test_the_namespace_holds_nothing_else() -> None:
    packages = {info.name for info in pkgutil.iter_modules(shoal.__path__)}
    public = {name for name in vars(shoal) if not name.startswith("_")} - (packages - set(shoal.__all__))
    lazy = {"join", "nn", "sync"}  # there at their first use
    assert public | {"__version__"} | lazy == set(shoal.__all__)


@pytest.mark.parametrize("name", [name for name in shoal.__all__ if name != "__version__"])
def test_public_names_are_documented(name: str) -> None:
    assert getattr(shoal, name).__doc__


@pytest.mark.parametrize("kind", [shoal.Client, shoal.Table, shoal.Tensor, shoal.Ticket, shoal.LocalCluster])
def test_public_methods_are_documented(kind: type) -> None:
    methods = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    assert [name for name, value in methods.items() if not (callable(value) or value.__doc__)] == []
    assert [name for name, value in methods.items() if callable(value) and not value.__doc__] == []


@pytest.mark.parametrize("module", [shoal, *MODULES], ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_say_what_they_are_for(module: ModuleType) -> None:
    assert module.__doc__


@pytest.mark.parametrize(
    "module", ["shoal", "shoal.cli", "shoal.fleet.coordinator_process", "shoal.fleet.server_process"]
)
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
