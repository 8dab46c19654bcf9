"""Promises of every kind of source, a folder of this machine too: the same bytes by every way, and the same listings. Changes
are noticed."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain
from safetensors.torch import save

import store_kinds
from compare import check_same
from mounts import until
from program import DONE, FAILED
from store_models import write_models

MODELS = ["sharded", "pickled", "dcp", "zero"]

# The kinds whose directories are listed.
LISTING = [kind for kind, (store, *_) in store_kinds.KINDS.items() if store.lists]

# Names that have a meaning in URLs, in XML or to shells.
ODD_NAMES = ["a b", "50%41 100%", "ä✓", "x#y", "x?y", "q&a+b=c", "it's (1)", "<tag>", "~tilde", "..dots", "semi;colon", "@at:colon"]

@pytest.fixture(scope="module")
def stores_of_kinds(tmp_path_factory):
    """Starts the store of a kind, once, with the models in it."""
    stores = {}

    def store_of(kind, folder):
        if kind not in stores:
            stores[kind] = store_kinds.make(kind, tmp_path_factory.mktemp("store"))
            stores[kind].upload(folder, "models")
        return stores[kind]

    yield store_of
    for store in stores.values():
        store.end()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conformance")
    write_models(folder)
    return folder


@pytest.fixture
def any_store(request, stores_of_kinds, model_folder, monkeypatch):
    """A store of each kind that is installed, and an environment in which it is found."""
    kind = request.param
    if not store_kinds.is_installed(kind):
        pytest.skip(f"{kind} is not installed")
    store = stores_of_kinds(kind, model_folder)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.fault()
    yield store
    store.fault()


every_kind = pytest.mark.parametrize("any_store", store_kinds.KINDS, indirect=True)
every_listing_kind = pytest.mark.parametrize("any_store", LISTING, indirect=True)


def names_of(listings):
    return [(one["path"], [(entry["name"], entry["kind"]) for entry in one["entries"]]) for one in listings]


@every_listing_kind
def test_every_kind_of_checkpoint_is_the_same(ckptfs, mounts, any_store, model_folder, tmp_path):
    url = f"{any_store.url}/models"
    mount = mounts(url)
    for model in MODELS:
        whole = ckptfs.export(model_folder / model, tmp_path / f"{model}.safetensors").read_bytes()
        layouts = [ckptfs.inspect(f"{where}/{model}")["virtual_file"]["layout"] for where in (url, model_folder)]
        assert layouts[0] == layouts[1]
        assert ckptfs.export(f"{url}/{model}", tmp_path / f"{model}-2.safetensors").read_bytes() == whole
        assert (mount / model / "model.safetensors").read_bytes() == whole
        check_same(load_file(f"{url}/{model}", backend="pread"), load_plain(tmp_path / f"{model}.safetensors"))


@every_kind
def test_a_file_and_the_index_of_shards_are_read_by_their_own_urls(ckptfs, any_store, model_folder):
    url = f"{any_store.url}/models"
    expected = load_file(model_folder / "sharded", backend="pread")
    check_same(load_file(f"{url}/sharded/model.safetensors.index.json", backend="pread"), expected)
    one = "sharded/model-00002-of-00003.safetensors"
    check_same(load_file(f"{url}/{one}", backend="pread"), load_plain(model_folder / one))
    pickle = "pickled/pytorch_model.bin"
    check_same(load_file(f"{url}/{pickle}", backend="pread"), load_file(model_folder / pickle, backend="pread"))


@every_kind
def test_random_slices_are_the_same(any_store, model_folder):
    rng = random.Random(11)
    name = "sharded/model-00001-of-00003.safetensors"
    with package.safe_open(f"{any_store.url}/models/{name}", framework="pt") as remote:
        local = load_plain(model_folder / name)
        assert sorted(remote.keys()) == sorted(local)
        for _ in range(12):
            key = rng.choice(sorted(local))
            start = rng.randrange(local[key].shape[0])
            stop = rng.randint(start + 1, local[key].shape[0])
            check_same({"part": remote.get_slice(key)[start:stop]}, {"part": local[key][start:stop]})


@every_listing_kind
def test_directories_are_listed(ckptfs, mounts, any_store, model_folder):
    listings = [ckptfs("ls", "-r", "--json", where) for where in (f"{any_store.url}/models", model_folder)]
    assert names_of(listings[0].json()) == names_of(listings[1].json())
    mount = mounts(f"{any_store.url}/models")
    assert sorted(os.listdir(mount.point)) == sorted(os.listdir(model_folder))


@every_listing_kind
def test_odd_names_are_names(ckptfs, mounts, any_store, tmp_path):
    for number, name in enumerate(ODD_NAMES):
        any_store.put(f"odd/{name}/{name}.safetensors", save({"a": torch.full((3,), float(number))}))
    any_store.put("odd/empty/nothing.bin", b"")
    listings = ckptfs("ls", "-r", "--json", f"{any_store.url}/odd").json()
    listed = {one["path"]: [entry["name"] for entry in one["entries"]] for one in listings}
    assert listed.pop("") == sorted([*ODD_NAMES, "empty"], key=str.encode)
    assert "empty" in listed or not listed.pop("empty", None)
    assert [listed[name] for name in ODD_NAMES] == [[f"{name}.safetensors"] for name in ODD_NAMES]
    mount = mounts(f"{any_store.url}/odd")
    for number, name in enumerate(ODD_NAMES):
        path = mount / f"{name}/{name}.safetensors"
        assert path.read_bytes() == save({"a": torch.full((3,), float(number))}), name
        assert load_file(path)["a"].tolist() == [number] * 3


@every_listing_kind
def test_a_long_directory_is_listed(mounts, any_store):
    count = any_store.long_count
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: any_store.put(f"many/{n:05}.txt", b"x"), range(count)))
    any_store.put("many/inside/model.safetensors", save({"a": torch.ones(2)}))
    mount = mounts(f"{any_store.url}/many")
    assert sorted(os.listdir(mount.point)) == [*(f"{n:05}.txt" for n in range(count)), "inside"]
    assert (mount / "inside/model.safetensors").read_bytes() == save({"a": torch.ones(2)})


@every_kind
def test_a_replaced_file_is_an_error_for_its_reader_and_new_for_the_next(any_store):
    key, url = "replaced/model.safetensors", f"{any_store.url}/replaced/model.safetensors"
    first, second = (save({"a": torch.full((900_000,), float(n))}) for n in (1, 2))
    any_store.put(key, first)
    with package.safe_open(url, framework="pt") as held:
        assert held.get_slice("a")[:3].tolist() == [1, 1, 1]
        wait_for_another_second(any_store)
        any_store.put(key, second)
        if isinstance(any_store, store_kinds.Local):
            # An open file of this machine has its bytes whatever has its name.
            assert held.get_tensor("a")[-1] == 1
        else:
            with pytest.raises(package.SafetensorError, match="changed"):
                held.get_tensor("a")
    assert load_file(url)["a"].tolist() == [2] * 900_000


@every_kind
def test_a_removed_file_is_missing(ckptfs, any_store):
    key, url = "removed/model.safetensors", f"{any_store.url}/removed/model.safetensors"
    any_store.put("removed/other.safetensors", save({"b": torch.ones(2)}))
    any_store.put(key, save({"a": torch.ones(900_000)}))
    with package.safe_open(url, framework="pt") as held:
        any_store.delete(key)
        if isinstance(any_store, store_kinds.Local):
            # An open file of this machine has its bytes without a name.
            assert held.get_tensor("a")[0] == 1
        else:
            # A server may compare the version first, and call it changed.
            with pytest.raises((FileNotFoundError, package.SafetensorError), match="removed/model.safetensors"):
                held.get_tensor("a")
    missing = ckptfs("inspect", url)
    assert missing.code == FAILED and url in missing.stderr and "what to do: " in missing.stderr


@every_kind
def test_a_missing_name_is_told_as_that(ckptfs, any_store):
    for name in ("nothing", "nothing.safetensors", "models/nothing.bin", "nothing/model.safetensors.index.json"):
        missing = ckptfs("inspect", f"{any_store.url}/{name}")
        assert missing.code == FAILED and f"{any_store.url}/{name}" in missing.stderr, missing
        assert "what to do: check the " in missing.stderr, missing.stderr
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_file(f"{any_store.url}/nothing.safetensors")


@every_listing_kind
def test_markers_of_directories_are_not_shown(ckptfs, mounts, any_store):
    if not any_store.takes_any_key:
        pytest.skip("its objects are files")
    for marker in ("marked/", "marked/inner/", "marked/inner"):
        any_store.put(marker, b"")
    any_store.put("marked/inner/model.safetensors", save({"a": torch.ones(3)}))
    listings = ckptfs("ls", "-r", "--json", f"{any_store.url}/marked").json()
    assert names_of(listings) == [("", [("inner", "directory")]), ("inner", [("model.safetensors", "file")])]
    assert (mounts(f"{any_store.url}/marked") / "inner/model.safetensors").read_bytes() == save({"a": torch.ones(3)})


@every_listing_kind
def test_keys_that_are_no_paths_are_left_out(ckptfs, mounts, any_store):
    if not any_store.keys_that_are_no_paths:
        pytest.skip("it takes no such keys")
    any_store.put("unusable/model.safetensors", save({"a": torch.ones(3)}))
    for key in any_store.keys_that_are_no_paths:
        any_store.put(f"unusable/{key}", b"x")
    done = ckptfs("ls", "--json", f"{any_store.url}/unusable")
    assert done.code == DONE, done.stderr
    assert [entry["name"] for entry in done.json()[0]["entries"]] == ["model.safetensors"]
    mount = mounts(f"{any_store.url}/unusable")
    assert os.listdir(mount.point) == ["model.safetensors"]
    until("the mount says so", lambda: "are not shown" in mount.logged())


def wait_for_another_second(store):
    """Of a server without ETags, a change within one second cannot be seen."""
    import time

    if not store.lists:
        time.sleep(1.1)
