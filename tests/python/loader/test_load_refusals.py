"""An impossible request raises the documented exception with words that help. Nothing half done is handed out, and
the next load works."""

import contextlib
import errno
import json
import os
import pickle
import subprocess
import sys
import tempfile

import ckptfs
import ckptfs.fastsafetensors
import ckptfs.numpy
import ckptfs.torch
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from compare import check_same
from samples import numbers

Refused = ckptfs.SafetensorError


@pytest.fixture
def path(tmp_path):
    save_file({"a": numbers(1, 30, 20), "b": torch.arange(9)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_it_is_an_error_of_safetensors_too(path):
    with pytest.raises(safetensors.SafetensorError):
        ckptfs.torch.load_file(path, names=["nobody"])
    assert issubclass(ckptfs.SafetensorError, Exception)


def test_it_is_one_where_safetensors_was_not_imported(path):
    script = "import sys, ckptfs\ntry: ckptfs.safe_open(sys.argv[1], 'pt').get_slice('nobody')\n" \
             "except ckptfs.SafetensorError as e: assert type(e) is ckptfs.SafetensorError\n" \
             "assert 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


def test_unknown_names_are_refused(path):
    with ckptfs.safe_open(path, "pt") as file:
        for ask in file.get_tensor, file.get_slice, file.get_tensor_meta:
            with pytest.raises(Refused, match="does not contain tensor.*'?aa'?") as refused:
                ask("aa")
            assert any("what to do" in note for note in refused.value.__notes__)
        with pytest.raises(Refused, match="does not contain"):
            file.prefetch({"aa": None})
    with pytest.raises(Refused, match="no tensor matches"):
        ckptfs.torch.load_file(path, names="z*")
    with pytest.raises(Refused, match="does not contain"):
        ckptfs.torch.load_file(path, into={"aa": torch.zeros(1)})


def test_missing_and_unreadable_paths_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file or directory: .*nothing"):
        ckptfs.safe_open(tmp_path / "nothing", "pt")
    (tmp_path / "text.safetensors").write_text("a text that is no checkpoint at all")
    with pytest.raises(Refused, match="text.safetensors"):
        ckptfs.torch.load_file(tmp_path / "text.safetensors")
    with pytest.raises(Refused):
        ckptfs.torch.load(b"no checkpoint")
    with pytest.raises(TypeError):
        ckptfs.safe_open(3, "pt")


OF_THE_SYSTEM = {
    "below-a-file": ("x.safetensors/y.safetensors", NotADirectoryError, errno.ENOTDIR),
    "a-loop": ("loop.safetensors", OSError, errno.ELOOP),
    "a-long-name": ("n" * 300, OSError, errno.ENAMETOOLONG),
    "a-folder-that-may-not-be-read": ("locked", PermissionError, errno.EACCES),
    "a-file-that-may-not-be-read": ("locked.safetensors", PermissionError, errno.EACCES),
    "nothing": ("nothing.safetensors", FileNotFoundError, errno.ENOENT),
    "a-link-to-nothing": ("dangling.safetensors", FileNotFoundError, errno.ENOENT),
}

ASKS = {
    "load_file": lambda path: ckptfs.torch.load_file(path), "numpy": lambda path: ckptfs.numpy.load_file(path),
    "safe_open": lambda path: ckptfs.safe_open(path, "pt"), "load_many": lambda path: ckptfs.load_many([path]),
    "fastsafetensors": lambda path: ckptfs.fastsafetensors.fastsafe_open(path),
}  # fmt: skip


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize(("name", "kind", "number"), OF_THE_SYSTEM.values(), ids=OF_THE_SYSTEM)
def test_a_failed_system_call_is_its_oserror(path, name, kind, number, ask):
    (path.parent / "loop.safetensors").symlink_to("loop.safetensors")
    (path.parent / "dangling.safetensors").symlink_to("nothing.safetensors")
    (path.parent / "locked").mkdir(mode=0)
    (path.parent / "locked.safetensors").touch(mode=0)
    asked = str(path.parent / name)
    with as_nobody(path.parent), pytest.raises(kind) as refused:
        ask(asked)
    fault = refused.value
    assert fault.errno == number and asked in str(fault)
    assert any("what to do" in note and "dmesg" not in note for note in fault.__notes__)
    assert fault.filename == asked and fault.strerror == os.strerror(number)
    if kind is FileNotFoundError:
        # As safetensors says it.
        assert str(fault).startswith(f"No such file or directory: {asked}") and not isinstance(fault, Refused)
        assert type(fault).__name__ == "FileNotFoundError" and type(fault).__module__ == "builtins"
    else:
        assert isinstance(fault, Refused)
    again = pickle.loads(pickle.dumps(fault))
    assert type(again) is type(fault) and (again.errno, again.filename) == (number, asked)
    assert str(again) == str(fault) and again.__notes__ == fault.__notes__


@contextlib.contextmanager
def as_nobody(folder):
    """Runs as a user whose permissions are checked, unlike root's."""
    if os.geteuid():
        yield
        return
    opened = [above for above in (folder, *folder.parents) if above.is_relative_to(tempfile.gettempdir())]
    modes = [(above, above.stat().st_mode) for above in opened]
    for above in opened:
        above.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for above, mode in modes:
            above.chmod(mode)


@pytest.mark.parametrize("ask", [
    *ASKS.values(), lambda path: ckptfs.torch.save_file({"a": torch.ones(1)}, path),
    lambda path: ckptfs.numpy.save_file({}, path), lambda path: ckptfs.serialize_file({}, path),
    lambda path: ckptfs.torch.save_sharded({"a": torch.ones(1)}, path), ckptfs.torch.load_sharded,
    lambda path: ckptfs.torch.cached(path, dict), ckptfs.mount, lambda path: ckptfs.mount("/nothing", path),
], ids=[*ASKS, "save", "numpy-save", "serialize", "sharded", "load-sharded", "cached", "mount", "mount-at"])  # fmt: skip
def test_a_path_with_a_nul_is_refused(ask):
    with pytest.raises(Refused, match="no path can have a NUL in it") as refused:
        ask("m\0")
    assert isinstance(refused.value, ValueError) and refused.value.__notes__ == ["what to do: leave it out"]


@pytest.mark.parametrize("how", [{}, {"follow_symlinks": True}], ids=["", "following"])
def test_a_dangling_link_is_named_with_its_target(tmp_path, how):
    (tmp_path / "models").mkdir()
    link = tmp_path / "models/model.pt"
    link.symlink_to("../nothing.pt")
    with pytest.raises(FileNotFoundError, match="is a link to ../nothing.pt, which does not exist") as missing:
        ckptfs.torch.load_file(tmp_path / "models", **how)
    assert str(missing.value).startswith(f"No such file or directory: {link}: is a link")
    assert missing.value.filename == str(link)
    assert missing.value.__notes__ == ["what to do: put the file there, or remove the link"]


def test_several_checkpoints_are_listed(tmp_path):
    for n in range(12):
        torch.save({"a": torch.ones(1)}, tmp_path / f"{n:02}.pt")
    with pytest.raises(Refused, match="several checkpoints .*: `00.pt`, `01.pt`, .*, and 4 more") as refused:
        ckptfs.torch.load_file(tmp_path)
    assert refused.value.__notes__ == [f"what to do: name one of them, such as {tmp_path}/00.pt"]


INTO = {
    "another-type": lambda: torch.zeros(30, 20).half(),
    "another-shape": lambda: torch.zeros(20, 30),
    "too-few-axes": lambda: torch.zeros(600),
    "strided": lambda: torch.zeros(20, 30).t(),
    "elsewhere": lambda: torch.zeros(30, 20, device="meta"),
    "sparse": lambda: torch.zeros(30, 20).to_sparse(),
}


@pytest.mark.parametrize("into", INTO.values(), ids=INTO)
def test_unusable_targets_are_refused_by_name(path, into):
    with pytest.raises(Refused, match="a: cannot be loaded into"):
        ckptfs.torch.load_file(path, into={"a": into()})


def test_targets_of_the_wrong_kind_are_refused_and_stay_unchanged(path):
    whole = torch.zeros(30, 20)
    with pytest.raises(TypeError, match="torch.Tensor"):
        ckptfs.torch.load_file(path, into={"a": [1, 2]})
    with pytest.raises(TypeError, match="ndarray"):
        ckptfs.numpy.load_file(path, into={"a": whole})
    locked = whole.numpy().copy()
    locked.flags.writeable = False
    with pytest.raises(Refused, match="writeable"):
        ckptfs.numpy.load_file(path, into={"a": locked})
    with pytest.raises(Refused, match="not in into="):
        ckptfs.torch.load_file(path, into={"a": whole}, names=["a", "b"])
    with pytest.raises(Refused, match="torch.float16"):
        ckptfs.torch.load_file(path, into={"a": whole}, dtype=torch.float16)
    assert not whole.any()


def test_two_places_that_share_memory_are_refused(tmp_path):
    save_file({"a": torch.ones(8), "b": torch.ones(8)}, tmp_path / "x.safetensors")
    whole = torch.zeros(12)
    with pytest.raises(Refused, match="share memory"):
        ckptfs.torch.load_file(tmp_path / "x.safetensors", into={"a": whole[:8], "b": whole[4:]})
    assert not whole.any()


def test_meaningless_values_are_refused(path):
    for asked, words in [
        ({"backend": "fast"}, "backend"), ({"num_threads": 0}, "num_threads"),
        ({"memory": -1}, "memory"), ({"memory": 1000}, "1000 bytes"), ({"dtype": "float12"}, "float12"),
        ({"device": "nowhere"}, "nowhere"), ({"root": "nobody"}, "nobody"),
    ]:  # fmt: skip
        with pytest.raises(Refused, match=words):
            ckptfs.torch.load_file(path, **asked)
    with pytest.raises(Refused, match="framework"):
        ckptfs.safe_open(path, "pascal")
    with pytest.raises(Refused, match="numpy"):
        ckptfs.safe_open(path, "np", device="cuda:0")


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("module", [ckptfs.torch, ckptfs.numpy])
def test_limits_are_looked_at_before_they_are_used(path, module, dtype):
    for asked in {"memory": -1}, {"memory": 1.5e9}, {"num_threads": "4"}, {"num_threads": True}:
        [(name, value)] = asked.items()
        with pytest.raises(Refused, match=f"{name} must be a positive integer, got {value!r}"):
            module.load_file(path, dtype=dtype, **asked)
    for memory in 1001, 500_001:
        with pytest.raises(Refused, match=f"{memory} bytes of memory were allowed"):
            module.load_file(path, dtype=dtype, memory=memory)
    with pytest.raises(Refused, match="memory 'much' is no size"):
        module.load_file(path, dtype=dtype, memory="much")
    for asked in {"memory": 6 << 20}, {"memory": "1G"}, {"memory": 2**70, "num_threads": 2**70}:
        assert module.load_file(path, dtype=dtype, **asked)["a"].shape == (30, 20)


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "bits8", "quint8"])
def test_types_that_nothing_can_be_cast_to_are_refused(path, name):
    for given in name, getattr(torch, name):
        with pytest.raises(Refused, match="nothing can be cast to"):
            ckptfs.torch.load_file(path, dtype=given)


