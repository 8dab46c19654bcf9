"""Recipes given to a load: by every call of the package, of files and of mounts; and the options of `ckptfs export`."""

from pathlib import Path

import ckptfs as package
import numpy as np
import pytest
import torch
from ckptfs import load_many
from ckptfs.numpy import load_file as load_numpy
from ckptfs.torch import load_distributed, load_file
from safetensors.torch import save_file

from compare import check_same

STEPS = {
    "drop": ["*.inv_freq"],
    "rename": [{"match": r"^model\.(.*)$", "to": "$1"}],
    "cast": [{"tensors": "*.w", "to": "float16"}],
}


@pytest.fixture
def source(tmp_path):
    """A model, and what these steps make of it."""
    (tmp_path / "models").mkdir()
    state = {f"model.{n}.w": torch.randn(6, 5) for n in range(3)}
    state |= {"model.norm": torch.randn(7), "model.rotary.inv_freq": torch.randn(3)}
    torch.save(state, tmp_path / "models/model.bin")
    expected = {f"{n}.w": state[f"model.{n}.w"].half() for n in range(3)}
    return tmp_path / "models", expected | {"norm": state["model.norm"]}


def route(path, **options):
    with package.safe_open(path, "pt", **options) as file, file._handle.use() as opened:
        return opened.route[0]


@pytest.fixture(params=["file", "mount"])
def path(request, source):
    """The model where it lies, and through a mount."""
    if request.param == "file":
        return source[0] / "model.bin"
    return request.getfixturevalue("mounts")(source[0]) / "model.safetensors"


def test_every_call_takes_a_recipe(path, source):
    _, expected = source
    for backend in ("mmap", "pread"):
        check_same(load_file(path, views=STEPS, backend=backend), expected)
        assert not [why for why in package.last_report().fallbacks if "mount" in why]
        with package.safe_open(path, "pt", views=STEPS, backend=backend) as file:
            check_same({name: file.get_tensor(name) for name in file.keys()}, expected)
    for tensors in load_many([path, path], views=STEPS, backend="pread"):
        check_same(tensors, expected)
    check_same(load_distributed(path, views=STEPS), expected)
    arrays = load_numpy(path, views=STEPS)
    assert arrays.keys() == expected.keys()
    assert all(np.array_equal(arrays[name], tensor.numpy()) for name, tensor in expected.items())


def test_a_mounted_file_with_steps_is_read_at_its_source(mounts, source):
    folder, _ = source
    shown = mounts(folder) / "model.safetensors"
    assert route(shown, views=STEPS) == route(shown) == "direct"
    with package.safe_open(shown, "pt", views=STEPS) as file:
        assert file.metadata() == {"format": "pt"}
    # Steps that do not fit are refused as they are without a mount.
    for path in (shown, folder / "model.bin"):
        with pytest.raises(package.SafetensorError, match="matches no tensor"):
            load_file(path, views={"drop": ["nothing.like.it"]})


def test_a_recipe_shows_the_same_by_mount_and_by_load(mounts, source, tmp_path):
    folder, expected = source
    recipe = {"file": [{"path": "half/model.safetensors", "from": ["model.bin"], **STEPS}]}
    check_same(load_file(folder / "half", views=recipe), expected)
    (tmp_path / "mnt").mkdir()
    with package.mount(folder, tmp_path / "mnt", views=recipe) as mount:
        check_same(load_file(f"{mount}/half"), expected)
        # A cast of a cast, which rounds twice.
        again = {"cast": [{"tensors": "*.w", "to": "float8_e5m2"}]}
        twice = {name: one.to(torch.float8_e5m2) if name.endswith("w") else one for name, one in expected.items()}
        check_same(load_file(f"{mount}/half", views=again), twice)


def test_a_package_mount_reads_a_recipe_in_the_source_only_on_request(source, tmp_path):
    folder, expected = source
    (folder / ".ckptfs.toml").write_text(
        '[[file]]\npath = "x.safetensors"\nfrom = ["model.bin"]\ncast = [{ tensors = "*", to = "float64" }]\n'
    )
    (tmp_path / "mnt").mkdir()
    with package.mount(folder, tmp_path / "mnt", views="auto") as mount:
        assert {one.dtype for one in load_file(f"{mount}/x.safetensors").values()} == {torch.float64}
    with package.mount(folder, tmp_path / "mnt") as mount:
        assert not Path(f"{mount}/x.safetensors").exists()


def test_export_takes_steps_as_options(ckptfs, source, tmp_path):
    folder, expected = source
    options = ["--drop", "*.inv_freq", "--rename", r"^model\.(.*)$=$1", "--cast", "*.w=float16"]
    out = ckptfs.export(folder / "model.bin", tmp_path / "out.safetensors", *options)
    check_same(load_file(out), expected)
    out = ckptfs.export(folder / "model.bin", tmp_path / "one.safetensors", "--only", "model.norm", "--rename", "model=m")
    assert load_file(out).keys() == {"m.norm"}


def test_options_are_cut_at_their_last_equals_sign(ckptfs, tmp_path):
    save_file({"a=b.w": torch.ones(2), "c": torch.ones(3)}, tmp_path / "model.safetensors")
    options = ["--rename", r"a=(b.*)=x.$1", "--cast", "a=*=bfloat16"]
    refused = ckptfs("export", tmp_path / "model.safetensors", tmp_path / "out.safetensors", *options)
    # The glob is `a=*`, which the new name no longer matches.
    assert refused.code and "a=*" in refused.stderr and "matches no tensor" in refused.stderr
    options[-1] = "x.b*=bfloat16"
    out = ckptfs.export(tmp_path / "model.safetensors", tmp_path / "out.safetensors", *options)
    tensors = load_file(out)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"x.b.w": torch.bfloat16, "c": torch.float32}


@pytest.mark.parametrize("rule", [
    {"only": ["none.*"]}, {"drop": ["none.*"]}, {"rename": [{"match": "^none", "to": "x"}]},
    {"slice": [{"tensors": "none.*", "dim": 0, "range": [0, 1]}]},
    {"split": [{"tensors": "none.*", "dim": 0, "to": "x.{}"}]}, {"stack": [{"tensors": r"none\.(\d+)", "to": "x"}]},
    {"cast": [{"tensors": "none.*", "to": "float16"}]},
], ids=lambda rule: next(iter(rule)))  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_unless_it_is_optional(source, rule):
    folder, _ = source
    with pytest.raises(package.SafetensorError, match="matches no tensor") as refused:
        load_file(folder / "model.bin", views=rule)
    (step,) = rule
    assert step in str(refused.value) and "none" in str(refused.value)
    (value,) = rule[step]
    value = {"tensors": value} if isinstance(value, str) else value
    optional = {step: [value | {"optional": True}]}
    if step == "only":
        optional["only"].append("*")
    assert len(load_file(folder / "model.bin", views=optional)) == 5


@pytest.mark.parametrize("pattern, words", [
    (r"model\.(\d+)\.w", "another type or shape"), (r"model\.\d\.w", "no group for the number"),
    (r"model\.(0|2)\.w", "no tensor of number 1"), (r"(model)\.1\.w", "finds no number"),
])  # fmt: skip
def test_tensors_that_cannot_be_stacked_are_refused(tmp_path, pattern, words):
    save_file({f"model.{n}.w": torch.ones(2 + n % 2) for n in range(3)}, tmp_path / "model.safetensors")
    with pytest.raises(package.SafetensorError, match=words):
        load_file(tmp_path / "model.safetensors", views={"stack": [{"tensors": pattern, "to": "w"}]})
