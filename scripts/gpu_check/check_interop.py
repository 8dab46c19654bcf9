"""Other packages: transformers, which knows nothing of ckptfs, and those that take tensors by DLPack."""

import importlib.util
import os

import ckptfs
import safetensors.torch
import torch

import samples
from gpu_check.assertions import Skipped, check, same
from compare import check_same

# Nothing here may ask a hub; read when the libraries are imported.
os.environ["HF_HUB_OFFLINE"] = "1"


@check("install() with transformers")
def _(place):
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=999, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(place.folder, max_shard_size="3MB")
    shards = len(list(place.folder.glob("*.safetensors")))
    assert shards > 1
    # Only with accelerate can it be told where weights go.
    how = {} if importlib.util.find_spec("accelerate") is None else {"device_map": place.device}
    before, loaded = ckptfs.stats(), []
    for ours in False, True:
        if ours:
            ckptfs.install()
        try:
            one = LlamaForCausalLM.from_pretrained(place.folder, **how).eval()
            loaded.append(one if how else one.to(place.device))
        finally:
            ckptfs.uninstall()
    stats = {what: ckptfs.stats()[what] - before[what] for what in ("loads", "originals")}
    same(loaded[1].state_dict(), model.state_dict(), place.device)
    tokens = torch.arange(50, device=place.device)[None]
    with torch.no_grad():
        assert torch.equal(loaded[0](tokens).logits, loaded[1](tokens).logits)
    assert stats["loads"], f"none of its files was read by ckptfs: {stats}"
    by = "device_map" if how else "without accelerate"
    return f"{shards} shards, {by}; {stats['loads']} loads by ckptfs, {stats['originals']} left to the original"


@check("DLPack: torch")
def _(place):
    exchanged(place, torch.from_dlpack, lambda tensor: tensor.cpu())


@check("DLPack: cupy")
def _(place):
    if not place.is_gpu:
        raise Skipped("there is no GPU")
    cupy = imported("cupy")
    exchanged(place, cupy.from_dlpack, lambda array: torch.from_numpy(cupy.asnumpy(array)))


@check("DLPack: jax")
def _(place):
    jax = imported("jax")
    if place.is_gpu and not any(device.platform in ("gpu", "cuda") for device in jax.devices()):
        raise Skipped("this jax has no GPU")
    import numpy

    exchanged(place, jax.dlpack.from_dlpack, lambda array: torch.from_numpy(numpy.array(array)))


def imported(name):
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise Skipped(f"not there: {fault}") from None


def exchanged(place, take, back):
    """Checks what another package takes of tensors loaded with framework="dlpack", also after their source is gone."""
    path = place.folder / "x.safetensors"
    expected = {"a": samples.numbers(1, 300, 200), "b": torch.arange(999, dtype=torch.int32),
                "c": samples.numbers(2, 70_001).half()}  # fmt: skip
    safetensors.torch.save_file(expected, path)
    for _ in range(place.times):
        try:
            f = ckptfs.safe_open(path, "dlpack", device=place.device)
        except ckptfs.SafetensorError as refused:
            raise Skipped(f'not there: framework="dlpack": {refused}') from None
        with f:
            given = {name: f.get_tensor(name) for name in f.keys()}
            taken = {name: take(one) for name, one in given.items()}
        del f, given
        check_same({name: back(one) for name, one in taken.items()}, expected)
