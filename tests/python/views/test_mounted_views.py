"""What a mount shows of a recipe: as export and the loader make it, and as torch does."""

import json
import os

import torch
from safetensors.torch import load_file, save_file

import ckptfs as package
from ckptfs.torch import load_file as load

from mounts import until
from program import FAILED

RECIPE = """
[[file]]
path = "llama-bf16/model.safetensors"
from = ["llama"]
drop = ["*.inv_freq"]
rename = [{ match = '^model\\.(.*)$', to = '$1' }]
slice = [{ tensors = "q.weight", dim = 0, part = "2/3" }]
split = [{ tensors = "experts.w", dim = 1, to = "experts.{}.w" }]
stack = [{ tensors = 'layers\\.(\\d+)\\.w', to = "layers.w" }]
cast = [{ tensors = "*", to = "bfloat16" }, { tensors = "norm.weight", to = "float32" }]
beside = ["config.json", "tokenizer*", { names = "special_tokens*", optional = true }]
config = { dtype = "bfloat16" }
"""


def write_source(folder):
    """A model in fp32 as torch saves it, one tensor transposed; and what the recipe makes of it."""
    (folder / "llama").mkdir(parents=True)
    state = {f"model.layers.{n}.w": torch.randn(5, 7) for n in (1, 0, 2)}
    state |= {"model.q.weight": torch.randn(7, 4).t().contiguous().t(), "model.norm.weight": torch.randn(9)}
    state |= {"model.experts.w": torch.randn(3, 2, 4), "model.rotary.inv_freq": torch.randn(4)}
    torch.save(state, folder / "llama/pytorch_model.bin")
    (folder / "llama/config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (folder / "llama/tokenizer.json").write_text("{}")
    cast = {"layers.w": torch.stack([state[f"model.layers.{n}.w"] for n in range(3)])}
    cast |= {"q.weight": state["model.q.weight"].chunk(3)[1]}
    cast |= {f"experts.{n}.w": state["model.experts.w"][:, n] for n in range(2)}
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in cast.items()}
    return expected | {"norm.weight": state["model.norm.weight"]}


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def test_files_with_equal_headers_have_their_own_bytes(mounts, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    source.mkdir()
    rows = torch.arange(1 << 20, dtype=torch.float32).reshape(8, -1)
    save_file({"w": rows}, source / "model.safetensors")
    parts = {"first": [0, 4], "second": [4, 8]}
    recipe.write_text("".join(
        f'[[file]]\npath = "{name}/model.safetensors"\nfrom = ["model.safetensors"]\n'
        f'slice = [{{ tensors = "w", dim = 0, range = {part} }}]\n' for name, part in parts.items()
    ))  # fmt: skip
    mountpoint = mounts(source, "--views", recipe)
    for name, (start, end) in parts.items():
        expected = {"w": rows[start:end]}
        assert_equal(load_file(mountpoint / name / "model.safetensors"), expected)
        assert_equal(load(mountpoint / name, backend="pread"), expected)
        assert_equal(load(source / name, views=recipe), expected)
    headers = [(mountpoint / name / "model.safetensors").read_bytes()[:64] for name in parts]
    assert headers[0] == headers[1]
    # The layout names the order that a mount remembers.
    for attribute in ("user.ckptfs.layout", "user.ckptfs.identity"):
        assert len({os.getxattr(mountpoint / name / "model.safetensors", attribute) for name in parts}) == 2, attribute


def test_the_longest_path_that_a_given_one_ends_with_is_meant(mounts, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "base.safetensors")
    paths = {"model.safetensors": "a", "fp16/model.safetensors": "b", "x/fp16/model.safetensors": "c"}
    recipe.write_text("".join(
        f'[[file]]\npath = "{path}"\nfrom = ["base.safetensors"]\nrename = [{{ match = "w", to = "{name}" }}]\n'
        for path, name in paths.items()
    ))  # fmt: skip
    mountpoint = mounts(source, "--views", recipe)
    for path, name in paths.items():
        for shown in (load_file(mountpoint / path), load(source / path, views=recipe)):
            assert_equal(shown, {name: torch.ones(2)})
    assert_equal(load(source / "x/fp16", views=recipe), {"c": torch.ones(2)})
    assert_equal(load(source / "fp16", views=recipe), {"b": torch.ones(2)})


def test_mount_loader_export_and_torch_agree(mounts, ckptfs, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    expected = write_source(source)
    recipe.write_text(RECIPE)
    checked = ckptfs("views", "check", recipe, source)
    assert checked.code == 0 and "5 tensors (4 BF16, 1 F32)" in checked.stdout, checked
    [as_json] = json.loads(ckptfs("views", "check", "--json", recipe, source).stdout)
    mountpoint = mounts(source, "--views", recipe)
    shown = mountpoint / "llama-bf16/model.safetensors"
    assert_equal(load_file(shown), expected)
    assert_equal(load(shown, backend="pread"), expected)
    report = package.last_report()
    # All but the layer norm, in two bytes for each value.
    assert not report.fallbacks and report.cast == 2 * (3 * 5 * 7 + 3 * 4 + 3 * 2 * 4)
    assert_equal(load(source / "llama-bf16", views=recipe), expected)
    out = ckptfs.export(source / "llama-bf16/model.safetensors", tmp_path / "x.safetensors", "--views", recipe)
    assert out.read_bytes() == shown.read_bytes()
    assert as_json == {
        "path": "llama-bf16/model.safetensors", "from": ["llama"], "dtypes": {"BF16": 4, "F32": 1}, "tensors": 5,
        "bytes": shown.stat().st_size, "notes": [],
    }  # fmt: skip
    config = json.loads((mountpoint / "llama-bf16/config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "bfloat16"}
    assert sorted(path.name for path in (mountpoint / "llama-bf16").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (mountpoint / "llama-bf16/tokenizer.json").read_text() == "{}"
    assert (mountpoint / "llama/config.json").read_text() == (source / "llama/config.json").read_text()


def test_the_command_line_opens_what_a_recipe_shows(ckptfs, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    expected = write_source(source)
    recipe.write_text(RECIPE)
    path = source / "llama-bf16/model.safetensors"
    out = ckptfs.export(path, tmp_path / "x.safetensors", "--views", recipe)
    size = out.stat().st_size
    listed = ckptfs("ls", "-r", "--json", "--views", recipe, source).json()
    [entries] = [folder["entries"] for folder in listed if folder["path"] == "llama-bf16"]
    [file] = [entry for entry in entries if entry["kind"] == "virtual_file"]
    assert file["name"] == "model.safetensors" and file["size"] == size
    assert file["virtual_file"]["from"] == ["llama"] and file["virtual_file"]["tensors"] == len(expected)
    inspected = ckptfs("inspect", "--json", "--views", recipe, path).json()
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    assert {one["name"]: (one["dtype"], one["shape"]) for one in inspected["tensors"]} == {
        name: (names[tensor.dtype], list(tensor.shape)) for name, tensor in expected.items()
    }
    verified = ckptfs("verify", "--json", "--views", recipe, path).json()
    assert verified["tensors"] == len(expected) and verified["bytes"] == size
    assert ckptfs("verify", "--views", recipe, path, "--against", out).code == 0
    assert ckptfs("verify", "--views", recipe, path, "--against", source / "llama").code == FAILED


def test_a_recipe_that_changes_shows_and_a_wrong_one_is_explained(mounts, ckptfs, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    write_source(source)
    file = '[[file]]\npath = "one/x.safetensors"\nfrom = ["llama"]\ncast = [{{ tensors = "*", to = "{}" }}]\n'
    recipe.write_text(file.format("bfloat16"))
    mountpoint = mounts(source, "--views", recipe)
    shown = mountpoint / "one/x.safetensors"
    before = ckptfs.export(source / "one/x.safetensors", tmp_path / "x.safetensors", "--views", recipe).read_bytes()
    assert shown.stat().st_size == len(before)

    with shown.open("rb") as kept:
        recipe.write_text(file.format("float64"))
        assert until("the file is larger", lambda: shown.stat().st_size > len(before)) < 30
        assert {one.dtype for one in load_file(shown).values()} == {torch.float64}
        recipe.write_text(file.format("float65"))
        assert until("the file is gone", lambda: not shown.exists()) < 30
        assert kept.read() == before
    assert "float65" in ckptfs("ls", "--views", recipe, source).stderr
    assert "float65" in ckptfs("status").stdout
    recipe.write_text(file.format("float16"))
    assert until("the file is there", shown.exists) < 30


def test_a_changed_recipe_shows_within_a_second(mounts, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    write_source(source)
    file = '[[file]]\npath = "one/x.safetensors"\nfrom = ["llama"]\ncast = [{{ tensors = "*", to = "{}" }}]\n'
    recipe.write_text(file.format("bfloat16"))
    shown = mounts(source, "--views", recipe) / "one/x.safetensors"
    waits = []
    for dtype in ("float32", "bfloat16") * 3:
        before = shown.stat().st_size
        (tmp_path / "next.toml").write_text(file.format(dtype))
        (tmp_path / "next.toml").rename(recipe)
        waits.append(until("the change shows", lambda before=before: shown.stat().st_size != before))
    # On a busy machine some take longer.
    assert min(waits) < 1


def test_what_would_hide_a_file_or_match_nothing_is_refused(ckptfs, tmp_path):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    write_source(source)
    save_file({"a": torch.zeros(2)}, source / "real.safetensors")
    for path, rule, reason in [
        ("real.safetensors", "", "the source has a file"),
        ("llama", "", "safetensors"),
        ("a/x.safetensors", "drop = ['nothing.*']", "matches no tensor"),
        ("a/x.safetensors", "beside = ['nothing*']", "matches no name"),
        ("a/x.safetensors", "beside = [{ names = 'nothing*' }]", "matches no name"),
        ("a/x.safetensors", "beside = [{ tensors = 'nothing*', optional = true }]", "a glob such as"),
        ("a/x.safetensors", "rename = [{ match = '.*', to = 'same' }]", "the name `same`"),
        ("a/x.safetensors", "stack = [{ tensors = 'model.layers.(\\d+).w', to = 'x' }, { tensors = 'x(.*)', to = 'y' }]", "no number"),
        ("a/x.safetensors", "slice = [{ tensors = '*norm*', dim = 1, part = '1/2' }]", "needs axis 1"),
        ("a/x.safetensors", "cast = [{ tensors = '*', to = 'int8' }]", "cannot cast"),
        ("a/x.safetensors", "rename = [{ match = 'model', to = '' }, { match = '^.*$', to = '__metadata__' }]", "no tensor can have"),
    ]:  # fmt: skip
        recipe.write_text(f'[[file]]\npath = "{path}"\nfrom = ["llama"]\n{rule}\n')
        checked = ckptfs("views", "check", recipe, source)
        assert checked.code == 3 and reason in checked.stdout + checked.stderr, (rule, checked)
