"""A mounted hub cache is a cache: models are found by name, offline, even those that the client's own notes describe
otherwise. The same holds for a mount over the cache itself."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import models
from hub import hub, revision_of
from mounts import Mounts
from program import COMMON, find_binary

CLIENT = COMMON / "hub_client.py"
KINDS = {
    "org/sharded": "LlamaForCausalLM",
    "org/pickled": "GPT2LMHeadModel",
    "org/parts": "GPT2LMHeadModel",
}


def ask(cache, questions, address=None):
    """Runs the client on a cache; offline, unless it has the address of a hub."""
    environment = os.environ | {
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0" if address else "1",
        "HF_ENDPOINT": address or "http://127.0.0.1:9",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DISABLE_SAFETENSORS_CONVERSION": "1",
    }
    done = subprocess.run(
        [sys.executable, CLIENT],
        env=environment,
        input=json.dumps(questions),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BY_NAME = [{"load": kind, "name": name} for name, kind in KINDS.items()]
SNAPSHOTS = [{"snapshot": name} for name in KINDS]
LOCAL_SNAPSHOTS = [{**question, "with": {"local_files_only": True}} for question in SNAPSHOTS]


def by_way(answers, ways):
    """Answers to several ways of asking for each model: by way, then by name."""
    parts = [answers[n : n + len(KINDS)] for n in range(0, len(answers), len(KINDS))]
    return {way: dict(zip(KINDS, part, strict=True)) for way, part in zip(ways, parts, strict=True)}


def repository_in(cache, name):
    return cache / f"models--{name.replace('/', '--')}"


def snapshot(cache, name, revision):
    return repository_in(cache, name) / "snapshots" / revision


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """A cache as two ways of fetching leave it, and the models as they load from it offline."""
    folder = tmp_path_factory.mktemp("hub")
    made = {
        "org/sharded": (models.llama(), models.save_shards),
        "org/pickled": (models.gpt2(), models.save_bin),
        "org/parts": (models.gpt2(), models.save_bin_shards),
    }
    repositories = {}
    for name, (model, save) in made.items():
        repositories[name] = folder / name
        save(model, repositories[name])
        models.tokenizer().save_pretrained(repositories[name])
    cache = folder / "cache"
    with hub(repositories) as address:
        fetched = ask(cache, BY_NAME + SNAPSHOTS, address)
        assert not any(isinstance(answer, str) for answer in fetched), fetched
        revisions = {name: revision_of(repository) for name, repository in repositories.items()}
        for name, revision in revisions.items():
            kept = repository_in(cache, name)
            # Files that make this a cache and not only a folder of links.
            assert (kept / ".no_exist" / revision / "model.safetensors").exists()
            assert (kept / "trees" / f"{revision}.json").exists()
            assert all(file.is_symlink() for file in snapshot(cache, name, revision).iterdir())
        originals = dict(zip(KINDS, ask(cache, BY_NAME), strict=True))
        assert not any(isinstance(answer, str) for answer in originals.values()), originals
        yield SimpleNamespace(cache=cache, address=address, revisions=revisions, originals=originals)


@pytest.fixture(scope="module", params=["elsewhere", "over-itself"])
def answers(fetched, tmp_path_factory, request):
    """The client's answers in the mounted cache, one way of asking at a time."""
    folder = tmp_path_factory.mktemp(request.param)
    source = fetched.cache
    if request.param == "over-itself":
        source = folder / "mnt0"
        shutil.copytree(fetched.cache, source, symlinks=True)
    mounts = Mounts(find_binary(), folder)
    try:
        point = mounts(source).point
        exact = {
            name: {"revision": revision, "use_safetensors": True}
            for name, revision in fetched.revisions.items()
        }
        ways = {
            "by-name": BY_NAME,
            "by-revision": [{**question, "with": exact[question["name"]]} for question in BY_NAME],
            "by-folder": [
                {"load": kind, "name": str(snapshot(point, name, fetched.revisions[name]))}
                for name, kind in KINDS.items()
            ],
            "snapshot": LOCAL_SNAPSHOTS,
        }
        found = by_way(ask(point, sum(ways.values(), [])), ways)
        yield SimpleNamespace(point=point, found=found)
    finally:
        mounts.end()


@pytest.mark.parametrize("way", ["by-name", "by-revision", "by-folder"])
@pytest.mark.parametrize("name", KINDS)
def test_models_load_from_a_mounted_cache_offline(fetched, answers, name, way):
    original, got = fetched.originals[name], answers.found[way][name]
    assert isinstance(got, dict), got
    models.check_fingerprints(got["tensors"], original["tensors"])
    for what in ("ties", "info", "tokens"):
        assert got[what] == original[what]
    assert set(got["said"]) <= set(original["said"])


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_is_found_offline_and_shows_one_file(fetched, answers, name):
    got = answers.found["snapshot"][name]
    assert isinstance(got, dict), got
    expected = snapshot(answers.point, name, fetched.revisions[name])
    assert got["folder"] == str(expected)
    shown = sorted(file.name for file in expected.glob("*model*"))
    assert shown == ["model.safetensors"]


def test_a_client_that_may_ask_the_hub_loads_what_the_cache_has(fetched, mounts):
    """Loading takes what the cache has. A snapshot is compared with the hub, and the client fetches a file whose name
    is not shown, unless it is offline."""
    point = mounts(fetched.cache).point
    found = ask(point, BY_NAME + SNAPSHOTS + LOCAL_SNAPSHOTS, fetched.address)
    found = by_way(found, ["by-name", "untold", "told"])
    assert found["by-name"] == fetched.originals
    for name, revision in fetched.revisions.items():
        assert "Read-only file system" in found["untold"][name], found["untold"][name]
        assert found["told"][name] == {"folder": str(snapshot(point, name, revision))}
