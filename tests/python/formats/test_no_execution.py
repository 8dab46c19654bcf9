"""No pickle is ever executed, however it asks for it.

Each payload first proves to be one: Python's own unpickler runs it. Then the same opcodes, anywhere in a checkpoint
of either of torch's forms, are refused or ignored, and their effect is missing.
"""

import subprocess
import sys

import pytest
import torch

from compare import check_export
from pickles import (
    BUILD,
    MARK,
    NONE,
    POP,
    STORAGE,
    call,
    dict_of,
    list_of,
    name,
    program,
    tensor,
    text,
    tuple_of,
    write_legacy,
    write_zip,
)
from refusals import check_refused

WEIGHT = torch.frombuffer(bytearray(STORAGE), dtype=torch.float32)

SYSTEM = name("os", "system")
NEW, NEW_WITH_KEYWORDS, STACK_GLOBAL = b"\x81", b"\x92", b"\x93"


def python(marker):
    return text(f"open({marker!r}, 'w').close()")


def shell(marker):
    return text(f"touch '{marker}'")


def mapped(marker):
    """Runs when it is iterated over."""
    return name("builtins", "map") + tuple_of(SYSTEM, list_of(shell(marker))) + NEW


# Each leaves one value on the stack, after an action that must never happen.
PAYLOADS = {
    "os.system": lambda m: call(SYSTEM, shell(m)),
    "posix.system": lambda m: call(name("posix", "system"), shell(m)),
    "subprocess.Popen": lambda m: call(
        name("subprocess", "Popen"), list_of(text("touch"), text(m))
    ),
    "eval": lambda m: call(name("builtins", "eval"), python(m)),
    "eval-by-its-old-name": lambda m: call(name("__builtin__", "eval"), python(m)),
    "runpy": lambda m: call(name("runpy", "_run_code"), python(m), dict_of({})),
    "getattr": lambda m: call(
        call(
            name("builtins", "getattr"),
            call(name("importlib", "import_module"), text("os")),
            text("system"),
        ),
        shell(m),
    ),
    "stack-global": lambda m: call(text("os") + text("system") + STACK_GLOBAL, shell(m)),
    "new": lambda m: name("builtins", "tuple") + tuple_of(mapped(m)) + NEW,
    "new-with-keywords": lambda m: (
        name("builtins", "tuple") + tuple_of(mapped(m)) + dict_of({}) + NEW_WITH_KEYWORDS
    ),
    "inst": lambda m: MARK + shell(m) + b"ios\nsystem\n",
    "obj": lambda m: MARK + SYSTEM + shell(m) + b"o",
    "build": lambda m: (
        name("argparse", "Namespace")
        + tuple_of()
        + NEW
        + dict_of({"__setstate__": SYSTEM})
        + BUILD
        + shell(m)
        + BUILD
    ),
    "torch-rebuild": lambda m: call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        SYSTEM,
        name("torch", "Tensor"),
        tuple_of(shell(m)),
        NONE,
    ),
}

FORMS = {"zip": write_zip, "legacy": write_legacy}


@pytest.fixture(params=PAYLOADS)
def payload(request, tmp_path):
    """The opcodes, and the file that they would make."""
    marker = tmp_path / "marker" / "executed"
    marker.parent.mkdir()
    yield PAYLOADS[request.param](str(marker))
    assert not marker.exists(), "the payload was executed"


@pytest.fixture(params=FORMS)
def write(request, tmp_path):
    return lambda *parts: FORMS[request.param](tmp_path / "model.pt", program(*parts))


@pytest.mark.parametrize("kind", PAYLOADS)
def test_pythons_unpickler_runs_the_payload(tmp_path, kind):
    marker, path = tmp_path / "executed", tmp_path / "payload.pkl"
    path.write_bytes(program(PAYLOADS[kind](str(marker))))
    unpickle = "import pickle, sys; getattr(pickle.load(open(sys.argv[1], 'rb')), 'wait', int)()"
    subprocess.run([sys.executable, "-c", unpickle, path], capture_output=True)
    assert marker.exists()


def test_alone_it_is_refused(ckptfs, write, payload):
    check_refused(ckptfs, write(payload))


def test_beside_a_tensor_it_is_refused_by_name(ckptfs, write, payload):
    path = write(dict_of({"weight": tensor(), "payload": payload}))
    check_refused(ckptfs, path, tensor="payload")


def test_as_a_key_it_is_refused(ckptfs, write, payload):
    check_refused(ckptfs, write(b"}", payload, tensor(), b"s"))


def test_in_the_arguments_of_a_tensor_it_is_refused(ckptfs, write, payload):
    path = write(dict_of({"weight": tensor(shape_as=payload)}))
    check_refused(ckptfs, path, tensor="weight")


def test_outside_the_chosen_dictionary_it_is_ignored(ckptfs, tmp_path, write, payload):
    path = write(dict_of({"state_dict": dict_of({"weight": tensor()}), "payload": payload}))
    check_export(ckptfs, path, {"weight": WEIGHT}, tmp_path / "out.safetensors")


def test_popped_from_the_stack_it_is_ignored(ckptfs, tmp_path, write, payload):
    path = write(payload, POP, dict_of({"weight": tensor()}))
    check_export(ckptfs, path, {"weight": WEIGHT}, tmp_path / "out.safetensors")


def test_as_an_attribute_of_the_dictionary_it_is_ignored(ckptfs, tmp_path, write, payload):
    entries = call(name("collections", "OrderedDict")) + text("weight") + tensor() + b"s"
    path = write(entries, dict_of({"_metadata": payload}), BUILD)
    check_export(ckptfs, path, {"weight": WEIGHT}, tmp_path / "out.safetensors")


def test_in_the_legacy_forms_other_pickles_it_is_ignored(ckptfs, tmp_path, payload):
    state = program(dict_of({"weight": tensor()}))
    path = write_legacy(tmp_path / "model.pt", state, system=program(payload))
    check_export(ckptfs, path, {"weight": WEIGHT}, tmp_path / "out.safetensors")
