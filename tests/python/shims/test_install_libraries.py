"""With `install`, transformers, diffusers, accelerate and peft load what they load without: plain and mounted, imported
before and after it, in threads. None of their calls is left to the original. In an environment that `ckptfs enable`
prepared that holds for programs without a word of ckptfs, and files of mounts."""

import json

import pytest
import safetensors.torch

from environments import OTHER_HOOKS, Environment
from installed import run
from samples import numbers
from program import COMMON

PROGRAMS = """
import json, sys, threading
first, groups, *shelves, common = sys.argv[1:]
sys.path.insert(0, common)
if first == "enabled":
    assert "ckptfs" not in sys.modules
if first == "installed":
    import ckptfs
    ckptfs.install()
import models

def loader_of(kind):
    if kind == "transformers":
        from transformers import LlamaForCausalLM
        return lambda folder: models.tensors_of(LlamaForCausalLM.from_pretrained(folder))
    if kind == "diffusers":
        from diffusers import UNet2DConditionModel
        return lambda folder: UNet2DConditionModel.from_pretrained(folder).state_dict()
    if kind == "accelerate":
        from accelerate import init_empty_weights, load_checkpoint_in_model
        from transformers import LlamaConfig, LlamaForCausalLM
        def load(folder):
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
            load_checkpoint_in_model(model, folder)
            return model.state_dict()
        return load
    from peft.utils import load_peft_weights
    return lambda folder: load_peft_weights(folder, device="cpu")

def outcomes(kinds):
    if first == "installed":
        import ckptfs
        ckptfs.install()
    loaders = {kind: loader_of(kind) for kind in kinds}
    load_all = lambda kind: [models.fingerprints(loaders[kind](f"{shelf}/{kind}")) for shelf in shelves]
    plain = {kind: load_all(kind) for kind in kinds} if first == "imported" else {}
    import ckptfs
    if first == "imported":
        ckptfs.install()
    loaded, used = {}, {}
    for kind in kinds:
        before = ckptfs.stats()
        every = loaded[kind] = [load_all(kind)]
        after = ckptfs.stats()
        used[kind] = after["loads"] >= before["loads"] + len(shelves) - (first == "enabled")
        threads = [threading.Thread(target=lambda: every.append(load_all(kind))) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    ckptfs.uninstall()
    for kind in kinds:
        every = loaded[kind] + [load_all(kind)]
        same = len(every) == 4 and all(one == plain.get(kind, every[0]) for one in every)
        same &= every[0][0] == every[0][1]
        if first == "enabled":
            # Only the files of the mount are ours.
            before = ckptfs.stats()["loads"]
            loaders[kind](f"{shelves[0]}/{kind}")
            used[kind] &= ckptfs.stats()["loads"] == before
        yield [kind, same, len(every[0][0]), used[kind], ckptfs.stats()["originals"]]

print(json.dumps([outcome for group in groups.split("/") for outcome in outcomes(group.split())]))
"""

# Threads that load with diffusers at once can leave torch's modules without memory, so it comes after all others.
KINDS = "peft accelerate transformers/diffusers"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Models by the library that loads them, in shards where it supports them."""
    import models
    from diffusers import UNet2DConditionModel

    folder = tmp_path_factory.mktemp("installed")
    models.save_shards(models.llama(), folder / "transformers")
    (folder / "accelerate").symlink_to("transformers")
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4, cross_attention_dim=8,
    )  # fmt: skip
    unet.save_pretrained(folder / "diffusers")
    lora = {f"base_model.model.layers.{n}.lora_{ab}.weight": numbers(n, 4, 8) for n in range(3) for ab in "AB"}
    (folder / "peft").mkdir()
    safetensors.torch.save_file(lora, folder / "peft" / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def check(outcomes):
    assert [kind for kind, *_ in outcomes] == KINDS.replace("/", " ").split()
    for kind, same, count, used, left_to_originals in outcomes:
        assert (same, used, left_to_originals) == (True, True, 0) and count > 4, kind


@pytest.mark.parametrize("first", ["installed", "imported"])
def test_libraries_load_the_same_through_ours(shelf, mounts, first):
    check(run(PROGRAMS, first, KINDS, shelf, mounts(shelf).point, str(COMMON)))


@pytest.mark.parametrize("hooks", [(), OTHER_HOOKS], ids=["alone", "with-others"])
def test_libraries_load_the_same_in_an_enabled_environment(shelf, mounts, tmp_path, hooks):
    """An environment of its own, also with the `.pth` files of other packages."""
    environment = Environment(tmp_path / "env", hooks).enable()
    done = environment.start("-c", PROGRAMS, "enabled", KINDS, shelf, mounts(shelf).point, COMMON)
    assert done.returncode == 0 and "ckptfs" not in done.stderr, done.stderr
    check(json.loads(done.stdout.splitlines()[-1]))
