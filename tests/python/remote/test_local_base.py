"""A delta in a store whose base lies on this machine: one checkpoint of files of both."""

from ckptfs.bench import page_cache
from ckptfs.torch import load_file

from compare import check_same
from samples import numbers
from versions import name_of, write_delta, write_whole


def test_large_tensors_of_a_local_base_are_loaded(store, tmp_path):
    # Larger than what a reader of a local file reads at once.
    before = {"large": numbers(1, 1 << 11, 5000), "small": numbers(2, 100, 70)}
    after = {**before, "small": numbers(3, 100, 70)}
    base = write_whole(tmp_path / "hf", 7, before)
    write_delta(tmp_path / "run", 1, before, after)
    url = store.upload(tmp_path / "run", "local-base")
    for backend in "mmap", "pread":
        page_cache.clear(sorted(base.glob("*.safetensors")))
        check_same(load_file(f"{url}/{name_of(1)}", delta_base=base, backend=backend), after)
