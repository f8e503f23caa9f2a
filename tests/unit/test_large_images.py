"""An image is read in order of hashes: taking it over must not take longer for it."""

import time

import numpy as np

from shoal import _core

ROWS, DIM, WAIT_S = 300_000, 1, 60.0


def store() -> tuple[_core.Client, _core.Store]:
    client = _core.Client.embedded(shards=1, threads=1)
    spec = _core.TableSpec()
    spec.id, spec.name, spec.dim = 1, "t", DIM
    spec.optimizer, spec.init = _core.OptimizerSpec("sgd"), _core.InitSpec("zeros")
    client.declare(spec, WAIT_S)
    return client, client.store()


def test_rows_in_order_of_hashes_are_taken_over_as_fast_as_they_were_born() -> None:
    client, source = store()
    keys = np.random.default_rng(1).permutation(ROWS * 10)[:ROWS].astype(np.int64)
    values = np.arange(ROWS, dtype=np.float32).reshape(-1, 1)
    began = time.process_time()
    client.assign(1, keys, values, timeout_s=WAIT_S).wait(WAIT_S)
    births_s = time.process_time() - began
    image, head = source.begin_image(0)
    pages = []
    while (page := source.read_image(0, image, 1 << 18)) is not None:
        pages.append(page)
    assert len(pages) > 4
    copy, target = store()
    target.restore_head(0, head)
    began = time.process_time()
    for table, some, metas, rows in pages:
        target.restore_page(0, table, some, metas, rows)
    restore_s = time.process_time() - began
    # Each key behind all others in one end of the index was 40 times as slow, and worse for more rows.
    assert restore_s < 10 * births_s, (births_s, restore_s)
    np.testing.assert_array_equal(copy.pull(1, keys, timeout_s=WAIT_S).wait(WAIT_S), values)
    assert copy.table_stats(1, WAIT_S)["memory_bytes"] < 1.2 * client.table_stats(1, WAIT_S)["memory_bytes"]
