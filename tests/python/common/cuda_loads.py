"""Loads to CUDA devices on the stubs: each function runs in a process of its own."""

import gc
import os
import threading
from pathlib import Path

import ckptfs
import pytest
import torch
from ckptfs import _ckptfs
from ckptfs.load import cuda, pipeline, prefetch
from ckptfs.load.report import Load
from ckptfs.load.torch import Torch
from ckptfs.torch import load_file

import kernels
from compare import bits

MIB = 1 << 20

# Seconds after which work that has not come is taken for lost.
SECONDS = 60

# Not in the process of the tests: the stubs have no kernels.
if "STUB_CUDA_REPORT" in os.environ:
    kernels.in_every_thread()


def same(loaded, expected, device="cuda:0"):
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        got = loaded[name]
        assert (str(got.device), got.dtype, got.shape) == (device, tensor.dtype, tensor.shape), name
        assert got.is_contiguous() and torch.equal(bits(got.cpu()), bits(tensor)), name


def straight(report=None):
    """Asserts that the load used neither a fallback nor a mapping."""
    report = report or ckptfs.last_report()
    assert report.fallbacks == {} and report.mapped == 0, report


def loads(paths):
    """Every call, of every kind of checkpoint."""
    every = {}
    for path in map(Path, paths):
        expected = load_file(path, backend="pread")
        for backend in ("mmap", "pread"):
            same(load_file(path, "cuda", backend=backend), expected)
            straight()
        report = ckptfs.last_report()
        assert (report.tensors, report.bytes) == (len(expected), sum(t.nbytes for t in expected.values()))
        same(load_file(path, device=0, num_threads=3, progress=True), expected)
        with ckptfs.safe_open(path, "pt", device="cuda") as file:
            same(file.get_tensors(), expected)
            for name in list(expected)[:20]:
                tensor, part = expected[name], file.get_slice(name)
                same({name: file.get_tensor(name)}, {name: tensor})
                same({name: part[...]}, {name: tensor})
                if tensor.ndim and tensor.shape[0] > 2:
                    same({name: part[1:-1]}, {name: tensor[1:-1]})
                    same({name: part[1]}, {name: tensor[1].clone()})
                    same({name: part[..., ::2]}, {name: tensor[..., ::2].contiguous()})
                straight()
            with file.prefetch() as loader:
                same(dict(loader), expected)
                straight(loader.report)
        every[path] = expected
    for got, expected in zip(ckptfs.load_many(list(every), device="cuda"), every.values(), strict=True):
        same(got, expected)
    straight()


def small_tensors_share_blocks(path):
    expected = load_file(path)
    loaded = load_file(path, "cuda")
    for tensor in loaded.values():
        assert tensor.data_ptr() % 256 == 0
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in loaded.values()}
    assert len(storages) < len(loaded) / 20
    assert max(storage.nbytes() for storage in storages.values()) <= 4 * MIB
    # One tensor keeps its own block and no other.
    name = next(iter(loaded))
    kept = loaded[name]
    del loaded, storages, tensor
    torch.cuda.synchronize()
    assert 0 < torch.cuda.memory_allocated() <= 4 * MIB
    same({name: kept}, {name: expected[name]})


def streams_keep_their_order(path):
    """Earlier work of a stream with the memory is over before the load writes it, and later work finds the loaded
    bytes."""
    expected = load_file(path)
    size = max(tensor.nbytes for tensor in expected.values())
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            old = torch.full((size,), 7, dtype=torch.uint8).to("cuda")
            # A copy on the device that nothing waits for when its source is given to the load.
            kept = torch.empty_like(old).copy_(old)
            del old
            loaded = load_file(path, "cuda")
            copies = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in loaded.items()}
            same(copies, expected)
            assert (kept.cpu() == 7).all()
            del loaded, copies, kept


