"""Loaders and workloads of these benchmarks, beside those of `ckptfs.bench`, whose `worker` runs them.

A loader returns the function that loads a request; `machine.load` makes a request of one. A workload is a generator
of a request: see the worker. `make_request` makes a request of one. Whatever it holds at its end it keeps in `kept`.
"""

import ctypes
import itertools
import mmap
import os
import random
import threading
import time

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


def unet_from_pretrained():
    import torch
    from diffusers import UNet2DConditionModel

    return lambda request: UNet2DConditionModel.from_pretrained(request["path"], torch_dtype=torch.bfloat16).state_dict()


def boto3_then_from_pretrained():
    """Downloads a model by boto3's transfer manager, with its defaults, and loads it."""
    import boto3

    load = from_pretrained()

    def download_and_load(request):
        bucket, _, prefix = request["path"].removeprefix("s3://").partition("/")
        if not request["path"].startswith("s3://"):
            return load(request)
        folder = request["folder"]
        client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        for entry in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
            client.download_file(bucket, entry["Key"], os.path.join(folder, os.path.basename(entry["Key"])))
        return load({**request, "path": folder})

    return download_and_load


def one_tensor(name):
    from ckptfs.torch import load_file

    # A warm-up has another model.
    return lambda request: load_file(request["path"], names=[name] if "s3://" in request["path"] else None)


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


def fault_and_read(request):
    """Faults a mapping at random from 32 threads, while 8 read the file in order. The result has the longest of all."""
    yield
    size, end = os.stat(request["path"]).st_size, time.monotonic() + request.get("seconds", 1)
    copy = ctypes.CDLL(None).memcpy
    longest, faults, read = [], [], []

    def measure(steps):
        slowest = done = 0
        for step in steps:
            start = time.monotonic()
            done += step()
            slowest = max(slowest, time.monotonic() - start)
            if time.monotonic() > end:
                break
        longest.append(slowest)
        return done

    with open(request["path"], "rb") as file:
        # Closed by its end: numpy's view of it is not to outlive it.
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        address = address_of(mapping)

        def fault_at_random(seed):
            rng, out = random.Random(seed), ctypes.create_string_buffer(1)

            def touch(at):
                # A call of C: the other threads go on while the page is waited for.
                copy(out, ctypes.c_void_p(address + at), 1)
                return 1

            faults.append(measure((lambda at=rng.randrange(size): touch(at)) for _ in itertools.count()))

        def read_in_order(number):
            places = itertools.cycle(range(number * size // 8, size, 1 << 20))
            read.append(measure((lambda at=at: len(os.pread(file.fileno(), 1 << 20, at))) for at in places))

        threads = [threading.Thread(target=fault_at_random, args=[n]) for n in range(32)]
        threads += [threading.Thread(target=read_in_order, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    yield {"number": 0, "longest": max(longest), "faults": sum(faults), "read": sum(read)}


def address_of(mapping):
    """The address of a mapping that is only read."""
    import numpy

    return numpy.frombuffer(mapping, dtype=numpy.uint8).ctypes.data


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
