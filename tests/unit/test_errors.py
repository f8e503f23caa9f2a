"""The tree of errors, and its numbers."""

import copy
import re
from pathlib import Path

import pytest

from shoal import errors

STATUS_H = Path(__file__).parents[2] / "core" / "base" / "status.h"
KINDS = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_codes_are_those_of_the_core() -> None:
    codes = re.findall(r"^\s+(\w+) = (\d+),", STATUS_H.read_text(), re.MULTILINE)
    named = {name: int(code) for name, code in codes if name not in ("ok", "moved")}
    assert type(errors.from_code(10, "")) is errors.Unavailable
    assert {snake(type(errors.from_code(code, "")).__name__): code for code in named.values()} == named


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_shoal_error_and_is_drawn_in_the_tree(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.ShoalError)
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("code", range(1, 10))
def test_a_code_survives_the_wire(code: int) -> None:
    error = errors.from_code(code, "what happened")
    assert errors.code_of(error) == code
    assert str(error) == "what happened"


def test_an_unknown_code_is_internal_and_keeps_the_message() -> None:
    error = errors.from_code(99, "what")
    assert isinstance(error, errors.Internal)
    assert "99" in str(error)
    assert "what" in str(error)


def test_a_subclass_has_the_code_of_its_parent() -> None:
    assert errors.code_of(errors.WrongProcess("x")) == errors.code_of(errors.Closed("x"))
    assert errors.code_of(errors.ShoalError("x")) == errors.code_of(errors.Internal("x"))


def test_from_core_leads_with_the_thing() -> None:
    error = errors.from_core(Exception(3, "open it first"), "table 'x'")
    assert isinstance(error, errors.UnknownTable)
    assert str(error) == "table 'x': open it first"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.BadInput, ValueError),
        (errors.Mismatch, ValueError),
        (errors.UnknownTable, LookupError),
        (errors.Unavailable, ConnectionError),
        (errors.Timeout, TimeoutError),
    ],
)
def test_the_builtin_kind_catches_it(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


def test_a_timeout_travels_without_its_ticket() -> None:
    error = errors.Timeout("late")
    error.ticket = object()  # type: ignore[assignment]
    twin = copy.copy(error)
    assert str(twin) == "late"
    assert twin.ticket is None
