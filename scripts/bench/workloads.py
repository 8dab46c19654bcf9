"""What is measured of loading, as bench.worker has it done: each of LOADERS imports what it needs and gives what
loads: a file or a folder in, tensors by name out.

In: a path, and a loader's name. Out: a call that loads and keeps what it loaded, and a number: of `touching` the sum of
one byte in every 4096 of all tensors, of `checking` a digest of all of them.
"""

import hashlib
import mmap
import os
import random
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def files_of(path):
    """Of a checkpoint; a file is its own."""
    if not os.path.isdir(path):
        return [path]
    return sorted(str(file) for file in Path(path).iterdir() if file.suffix in (".safetensors", ".bin"))


def each(load):
    return lambda path: {name: tensor for file in files_of(path) for name, tensor in load(file).items()}


def from_pretrained():
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return lambda path: LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()


def from_pretrained_installed():
    import ckptfs

    ckptfs.install()
    load = from_pretrained()

    def taken_over(path):
        loads = ckptfs.stats()["loads"]
        tensors = load(path)
        assert ckptfs.stats()["loads"] > loads and ckptfs.stats()["originals"] == 0
        return tensors

    return taken_over


def from_pretrained_disabled():
    import ckptfs

    ckptfs.configure(disable=True)
    ckptfs.install()
    load = from_pretrained()

    def left_alone(path):
        tensors = load(path)
        assert ckptfs.stats()["loads"] == 0
        return tensors

    return left_alone


def ckptfs_owned():
    from ckptfs.torch import load_file

    return lambda path: load_file(path, backend="pread")


def ckptfs_mapped():
    from ckptfs.torch import load_file

    return lambda path: load_file(path, backend="mmap")


def ckptfs_into():
    import ckptfs
    import torch
    from ckptfs.torch import load_file

    def load(path):
        with ckptfs.safe_open(path, "pt") as f:
            into = {name: torch.empty(f.get_slice(name).get_shape(), dtype=torch.bfloat16) for name in f.keys()}
        return load_file(path, into=into)

    return load


def safetensors_mapped():
    from safetensors.torch import load_file

    return each(load_file)


def safetensors_owned():
    from safetensors.torch import load_file

    return each(lambda file: load_file(file, backend="pread"))


def safetensors_cloned():
    from safetensors.torch import load_file

    return each(lambda file: {name: tensor.clone() for name, tensor in load_file(file).items()})


def fastsafetensors_buffer():
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load(path):
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: files_of(path)})
        buffer = loader.copy_files_to_device()
        tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
        # They are views of memory that closing it would free.
        load.kept = loader, buffer
        return tensors

    return load


def runai_buffer():
    from runai_model_streamer import SafetensorsStreamer

    def load(path):
        streamer = SafetensorsStreamer()
        streamer.__enter__()
        streamer.stream_files(files_of(path))
        # They are views of one buffer as large as the model, which is not used twice.
        load.kept = streamer
        return dict(streamer.get_tensors())

    return load


def torch_load():
    import torch

    return each(lambda file: torch.load(file, weights_only=True))


def torch_load_mapped():
    import torch

    return each(lambda file: torch.load(file, weights_only=True, mmap=True))


LOADERS = {
    loader.__name__: loader
    for loader in (
        from_pretrained, from_pretrained_installed, from_pretrained_disabled, ckptfs_owned, ckptfs_mapped, ckptfs_into,
        safetensors_mapped, safetensors_owned, safetensors_cloned, fastsafetensors_buffer, runai_buffer,
        torch_load, torch_load_mapped,
    )
}  # fmt: skip


def with_one_thread():
    import torch

    torch.set_num_threads(1)
    return torch


def touched(tensor):
    import torch

    return tensor.view(torch.uint8).reshape(-1)[::4096].sum().item()


def touching(path, loader):
    with_one_thread()
    load, kept = LOADERS[loader](), {}

    def touch():
        kept.update(load(path))
        return sum(map(touched, kept.values()))

    return touch


def checking(path, loader):
    torch, load = with_one_thread(), LOADERS[loader]()

    def checked():
        tensors, digest = load(path), hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    return checked


def in_random_order(path):
    """Each tensor is touched before the next one is asked for."""
    with_one_thread()
    from safetensors import safe_open

    kept = []

    def load():
        with safe_open(path, "pt") as f:
            names = sorted(f.keys())
            random.Random(7).shuffle(names)
            return sum(map(touched_and_kept, map(f.get_tensor, names)))

    def touched_and_kept(tensor):
        kept.append(tensor)
        return touched(tensor)

    return load


def mapping(path):
    """Without torch, for many at once."""
    kept = []

    def touch():
        with open(path, "rb") as file:
            kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return sum(kept[0][:: mmap.PAGESIZE])

    return touch


def ckptfs_opened(path):
    with_one_thread()
    import ckptfs

    def opened():
        with ckptfs.safe_open(path, "pt") as f:
            return len(f.keys())

    return opened


def safetensors_opened(path):
    with_one_thread()
    import safetensors

    def opened():
        # Open at once, as who loads from all of them has them.
        files = [safetensors.safe_open(file, "pt") for file in files_of(path)]
        return sum(len(f.keys()) for f in files)

    return opened
