"""Versions that a trainer writes as deltas are shown as whole models, bit for bit, through every door. What does not
follow its base, or fails its checksum, is refused, and the versions before it stay."""

import json
import os
import random
import shutil
import struct

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_original
from safetensors.torch import save_file

from compare import check_same
from mounts import until
from program import DONE, REFUSED
from refusals import check_refused
from training import any_tensor, check_doors
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

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8)


def any_model(rng):
    shapes = [(), (1,), (0, 3), (7, 5), (300, 257), (64, 3, 9)]
    return {f"layers.{n}.w": any_tensor(rng, rng.choice(shapes), rng.choice(DTYPES)) for n in range(8)} | {
        "embed": any_tensor(rng, (500, 333), torch.bfloat16)
    }


def changed(rng, tensors, share):
    """The tensors with a share of their bytes changed, and a few left as they are."""
    after = {}
    for name, tensor in tensors.items():
        raw = raw_bytes(tensor).copy()
        if not raw.size:
            after[name] = tensor
            continue
        if rng.random() < 0.8:
            for place in rng.sample(range(raw.size), max(1, int(raw.size * share))):
                raw[place] = rng.randrange(256)
        after[name] = torch.from_numpy(raw).view(tensor.dtype).reshape(tensor.shape)
    return after


def write_versions(parent, seed, shares=(0.02, 0.5, 0.001, 1), encodings=("xor", "overwrite")):
    """Writes a whole version 1 and deltas on it. Returns the tensors of each version."""
    rng = random.Random(seed)
    states = [any_model(rng)]
    write_whole(parent, 1, states[0])
    for share in shares:
        states.append(changed(rng, states[-1], share))
        version = len(states)
        write_delta(parent, version, *states[-2:], encoding=encodings[version % len(encodings)],
                    checksum=rng.choice(list(CHECKSUMS)), ranks=rng.randint(1, 3))  # fmt: skip
    return {number: state for number, state in enumerate(states, 1)}


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    return folder, write_versions(folder, 1)


@pytest.mark.parametrize("version", [2, 3, 5])
def test_a_delta_is_its_whole_model_through_every_door(ckptfs, versions, tmp_path, version):
    folder, states = versions
    check_doors(ckptfs, folder / name_of(version), states[version], tmp_path / "out.safetensors")


def test_deltas_are_applied_as_trainers_engines_do(ckptfs, versions, tmp_path):
    folder, states = versions
    state = {name: raw_bytes(tensor) for name, tensor in states[1].items()}
    for version in list(states)[1:]:
        state = apply_delta(state, folder / name_of(version))
        out = load_original(ckptfs.export(folder / name_of(version), tmp_path / f"{version}.safetensors"))
        assert {name: raw_bytes(tensor).tobytes() for name, tensor in out.items()} == {
            name: raw.tobytes() for name, raw in state.items()
        }


@pytest.mark.parametrize("seed", range(4))
def test_random_chains_are_read_bit_for_bit(tmp_path, seed):
    encodings = [("xor",), ("overwrite",), ("xor", "overwrite")][seed % 3]
    states = write_versions(tmp_path / "run", seed + 10, shares=(0.01, 0.3, 0.02), encodings=encodings)
    for version, state in states.items():
        check_same(load_file(tmp_path / "run" / name_of(version)), state)


def test_a_mount_shows_each_version_as_one_file_and_writes_nothing(ckptfs, versions, mounts):
    folder, states = versions
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
    mount = mounts(folder)
    for version, state in states.items():
        assert "model.safetensors" in os.listdir(mount / name_of(version))
        check_same(load_original(mount / name_of(version) / "model.safetensors"), state)
    for version in list(states)[1:]:
        assert sorted(os.listdir(mount / name_of(version))) == ["config.json", "model.safetensors"]
        # The base's own, as a link.
        assert os.readlink(mount / name_of(version) / "config.json") == f"../{name_of(1)}/config.json"
        assert (mount / name_of(version) / "config.json").read_text() == "{}"
    # The loader reads the sources of what is mounted.
    check_same(load_file(mount / name_of(4), backend="pread"), states[4])
    report = package.last_report()
    assert not report.fallbacks, report
    assert ckptfs("verify", folder / name_of(3), "--against", mount / name_of(3) / "model.safetensors").code == DONE
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before


