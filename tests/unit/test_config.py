"""Options and the environment."""

from pathlib import Path

import pytest

from shoal.config import (
    NAME_BYTES_MAX,
    ClientOptions,
    CoordinatorOptions,
    ServerOptions,
    check_name,
    check_timeout,
    read_environment,
    read_token_file,
)
from shoal.errors import BadInput
from shoal.fleet import token


def test_an_empty_environment_says_nothing() -> None:
    found = read_environment({})
    assert found.address is None
    assert found.find_token() is None
    assert found.log == "WARNING"


def test_all_variables_are_read_and_there_are_at_most_ten() -> None:
    values = {"ADDRESS": "a", "TOKEN": "t", "TOKEN_FILE": "f", "TIMEOUT_S": "2", "LANE": "tcp", "LOG": "info"}
    values["READS"] = "any"
    found = read_environment({f"SHOAL_{name}": value for name, value in values.items()})
    assert (found.address, found.token, found.token_file) == ("a", "t", Path("f"))
    assert (found.timeout_s, found.lane, found.log) == (2.0, "tcp", "INFO")
    assert found.reads == "any"
    assert len(values) <= 10


def test_empty_variables_count_as_not_set() -> None:
    assert read_environment({"SHOAL_ADDRESS": "", "SHOAL_TIMEOUT_S": ""}) == read_environment({})


@pytest.mark.parametrize("name", ["TIMEOUT_S", "LANE", "READS", "LOG"])
def test_a_bad_variable_is_named(name: str) -> None:
    with pytest.raises(BadInput, match="x-bad"):
        read_environment({f"SHOAL_{name}": "x-bad"})


def test_an_explicit_token_wins_over_the_variable_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n")
    environ = {"SHOAL_TOKEN_FILE": str(path)}
    assert read_environment(environ).find_token() == "from-file"
    environ["SHOAL_TOKEN"] = "from-variable"
    assert read_environment(environ).find_token() == "from-variable"
    assert read_environment(environ).find_token("from-argument") == "from-argument"


def test_a_token_is_not_shown_in_the_repr() -> None:
    assert "secret" not in repr(read_environment({"SHOAL_TOKEN": "secret"}))


@pytest.mark.parametrize("text", [b"", b"  \n", b"\xff\xfe\xff", b"x" * 5000])
def test_a_file_without_a_token_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(text)
    with pytest.raises(BadInput, match="token"):
        read_token_file(path)


def test_a_missing_token_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing-here"):
        read_token_file(tmp_path / "nothing-here")


def test_a_token_file_is_for_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token.write_token_file(path, "first")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadInput, match="exists"):
        token.write_token_file(path, "second")
    assert read_token_file(path) == "first"


def test_generated_tokens_differ() -> None:
    assert len({token.generate() for _ in range(100)}) == 100


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_a_public_bind_needs_an_explicit_long_token(host: str) -> None:
    with pytest.raises(BadInput, match="without a token"):
        token.check_bind(host, None)
    with pytest.raises(BadInput, match="characters"):
        token.check_bind(host, "short")
    token.check_bind(host, token.generate())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    token.check_bind(host, None)


def test_a_wildcard_is_not_what_others_call_us() -> None:
    assert token.reachable_host("0.0.0.0") != "0.0.0.0"
    assert token.reachable_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("name", ["x", "x" * NAME_BYTES_MAX, "\u00e9" * (NAME_BYTES_MAX // 2)])
def test_a_name_is_given_back(name: str) -> None:
    assert check_name("name", name) == name


@pytest.mark.parametrize(
    "name",
    ["", "x" * (NAME_BYTES_MAX + 1), "\u00e9" * (NAME_BYTES_MAX // 2 + 1), "a\nb", "\ud800", None, b"x"],
)
def test_a_bad_name_is_refused_with_the_one_limit(name: str) -> None:
    with pytest.raises(BadInput, match=r"name is .*; allowed: printable text of 1 to 512 bytes"):
        check_name("name", name)


def test_the_limit_of_names_is_that_of_the_core() -> None:
    source = (Path(__file__).parents[2] / "core" / "store" / "table_spec.cc").read_text()
    assert f"kNameMax = {NAME_BYTES_MAX};" in source


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "5"])
def test_a_deadline_is_finite_and_above_zero(seconds: float) -> None:
    with pytest.raises(BadInput, match="timeout"):
        check_timeout(seconds)


def test_options_refuse_what_cannot_run() -> None:
    for make in (
        lambda: ClientOptions(lane="pigeon"),  # type: ignore[arg-type]
        lambda: ClientOptions(shm_bytes_max=-1),
        lambda: ClientOptions(shm_bytes_max="1G"),  # type: ignore[arg-type]
        lambda: ClientOptions(timeout_s="5"),  # type: ignore[arg-type]
        lambda: CoordinatorOptions(shards=0),
        lambda: CoordinatorOptions(servers=65),
        lambda: CoordinatorOptions(servers=0),
        lambda: CoordinatorOptions(servers="2"),  # type: ignore[arg-type]
        lambda: CoordinatorOptions(servers=2.0),  # type: ignore[arg-type]
        lambda: CoordinatorOptions(servers=True),
        lambda: ServerOptions(port=70000),
        lambda: ServerOptions(threads=-1),
        lambda: ServerOptions(host=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadInput):
            make()
