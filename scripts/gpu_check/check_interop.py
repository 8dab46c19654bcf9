"""Other packages: transformers, which knows nothing of ckptfs, and those that take tensors by DLPack."""

import importlib.util
import os

import ckptfs
import safetensors.torch
import torch

import samples
from gpu_check.assertions import Skipped, check, assert_same
from compare import check_same

# Nothing here may ask a hub; read when the libraries are imported.
os.environ["HF_HUB_OFFLINE"] = "1"


@check("install() with transformers")
def _(context):
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=999, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(context.folder, max_shard_size="3MB")
    shards = len(list(context.folder.glob("*.safetensors")))
    assert shards > 1
    # Only with accelerate can it be told where weights go.
    options = {} if importlib.util.find_spec("accelerate") is None else {"device_map": context.device}
    counts_before, loaded = ckptfs.stats(), []
    for is_ours in False, True:
        if is_ours:
            ckptfs.install()
        try:
            copy = LlamaForCausalLM.from_pretrained(context.folder, **options).eval()
            loaded.append(copy if options else copy.to(context.device))
        finally:
            ckptfs.uninstall()
    counts = {name: ckptfs.stats()[name] - counts_before[name] for name in ("loads", "originals")}
    assert_same(loaded[1].state_dict(), model.state_dict(), context.device)
    tokens = torch.arange(50, device=context.device)[None]
    with torch.no_grad():
        assert torch.equal(loaded[0](tokens).logits, loaded[1](tokens).logits)
    assert counts["loads"], f"none of its files was read by ckptfs: {counts}"
    placement = "device_map" if options else "without accelerate"
    loads, originals = counts["loads"], counts["originals"]
    return f"{shards} shards, {placement}; {loads} loads by ckptfs, {originals} left to the original"


@check("DLPack: torch")
def _(context):
    check_exchange(context, torch.from_dlpack, lambda tensor: tensor.cpu())


@check("DLPack: cupy")
def _(context):
    if not context.is_gpu:
        raise Skipped("there is no GPU")
    cupy = import_or_skip("cupy")
    check_exchange(context, cupy.from_dlpack, lambda array: torch.from_numpy(cupy.asnumpy(array)))


@check("DLPack: jax")
def _(context):
    jax = import_or_skip("jax")
    if context.is_gpu and not any(device.platform in ("gpu", "cuda") for device in jax.devices()):
        raise Skipped("this jax has no GPU")
    import numpy

    check_exchange(context, jax.dlpack.from_dlpack, lambda array: torch.from_numpy(numpy.array(array)))


def import_or_skip(name):
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise Skipped(f"not there: {fault}") from None


def check_exchange(context, take_tensor, to_torch):
    """Checks what another package takes of tensors loaded with framework="dlpack", also after their source is gone."""
    path = context.folder / "x.safetensors"
    expected = {"a": samples.numbers(1, 300, 200), "b": torch.arange(999, dtype=torch.int32),
                "c": samples.numbers(2, 70_001).half()}  # fmt: skip
    safetensors.torch.save_file(expected, path)
    for _ in range(context.repeats):
        try:
            f = ckptfs.safe_open(path, "dlpack", device=context.device)
        except ckptfs.SafetensorError as refused:
            raise Skipped(f'not there: framework="dlpack": {refused}') from None
        with f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
            exchanged = {name: take_tensor(tensor) for name, tensor in tensors.items()}
        del f, tensors
        check_same({name: to_torch(array) for name, array in exchanged.items()}, expected)