def prefetch_hands_over(path):
    """A stream that takes a tensor keeps its memory until its work is done."""
    expected = load_file(path)
    other = torch.cuda.Stream()
    with ckptfs.safe_open(path, "pt", device="cuda") as file:
        with torch.cuda.stream(other), file.prefetch() as loader:
            copies = {}
            for name, tensor in loader:
                copies[name] = torch.empty_like(tensor).copy_(tensor)
                del tensor
            again = load_file(path, "cuda")
            same(copies, expected)
            same(again, expected)
        # Closed at once: pending work ends, and the memory can be reused.
        loader = file.prefetch()
        loader.close()
        loader._state.thread.join()
    same(load_file(path, "cuda"), expected)
    with ckptfs.safe_open(path, "pt") as file, pytest.raises(ckptfs.SafetensorError, match="one device"):
        file.prefetch(device={"": "cuda"})


def handed_over_memory_stays(path):
    """The stream that was given a tensor has its memory until its work is done, whatever is allocated next."""
    expected = load_file(path)
    aside, other = cuda.BackgroundStream(torch.device("cuda")), torch.cuda.Stream()
    with aside:
        loaded = load_file(path, "cuda")
        mark = aside.mark()
    with torch.cuda.stream(other):
        copies = {}
        for name, tensor in expected.items():
            aside.hand_over(loaded[name], mark)
            copies[name] = torch.empty_like(tensor, device="cuda").copy_(loaded.pop(name))
    with aside:
        others = [torch.zeros_like(tensor).to("cuda") for tensor in expected.values()]
        torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(other):
        same(copies, expected)
    assert not any(tensor.any() for tensor in map(torch.Tensor.cpu, others))


def is_stopped(path):
    """A load that is stopped ends with an error."""
    stop = _ckptfs.Stop()
    stop.set()
    with ckptfs.safe_open(path, "pt") as file, file._handle.use() as opened, Load(stop=stop) as load:
        parts = [opened.tensor(name) for name in opened.names]
        with pytest.raises(ckptfs.SafetensorError, match="stopped"):
            cuda.load_to_devices(parts, [torch.device("cuda")] * len(parts), load)
    assert torch.cuda.memory_allocated() == 0


