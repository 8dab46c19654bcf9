"""A file of a recipe with `base` and `deltas` is the newest version that follows, or the last good one before a bad one."""

import os
import shutil

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file as load_original
from safetensors.torch import save_file

from compare import check_same
from mounts import until
from program import DONE, REFUSED
from versions import (
    CHECKSUMS,
    apply_delta,
    blob,
    encode,
    name_of,
    raw_bytes,
    write_blobs,
    write_delta,
    write_index,
    write_whole,
)

RECIPE = '[[file]]\npath = "latest/model.safetensors"\nbase = "{}"\ndeltas = {}\nbeside = ["config.json"]\n'


def state_of(version):
    generator = torch.Generator().manual_seed(version)
    return {f"layers.{n}.w": torch.randn(64, 33, generator=generator).to(torch.bfloat16) for n in range(4)} | {
        "count": torch.tensor([version])
    }


def write_recipe(tmp_path, base=name_of(1), deltas='"auto"', more=""):
    recipe = tmp_path / "views.toml"
    recipe.write_text(RECIPE.format(base, deltas) + more)
    return recipe


def write_run(parent, last, first=1):
    """A full version, and deltas on it up to `last`. Returns the tensors of each."""
    states = {first: state_of(first)}
    if first:
        write_whole(parent, first, states[first])
    for version in range(first + 1, last + 1):
        states[version] = state_of(version) | {"layers.0.w": states[version - 1]["layers.0.w"]}
        encoding = ("xor", "overwrite")[version % 2]
        write_delta(parent, version, states[version - 1], states[version], encoding=encoding)
    return states


def save_whole(folder, state):
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")


def write_damaged_delta(parent, version, old, new, encoding="xor"):
    """Writes a delta whose checksums are of `new`, and whose changes give one tensor another byte. Returns its name."""
    folder = parent / name_of(version)
    folder.mkdir()
    shard = "model-00000-of-00001.safetensors"
    changed = [name for name in new if not torch.equal(old[name], new[name])]
    blobs, sums = {}, {}
    for name in changed:
        after = raw_bytes(new[name]).copy()
        sums[name] = CHECKSUMS["xxh3-128"](after.tobytes())
        # The second byte of a small number is 0 in every version.
        after[1] ^= 0x55 if name == changed[-1] else 0
        blobs[name] = blob(encode(raw_bytes(old[name]), after, encoding))
    write_blobs(folder / shard, blobs, sums)
    write_index(folder, version, encoding, "xxh3-128", dict.fromkeys(changed, shard))
    return changed[-1]


def test_the_newest_version_is_shown_through_every_door_as_trainers_engines_apply_it(ckptfs, tmp_path, mounts):
    run = tmp_path / "run"
    states = write_run(run, 4)
    recipe = write_recipe(tmp_path)
    raw = {name: raw_bytes(tensor) for name, tensor in states[1].items()}
    for version in (2, 3, 4):
        raw = apply_delta(raw, run / name_of(version))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    checked = ckptfs("views", "check", recipe, run)
    assert checked.code == 0 and f"from {name_of(1)}" in checked.stdout, checked
    mount = mounts(run, "--views", recipe)
    shown = mount / "latest/model.safetensors"
    out = load_original(shown)
    assert {name: raw_bytes(tensor).tobytes() for name, tensor in out.items()} == {
        name: one.tobytes() for name, one in raw.items()
    }
    check_same(load_file(shown, backend="pread"), states[4])
    assert not package.last_report().fallbacks
    check_same(load_file(run / "latest/model.safetensors", views=recipe), states[4])
    exported = ckptfs.export(run / "latest/model.safetensors", tmp_path / "x.safetensors", "--views", recipe)
    assert exported.read_bytes() == shown.read_bytes()
    assert sorted(os.listdir(mount / "latest")) == ["config.json", "model.safetensors"]
    assert {path: path.read_bytes() for path in before} == before


def test_a_list_of_versions_ends_where_it_says_and_steps_apply_to_it(ckptfs, tmp_path):
    run = tmp_path / "run"
    states = write_run(run, 4)
    recipe = write_recipe(
        tmp_path, deltas=f'["{name_of(2)}", "{name_of(3)}"]', more='cast = [{ tensors = "layers.*", to = "float32" }]\n'
    )
    out = load_original(ckptfs.export(run / "latest", tmp_path / "x.safetensors", "--views", recipe))
    assert torch.equal(out.pop("count"), states[3].pop("count"))
    check_same(out, {name: tensor.float() for name, tensor in states[3].items()})


