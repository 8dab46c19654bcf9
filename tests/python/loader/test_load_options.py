"""Options of `load_file` and `safe_open`: in place, cast, chosen by name, within bounds, with a report; for torch and
numpy, mapped and owned."""

import fnmatch
import gc
import importlib
import json
import os
import pickle
import subprocess
import sys

import ckptfs
import ckptfs.numpy
import ckptfs.torch
import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from compare import check_same
from samples import numbers, write_all

SAMPLES = ["sharded", "loose/small.bin", "loose/strided.pt", "loose/swapped.pt", "loose/legacy.pth"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_all(folder, 5)
    save = {"a": numbers(1, 300, 200), "b": numbers(2, 7).half(), "c": torch.arange(9)}
    safetensors.torch.save_file(save, folder / "one.safetensors", {"made": "by hand"})
    return folder


@pytest.mark.parametrize("sample", SAMPLES)
def test_into_lands_in_place(folder, sample, backend):
    expected = ckptfs.torch.load_file(folder / sample, backend="pread")
    into = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    got = ckptfs.torch.load_file(folder / sample, into=into, backend=backend)
    assert all(got[name] is into[name] for name in expected)
    assert places == {name: tensor.data_ptr() for name, tensor in got.items()}
    check_same(got, expected)


def test_into_loads_its_own_names_alone_also_those_of_a_model(folder):
    model = torch.nn.ParameterDict({"a": torch.zeros(300, 200)})
    state = model.state_dict(keep_vars=True)
    assert state["a"].requires_grad
    ckptfs.torch.load_file(folder / "one.safetensors", into=state)
    assert ckptfs.last_report().tensors == 1
    expected = safetensors.torch.load_file(folder / "one.safetensors")
    assert torch.equal(model["a"].detach(), expected["a"])


def test_into_fills_arrays_of_numpy(folder, backend):
    expected = ckptfs.numpy.load_file(folder / "one.safetensors")
    into = {name: numpy.zeros_like(array) for name, array in expected.items()}
    ckptfs.numpy.load_file(folder / "one.safetensors", into=into, backend=backend)
    assert all(numpy.array_equal(into[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("memory", [None, 40 << 20])
def test_dtype_casts_floats_and_nothing_else(folder, sample, backend, memory):
    plain = ckptfs.torch.load_file(folder / sample)
    how = {"dtype": torch.bfloat16, "memory": memory, "backend": backend}
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in plain.items()}
    check_same(ckptfs.torch.load_file(folder / sample, **how), expected)
    into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    check_same(ckptfs.torch.load_file(folder / sample, into=into, **how), expected)


def test_dtype_leaves_whole_numbers_and_can_be_a_name(folder):
    got = ckptfs.torch.load_file(folder / "one.safetensors", dtype="float64")
    assert [got[name].dtype for name in "abc"] == [torch.float64, torch.float64, torch.int64]
    got = ckptfs.numpy.load_file(folder / "one.safetensors", dtype="float16")
    assert [got[name].dtype for name in "abc"] == ["float16", "float16", "int64"]


def test_a_tensor_of_more_than_the_memory_is_cast_in_parts(tmp_path):
    tensor = numbers(3, 5001, 1000)
    safetensors.torch.save_file({"large": tensor}, tmp_path / "x.safetensors")
    how = {"dtype": torch.float16, "memory": 10 << 20, "backend": "pread"}
    got = ckptfs.torch.load_file(tmp_path / "x.safetensors", **how)
    check_same(got, {"large": tensor.half()})
    report = ckptfs.last_report()
    assert (report.tensors, report.bytes) == (1, tensor.nbytes)


def test_names_choose(folder, backend):
    path = folder / "sharded"
    everything = ckptfs.torch.load_file(path)
    for names in ["layers.1.*", "*.2.weight", "layers.0.1.weight"]:
        wanted = {name: everything[name] for name in fnmatch.filter(everything, names)}
        check_same(ckptfs.torch.load_file(path, names=names, backend=backend), wanted)
    names = ["layers.2.0.weight", "layers.0.3.weight"]
    got = ckptfs.torch.load_file(path, names=iter(names), backend=backend)
    check_same(got, {name: everything[name] for name in names})
    with ckptfs.safe_open(path, "pt") as file:
        check_same(file.get_tensors(names), {name: everything[name] for name in names})


def test_root_and_options_reach_the_checkpoint(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(3)}}, tmp_path / "x.pt")
    check_same(ckptfs.torch.load_file(tmp_path / "x.pt"), {"w": torch.ones(2)})
    check_same(ckptfs.torch.load_file(tmp_path / "x.pt", root="ema"), {"w": torch.zeros(3)})
    with ckptfs.safe_open(tmp_path / "x.pt", "pt", root="ema", num_threads=2) as file:
        assert file.get_slice("w").get_shape() == [3] and file.notes() == []


def test_a_handle_is_an_instance_of_safetensors_class(folder):
    path = folder / "one.safetensors"
    with ckptfs.safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        assert ours.metadata() == theirs.metadata() == {"made": "by hand"}
        assert ours.keys() == theirs.keys() and ours.offset_keys() == theirs.offset_keys()
        check_same(ours.get_tensors(), theirs.get_tensors())
        header = ours.get_tensor_meta("b")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    start, end = header.data_offsets
    expected = safetensors.torch.load_file(path)["b"]
    assert (header.dtype, header.shape) == ("F16", [7])
    assert data[8 + length :][start:end] == expected.numpy().tobytes()
    with ckptfs.safe_open(folder / "loose/small.bin", "pt") as file:
        assert file.metadata() == {"format": "pt"}


HEADERS = {
    "none": {}, "null": {"__metadata__": None}, "empty": {"__metadata__": {}}, "some": {"__metadata__": {"a": "b"}},
    "format": {"__metadata__": {"format": "pt"}},
}  # fmt: skip


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("metadata", HEADERS.values(), ids=HEADERS)
def test_metadata_is_what_safetensors_says(tmp_path, metadata, framework):
    header = json.dumps(metadata | {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with safetensors.safe_open(path, framework) as theirs:
        expected = theirs.metadata()
    with ckptfs.safe_open(path, framework) as ours:
        assert ours.metadata() == expected
    with ckptfs.installed(), safetensors.safe_open(path, framework) as file:
        assert file.metadata() == expected


@pytest.mark.parametrize("name", ["", ".torch", ".numpy"])
def test_every_public_name_of_safetensors_is_in_the_same_module(name):
    theirs = importlib.import_module(f"safetensors{name}")
    ours = importlib.import_module(f"ckptfs{name}")
    theirs = {name: str(getattr(value, "__module__", "")) for name, value in vars(theirs).items()}
    # Names from the Rust part have a Python built-in as their module.
    own = ("safetensors", "builtins")
    public = {name for name, of in theirs.items() if not name.startswith("_") and of.startswith(own)}
    assert {"safe_open", "serialize_file"} <= public
    assert not {name for name in public if not hasattr(ours, name)}


def test_bytes_in_memory_load_like_their_file(folder):
    for path in [folder / "one.safetensors", folder / "loose/strided.pt"]:
        check_same(ckptfs.torch.load(path.read_bytes()), ckptfs.torch.load_file(path))
    arrays = ckptfs.numpy.load((folder / "one.safetensors").read_bytes())
    assert sorted(arrays) == ["a", "b", "c"]


def test_writing_to_a_tensor_never_reaches_the_file(folder, backend):
    path = folder / "one.safetensors"
    before = path.read_bytes()
    first = ckptfs.torch.load_file(path, backend=backend)
    for tensor in first.values():
        tensor.fill_(1)
    array = ckptfs.numpy.load_file(path, backend=backend)["a"]
    array[:] = 5
    assert path.read_bytes() == before
    check_same(ckptfs.torch.load_file(path, backend=backend), safetensors.torch.load_file(path))
    assert first["a"].sum() == first["a"].numel()


def mappings(path):
    with open("/proc/self/maps") as maps:
        return sum(line.rstrip().endswith(str(path)) for line in maps)


def test_a_file_is_mapped_once_at_its_first_use(folder):
    path = folder / "sharded"
    shard = path / "model-00001-of-00003.safetensors"
    gc.collect()
    before = mappings(shard)
    owned = ckptfs.torch.load_file(path, backend="pread")
    assert mappings(shard) == before
    mapped = ckptfs.torch.load_file(path, backend="mmap")
    assert mappings(shard) == before + 1
    last = mapped.popitem()
    del mapped, last
    gc.collect()
    assert mappings(shard) == before
    check_same(owned, ckptfs.torch.load_file(path))


def test_tensors_outlive_what_they_came_from(folder, backend):
    with ckptfs.safe_open(folder / "one.safetensors", "pt", backend=backend) as file:
        tensor, part = file.get_tensor("a"), file.get_slice("a")[3:5]
    gc.collect()
    expected = safetensors.torch.load_file(folder / "one.safetensors")["a"]
    assert torch.equal(tensor, expected) and torch.equal(part, expected[3:5])


def test_a_slice_reads_little_else(tmp_path):
    tensor = numbers(4, 4000, 1000)
    safetensors.torch.save_file({"w": tensor}, tmp_path / "x.safetensors")
    with ckptfs.safe_open(tmp_path / "x.safetensors", "pt", backend="pread") as file:
        got = file.get_slice("w")[2000:2010]
    report = ckptfs.last_report()
    assert torch.equal(got, tensor[2000:2010])
    read = report.cached + report.direct + report.buffered
    assert report.bytes == 40_000 and 40_000 <= read <= 80_000


def test_memory_begins_in_a_page_as_the_tensor_does_in_its_file(tmp_path):
    path = tmp_path / "large.safetensors"
    tensors = {"a": numbers(3, 1031, 300), "b": numbers(4, 700, 777).double()}
    safetensors.torch.save_file(tensors, path)
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    loaded = ckptfs.torch.load_file(path, backend="pread")
    for name, tensor in tensors.items():
        offset = 8 + header_bytes + header[name]["data_offsets"][0]
        assert (loaded[name].data_ptr() - offset) % 4096 == 0 and loaded[name].equal(tensor)
    # Some libraries refuse memory that is not aligned to 64 bytes.
    with ckptfs.safe_open(path, framework="dlpack") as file:
        for name, tensor in tensors.items():
            array = torch.from_dlpack(file.get_tensor(name))
            assert array.data_ptr() % 64 == 0 and array.equal(tensor)


def test_reports_say_how_tensors_were_read(folder, backend):
    told = []
    before = ckptfs.stats()
    tensors = ckptfs.torch.load_file(folder / "sharded", backend=backend, report=told.append)
    size = sum(tensor.nbytes for tensor in tensors.values())
    [report] = told
    assert report is ckptfs.last_report()
    assert (report.tensors, report.bytes) == (len(tensors), size) and report.seconds > 0
    read = report.cached + report.direct + report.buffered
    assert (report.mapped, read >= size) == ((size, False) if backend == "mmap" else (0, True))
    after = ckptfs.stats()
    assert after["loads"] == before["loads"] + 1 and after["bytes"] == before["bytes"] + size
    assert str(report.tensors) in repr(report)


def test_reports_say_which_dictionary_was_chosen(tmp_path, folder):
    """Covers a pickle, and a directory with one model in several formats and variants."""
    state = safetensors.torch.load_file(folder / "one.safetensors")
    torch.save({"model_state_dict": state, "ema": state, "epoch": 1}, tmp_path / "pytorch_model.bin")
    ckptfs.torch.load_file(tmp_path / "pytorch_model.bin")
    [told] = ckptfs.last_report().notes
    assert "`model_state_dict`" in told and "`ema`" in told
    safetensors.torch.save_file({"w": numbers(1, 4)}, tmp_path / "model.safetensors")
    safetensors.torch.save_file({"w": numbers(2, 4).half()}, tmp_path / "model.fp16.safetensors")
    loads = {
        "torch": lambda **how: ckptfs.torch.load_file(tmp_path, **how),
        "numpy": lambda **how: ckptfs.numpy.load_file(tmp_path, **how),
        "into": lambda **how: ckptfs.torch.load_file(tmp_path, into={"w": torch.zeros(4)}, **how),
        "many": lambda **how: ckptfs.load_many([tmp_path, folder / "one.safetensors"], **how)[0],
    }
    for load in loads.values():
        reports = []
        loaded = load(report=reports.append)
        assert torch.equal(torch.as_tensor(loaded["w"]), numbers(1, 4))
        [told] = reports[0].notes
        assert "`model.safetensors` was chosen" in told
        assert "`pytorch_model.bin`" in told and "`model.fp16.safetensors`" in told
        assert reports[0].as_dict()["notes"] == [told] and "notes" not in ckptfs.stats()
    with ckptfs.safe_open(tmp_path, "pt") as f:
        assert f.notes() == [told]
    ckptfs.torch.load_file(folder / "one.safetensors")
    assert not ckptfs.last_report().notes


def test_unmappable_tensors_are_read_and_the_report_says_why(folder):
    tensors = ckptfs.torch.load_file(folder / "loose/strided.pt")
    report = ckptfs.last_report()
    [(why, count)] = report.fallbacks.items()
    assert "do not lie in order" in why and count == 5
    assert report.mapped == tensors["whole"].nbytes and report.gathered > 0


def test_arrays_own_their_memory_unless_it_is_asked_otherwise(folder):
    ckptfs.numpy.load_file(folder / "one.safetensors")
    assert ckptfs.last_report().mapped == 0
    ckptfs.numpy.load_file(folder / "one.safetensors", backend="mmap")
    assert ckptfs.last_report().mapped > 0


def test_a_handle_survives_pickling(folder):
    handle = ckptfs.safe_open(folder / "sharded", "pt", backend="pread", num_threads=2)
    with pickle.loads(pickle.dumps(handle)) as again:
        check_same(again.get_tensors(), handle.get_tensors())


def test_types_that_numpy_lacks_are_what_they_are_to_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, path)
    for load in safetensors.numpy.load_file, ckptfs.numpy.load_file:
        with pytest.raises(TypeError, match="bfloat16"):
            load(path)
    with pytest.raises(ckptfs.SafetensorError, match="BF16") as refused:
        ckptfs.numpy.load_file(path)
    assert any("ml_dtypes" in note for note in refused.value.__notes__)


WITHOUT = """
import sys
class None_of_them:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "safetensors"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, None_of_them())
import ckptfs
with ckptfs.safe_open(sys.argv[1], "pt") as file:
    assert file.keys() == ["a", "b", "c"] and file.metadata() == {"made": "by hand"}
    assert file.get_slice("a").get_shape() == [300, 200]
    try:
        file.get_tensor("a")
    except ModuleNotFoundError as fault:
        assert "torch" in str(fault)
    else:
        raise AssertionError
data = dict(ckptfs.deserialize(open(sys.argv[1], "rb").read()))
assert len(data["a"]["data"]) == 300 * 200 * 4
"""


def test_calls_without_tensors_need_neither_torch_nor_numpy(folder):
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(folder / "one.safetensors")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_neither():
    script = "import sys, ckptfs; ckptfs.safe_open; ckptfs.serialize; " \
             "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_stubs_and_help_are_there():
    folder = os.path.dirname(ckptfs.__file__)
    assert {"py.typed", "__init__.pyi", "_ckptfs.pyi", "torch.pyi", "numpy.pyi"} <= set(os.listdir(folder))
    for name in ckptfs.__all__:
        assert getattr(ckptfs, name).__doc__, name
    assert set(ckptfs.__all__) <= set(dir(ckptfs))


def test_a_whole_path_opens_from_a_directory_that_is_gone(folder, tmp_path):
    script = "import os, sys, ckptfs; os.rmdir('.'); print(len(ckptfs.safe_open(sys.argv[1], 'pt').keys()))"
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", script.replace("'.'", "os.getcwd()"), str(folder / "sharded")]
    done = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, text=True)
    with ckptfs.safe_open(folder / "sharded", "pt") as file:
        assert done.stdout.strip() == str(len(file.keys())), done.stderr


def test_paths_may_be_bytes(tmp_path):
    tensors, path = {"a": numbers(1, 3)}, os.fsencode(tmp_path) + b"/\xff.safetensors"
    ckptfs.torch.save_file(tensors, path)
    check_same(ckptfs.torch.load_file(path), tensors)
    for loaded in ckptfs.load_many([path, os.fsdecode(path)]):
        check_same(loaded, tensors)
    with ckptfs.safe_open(path, "pt") as f:
        check_same(f.get_tensors(), tensors)
    check_same(ckptfs.torch.cached(path, dict), tensors)
    arrays = ckptfs.numpy.load_file(path)
    assert (arrays["a"] == tensors["a"].numpy()).all()
    folder = os.fsencode(tmp_path) + b"/\xfe"
    ckptfs.torch.save_sharded(tensors, folder)
    check_same(ckptfs.torch.load_sharded(folder), tensors)
    with pytest.raises(FileNotFoundError):
        ckptfs.torch.load_file(path + b"x")


def test_changing_a_report_changes_no_sum(folder):
    before = ckptfs.stats()

    def change(report):
        report.note, report.bytes = "x", "many"
        report.fallbacks["mine"] = "much"

    for _ in range(200):
        loaded = ckptfs.torch.load_file(folder / "sharded", report=change)
    after = ckptfs.stats()
    assert after["loads"] == before["loads"] + 200
    assert after["tensors"] == before["tensors"] + 200 * len(loaded)
    assert after["bytes"] == before["bytes"] + 200 * sum(tensor.nbytes for tensor in loaded.values())
    assert "mine" not in after["fallbacks"]


def test_a_relative_path_that_is_too_long_when_absolute_is_loaded(tmp_path, monkeypatch):
    tensors = {"x": torch.arange(9)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    monkeypatch.chdir(tmp_path)
    above = os.open(".", os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    os.rename("x.safetensors", "x.safetensors", src_dir_fd=above)
    os.close(above)
    try:
        for backend in ("mmap", "pread"):
            check_same(ckptfs.torch.load_file("x.safetensors", backend=backend), tensors)
    finally:
        # pytest cannot remove a file at such a depth.
        os.unlink("x.safetensors")
        for _ in range(20):
            os.chdir("..")
            os.rmdir("d" * 250)
