"""Checkpoints in an object store: the servers write to it themselves."""

from collections.abc import Iterator

import numpy as np
import pytest
import s3fs
from moto.server import ThreadedMotoServer

import shoal
from shoal.checkpoint.client import check_writable
from shoal.checkpoint.manifest import names
from shoal.checkpoint.place import Place
from shoal.errors import BadInput, Refused

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("models")
        yield "s3://models"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_saved_and_loaded_by_servers_through_s3(bucket: str) -> None:
    url = f"{bucket}/run1"
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        items = client.table("items", dim=8, optimizer=shoal.optim.Adagrad(lr=0.1))
        items.push(np.arange(1000), np.ones((1000, 8), np.float32))
        first, rows = client.save(url), items.pull(np.arange(1000))
        items.push(np.arange(1000), np.ones((1000, 8), np.float32))
        second = client.save(url)
        assert names(Place(url)) == [first, second]
        assert client.load(f"{url}/{first}") == first
        np.testing.assert_array_equal(items.pull(np.arange(1000)), rows)
    with shoal.connect("memory://") as client:
        s3fs.S3FileSystem().rm(f"models/run1/{second}/part-1-0.safetensors")
        with pytest.raises(Refused, match=r"part-1-0.safetensors is damaged or gone"):
            client.load(f"{url}/{second}")
        assert client.load(url) == first
        np.testing.assert_array_equal(client.table("items").pull(np.arange(1000)), rows)


def test_a_bucket_that_is_not_there_is_found_before_training(bucket: str) -> None:
    check_writable(f"{bucket}/run2")
    with pytest.raises(BadInput, match="no checkpoint can be written: cannot write s3://modles/run2"):
        check_writable("s3://modles/run2")
