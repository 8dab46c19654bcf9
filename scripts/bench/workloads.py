"""Loaders and workloads of these benchmarks, beside those of `ckptfs.bench`, whose `worker` runs them.

A loader returns the function that loads a request; `machine.load` makes a request of one. A workload is a generator
of a request: see the worker. `make_request` makes a request of one. Whatever it holds at its end it keeps in `kept`.
"""

import mmap
import os
import random

from ckptfs.bench.loaders import files_of, kept

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def make_request(function, **options):
    """A request that does a workload."""
    return {"workload": f"{function.__module__}:{function.__name__}", **options}


def from_pretrained():
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return lambda request: LlamaForCausalLM.from_pretrained(request["path"], dtype=torch.bfloat16).state_dict()


def from_pretrained_with_install():
    import ckptfs

    ckptfs.install()
    load = from_pretrained()

    def load_and_check_replaced(request):
        loads = ckptfs.stats()["loads"]
        tensors = load(request)
        assert ckptfs.stats()["loads"] > loads and ckptfs.stats()["originals"] == 0
        return tensors

    return load_and_check_replaced


def from_pretrained_with_install_disabled():
    import ckptfs

    ckptfs.configure(disable=True)
    ckptfs.install()
    load = from_pretrained()

    def load_and_check_original(request):
        tensors = load(request)
        assert ckptfs.stats()["loads"] == 0
        return tensors

    return load_and_check_original


def touch_in_random_order(request):
    """Touches each tensor before it asks for the next one."""
    from ckptfs.bench.worker import touch
    from safetensors import safe_open

    yield
    with safe_open(request["path"], "pt") as f:
        names = sorted(f.keys())
        random.Random(7).shuffle(names)
        total = 0
        for name in names:
            kept.append(f.get_tensor(name))
            total += touch(kept[-1])
    yield {"number": total}


def map_file(request):
    """Maps a file and touches its pages, for many processes at once."""
    yield
    with open(request["path"], "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    yield {"number": sum(kept[-1][:: mmap.PAGESIZE])}


def open_with_ckptfs(request):
    import ckptfs

    yield
    with ckptfs.safe_open(request["path"], "pt") as f:
        count = len(f.keys())
    yield {"number": count}


def open_with_safetensors(request):
    import safetensors

    yield
    # All are open at once, as in a program that loads from all of them.
    files = [safetensors.safe_open(file, "pt") for file in files_of(request)]
    count = sum(len(f.keys()) for f in files)
    del files
    yield {"number": count}