def test_one_delta_is_mounted_by_its_folder(versions, mounts):
    folder, states = versions
    mount = mounts(folder / name_of(3))
    assert os.listdir(mount.point) == ["model.safetensors"]
    check_same(load_original(mount / "model.safetensors"), states[3])
    check_same(load_file(mount.point, backend="pread"), states[3])


def test_slices_and_random_reads_of_a_delta_are_right(versions, mounts):
    folder, states = versions
    mount = mounts(folder, "--memory", "16M")
    expected = states[5]["embed"]
    for place in (folder, mount.point):
        with package.safe_open(place / name_of(5) / "model.safetensors", "pt") as opened:
            cut = opened.get_slice("embed")
            assert torch.equal(cut[3:400:7, 5:11], expected[3:400:7, 5:11])
    path = mount / name_of(5) / "model.safetensors"
    whole = path.read_bytes()
    rng = random.Random(2)
    with path.open("rb", buffering=0) as file:
        for _ in range(200):
            start = rng.randrange(len(whole))
            assert os.pread(file.fileno(), 5000, start) == whole[start : start + 5000]


def test_versions_of_one_model_share_their_layout_and_no_identity(versions, mounts):
    folder, states = versions
    mount = mounts(folder)
    values = [
        {os.getxattr(mount / name_of(version) / "model.safetensors", f"user.ckptfs.{kind}") for version in states}
        for kind in ("layout", "identity")
    ]
    assert [len(different) for different in values] == [1, len(states)]


def test_versions_of_a_base_of_one_shard_share_its_layout(tmp_path, mounts):
    rng = random.Random(5)
    base, run = any_model(rng), tmp_path / "run"
    write_whole(run, 1, base, shards=1)
    recipe = tmp_path / "views.toml"
    recipe.write_text(f'[[file]]\npath = "newest/model.safetensors"\nbase = "{name_of(1)}"\ndeltas = "auto"\n')
    mount = mounts(run, "--views", recipe)

    def attribute(folder, kind="layout"):
        return os.getxattr(mount / folder / "model.safetensors", f"user.ckptfs.{kind}")

    layout, identity = attribute("newest"), attribute("newest", "identity")
    after = changed(rng, base, 0.02)
    write_delta(run, 2, base, after)
    until("the delta is the newest", lambda: attribute("newest", "identity") != identity)
    assert attribute("newest") == layout
    assert attribute(name_of(1)) == attribute(name_of(2))
    [shard] = (run / name_of(1)).glob("model-*.safetensors")
    # The base is the shard, header included, and the delta has its header.
    contents = [(mount / name_of(version) / "model.safetensors").read_bytes() for version in (1, 2)]
    assert contents[0] == shard.read_bytes() != contents[1]
    data_start = 8 + int.from_bytes(contents[0][:8], "little")
    assert contents[0][:data_start] == contents[1][:data_start]
    for folder in (name_of(2), "newest"):
        check_same(load_original(mount / folder / "model.safetensors"), after)
        check_same(load_file(mount / folder), after)


def test_a_new_version_shows_within_a_second(tmp_path, mounts):
    rng = random.Random(3)
    states = [any_model(rng)]
    write_whole(tmp_path / "run", 1, states[0])
    mount = mounts(tmp_path / "run")
    assert os.listdir(mount.point) == [name_of(1)]
    waits = []
    for version in (2, 3, 4):
        states.append(changed(rng, states[-1], 0.02))
        folder = write_delta(tmp_path / "run", version, *states[-2:])
        index = folder / "model.safetensors.index.json"
        hidden = index.rename(tmp_path / "index")
        # The files of a version that is not complete are no model.
        assert "model.safetensors" not in os.listdir(mount / name_of(version))
        hidden.rename(index)
        waits.append(until("it is shown", lambda: "model.safetensors" in os.listdir(mount / name_of(version))))
        assert waits[-1] < 15
        check_same(load_original(mount / name_of(version) / "model.safetensors"), states[-1])
    # On a busy machine some take longer.
    assert min(waits) < 1


