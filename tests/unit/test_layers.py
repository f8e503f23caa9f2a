"""Imports go down only; nothing that came from outside is ever executed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
# From the bottom up; modules of one line may import each other as long as there is no cycle.
LAYERS = [
    {"errors", "types", "config", "settings"},
    {"_core"},
    {"optim", "init", "placement"},
    {"store"},
    {"checkpoint"},
    {"fleet"},
    {"sync", "data", "collective"},
    {"nn"},
    {"train"},
    {"launch"},
    {"compare"},
    {"cli"},
]
# Where torch may be imported; the rest of Shoal runs without it.
TORCH_FOLDERS = {"data", "collective", "nn", "train"}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
# What would run or unpack foreign bytes. `.eval(` of a module is not it, nor is a word in a sentence.
FORBIDDEN = re.compile(
    r"\b(import|from)\s+(c?pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
    r"|\b(pickle|marshal|dill)\.\w+\(|\btorch\.load\b|multiprocessing\.connection"
    r"|(?<![\w.])(eval|exec)\s*\(|\bPyRun_\w+|\ballow_pickle\s*=\s*True"
)
# Benchmarks hand functions to children of their own, by a pipe that no other process can reach.
ALLOWED = {("bench/processes.py", "multiprocessing.connection")}


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it runs; those for type checkers alone do not count."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in skipped:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(used: str, module: str) -> bool:
    return used == module or used.startswith(f"{module}.")


def layer(module: str) -> int | None:
    parts = module.split(".")
    return RANK.get(parts[1]) if parts[0] == "shoal" and len(parts) > 1 else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path: Path) -> None:
    own = RANK[path.relative_to(SOURCE).parts[0].removesuffix(".py")]
    upward = {name for name in imports(path) if (layer(name) or 0) > own}
    assert upward == set()


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in [*FILES, SOURCE / "__init__.py"]
        if path.relative_to(SOURCE).parts[0] not in TORCH_FOLDERS
    ],
    ids=lambda path: path.stem,
)
def test_torch_is_not_imported_here(path: Path) -> None:
    assert {name for name in imports(path) if name.split(".")[0] == "torch"} == set()


def test_the_root_imports_nothing_of_the_command_line() -> None:
    assert not any(name.startswith("shoal.cli") for name in imports(SOURCE / "__init__.py"))


def test_there_are_no_cycles() -> None:
    graph = {f"shoal.{'.'.join(path.relative_to(SOURCE).with_suffix('').parts)}": path for path in FILES}
    edges = {
        name: {other for used in imports(path) for other in graph if within(used, other)}
        for name, path in graph.items()
    }
    while free := [name for name, used in edges.items() if not used & edges.keys()]:
        for name in free:
            del edges[name]
    assert edges == {}


@pytest.mark.parametrize("folder", ["src", "core", "bindings", "bench", "examples", "scripts"])
def test_nothing_is_unpickled_or_executed(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".pyi", ".cc", ".h"}]
    hits = {
        (str(path.relative_to(ROOT)), hit.group())
        for path in files
        for hit in FORBIDDEN.finditer(path.read_text())
    }
    assert hits <= ALLOWED


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from marshal import loads", "pickle.loads(x)", "torch.load(f)", "eval(x)", "exec (x)"],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert FORBIDDEN.search(line)


@pytest.mark.parametrize("line", ["model.eval()", "it cannot be pickled", "self.execute(x)"])
def test_the_search_leaves_the_rest_alone(line: str) -> None:
    assert not FORBIDDEN.search(line)
