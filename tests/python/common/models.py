"""Tiny models for the tests of libraries. They are made once from a seed, written in every published layout, and
compared after loading by every bit of every parameter and buffer."""

import copy
import hashlib
import json
import logging
import os
import warnings
from contextlib import contextmanager

# Nothing here may ask a hub; the libraries read this when they are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
    PreTrainedTokenizerFast, ResNetConfig, ResNetForImageClassification,
)  # fmt: skip
from transformers.utils.logging import disable_progress_bar

from mounts import Mounts
from program import find_binary

disable_progress_bar()
# Models this small are slower with more threads, and much slower on a busy machine.
torch.set_num_threads(1)


def llama():
    """No tied weights; positions in buffers that are not saved."""
    return _of(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
        ),
    )  # fmt: skip


def gpt2():
    """Tied embeddings: two names of one tensor."""
    return _of(
        GPT2LMHeadModel,
        GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=100, n_positions=64,
            bos_token_id=1, eos_token_id=2,
        ),
    )  # fmt: skip


def resnet():
    """Saved buffers, of floats and of integers."""
    return _of(
        ResNetForImageClassification,
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
        ),
    )  # fmt: skip


def bert():
    return _of(
        BertModel,
        BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=64,
        ),
    )  # fmt: skip


def _of(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        # The ones and zeros of a new model would look right even if they were not loaded.
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) / 8)
            elif tensor.dim() == 0:
                tensor.add_(7)
    return model


def tokenizer():
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(96))]
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip


def save_bin(model, folder, variant=None):
    """`pytorch_model.bin` as releases without safetensors wrote it: tied tensors under all their names."""
    _save_config(model, folder)
    torch.save(model.state_dict(), folder / with_variant("pytorch_model.bin", variant))


def in_one_storage(model):
    """The same weights as parts of one storage; tied ones stay tied."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel()
        parameter.data = flat[start:end].view(parameter.shape)
        start = end
    return model


def save_bin_shards(model, folder, variant=None, cloned=True):
    """The same in shards, in the order of the state dict, with an index. Not cloned, each shard has the whole
    storages of its tensors, as older releases wrote them."""
    _save_config(model, folder)
    state = model.state_dict()
    parts, size, most = [{}], 0, _shard_bytes(model)
    for name, tensor in state.items():
        size += tensor.nbytes
        if size > most and parts[-1]:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor.clone() if cloned else tensor
    assert len(parts) > 1
    whole = with_variant("pytorch_model.bin", variant).removesuffix(".bin")
    weight_map = {}
    for n, part in enumerate(parts):
        name = f"{whole}-{n + 1:05}-of-{len(parts):05}.bin"
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in state.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (folder / with_variant("pytorch_model.bin.index.json", variant)).write_text(index)


def _shard_bytes(model):
    """A limit that puts a model into several shards."""
    return sum(tensor.nbytes for tensor in model.state_dict().values()) // 3


def _save_config(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def with_variant(name, variant):
    """The name of a variant as transformers spells it: before the last suffix."""
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}.{variant}.{suffix}" if variant else name


def save_shards(model, folder, variant=None):
    """Sharded safetensors, as the library writes them."""
    model.save_pretrained(folder, max_shard_size=_shard_bytes(model), variant=variant)
    assert len(list(folder.glob("*.safetensors"))) > 1


def respell(folder, variant):
    """Gives a sharded variant the names that diffusers gives: `X-00001-of-00002.fp16.safetensors`
    instead of `X.fp16-00001-of-00002.safetensors`, and `X.fp16.safetensors.index.json`."""
    (index,) = folder.glob(f"*.index.{variant}.json")
    text = index.read_text()
    for shard in list(folder.glob(f"*.{variant}-*")):
        stem, number = shard.stem.split(f".{variant}")
        name = f"{stem}{number}.{variant}{shard.suffix}"
        text = text.replace(shard.name, name)
        shard.rename(folder / name)
    index.unlink()
    stem, suffix, *_ = index.name.split(".")
    (folder / f"{stem}.{variant}.{suffix}.index.json").write_text(text)


def halved(model):
    return copy.deepcopy(model).half()


def tensors_of(model):
    """Every parameter and buffer by its names, unsaved ones included."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def fingerprints(tensors):
    """Type, shape and a hash of the values of each tensor, fit for JSON."""
    return {name: _fingerprint(tensor) for name, tensor in sorted(tensors.items())}


def _fingerprint(tensor):
    assert not tensor.is_meta
    values = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(values).hexdigest()]


def ties(tensors):
    """Names that share a tensor."""
    groups = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.data_ptr(), set()).add(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def check_same(got, original):
    """Asserts that two models have the same parameters and buffers, and the same ties."""
    got, original = tensors_of(got), tensors_of(original)
    check_fingerprints(fingerprints(got), fingerprints(original))
    assert ties(got) == ties(original), (ties(got), ties(original))


def check_fingerprints(got, original):
    different = {
        name: (got.get(name), original.get(name))
        for name in got.keys() | original.keys()
        if got.get(name) != original.get(name)
    }
    assert not different, (len(different), dict(list(different.items())[:3]))


def check_loads_same(load, original, mounted):
    """Asserts that `load(folder)` gives the same model from both, or the same pair of a model and its missing and
    unexpected keys. The mount may give no warning that the original does not give. Gives both models."""
    (first, info), said = _heard(load, original)
    (second, info_mounted), said_mounted = _heard(load, mounted)
    check_same(second, first)
    assert info_mounted == info, (info_mounted, info)
    assert set(said_mounted) <= set(said), said_mounted
    return first, second


def _heard(load, folder):
    with listening() as said:
        loaded = load(folder)
    model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
    return (model, info), [text.replace(str(folder), "FOLDER") for text in said]


class _Listener(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


# The root logger first: others take their level from it.
LIBRARIES = ["", "transformers", "huggingface_hub"]


@contextmanager
def listening():
    """The warnings of libraries meanwhile."""
    listener = _Listener()
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield listener.said
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
        listener.said += [str(warning.message) for warning in warned]


@contextmanager
def on_show(folder, *options):
    """A mount of `folder / "source"` for as long as it is used."""
    mounts = Mounts(find_binary(), folder)
    try:
        yield mounts(folder / "source", *options)
    finally:
        mounts.end()