def test_a_version_that_came_too_early_shows_when_those_before_it_are_there(tmp_path, mounts):
    states = write_versions(tmp_path / "run", 4, shares=(0.02, 0.02))
    shutil.move(tmp_path / "run" / name_of(2), tmp_path / "later")
    mount = mounts(tmp_path / "run")
    assert "model.safetensors" not in os.listdir(mount / name_of(3))
    shutil.move(tmp_path / "later", tmp_path / "run" / name_of(2))
    until("it is shown", lambda: "model.safetensors" in os.listdir(mount / name_of(3)))
    check_same(load_original(mount / name_of(3) / "model.safetensors"), states[3])


def test_a_version_without_changes_is_the_one_before(ckptfs, tmp_path):
    states = write_versions(tmp_path / "run", 5, shares=(0.1,))
    write_delta(tmp_path / "run", 3, states[2], states[2])
    check_same(load_file(tmp_path / "run" / name_of(3)), states[2])


def test_the_base_of_the_first_delta_is_given_or_lies_beside_it(ckptfs, tmp_path, mounts):
    rng = random.Random(6)
    base = any_model(rng)
    after = changed(rng, base, 0.05)
    write_delta(tmp_path / "run", 1, base, after)
    write_whole(tmp_path / "hf", 7, base)
    first, given = tmp_path / "run" / name_of(1), tmp_path / "hf" / name_of(7)
    check_refused(ckptfs, first, "the model that the training began with", "--delta-base DIR", str(first.parent / name_of(0)))
    out = tmp_path / "out.safetensors"
    assert ckptfs("export", first, out, "--delta-base", given).code == DONE
    check_same(load_original(out), after)
    check_same(load_file(first, delta_base=given), after)
    mount = mounts(tmp_path / "run", "--delta-base", os.path.relpath(given))
    check_same(load_original(mount / name_of(1) / "model.safetensors"), after)
    assert json.loads((mount / name_of(1) / "config.json").read_text()) == {}
    assert os.path.realpath(mount / name_of(1) / "config.json") == str(given / "config.json")
    check_same(load_file(mount / name_of(1), backend="pread"), after)
    assert not package.last_report().fallbacks
    # Over the folders themselves, the daemon must not ask its own mount.
    with package.mount(tmp_path, tmp_path, delta_base=given) as path:
        check_same(load_original(path / "run" / name_of(1) / "model.safetensors"), after)
        assert os.readlink(path / "run" / name_of(1) / "config.json") == f"../../hf/{name_of(7)}/config.json"
    shutil.copytree(given, tmp_path / "run" / name_of(0))
    check_same(load_file(first), after)


def test_a_base_of_one_file_or_of_torch_is_a_base(tmp_path):
    rng = random.Random(7)
    base = any_model(rng)
    after = changed(rng, base, 0.05)
    write_delta(tmp_path / "run", 1, base, after)
    for name, save in (("model.safetensors", save_file), ("pytorch_model.bin", torch.save)):
        (tmp_path / name).mkdir()
        save(base, tmp_path / name / name)
        check_same(load_file(tmp_path / "run" / name_of(1), delta_base=tmp_path / name), after)


