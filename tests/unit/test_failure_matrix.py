"""docs/failure-matrix.md, and the script that writes it: each row is of today, and none is missing."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from tests.process.kills import Fault, faults

ROOT = Path(__file__).resolve().parents[2]
FOUND = {"seconds": 0.5, "said": ["server 1 has ended"], "again": 0}
FAULT = Fault("server", "SIGKILL", "bsp", 1)
CASE = ("server", "SIGKILL", "training", "`bsp`")


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    loader = SourceFileLoader("failure_matrix", str(ROOT / "scripts/failure_matrix"))
    spec = spec_from_loader("failure_matrix", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_case_that_fails_now_loses_the_row_of_when_it_passed(matrix: ModuleType) -> None:
    before = matrix.page({str(FAULT): FOUND, "server SIGKILL asp 1": FOUND}, "")
    after = matrix.rows_of(matrix.page({str(FAULT): {"failed": "rows are lost"}}, before))
    assert after[CASE] == "| server | SIGKILL | training | `bsp` | FAILED | 1 | seed 1 |  |  |\n"
    assert "| 0.5 | 1 | nothing |" in after["server", "SIGKILL", "training", "`asp`"]  # not run again
    again = matrix.rows_of(matrix.page({str(FAULT): FOUND}, matrix.page({}, before)))
    assert again[CASE] == matrix.rows_of(before)[CASE]


def test_a_case_that_fails_with_one_seed_has_failed(matrix: ModuleType) -> None:
    kept = {f"server SIGKILL bsp {seed}": FOUND for seed in (1, 3)} | {"server SIGKILL bsp 2": {"failed": ""}}
    assert "| FAILED | 3 | seed 2 |" in matrix.rows_of(matrix.page(kept, ""))[CASE]


def test_the_page_has_a_row_of_every_case(matrix: ModuleType) -> None:
    cases = list(map(matrix.case, faults(0)))
    assert [case for case in cases if case not in matrix.rows_of(matrix.PAGE.read_text())] == []
