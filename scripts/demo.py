"""The demo's model: a small GPT-2, saved and loaded without torch.

    demo.py make FOLDER            saves it in FOLDER/sharded and FOLDER/pickled
    demo.py safetensors FOLDER     loads both as safetensors, and compares every tensor with what was saved
    demo.py transformers FOLDER    loads both with transformers, compares, and generates tokens
"""

import json
import math
import os
import sys
import zipfile
from pathlib import Path

import numpy

LAYER_COUNT, WIDTH, VOCABULARY_COUNT, POSITION_COUNT = 4, 128, 1000, 64

# Of each shard but the last.
SHARD_TENSOR_COUNT = 20

CONFIG = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": LAYER_COUNT, "n_embd": WIDTH, "n_head": 4,
    "vocab_size": VOCABULARY_COUNT, "n_positions": POSITION_COUNT, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def model():
    """The model's tensors by their names, the same each time."""
    shapes = {"wte.weight": (VOCABULARY_COUNT, WIDTH), "wpe.weight": (POSITION_COUNT, WIDTH)}
    for n in range(LAYER_COUNT):
        for name, inner, outer in [
            ("attn.c_attn", WIDTH, 3 * WIDTH), ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH), ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ]:  # fmt: skip
            shapes |= {f"h.{n}.{name}.weight": (inner, outer), f"h.{n}.{name}.bias": (outer,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{n}.{name}.weight": (WIDTH,), f"h.{n}.{name}.bias": (WIDTH,)}
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    numbers = numpy.random.default_rng(0)
    return {
        f"transformer.{name}": numbers.normal(0, 0.02, shape).astype(numpy.float32) for name, shape in shapes.items()
    }


def make(folder):
    tensors = model()
    for name, save in [("sharded", save_shards), ("pickled", save_pickle)]:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(CONFIG, indent=2))
        save(tensors, folder / name)


def save_shards(tensors, folder):
    from safetensors.numpy import save_file

    names = list(tensors)
    shards = [names[at : at + SHARD_TENSOR_COUNT] for at in range(0, len(names), SHARD_TENSOR_COUNT)]
    weight_map = {}
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in shard}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save_pickle(tensors, folder):
    """Writes what `torch.save(tensors, ...)` writes: a zip with a pickle, which calls functions of torch for each
    tensor, and with the bytes of each."""
    entries = b"".join(
        text(name) + tensor_call(str(key), tensor) for key, (name, tensor) in enumerate(tensors.items())
    )
    # Protocol 2: a dictionary, filled with the entries since a mark.
    program = b"\x80\x02}(" + entries + b"u."
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("pytorch_model/data.pkl", program)
        archive.writestr("pytorch_model/byteorder", "little")
        for key, tensor in enumerate(tensors.values()):
            archive.writestr(f"pytorch_model/data/{key}", tensor.tobytes())
        archive.writestr("pytorch_model/version", "3\n")


def tensor_call(key, tensor):
    """The opcodes that call torch's function for a float tensor whose elements are stored in order under a key."""
    storage = tuple_of(text("storage"), name_of("torch", "FloatStorage"), text(key), text("cpu"), number(tensor.size))
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.ndim)]
    no_hooks = name_of("collections", "OrderedDict") + b")R"
    arguments = tuple_of(
        storage + b"Q", number(0), tuple_of(*map(number, tensor.shape)), tuple_of(*map(number, strides)),
        b"\x89", no_hooks,
    )  # fmt: skip
    return name_of("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def text(words):
    return b"X" + len(words.encode()).to_bytes(4, "little") + words.encode()


def number(value):
    return b"J" + value.to_bytes(4, "little")


def name_of(module, name):
    return f"c{module}\n{name}\n".encode()


def tuple_of(*items):
    return b"(" + b"".join(items) + b"t"


def load_with_safetensors(folder):
    from safetensors.numpy import load_file

    for name in ("sharded", "pickled"):
        tensors = load_file(folder / name / "model.safetensors")
        compare(name, tensors)
        print(f"{name}: {len(tensors)} tensors, equal to those that were saved")


def compare(name, tensors):
    expected = model()
    if tensors.keys() != expected.keys():
        sys.exit(f"{name}: other names: {tensors.keys() ^ expected.keys()}")
    for key, tensor in tensors.items():
        if tensor.dtype != expected[key].dtype or not numpy.array_equal(tensor, expected[key]):
            sys.exit(f"{name}: {key}: other values")


def load_with_transformers(folder):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generated = []
    for name in ("sharded", "pickled"):
        loaded = GPT2LMHeadModel.from_pretrained(folder / name).eval()
        state = loaded.state_dict()
        # The second name of a tensor that has two.
        state.pop("lm_head.weight")
        compare(name, {key: tensor.numpy() for key, tensor in state.items()})
        generated.append(loaded.generate(torch.arange(8).unsqueeze(0), max_new_tokens=8, do_sample=False))
        print(f"{name}: {loaded.num_parameters()} parameters, equal to those that were saved")
    if not torch.equal(*generated):
        sys.exit("the two models generate other tokens")
    print(f"both generate the tokens {generated[0][0, 8:].tolist()}")


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    commands = {"make": make, "safetensors": load_with_safetensors, "transformers": load_with_transformers}
    commands[command](Path(folder))
