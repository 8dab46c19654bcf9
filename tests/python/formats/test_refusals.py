"""A tensor whose values are not plainly in the file is refused by its name, with the reason; `--allow-partial` shows
the rest.

The first half is what torch saves and safetensors has no counterpart for. The second is what no torch writes.
"""

import json
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open

from compare import check_export
from pickles import (
    APPEND,
    BUILD,
    FALSE,
    NONE,
    POP,
    SET_ITEM,
    STORAGE,
    TRUE,
    call,
    dict_of,
    get,
    list_of,
    name,
    number,
    numbers,
    program,
    put,
    storage,
    tensor,
    text,
    tuple_of,
    write_legacy,
    write_zip,
)
from refusals import check_refused


def complex64():
    return torch.view_as_complex(torch.arange(6.0).view(3, 2))


def parts():
    return [torch.rand(2, 3), torch.rand(4, 3)]


# Values to save, and words of the reason.
UNSUPPORTED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "sparse-rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "sparse-columns": (lambda: torch.eye(3).to_sparse_csc(), "sparse"),
    "sparse-blocks": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "sparse"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
        "quantised",
    ),
    "quantised-by-channel": (
        lambda: torch.quantize_per_channel(
            torch.rand(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8
        ),
        "quantised",
    ),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "nested": (lambda: torch.nested.nested_tensor(parts()), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor(parts(), layout=torch.jagged), "cannot hold"),
    "complex128": (lambda: complex64().to(torch.complex128), "complex128"),
    "conjugate": (lambda: complex64().conj(), "conjugate"),
    "negative": (lambda: complex64().conj().imag, "negative"),
    "storage": (lambda: torch.rand(3).untyped_storage(), "storage"),
    "module": (lambda: torch.nn.Linear(2, 2), "Linear"),
}

# Types of untyped storages, which torch writes in the legacy form and cannot read.
UNSUPPORTED_ZIP = {
    "complex32": (lambda: complex64().to(torch.complex32), "complex32"),
    "packed-scalar": (
        lambda: torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0],
        "packed",
    ),
}

CASES = [(kind, zipped) for kind in UNSUPPORTED for zipped in (True, False)]
CASES += [(kind, True) for kind in UNSUPPORTED_ZIP]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'zip' if case[1] else 'legacy'}")
def unsupported(request, tmp_path):
    """A checkpoint with a tensor that can be shown and one that cannot, and words of the reason."""
    kind, zipped = request.param
    make, reason = {**UNSUPPORTED, **UNSUPPORTED_ZIP}[kind]
    path = tmp_path / "model.pt"
    saved = {"fine": torch.ones(2), "layer.odd": make()}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    return path, reason


def test_what_safetensors_cannot_hold_is_refused(ckptfs, unsupported):
    path, reason = unsupported
    check_refused(ckptfs, path, reason, tensor="layer.odd")


def test_the_rest_is_shown_with_allow_partial(ckptfs, tmp_path, unsupported):
    path, _ = unsupported
    out = tmp_path / "out.safetensors"
    check_export(ckptfs, path, {"fine": torch.ones(2)}, out, "--allow-partial")


def test_a_torchscript_program_is_refused(ckptfs, tmp_path):
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    check_refused(ckptfs, path, "TorchScript", "torch.jit.load")


BIG = 2**62

