"""What all tests share: they leave the jobs of whoever runs them alone."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs are recorded under the user's state directory; here in one of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
