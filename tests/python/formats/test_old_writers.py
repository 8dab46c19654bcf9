"""Files of older or other torch writers are shown as torch reads them."""

import zipfile
from functools import partial

import pytest
import torch

from compare import check_export
from pickles import (
    BUILD,
    FALSE,
    MARK,
    NONE,
    SET_ITEM,
    STORAGE,
    call,
    dict_of,
    list_of,
    name,
    number,
    numbers,
    program,
    storage,
    tensor,
    text,
    tuple_of,
    write_legacy,
    write_zip,
)
from refusals import check_refused
from writers import PlainTensor


def python2_text(value):
    return b"U" + bytes([len(value)]) + value.encode()


def rebuild(function, of, *more):
    return call(name("torch._utils", function), of, number(0), numbers(2, 2), numbers(1, 2), *more)


ORDERED = name("collections", "OrderedDict")

# The bytes around a storage of four float32, as the given function writes its form.
PICKLES = {
    "first-rebuild-function": lambda stored: dict_of(
        {"weight": rebuild("_rebuild_tensor", stored())}
    ),
    "rebuild-with-type": lambda stored: dict_of(
        {
            "weight": rebuild(
                "_rebuild_tensor_v3",
                stored(count=16, kind="UntypedStorage"),
                FALSE,
                call(ORDERED),
                name("torch", "float32"),
            )
        }
    ),
    "empty-metadata": lambda stored: dict_of(
        {"weight": rebuild("_rebuild_tensor_v2", stored(), FALSE, call(ORDERED), dict_of({}))}
    ),
    "saved-from-a-gpu": lambda stored: dict_of({"weight": tensor(of=stored(location="cuda:0"))}),
    "ordered-by-a-list-of-pairs": lambda stored: call(
        ORDERED, list_of(list_of(text("weight"), tensor(of=stored())))
    ),
    "ordered-with-attributes": lambda stored: (
        call(ORDERED)
        + text("weight")
        + tensor(of=stored())
        + SET_ITEM
        + dict_of({"_metadata": call(ORDERED)})
        + BUILD
    ),
    "size-object": lambda stored: dict_of(
        {"weight": tensor(of=stored(), shape_as=call(name("torch", "Size"), numbers(4)))}
    ),
    "python-2-text": lambda stored: b"}" + python2_text("weight") + tensor(of=stored()) + SET_ITEM,
    "python-2-long": lambda stored: dict_of(
        {"weight": tensor(of=stored(), shape_as=MARK + b"L4L\nt")}
    ),
}

FORMS = {"zip": (write_zip, storage), "legacy": (write_legacy, partial(storage, window=NONE))}

# torch cannot read untyped storages of the legacy form.
CASES = [(form, kind) for form in FORMS for kind in PICKLES]
CASES.remove(("legacy", "rebuild-with-type"))


@pytest.mark.parametrize("form, kind", CASES)
def test_pickles_of_other_writers_are_shown_as_torch_reads_them(ckptfs, tmp_path, form, kind):
    write, stored = FORMS[form]
    path = write(tmp_path / "model.pt", program(PICKLES[kind](stored)))
    # torch's safe reader knows only what torch writes today; the test itself makes these files.
    expected = torch.load(path, map_location="cpu", weights_only=False)
    check_export(ckptfs, path, dict(expected), tmp_path / "out.safetensors")


def test_a_legacy_storage_of_the_gpu_is_shown(ckptfs, tmp_path):
    of = storage(module="torch.cuda", location="cuda:0", window=NONE)
    path = write_legacy(tmp_path / "model.pt", program(dict_of({"weight": tensor(of=of)})))
    expected = torch.frombuffer(bytearray(STORAGE), dtype=torch.float32)
    check_export(ckptfs, path, {"weight": expected}, tmp_path / "out.safetensors")


def part(first, count):
    """A storage that is a part of another, as torch wrote it before tensors had offsets."""
    return storage(window=tuple_of(text("0-part"), number(first), number(count)))


def test_a_legacy_part_of_a_storage_is_shown(ckptfs, tmp_path):
    tensors = {"whole": tensor(of=storage(window=NONE)), "part": tensor(of=part(1, 2), shape=(2,))}
    path = write_legacy(tmp_path / "model.pt", program(dict_of(tensors)))
    expected = torch.load(path)
    assert expected["part"].tolist() == [2, 3]
    check_export(ckptfs, path, expected, tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    "made",
    [
        tensor(of=part(1, 2), shape=(3,)),
        tensor(of=part(3, 2), shape=(1,)),
        tensor(of=part(2**62, 2**62), shape=(1,)),
    ],
    ids=["tensor-past-its-part", "part-past-its-storage", "part-that-overflows"],
)
def test_a_legacy_part_past_the_end_is_refused(ckptfs, tmp_path, made):
    path = write_legacy(tmp_path / "model.pt", program(dict_of({"part": made})))
    check_refused(ckptfs, path, "past the end", tensor="part")


@pytest.mark.parametrize(
    "file", ["model", "a b.v1.2.pt", "größe.bin", "archive.ckpt", ".hidden.pt"]
)
def test_archives_are_named_after_their_file(ckptfs, tmp_path, file):
    path = tmp_path / file
    torch.save({"weight": torch.arange(5.0)}, path)
    check_export(ckptfs, path, torch.load(path), tmp_path / "out.safetensors")


def test_an_archive_without_checksums_is_shown(ckptfs, tmp_path):
    path = tmp_path / "model.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(5.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    check_export(ckptfs, path, torch.load(path), tmp_path / "out.safetensors")


def test_an_archive_that_was_packed_again_with_compression_is_shown(ckptfs, tmp_path):
    stored, path = tmp_path / "stored.pt", tmp_path / "model.pt"
    table = torch.zeros(100, 100)
    table[5] = 1
    torch.save({"weight": table, "turned": table.t(), "half": table[50:]}, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record))
    assert path.stat().st_size < 10_000
    check_export(ckptfs, path, torch.load(path), tmp_path / "out.safetensors")
    report = ckptfs.inspect(path)
    assert "memory" in {tensor["layout"] for tensor in report["tensors"]}
    assert any("unpacked" in note for note in report["notes"])


def test_tensors_of_a_class_of_their_own_are_shown_with_a_note(ckptfs, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(2), "b": torch.ones(3).as_subclass(PlainTensor)}, path)
    check_export(ckptfs, path, torch.load(path), tmp_path / "out.safetensors")
    assert any("`b`" in note and "PlainTensor" in note for note in ckptfs.inspect(path)["notes"])