def lands_in_place(path):
    expected = load_file(path)
    into = {name: torch.empty_like(tensor, device="cuda") for name, tensor in expected.items()}
    version = {name: tensor._version for name, tensor in into.items()}
    assert load_file(path, into=into).keys() == into.keys()
    straight()
    same(into, expected)
    assert all(tensor._version > version[name] for name, tensor in into.items())
    # Some on one device, some on the other.
    names = list(expected)
    into = {name: torch.empty_like(expected[name], device="cuda" if n % 2 else "cpu")
            for n, name in enumerate(names)}  # fmt: skip
    load_file(path, into=into)
    same({name: into[name] for name in names[1::2]}, {name: expected[name] for name in names[1::2]})
    same({name: into[name] for name in names[::2]}, {name: expected[name] for name in names[::2]}, "cpu")
    shared = torch.empty(max(tensor.nbytes for tensor in expected.values()), dtype=torch.uint8, device="cuda")
    shared = {name: shared[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
              for name, tensor in expected.items()}  # fmt: skip
    with pytest.raises(ckptfs.SafetensorError, match="share memory"):
        load_file(path, into=shared)


def casts_of_a_recipe(path):
    # Few values: the stub interprets the kernels.
    views = {"cast": [{"tensors": "small.[ab]", "to": "float16"}], "only": ["small.*"]}
    expected = load_file(path, views=views)
    for _ in range(2):
        same(load_file(path, "cuda", views=views), expected)
        report = ckptfs.last_report()
        cast_bytes = expected["small.a"].nbytes + expected["small.b"].nbytes
        assert (report.cast, report.device_cast, report.bytes) == (cast_bytes, cast_bytes, cast_bytes + 72), report


def casts_of_any_layout(folder):
    """The device casts contiguous tensors, the host all others."""
    cast = {"cast": [{"tensors": "*", "to": "float16"}]}
    stack = {"stack": [{"tensors": r"layers\.(\d+)\.w", "to": "w"}]}
    cases = [("plain.pt", cast, True), ("layers.pt", cast | stack, False)]
    cases += [(name, cast, False) for name in ("strided.pt", "swapped.pt", "boxed")]
    for name, views, is_contiguous in cases:
        expected = load_file(Path(folder) / name, views=views)
        assert {tensor.dtype for tensor in expected.values()} == {torch.float16}
        same(load_file(Path(folder) / name, "cuda", views=views), expected)
        report, count = ckptfs.last_report(), sum(tensor.nbytes for tensor in expected.values())
        assert (report.cast, report.device_cast) == (count, count * is_contiguous), (name, report)
        straight()


def casts_there(path):
    copy = Torch.copy

    def there(target, source):
        assert target.device == source.device
        copy(target, source)

    Torch.copy = staticmethod(there)
    expected = {name: tensor.to(torch.float64) if tensor.is_floating_point() else tensor
                for name, tensor in load_file(path).items()}  # fmt: skip
    for at_once in (256 * MIB, 5 * MIB):
        pipeline._CAST_BYTES = at_once
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loaded = load_file(path, "cuda", dtype="float64")
        straight()
        # Torch allocates in steps; here two of the tensors are large.
        most = sum(tensor.nbytes for tensor in expected.values()) + at_once + 3 * MIB
        assert torch.cuda.max_memory_allocated() - before <= most, torch.cuda.max_memory_allocated()
        same(loaded, expected)
        del loaded
        into = {name: torch.empty_like(tensor, device="cuda") for name, tensor in expected.items()}
        load_file(path, into=into, dtype=torch.float64)
        same(into, expected)


def is_placed(path, names):
    """Parts of a model on several devices, in one load."""
    expected = load_file(path)
    first, rest = names
    asked = {first: 1, rest: "cuda:0", "": "cpu"}
    where = {name: "cuda:1" if name.startswith(f"{first}.") else "cuda:0" if name.startswith(f"{rest}.") else "cpu"
             for name in expected}  # fmt: skip
    assert set(where.values()) == {"cuda:0", "cuda:1", "cpu"}
    for dtype in (None, torch.float64):
        loaded = load_file(path, asked, dtype=dtype)
        for name, tensor in expected.items():
            same({name: loaded[name]}, {name: tensor if dtype is None else tensor.to(dtype)}, where[name])
    with ckptfs.safe_open(path, "pt", device=asked) as file:
        for name, tensor in expected.items():
            same({name: file.get_tensor(name)}, {name: tensor}, where[name])
    with pytest.raises(ckptfs.SafetensorError, match="names no device for it"):
        load_file(path, {first: 1})
    assert torch.cuda.current_device() == 0
    same(load_file(path, "cuda:1"), expected, "cuda:1")
    torch.cuda.set_device(1)
    same(load_file(path, "cuda"), expected, "cuda:1")
    assert torch.cuda.current_device() == 1


def has_no_room(path):
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        load_file(path, "cuda")
    assert torch.cuda.memory_allocated() == before
    some = load_file(path, "cuda", names="small*")
    same(some, load_file(path, names="small*"))


def pins_nothing(path):
    """Where no memory can be pinned, torch copies, and the report says so."""
    expected = load_file(path)
    loaded = load_file(path, "cuda")
    [(why, count)] = ckptfs.last_report().fallbacks.items()
    assert why.startswith("copied to cuda by torch: cuda:0: there is no host memory"), why
    assert count == len(expected)
    same(loaded, expected)
    into = {name: torch.empty_like(tensor, device="cuda") for name, tensor in expected.items()}
    same(load_file(path, into=into), expected)


def pins_little(path, most):
    """With little memory to pin, everything goes through that."""
    expected = load_file(path)
    for _ in range(2):
        same(load_file(path, "cuda"), expected)
        straight()
    ckptfs.configure(pinned=most)
    same(load_file(path, "cuda"), expected)
    straight()


def fails_and_goes_on(path, call):
    """A copy that fails is an error that leaves nothing, and the next load is right."""
    expected = load_file(path)
    with pytest.raises(ckptfs.SafetensorError, match=f"cuda:0: {call}: "):
        load_file(path, "cuda")
    assert torch.cuda.memory_allocated() == 0
    same(load_file(path, "cuda"), expected)


def truncated_meanwhile(path):
    with ckptfs.safe_open(path, "pt", device="cuda") as file:
        os.truncate(path, os.path.getsize(path) // 2)
        with pytest.raises(ckptfs.SafetensorError, match="changed|shorter|truncated"):
            file.get_tensors()
    assert torch.cuda.memory_allocated() == 0


def many_threads(path):
    expected, failed = load_file(path), []

    def load(stream):
        try:
            with torch.cuda.stream(stream):
                for _ in range(4):
                    same(load_file(path, "cuda"), expected)
        except BaseException as fault:
            failed.append(fault)

    threads = [threading.Thread(target=load, args=[torch.cuda.Stream()]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    # Chunks that were busy when their load ended stay pinned until a load finds them idle.
    same(load_file(path, "cuda"), expected)


def forked(path):
    """A forked child of a process that has loaded refuses, as torch does there; the parent goes on."""
    expected = load_file(path)
    same(load_file(path, "cuda"), expected)
    child = os.fork()
    if not child:
        try:
            load_file(path, "cuda")
        except RuntimeError as fault:
            os._exit(0 if "forked" in str(fault) else 2)
        except BaseException:
            os._exit(3)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    same(load_file(path, "cuda"), expected)


def transformers_on_a_device(folder):
    """With `install`, each tensor goes straight to its device."""
    import models
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(folder).state_dict()
    ckptfs.install()
    copied = []
    to, torch.Tensor.to = torch.Tensor.to, lambda *args, **how: copied.append(how) or to(*args, **how)
    before = ckptfs.stats()
    model = LlamaForCausalLM.from_pretrained(folder, device_map="cuda")
    torch.Tensor.to = to
    after = ckptfs.stats()
    assert after["originals"] == 0 and after["bytes"] - before["bytes"] >= sum(t.nbytes for t in plain.values())
    assert not any("cuda" in str(how.get("device")) for how in copied), copied
    assert models.fingerprints({name: tensor.cpu() for name, tensor in model.state_dict().items()}) == \
        models.fingerprints(plain)


def in_steps(path):
    """A progress bar that moves needs as many calls as its steps."""
    pipeline._PROGRESS_BYTES = MIB
    same(load_file(path, "cuda", progress=True), load_file(path))


# Programs of several ranks may wait for each other as long as they like.
IMPATIENT = ()


def on_every_rank(package, group, folder, out):
    """Every rank has every tensor on its device, and all ranks together have read each byte once."""
    from ckptfs.distributed import load_distributed

    for at_once in (MIB, 64 * MIB):
        load_distributed._PARCEL_BYTES = at_once
        loaded = package.load_distributed(folder / "mixed.safetensors", group, device="cuda")
        report = ckptfs.last_report()
        out[at_once] = {name: tensor.cpu() for name, tensor in loaded.items()}
        out[at_once, "read"] = report.cached + report.direct + report.buffered
        assert all(tensor.device.type == "cuda" for tensor in loaded.values()) and report.fallbacks == {}
        rows = {"large": 0, "small.b": 0}
        loaded = package.load_distributed(folder / "mixed.safetensors", group, device="cuda", names=list(rows), shard=rows)
        out[at_once, "cut"] = {name: tensor.cpu() for name, tensor in loaded.items()}


def several_ranks(folder):
    import compare
    import ranks

    folder = Path(folder)
    expected = load_file(folder / "mixed.safetensors")
    ours = ranks.run(folder, 2, "cuda_loads", "ckptfs.torch", "on_every_rank")
    for at_once in (MIB, 64 * MIB):
        for rank, out in enumerate(ours):
            same(out[at_once], expected, "cpu")
            for name, tensor in out[at_once, "cut"].items():
                compare.same(tensor, ranks.part(expected[name], 0, rank, 2))
        total = sum(tensor.nbytes for tensor in expected.values())
        assert sum(out[at_once, "read"] for out in ours) <= total + MIB


def shares_memory(path):
    expected = load_file(path)
    for backend in ("mmap", "pread"):
        loaded = load_file(path, "cuda", backend=backend)
        straight()
        same(loaded, expected)
    with ckptfs.safe_open(path, "pt", device="cuda") as file:
        with file.prefetch() as loader:
            same(dict(loader), expected)
        same({"large": file.get_slice("large")[1:3]}, {"large": expected["large"][1:3]})
    # Used by work that is not over when the last reference to it is gone.
    copies = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in loaded.items()}
    del loaded
    same(copies, expected)
    _ckptfs.trim_pinned()


def storage_writes(path):
    """Storage writes straight to the device where that is asked for; elsewhere the report says why not."""
    # Pages that are mapped cannot be evicted.
    expected = load_file(path, backend="pread")

    def loaded(**how):
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        same(load_file(path, "cuda", **how), expected)
        straight()
        return ckptfs.last_report()

    report = loaded()
    assert report.gpudirect == 0 and "nvidia-fs is not loaded" in report.without_gpudirect
    ckptfs.configure(gpudirect=True)
    report = loaded()
    assert report.gpudirect > 19 * MIB and report.direct == 0 and report.without_gpudirect is None, report
    assert "gpudirect 2" in repr(report) and ckptfs.stats()["gpudirect"] == report.gpudirect
    ckptfs.configure(gpudirect=False)
    report = loaded()
    assert report.gpudirect == 0 and report.without_gpudirect == "GPUDirect Storage: is switched off", report
    assert "is switched off" in repr(report)


def nothing_is_held(path):
    """A background load that is closed, fails or is used up leaves nothing to the garbage collector."""
    gc.disable()
    prefetch._BATCH_BYTES = MIB
    read, changed = prefetch.load_batch, threading.Condition()
    for ends in ("taken", "closed", "failed"):
        given, taken, held = 0, 0, []

        def batch(parts, *how, ends=ends, held=held):
            nonlocal given
            with changed:
                # Until every tensor that was read before has been taken and released.
                assert ends != "taken" or changed.wait_for(lambda: taken == given, SECONDS)
            held.append(torch.cuda.memory_allocated())
            if ends == "failed" and len(held) == 3:
                raise torch.OutOfMemoryError("no more")
            given += len(parts)
            return read(parts, *how)

        prefetch.load_batch = batch
        with ckptfs.safe_open(path, "pt", device="cuda") as file, file.prefetch() as loader:
            if ends == "taken":
                for _ in range(len(loader)):
                    # Released at once.
                    next(iter(loader))
                    with changed:
                        taken += 1
                        changed.notify_all()
                assert len(held) > 2 and not any(held), held
            elif ends == "failed":
                loader._state.thread.join()
                with pytest.raises(ckptfs.SafetensorError, match="no more"):
                    next(iter(loader))
        loader._state.thread.join()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == 0, (ends, torch.cuda.memory_allocated())


def refuses_a_capture(path):
    real = torch.cuda.is_current_stream_capturing
    torch.cuda.init()
    torch.cuda.is_current_stream_capturing = lambda: torch.cuda.current_device() == 0
    into = {name: torch.empty_like(tensor, device="cuda") for name, tensor in load_file(path).items()}
    for load in (lambda: load_file(path, "cuda"), lambda: load_file(path, into=into)):
        with pytest.raises(ckptfs.SafetensorError, match="part of a CUDA graph"):
            load()
    torch.cuda.is_current_stream_capturing = real
    same(load_file(path, "cuda"), load_file(path))
    with pytest.raises(ckptfs.SafetensorError, match="no such device, 1 found"):
        load_file(path, "cuda:5")