def test_a_memory_budget_below_one_row_is_refused_with_the_least_that_works(tmp_path):
    save_file({"row": numbers(1, 1, 4 << 20)}, tmp_path / "x.safetensors")
    with pytest.raises(Refused, match=f"memory={12 << 20}"):
        how = {"dtype": torch.float16, "memory": 12 << 20, "backend": "pread"}
        ckptfs.torch.load_file(tmp_path / "x.safetensors", **how)


INDEXES = {
    "index-past-the-end": (30,),
    "far-before": (-31,),
    "backwards": (slice(None, None, -1),),
    "no-step": (slice(None, None, 0),),
    "too-many": (0, 0, 0),
    "two-ellipses": (..., ...),
    "a-list-past-the-end": ([0, 30],),
    "a-text": ("a",),
    "a-float": (1.5,),
    "a-mask-of-another-size": (torch.ones(29, dtype=torch.bool),),
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_indexes_that_mean_nothing_are_refused(path, index):
    with ckptfs.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        with pytest.raises(Refused):
            part[index]
        assert part[29:].shape == (1, 20)


def test_a_closed_handle_refuses_every_call(path):
    with ckptfs.safe_open(path, "pt") as file:
        pass
    file.close()
    for ask in [
        file.keys, file.offset_keys, file.metadata, file.get_tensors, file.prefetch,
        lambda: file.get_tensor("a"), lambda: file.get_slice("a"),
        lambda: file.get_tensor_meta("a"), file.__reduce__,
    ]:  # fmt: skip
        with pytest.raises(Refused, match="closed"):
            ask()


def test_a_file_that_changed_is_no_owned_tensor(path):
    with ckptfs.safe_open(path, "pt", backend="pread") as file:
        before = os.stat(path)
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        for ask in lambda: file.get_tensor("a"), lambda: file.get_slice("a")[1], file.get_tensors:
            with pytest.raises(Refused, match="changed on disk"):
                ask()
    with ckptfs.safe_open(path, "pt", backend="mmap") as file:
        os.utime(path, ns=(0, 0))
        with pytest.raises(Refused, match="changed on disk"):
            file.get_tensor("a")


def test_a_file_that_was_truncated_is_an_error_and_no_crash(path):
    with ckptfs.safe_open(path, "pt", backend="pread") as file:
        os.truncate(path, 300)
        with pytest.raises(Refused, match="changed on disk|ends before"):
            file.get_tensors()


def test_a_tensor_larger_than_memory_is_a_memory_error_and_its_slice_is_read(tmp_path):
    size = 1 << 42
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    script = "import resource, sys, ckptfs\n" \
             "resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\n" \
             "f = ckptfs.safe_open(sys.argv[1], 'np', backend='pread')\n" \
             "try: f.get_tensor('x')\nexcept MemoryError as e: assert 'no memory' in str(e)\n" \
             "else: raise AssertionError\n" \
             "assert f.get_slice('x')[5:9].tolist() == [0] * 4"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_refusals_leave_no_descriptor_open(path):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(50):
        for asked in {"names": "z*"}, {"into": {"a": torch.zeros(1)}}, {"root": "x"}:
            with pytest.raises(Refused):
                ckptfs.torch.load_file(path, **asked)
    assert descriptors() == before


def test_remedies_name_arguments(tmp_path):
    """A remedy names the argument, and not the option of the command."""
    torch.save({"a": torch.ones(2)}, tmp_path / "elsewhere.pt")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/model.pt").symlink_to("../elsewhere.pt")
    with pytest.raises(ckptfs.SafetensorError) as fault:
        ckptfs.torch.load_file(tmp_path / "models")
    assert "follow_symlinks=True" in fault.value.__notes__[0] and "--" not in fault.value.__notes__[0]
    check_same(ckptfs.torch.load_file(tmp_path / "models", follow_symlinks=True), {"a": torch.ones(2)})
