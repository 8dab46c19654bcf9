"""`ckptfs bench` measures a checkpoint in a store: from the store itself, and from the cache on disk."""

import json

import pytest
import torch

from cloud import new_query
from program import DONE, FAILED, run_bench
from samples import numbers

OURS = ["ckptfs owned", "ckptfs mapped", "mount owned", "mount mapped"]


@pytest.mark.parametrize("model", ["sharded", "sharded/model.safetensors.index.json", "pickled", "dcp"])
def test_cold_loads_come_from_the_store_and_cached_ones_do_not(cache, store, models, model, capsys, left):
    _, url, _ = models
    before = store.stats["bytes"]
    assert run_bench([f"{url}/{model}", "--runs", "1", "--json"]) == DONE
    fetched = store.stats["bytes"] - before
    said = capsys.readouterr()
    assert said.err == "" and left() == []
    found = json.loads(said.out)
    assert found["loaders"][:4] == OURS and found["cleared_by"] == "ckptfs cache prune"
    assert found["machine"]["filesystem"] is None
    assert list(found["cold"])[:4] == OURS and list(found["cached"])[:4] == OURS
    # The comparison fetches the model once, and so does each of four cold loads. Then the cache has what the last of these
    # left there: the four cached loads fetch nothing. Headers are fetched, too.
    assert 5 <= fetched / found["bytes"] < 7


def test_a_bench_fetches_and_prunes_no_other_checkpoint(cache, store, server, ckptfs, tmp_path, capsys):
    """Not even one beneath the directory that it measures, and also where the URL has a query file."""
    (tmp_path / "top/below").mkdir(parents=True)
    for folder in (tmp_path / "top", tmp_path / "top/below"):
        torch.save({"a": numbers(1, 300, 400)}, folder / "pytorch_model.bin")
    url = server.upload(tmp_path / "top", "top")
    assert ckptfs("fetch", f"{url}/below").code == DONE
    [below] = ckptfs("cache", "ls", "--json").json()
    before = store.stats["bytes"]
    assert run_bench([url, "--runs", "1", "--json"]) == DONE
    assert store.stats["bytes"] - before < 7 * json.loads(capsys.readouterr().out)["bytes"]
    assert below in ckptfs("cache", "ls", "--json").json()


def test_a_url_with_a_query_file_is_measured(cache, store_cloud, ckptfs, tmp_path, monkeypatch, capsys):
    store_cloud.reset()
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
    torch.save({"a": numbers(1, 300, 400)}, tmp_path / "model.pt")
    store_cloud.files["/web/model.pt"] = (tmp_path / "model.pt").read_bytes()
    query = new_query()
    store_cloud.queries = {query}
    (tmp_path / "query").write_text(query)
    for _ in range(2):
        before = len(store_cloud.requests)
        assert run_bench([f"{store_cloud.address}/web/model.pt?@{tmp_path / 'query'}", "--runs", "1", "--json"]) == DONE
        said = capsys.readouterr()
        assert query not in said.out + said.err
        # At least two requests for each of four cold loads: also the second time, when all of it was cached.
        assert len(store_cloud.requests) - before >= 8 and json.loads(said.out)["cached"]


def test_without_a_cache_on_disk_only_cold_loads_are_measured(store, models, capsys):
    _, url, _ = models
    assert run_bench([f"{url}/sharded", "--runs", "1"]) == DONE
    said = capsys.readouterr().out
    assert "note: nothing was loaded cached: CKPTFS_NO_CACHE=1 turns the cache on disk off" in said
    assert "\ncold, without a cache on disk\n" in said and "\nin the cache on disk" not in said


def test_libraries_that_read_no_such_url_are_left_out(cache, store, models, capsys):
    _, url, _ = models
    assert run_bench([f"{url}/sharded", "--runs", "1", "--against", "safetensors,torch"]) == DONE
    said = capsys.readouterr().out
    assert "note: safetensors reads no s3:// URLs, and was left out" in said
    assert "note: compared with nothing" in said


def test_offline_it_is_refused(cache, store, models, capsys, monkeypatch):
    _, url, _ = models
    monkeypatch.setenv("CKPTFS_OFFLINE", "1")
    assert run_bench([f"{url}/sharded"]) == FAILED
    assert "CKPTFS_OFFLINE=1 forbids requests" in capsys.readouterr().err
