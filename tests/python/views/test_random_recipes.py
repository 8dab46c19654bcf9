"""Random recipes for random checkpoints give the same tensors mounted, loaded and exported as torch computes by itself.

CKPTFS_RECIPES is their number, and the number of a case is its seed.
"""

import os
import random

import pytest

import ckptfs as package
from ckptfs import safe_open
from ckptfs.torch import load_file

from compare import any_index, check_format, check_same, check_tensors
from program import DONE
from recipes import PACKED, RecipeCase, file_of

CASES = int(os.environ.get("CKPTFS_RECIPES", "200"))

# The number of cases in one recipe: their rules are fewer than it may have.
BATCH = 50


def shown_path(case):
    """A directory of its own, a new name beside the checkpoints, or the name of an ordinary virtual file."""
    ways = [f"views/{case.folder.name}/model.safetensors", f"{case.folder.name}/view.safetensors"]
    if (case.folder / "a.pt").exists():
        ways.append(f"{case.folder.name}/a.safetensors")
    return case.rng.choice(ways)


def check_ranges(rng, path, whole):
    with path.open("rb") as file:
        for _ in range(4):
            start, length = rng.randrange(len(whole)), rng.randint(1, 300)
            assert os.pread(file.fileno(), length, start) == whole[start : start + length]


@pytest.mark.parametrize("batch", range(-(-CASES // BATCH)))
def test_mount_loader_export_and_torch_agree(mounts, ckptfs, tmp_path, batch):
    source, recipe = tmp_path / "models", tmp_path / "views.toml"
    source.mkdir()
    cases, text = {}, ""
    for seed in range(batch * BATCH, min(CASES, (batch + 1) * BATCH)):
        case = RecipeCase(seed, source / f"case{seed}")
        path = shown_path(case)
        cases[path] = case
        own = file_of(path, [f"{case.folder.name}/{name}" for name in case.sources], case.steps)
        (case.folder / "view.toml").write_text(own)
        text += own
    recipe.write_text(text)
    checked = ckptfs("views", "check", recipe, source)
    assert checked.code == DONE, [line for line in checked.stdout.splitlines() if "refused" in line]
    mount = mounts(source, "--views", recipe)
    for path, case in cases.items():
        # A recipe of this case only: the patterns of the others need not be compiled.
        rng, expected, recipe = random.Random(path), case.tensors, case.folder / "view.toml"
        exported = ckptfs.export(source / path, tmp_path / f"{case.folder.name}.safetensors", "--views", recipe)
        whole = exported.read_bytes()
        check_format(exported)
        check_tensors(exported, expected)
        # Random reads come first: what is in the page cache is not computed again.
        check_ranges(rng, mount / path, whole)
        assert (mount / path).read_bytes() == whole, path
        check_same(load_file(mount / path, backend="pread"), expected)
        assert not package.last_report().fallbacks, path
        check_same(load_file(source / path, views=recipe), expected)
        if len(case.sources) == 1 and case.steps:
            check_same(load_file(case.folder / case.sources[0], views=case.steps), expected)
        with safe_open(mount / path, "pt") as file:
            for name, tensor in expected.items():
                index = any_index(rng, tensor.shape[:-1] if tensor.dtype is PACKED else tensor.shape)
                check_same({name: file.get_slice(name)[index]}, {name: tensor[index].contiguous()})