def test_a_failed_checksum_is_refused_with_the_tensor_and_the_last_good_version_stays(ckptfs, tmp_path, mounts):
    states = write_versions(tmp_path / "run", 8, shares=(0.02, 0.02))
    bad = tmp_path / "run" / name_of(3)
    shard = next(bad.glob("*.safetensors"))
    data = shard.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name, digits = next(iter(header["__metadata__"].items()))
    other = ("0" if digits[0] != "0" else "1") + digits[1:]
    shard.write_bytes(data.replace(digits.encode(), other.encode()))
    out = tmp_path / "out.safetensors"
    for outcome in (ckptfs("export", bad, out), ckptfs("verify", bad, "--against", bad)):
        assert outcome.code != DONE
    export = ckptfs("export", bad, out)
    assert export.code == REFUSED, export
    for words in (f"`{name}`", shard.name, other, digits, "what to do: "):
        assert words in export.error
    assert not out.exists()
    with pytest.raises(package.SafetensorError, match="its checksum is"):
        load_file(bad, backend="pread")
    mount = mounts(tmp_path / "run")
    with package.safe_open(mount / name_of(3) / "model.safetensors", "pt", backend="pread") as opened:
        with pytest.raises(package.SafetensorError, match="checksum"):
            opened.get_tensor(name)
    # What else the version has is not refused for it, and the versions before it stay.
    good = next(one for one in states[3] if one not in header)
    check_same({good: load_file(bad, names=[good], backend="pread")[good]}, {good: states[3][good]})
    with pytest.raises(OSError):
        (mount / name_of(3) / "model.safetensors").read_bytes()
    assert f"tensor `{name}`" in mount.logged()
    check_same(load_original(mount / name_of(2) / "model.safetensors"), states[2])


def test_changes_of_a_tensor_are_not_read_before_the_tensor_is(tmp_path):
    base = {"a": torch.zeros(100), "b": torch.zeros(100)}
    after = {"a": base["a"] + 1, "b": base["b"] + 2}
    write_whole(tmp_path, 1, base, shards=1)
    folder = write_delta(tmp_path, 2, base, after, ranks=1)
    [shard] = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start, end = json.loads(data[8 : 8 + length])["b"]["data_offsets"]
    data[8 + length + start : 8 + length + end] = b"x" * (end - start)
    shard.write_bytes(data)
    with package.safe_open(folder, "pt", backend="pread") as opened:
        check_same({"a": opened.get_tensor("a")}, {"a": after["a"]})
        with pytest.raises(package.SafetensorError, match="tensor `b`"):
            opened.get_tensor("b")


def test_what_does_not_follow_is_refused_with_a_remedy(ckptfs, tmp_path):
    rng = random.Random(9)
    base = {"a": any_tensor(rng, (40, 3), torch.bfloat16), "b": any_tensor(rng, (9,), torch.float32)}
    after = {"a": base["a"].clone(), "b": base["b"] + 1}
    after["a"][3] = 5

    def refused(*words, number=2, change=None, **metadata):
        parent = tmp_path / f"run-{refused.count}"
        refused.count += 1
        write_whole(parent, 1, base, shards=1)
        folder = write_delta(parent, number, base, after, ranks=1, metadata=metadata)
        if change:
            change(folder)
        check_refused(ckptfs, folder / "model.safetensors.index.json", *words)

    refused.count = 0
    refused("version 2 is a delta on version 0", base_version="000000")
    refused("version 3 is a delta on", "fetch", name_of(2), number=3)
    refused("delta_encoding `add`", delta_encoding="add")
    refused("compression_format `lz4`", compression_format="lz4")
    refused("checksum_format `md5`", checksum_format="md5")
    refused("folder is not called weight_v000007", "mv ", version="000007", base_version="000006")

    def strange_file(folder):
        save_file({"a": base["a"]}, folder / "more.safetensors")

    refused("more.safetensors lies beside it", change=strange_file)

    def strange_tensor(folder):
        shard = "model-00000-of-00001.safetensors"
        sums = {name: "0" * 32 for name in ("a", "c")}
        write_blobs(folder / shard, {"a": blob(b"1"), "c": blob(b"1")}, sums)
        write_index(folder, 2, "xor", "xxh3-128", dict.fromkeys(sums, shard))

    refused("changes tensor `c`, which", "does not have", change=strange_tensor)

    def misplaced(folder):
        write_index(folder, 2, "xor", "xxh3-128", {"a": "model-00000-of-00001.safetensors"})

    refused("tensor `b` is in model-00000-of-00001.safetensors", change=misplaced)

    def without_checksum(folder):
        shard = "model-00000-of-00001.safetensors"
        write_blobs(folder / shard, {"a": blob(b"1")}, {"a": "xyz"})
        write_index(folder, 2, "xor", "xxh3-128", {"a": shard})

    refused("tensor `a`: model-00000-of-00001.safetensors has no valid checksum", change=without_checksum)

    def not_bytes(folder):
        shard = "model-00000-of-00001.safetensors"
        save_file({"a": base["a"]}, folder / shard, {"a": "0" * 32})
        write_index(folder, 2, "xor", "xxh3-128", {"a": shard})

    refused("a tensor of it is not a list of bytes", change=not_bytes)

    def missing(folder):
        next(folder.glob("*.safetensors")).unlink()

    refused("shard `model-00000-of-00001.safetensors` is missing", change=missing)