@pytest.mark.parametrize("deltas", ['"auto"', f'["{name_of(1)}", "{name_of(2)}"]'])
def test_a_base_of_another_name_is_version_0(ckptfs, tmp_path, mounts, deltas):
    run = tmp_path / "run"
    states = write_run(run, 2, first=0)
    (run / "hf").mkdir()
    save_file(states[0], run / "hf/model.safetensors")
    (run / "hf/config.json").write_text("{}")
    recipe = write_recipe(tmp_path, base="hf", deltas=deltas)
    check_same(load_original(ckptfs.export(run / "latest", tmp_path / "x.safetensors", "--views", recipe)), states[2])
    mount = mounts(run, "--views", recipe)
    check_same(load_file(mount / "latest", backend="pread"), states[2])
    assert not package.last_report().fallbacks
    # Over the folder itself, the daemon must not ask its own mount.
    with package.mount(run, run, views=recipe) as over:
        check_same(load_original(over / "latest/model.safetensors"), states[2])
    shutil.rmtree(run / name_of(1))
    shutil.rmtree(run / name_of(2))
    check_same(load_original(ckptfs.export(run / "latest", tmp_path / "y.safetensors", "--views", recipe)), states[0])


def test_a_link_to_a_version_is_that_version_as_a_base(ckptfs, tmp_path):
    run = tmp_path / "run"
    states = write_run(run, 4)
    (run / "stable").symlink_to(name_of(2))
    recipe = write_recipe(tmp_path, base="stable")
    check_same(load_original(ckptfs.export(run / "latest", tmp_path / "x.safetensors", "--views", recipe)), states[4])
    for version in (3, 4):
        shutil.rmtree(run / name_of(version))
    check_same(load_original(ckptfs.export(run / "latest", tmp_path / "y.safetensors", "--views", recipe)), states[2])


def test_a_link_to_the_model_that_training_began_with_is_version_0(ckptfs, tmp_path):
    run = tmp_path / "models/run"
    states = write_run(run, 2, first=0)
    save_whole(tmp_path / "models/llama", states[0])
    (run / "hf").symlink_to("../llama")
    recipe = write_recipe(tmp_path, base="run/hf")
    shown = tmp_path / "models/latest"
    check_same(load_original(ckptfs.export(shown, tmp_path / "x.safetensors", "--views", recipe)), states[2])


@pytest.mark.parametrize("version, remedy", [(400, "weight_v000002"), (2, "give weight_v000002 as the base")])
def test_versions_that_do_not_follow_are_explained(ckptfs, tmp_path, version, remedy):
    """Behind a gap that is longer than a chain, and full versions in one file."""
    run = tmp_path / "run"
    states = write_run(run, 1)
    if version == 2:
        save_whole(run / name_of(2), state_of(2))
    else:
        write_delta(run, version, states[1], state_of(2))
    checked = ckptfs("views", "check", write_recipe(tmp_path), run)
    assert remedy in checked.stdout + checked.stderr, checked


def test_the_largest_version_number_overflows_nothing(ckptfs, tmp_path):
    run = tmp_path / "run"
    write_whole(run, 1, state_of(1))
    (run / f"weight_v{2**64 - 1}").mkdir()
    recipe = write_recipe(tmp_path)
    assert ckptfs("views", "check", recipe, run).code == 0
    recipe.write_text(RECIPE.format(f"weight_v{2**64 - 1}", '"auto"'))
    assert ckptfs("views", "check", recipe, run).code == REFUSED


def test_a_new_version_takes_the_place_of_the_last(tmp_path, mounts):
    run = tmp_path / "run"
    states = write_run(run, 1)
    mount = mounts(run, "--views", write_recipe(tmp_path))
    shown = mount / "latest/model.safetensors"
    check_same(load_original(shown), states[1])
    waits = []
    for version in (2, 3, 4):
        states[version] = state_of(version)
        folder = write_delta(run, version, states[version - 1], states[version])
        index = folder / "model.safetensors.index.json"
        hidden = index.rename(tmp_path / "index")
        check_same(load_original(shown), states[version - 1])
        with shown.open("rb") as kept:
            hidden.rename(index)
            waits.append(until("it is shown", lambda v=version: load_original(shown)["count"].item() == v))
            # What is open stays the version that it was.
            check_same(load_bytes(kept.read()), states[version - 1])
        check_same(load_original(shown), states[version])
    # On a busy machine some take longer.
    assert min(waits) < 1


def refused_by(mount):
    """Why the mount does not show files of its recipe, or newer versions, after a stat of one."""
    (mount / "latest/model.safetensors").stat()
    return " ".join(mount.stats()["refused_views"])


