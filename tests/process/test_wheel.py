"""The wheel as a user gets it: an empty environment, no compiler on PATH, the README's example as printed."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, env: dict[str, str], cwd: Path) -> str:
    result = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=540, check=False
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Built by `make wheel`, which does nothing when it is up to date."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    run("make", "wheel", env=env, cwd=ROOT)
    (built,) = (ROOT / "dist").glob("shoal-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel in it. What the wheel depends on is lent by this one: a .pth
    file adds its packages behind the new environment's own (and does not run the .pth files among them,
    so that the editable Shoal stays out)."""
    place = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(place, with_pip=True, symlinks=True)
    packages = place / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    run(place / "bin/pip", "install", "--no-deps", "--no-index", wheel, env=bare(place), cwd=place)
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place


def bare(place: Path) -> dict[str, str]:
    """Nothing on PATH but that environment: no compiler, no cmake, no make."""
    return {"PATH": str(place / "bin"), "HOME": str(place), "LANG": "C.UTF-8"}


def readme_example() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, "README.md has no python example"
    return found[1]


def test_readme_example_is_short() -> None:
    assert len([line for line in readme_example().splitlines() if line.strip()]) <= 15


def test_wheel_holds_the_package_and_nothing_of_the_repository(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"shoal"}
    assert any(re.fullmatch(r"shoal/_core\..*so", name) for name in names)
    assert any(name.endswith("LICENSE") for name in names)


def test_readme_example_runs_from_the_wheel(environment: Path) -> None:
    script = environment / "example.py"
    script.write_text(readme_example() + "\nprint(shoal.__file__)\n")
    output = run(environment / "bin/python", "-W", "error", script, env=bare(environment), cwd=environment)
    assert "3 rows on 2 servers" in output
    assert str(environment) in output.splitlines()[-1]


def test_nothing_that_only_tests_need_is_in_the_core(environment: Path) -> None:
    names = "from shoal import _core; print([name for name in dir(_core) if not name.startswith('_')])"
    found = run(environment / "bin/python", "-c", names, env=bare(environment), cwd=environment)
    declared = ast.parse((ROOT / "src/shoal/_core.pyi").read_text()).body
    stub = {each.name for each in declared if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    assert set(ast.literal_eval(found)) == stub - {"ManyTicket"}


def test_command_is_installed(environment: Path) -> None:
    output = run(environment / "bin/shoal", "--help", env=bare(environment), cwd=environment)
    assert "Usage" in output