def test_hostile_changes_fail_in_bounded_memory(ckptfs, tmp_path):
    base = {"a": torch.zeros(1000, dtype=torch.uint8)}
    old = raw_bytes(base["a"])
    cases = {
        "states": ("xor", blob(bytes(64 << 20))),
        "after byte 5": ("overwrite", blob(struct.pack("<III", 2, 5, 5) + b"12")),
        "and it has 1000": ("overwrite", blob(struct.pack("<II", 1, 1000) + b"1")),
        "said to change": ("overwrite", blob(struct.pack("<I", 1 << 31))),
        "no zstd frame": ("overwrite", b"nothing of the kind"),
        "do not end": ("xor", blob(encode(old, old, "xor")) + b"more"),
    }
    for number, (words, (encoding, changes)) in enumerate(cases.items()):
        parent = tmp_path / str(number)
        write_whole(parent, 1, base, shards=1)
        folder = parent / name_of(2)
        folder.mkdir()
        write_blobs(folder / "model-00000-of-00001.safetensors", {"a": changes}, {"a": "0" * 8})
        write_index(folder, 2, encoding, "adler32", {"a": "model-00000-of-00001.safetensors"})
        export = ckptfs("export", folder, tmp_path / "out.safetensors", bounded=True)
        assert export.code == REFUSED, export
        assert words in export.error and "tensor `a`" in export.error, export


def test_a_chain_is_bounded(ckptfs, tmp_path):
    base = {"a": torch.zeros(10, dtype=torch.uint8)}
    write_whole(tmp_path, 1, base, shards=1)
    for version in range(2, 260):
        write_delta(tmp_path, version, base, base)
    check_same(load_file(tmp_path / name_of(257)), base)
    check_refused(ckptfs, tmp_path / name_of(258), "more than 256 deltas", "ckptfs export")


def test_a_changed_base_is_an_error_and_never_a_mixture(tmp_path, mounts):
    states = write_versions(tmp_path / "run", 11, shares=(0.02,))
    mount = mounts(tmp_path / "run")
    path = mount / name_of(2) / "model.safetensors"
    check_same(load_original(path), states[2])
    shutil.rmtree(tmp_path / "run" / name_of(1))
    other = {name: tensor.clone() for name, tensor in states[1].items()}
    other["embed"][0] = 3
    write_whole(tmp_path / "run", 1, other)
    with pytest.raises(package.SafetensorError, match="checksum"):
        load_file(tmp_path / "run" / name_of(2), backend="pread")


# The first has more than the bound below. The second is decoded in many parts, and takes long.
@pytest.mark.parametrize(("encoding", "size"), [("xor", 96 << 20), ("overwrite", 24 << 20)])
def test_changes_of_all_bytes_are_read_within_the_memory_of_a_mount(tmp_path, mounts, encoding, size):
    old = torch.randint(0, 255, (size,), dtype=torch.uint8)
    base, after = {"a": old, "b": torch.zeros(3)}, {"a": old + 1, "b": torch.ones(3)}
    write_whole(tmp_path / "run", 1, base, shards=1)
    write_delta(tmp_path / "run", 2, base, after, encoding=encoding)
    mount = mounts(tmp_path / "run", "--memory", "16M")
    out = load_original(mount / name_of(2) / "model.safetensors")
    assert torch.equal(out["a"], after["a"])
    _, peak = mount.resident()
    assert peak < (16 + 64) << 20, peak
