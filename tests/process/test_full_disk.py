"""A disk that is full when a checkpoint is made: the save fails and says so, and nothing else does."""

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shoal

pytestmark = pytest.mark.process
KEYS = np.arange(20_000)
ONES = -np.ones((len(KEYS), 32), np.float32)  # 2.5 MB of rows, on two servers
SGD = shoal.optim.SGD(lr=1.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one checkpoint."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("a small tmpfs cannot be mounted here (that takes root)")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def save_fails_and_nothing_else(place: Path, fill: Callable[[shoal.LocalCluster], None], why: str) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        table = client.table("counts", dim=32, optimizer=SGD)
        table.push(KEYS, ONES)
        first = client.save(str(place))
        table.push(KEYS, ONES)
        fill(cluster)
        with pytest.raises(shoal.errors.ShoalError, match=why):
            client.save(str(place), timeout=20.0)
        table.push(KEYS, ONES)  # the cut that was not kept holds nothing up
        assert (table.pull(KEYS) == 3).all()
        assert [path.parent.name for path in place.glob("*/manifest.json")] == [first]
        client.load(str(place))
        assert (table.pull(KEYS) == 1).all()


def test_a_disk_without_room_for_a_second_checkpoint(small_disk: Path) -> None:
    save_fails_and_nothing_else(small_disk, lambda _: None, "No space left on device")


def test_a_server_that_may_not_write_so_much(tmp_path: Path) -> None:
    def limit(cluster: shoal.LocalCluster) -> None:
        resource.prlimit(cluster.servers[1].pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    save_fails_and_nothing_else(tmp_path, limit, "server 1.*File too large")
