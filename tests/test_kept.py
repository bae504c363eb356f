"""Results that the steps of one run compute once, also in several processes."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest
from reading import logged_to

from kdcli.kept import Keeper, Result, delete_oldest_results

ARRAYS = {
    "scalar": np.array(3.0, np.float32),
    "transposed": np.arange(12.0).reshape(3, 4).T,
    "empty": np.zeros((0, 3)),
}


def test_every_array_is_kept_to_the_bit(tmp_path):
    Keeper(tmp_path).store("key", Result(ARRAYS, "a text"), 2.0)
    found = Keeper(tmp_path).load("key")
    assert found.text == "a text"
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)
    assert [file.name for file in tmp_path.iterdir()] == ["key.safetensors"]


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_file_is_replaced(damage, tmp_path):
    keeper, file, lines = Keeper(tmp_path), tmp_path / "key.safetensors", []
    keeper.store("key", Result(ARRAYS), 2.0)
    file.write_bytes(damage(file.read_bytes()))
    with logged_to(lines):
        assert keeper.load("key") is None
    assert "key.safetensors is damaged" in lines[0]
    keeper.store("key", Result(ARRAYS), 2.0)
    assert keeper.load("key") is not None


def _store_all(folder, limit, number):
    keeper, said = Keeper(folder), []
    for key in map(str, range(60)):
        keeper.store(key, Result({"values": np.full(500, float(key))}), 1.0)
        if limit is not None:
            delete_oldest_results(folder, limit)
        elif (found := keeper.load(key)) is None or found.arrays["values"][0] != float(key):
            said.append(key)
    return said, keeper.seconds


@pytest.mark.parametrize("limit", [None, 20_000])
def test_processes_that_store_the_same_results_do_not_disturb_each_other(limit, tmp_path, capfd):
    with ProcessPoolExecutor(3, get_context("spawn")) as processes:
        done = list(processes.map(partial(_store_all, tmp_path, limit), range(3)))
    assert done == [([], 60.0)] * 3
    assert "result" not in capfd.readouterr().err
    assert not [file for file in tmp_path.iterdir() if file.suffix != ".safetensors"]