def test_a_version_that_does_not_follow_is_refused_and_the_last_good_one_stays(ckptfs, tmp_path, mounts):
    run = tmp_path / "run"
    states = write_run(run, 3)
    states[4] = state_of(4)
    recipe = write_recipe(tmp_path)
    mount = mounts(run, "--views", recipe)
    shown = mount / "latest/model.safetensors"

    def check_explained(folder, *words):
        until("status says why", lambda: words[0] in refused_by(mount))
        check_same(load_original(shown), states[3])
        listed = ckptfs("ls", "-r", "--views", recipe, run)
        for word in words:
            assert word in listed.stdout + listed.stderr and word in refused_by(mount), (word, listed)
        # The text is cut into lines.
        assert "".join(words[0].split()) in "".join(ckptfs("status").stdout.split())
        shutil.rmtree(folder)

    folder = write_delta(run, 4, states[3], states[4], metadata={"base_version": "000001"})
    check_explained(folder, "version 4 is a delta on version 1", "what to do: ")
    folder = write_delta(run, 5, states[3], states[4])
    check_explained(folder, "version 5 is a delta on", f"fetch {run / name_of(4)}")
    folder = write_whole(run, 4, states[4])
    check_explained(folder, "version 4 is a full one", "give weight_v000004 as the base")
    folder = write_delta(run, 4, states[3], states[4])
    next(folder.glob("*.safetensors")).unlink()
    check_explained(folder, "is missing", name_of(4))
    write_delta(run, 4, states[3], states[4])
    until("it is shown", lambda: load_original(shown)["count"].item() == 4)
    assert not refused_by(mount)


def test_after_a_failed_checksum_the_last_good_version_is_shown_again(ckptfs, tmp_path, mounts):
    run = tmp_path / "run"
    states = {version: state_of(version) for version in range(1, 6)}
    write_whole(run, 1, states[1])
    for version in (2, 4, 5):
        write_delta(run, version, states[version - 1], states[version])
    name = write_damaged_delta(run, 3, states[2], states[3])
    mount = mounts(run, "--views", write_recipe(tmp_path))
    shown = mount / "latest/model.safetensors"
    # Nothing wrong is ever served, and the versions that build on the damaged one are left out at once.
    with shown.open("rb", buffering=0) as kept:
        with pytest.raises(OSError):
            while kept.read(1 << 20):
                pass
        until("the last good one is shown", lambda: load_original(shown)["count"].item() == 2)
        check_same(load_original(shown), states[2])
    status = refused_by(mount)
    assert f"tensor `{name}`: its checksum is" in status and name_of(3) in status
    # A delta that is written again is read again.
    shutil.rmtree(run / name_of(3))
    write_delta(run, 3, states[2], states[3])
    until("the newest is shown", lambda: load_original(shown)["count"].item() == 5)
    check_same(load_original(shown), states[5])


def test_verify_compares_every_checksum_of_the_newest_version(ckptfs, tmp_path):
    run = tmp_path / "run"
    states = write_run(run, 2) | {3: state_of(3)}
    words = ("verify", "--views", write_recipe(tmp_path), run / "latest/model.safetensors")
    assert ckptfs(*words).code == DONE
    name = write_damaged_delta(run, 3, states[2], states[3])
    done = ckptfs(*words)
    assert done.code == REFUSED and f"tensor `{name}`: its checksum is" in done.stderr, done


def test_a_load_leaves_out_a_delta_that_failed_in_its_process(tmp_path):
    run = tmp_path / "run"
    states = write_run(run, 2) | {3: state_of(3)}
    write_damaged_delta(run, 3, states[2], states[3])
    recipe = write_recipe(tmp_path)
    with pytest.raises(package.SafetensorError, match="its checksum is"):
        load_file(run / "latest", views=recipe, backend="pread")
    check_same(load_file(run / "latest", views=recipe, backend="pread"), states[2])


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_delta_at_fault_is_named_whatever_follows_it(ckptfs, tmp_path, encoding):
    states = {version: {"a": torch.full((1000,), version, dtype=torch.int32)} for version in range(1, 9)}
    write_whole(tmp_path, 1, states[1], shards=1)
    for version in (2, 3, 4, 6, 7, 8):
        write_delta(tmp_path, version, states[version - 1], states[version], encoding=encoding)
    write_damaged_delta(tmp_path, 5, states[4], states[5], encoding)
    for version in (5, 6, 8):
        export = ckptfs("export", tmp_path / name_of(version), tmp_path / "out.safetensors")
        assert export.code == REFUSED and f"{name_of(5)}/model" in export.error, export
    for version in (2, 3, 4):
        check_same(load_file(tmp_path / name_of(version)), states[version])