# Tensors over a storage of four float32, and words of the reason.
TAMPERED = {
    "shape-past-the-end": (tensor(shape=(5,)), "past the end"),
    "offset-past-the-end": (tensor(offset=1), "past the end"),
    "stride-past-the-end": (tensor(shape=(2,), strides=(4,)), "past the end"),
    "stride-far-past-the-end": (tensor(shape=(2, 2), strides=(2**63 - 1, 1)), "past the end"),
    "offset-far-past-the-end": (tensor(offset=2**63 - 1, shape=(1,)), "past the end"),
    "shape-that-overflows": (tensor(shape=(BIG, BIG), strides=(0, 0)), "overflow"),
    "empty-shape-that-overflows": (tensor(shape=(2**40, 2**40, 0), strides=(0, 0, 1)), "overflow"),
    "shape-whose-bytes-overflow": (tensor(shape=(BIG,), strides=(0,)), "overflow"),
    "strides-that-overflow": (tensor(shape=(3, 3), strides=(2**63 - 1,) * 2), "past the end"),
    "negative-shape": (tensor(shape=(-1,)), "not rebuilt"),
    "negative-stride": (tensor(offset=3, strides=(-1,)), "not rebuilt"),
    "negative-offset": (tensor(offset=-1, shape=(1,)), "not rebuilt"),
    "shape-of-enormous-numbers": (tensor(shape=(2**70,)), "not rebuilt"),
    "fewer-strides": (tensor(shape=(2, 2), strides=(1,)), "not rebuilt"),
    "more-strides": (tensor(shape=(4,), strides=(1, 1)), "not rebuilt"),
    "too-many-dimensions": (tensor(shape=(1,) * 65, strides=(1,) * 65), "not rebuilt"),
    "expanded-to-petabytes": (tensor(shape=(2**50,), strides=(0,)), "limit"),
    "expanded-past-the-limit": (tensor(shape=(2**16, 2**15), strides=(0, 0)), "limit"),
    "storage-of-another-size": (tensor(of=storage(count=400)), "states 1600 bytes and has 16"),
    "storage-smaller-than-its-record": (tensor(shape=(3,), of=storage(count=3)), "states 12"),
    "storage-of-an-enormous-size": (tensor(of=storage(count=2**62)), "states"),
    "storage-of-a-negative-size": (tensor(of=storage(count=-4)), "storage"),
    "storage-of-another-type": (tensor(of=storage(kind="DoubleStorage")), "states 32 bytes"),
    "storage-of-an-unknown-type": (tensor(of=storage(kind="OddStorage")), "storage"),
    "storage-that-is-not-there": (tensor(of=storage(key="7")), "`7`"),
    "storage-outside-the-data": (tensor(of=storage(key="../version")), "`../version`"),
    "storage-that-is-none": (tensor(of=NONE), "not rebuilt"),
    "storage-named-by-text": (tensor(of=text("0") + b"Q"), "storage"),
    "storage-of-a-meta-tensor": (tensor(of=storage(location="meta")), "meta"),
    "shape-as-a-list": (tensor(shape_as=list_of(number(4))), "not rebuilt"),
    "shape-as-text": (tensor(shape_as=text("4")), "not rebuilt"),
    "shape-as-a-call": (
        tensor(shape_as=call(name("builtins", "tuple"), list_of(number(4)))),
        "not rebuilt",
    ),
    "shape-of-truths": (tensor(shape_as=tuple_of(TRUE)), "not rebuilt"),
    "shape-list-changed-later": (
        list_of(number(4))
        + put(0)
        + POP
        + tensor(shape_as=get(0))
        + get(0)
        + number(9)
        + APPEND
        + POP,
        "not rebuilt",
    ),
    "changed-by-build": (tensor() + dict_of({"shape": numbers(9)}) + BUILD, "changed"),
    "changed-by-item": (tensor() + number(0) + number(9) + SET_ITEM, "changed"),
    "changed-by-append": (tensor() + number(9) + APPEND, "changed"),
    "changed-by-memory": (
        tensor() + put(0) + get(0) + dict_of({"x": NONE}) + BUILD + POP,
        "changed",
    ),
    "storage-changed-by-build": (
        tensor(of=storage() + dict_of({"x": NONE}) + BUILD),
        "not rebuilt",
    ),
    "changed-inside-a-parameter": (
        call(
            name("torch._utils", "_rebuild_parameter"), tensor() + dict_of({}) + BUILD, FALSE, NONE
        ),
        "changed",
    ),
    "changed-by-an-attribute": (
        call(
            name("torch._utils", "_rebuild_parameter_with_state"),
            tensor(),
            FALSE,
            NONE,
            dict_of({"data": tensor(shape=(2,))}),
        ),
        "changed",
    ),
    "parameter-of-text": (
        call(name("torch._utils", "_rebuild_parameter"), text("x"), FALSE, NONE),
        "not rebuilt",
    ),
    "rebuilt-by-something-else": (
        call(name("torch._utils", "_rebuild_anything"), number(1)),
        "not rebuilt",
    ),
    "too-few-arguments": (
        call(name("torch._utils", "_rebuild_tensor_v2"), storage()),
        "not rebuilt",
    ),
}


# The legacy form finds storages by the sizes that tensors state: wrong ones spoil the whole file.
SPOILS_A_LEGACY_FILE = {
    "storage-of-another-size",
    "storage-smaller-than-its-record",
    "storage-of-an-enormous-size",
    "storage-of-another-type",
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_what_no_torch_writes_is_refused(ckptfs, tmp_path, kind):
    made, reason = TAMPERED[kind]
    path = write_zip(tmp_path / "model.pt", program(dict_of({"fine": tensor(), "layer.odd": made})))
    check_refused(ckptfs, path, reason, tensor="layer.odd")


@pytest.mark.parametrize("kind", TAMPERED)
def test_what_no_torch_writes_is_refused_in_the_legacy_form(ckptfs, tmp_path, kind):
    made, reason = TAMPERED[kind]
    path = write_legacy(
        tmp_path / "model.pt", program(dict_of({"fine": tensor(), "layer.odd": made}))
    )
    if kind in SPOILS_A_LEGACY_FILE:
        check_refused(ckptfs, path, "storage `0`")
    else:
        check_refused(ckptfs, path, reason, tensor="layer.odd")


def test_an_empty_shape_that_overflows_is_refused(ckptfs, tmp_path):
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}
    header = json.dumps({"weight": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(SafetensorError, match="overflow"):
        safe_open(path, framework="pt")
    check_refused(ckptfs, path, "`weight`", "shape")


LEGACY_STORAGES = {
    "cut-off": {"0": (4, STORAGE[:-1])},
    "cut-off-in-its-count": {"0": (4, b"")},
    "of-another-count": {"0": (3, STORAGE)},
    "of-a-negative-count": {"0": (-1, STORAGE)},
    "with-bytes-after-it": {"0": (4, STORAGE + b"x")},
    "that-no-tensor-names": {"0": (4, STORAGE), "1": (4, STORAGE)},
    "that-is-missing": {},
}


@pytest.mark.parametrize("kind", LEGACY_STORAGES)
def test_legacy_storages_that_are_not_as_stated_are_refused(ckptfs, tmp_path, kind):
    state = program(dict_of({"weight": tensor()}))
    check_refused(
        ckptfs, write_legacy(tmp_path / "model.pt", state, LEGACY_STORAGES[kind]), "storage"
    )
