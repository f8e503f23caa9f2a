"""The house rules that a machine can check, over the sources themselves.

A rule without a test is a wish. Imports nothing of Shoal, so that `scripts/check` needs no build.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP_TREES = ("core", "bindings", "tests/bindings")
TREES = ("src", "core", "bindings", "tests", "bench", "examples", "scripts")
CODE = (".py", ".pyi", ".cc", ".h")
TEXT = (*CODE, ".md", ".toml", ".txt", "")

LINE_LENGTH_MAX = 110
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# Written in pieces, or this file would break its own rules.
MACHINE_PATH = re.compile(r"(?<![\w.])/(" + "|".join(["work", "root", "farm", "home", "opt"]) + r")/")
LEFTOVER = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")


def sources(*suffixes: str, trees: tuple[str, ...] = TREES) -> list[Path]:
    """Every file of the trees (without what tools leave behind) whose name ends so, sorted."""
    found = (path for tree in trees for path in (ROOT / tree).rglob("*") if path.is_file())
    return sorted(p for p in found if p.suffix in suffixes and "__pycache__" not in p.parts)


def documents() -> list[Path]:
    """The files beside the trees: documentation, build and CI."""
    beside = [p for p in ROOT.iterdir() if p.is_file() and p.suffix in TEXT and not p.name.startswith(".git")]
    return sorted([*beside, *(ROOT / "docs").rglob("*.md"), ROOT / ".ci" / "run"])


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring not counted."""

    def span(node: ast.stmt) -> int:
        return (node.end_lineno or node.lineno) - node.lineno + 1

    return span(function) - (span(function.body[0]) if ast.get_docstring(function) is not None else 0)


def imported_packages(path: Path) -> set[str]:
    """The top-level names that a module imports absolutely."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_lines_are_short() -> None:
    too_long = re.compile(f".{{{LINE_LENGTH_MAX + 1}}}")
    assert lines_matching(too_long, sources(*CODE)) == []


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources(*CODE)}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES_MAX} == {}


def test_python_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{function.name}": code_lines(function)
        for path in sources(".py")
        for function in functions(path)
    }
    assert {name: n for name, n in lengths.items() if n > FUNCTION_LINES_MAX} == {}


def test_cpp_functions_are_short() -> None:
    """By the format: a function's body ends with a brace in the column its first line starts in."""
    offenders = []
    for path in sources(".cc", ".h", trees=CPP_TREES):
        start, indent = 0, ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            opening = re.match(r"( *)(?!namespace|class|struct|enum|union|extern)[A-Za-z~].*\) ?.*\{$", line)
            if start == 0 and opening and len(opening[1]) <= 2:
                start, indent = number, opening[1]
            elif start and line.startswith(f"{indent}}}"):
                if number - start + 1 > FUNCTION_LINES_MAX:
                    offenders.append(f"{path.relative_to(ROOT)}:{start}: {number - start + 1} lines")
                start = 0
    assert offenders == []


def test_no_path_of_a_machine_is_committed() -> None:
    assert lines_matching(MACHINE_PATH, [*sources(*TEXT), *documents()]) == []


def test_nothing_is_left_for_later_in_a_comment() -> None:
    assert lines_matching(LEFTOVER, sources(*CODE, "")) == []


def test_the_core_knows_nothing_of_python() -> None:
    assert (
        lines_matching(
            re.compile(r"nanobind|Python\.h|#include <torch"), sources(".cc", ".h", trees=("core",))
        )
        == []
    )


def test_memory_is_owned_by_objects() -> None:
    """No `new`, no `delete`, but for placement new and deleted members."""
    owning = re.compile(r"(?<![\w\"])(new [A-Za-z_:]+[\s({\[;]|delete(\[\])? [a-z_])(?!.*//)")
    hits = lines_matching(owning, sources(".cc", ".h", trees=CPP_TREES))
    assert [hit for hit in hits if not re.search(r": (//|\*)", hit)] == []


@pytest.mark.parametrize("name", ["CHANGELOG", "CONTRIBUTING", "SECURITY", "ARCHITECTURE", "README"])
def test_document_exists(name: str) -> None:
    assert (ROOT / f"{name}.md").stat().st_size > 0


def test_every_package_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    entries = [*project["dependencies"], *extras["plot"], *extras["etcd"]]
    declared = {re.split(r"[<>=!~\[ ]", entry)[0] for entry in entries}
    imported = set().union(*(imported_packages(path) for path in sources(".py", trees=("src",))))
    assert imported - set(sys.stdlib_module_names) - {"shoal"} <= declared


def test_every_declared_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[<>=!~\[ ]", entry)[0].replace("-", "_").lower() for entry in wanted}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert names <= {pin.split("==")[0].replace("-", "_").lower() for pin in pins}
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f'__version__ = "{project["version"]}"' in (ROOT / "src/shoal/__init__.py").read_text()
