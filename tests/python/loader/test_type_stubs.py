"""The type stubs match the package: every call with its arguments, in their order and with their defaults."""

import ast
import importlib
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import ckptfs
import pytest

FOLDER = Path(ckptfs.__file__).parent

MODULES = {
    "__init__": "ckptfs", "torch": "ckptfs.torch", "numpy": "ckptfs.numpy", "_ckptfs": "ckptfs._ckptfs",
    "fastsafetensors/__init__": "ckptfs.fastsafetensors",
}  # fmt: skip


def functions(stub):
    """The functions and methods of a stub by their dotted names."""
    for node in ast.parse((FOLDER / f"{stub}.pyi").read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef):
                yield prefix + member.name, member


def told(arguments):
    """The names and defaults of a stub."""
    positional = [*arguments.posonlyargs, *arguments.args]
    plain = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, plain, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    given = {arg.arg: None if default is None else ast.literal_eval(default) for arg, default in pairs}
    return given | ({arguments.kwarg.arg: None} if arguments.kwarg else {})


@pytest.mark.parametrize("stub", MODULES)
def test_stubs_have_the_arguments_of_every_call(stub):
    module = importlib.import_module(MODULES[stub])
    seen = 0
    for name, node in functions(stub):
        found = module
        for part in name.split("."):
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        if not inspect.isfunction(found) or name.endswith(("__exit__",)):
            # Rust functions reveal their arguments only in part.
            continue
        parameters = inspect.signature(found).parameters.values()
        empty = inspect.Parameter.empty
        there = {p.name: None if p.default is empty else p.default for p in parameters}
        stands = told(node.args)
        # A default without a literal is `...` there.
        stands |= {arg: there.get(arg) or "a default" for arg, default in stands.items() if default is ...}
        assert stands == there and list(stands) == list(there), name
        seen += 1
    assert seen or stub == "_ckptfs"


@pytest.mark.parametrize("stub", ["__init__", "fastsafetensors/__init__"])
def test_every_name_has_one(stub):
    tree = ast.parse((FOLDER / f"{stub}.pyi").read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert set(importlib.import_module(MODULES[stub]).__all__) <= named


USES = """
from typing import assert_type, Any
import ckptfs
import ckptfs.numpy
import ckptfs.torch
import torch
from ckptfs.fastsafetensors import SafeTensorsMetadata, TensorFrame
from ckptfs.torch import safe_open

assert_type(ckptfs.load_many(["a", "b"]), list[dict[str, Any]])
assert_type(ckptfs.load_many({1: "a", 2: "b"}), dict[int, dict[str, Any]])
assert_type(ckptfs.load_many({"a": "a"}), dict[str, dict[str, Any]])
assert_type(ckptfs.torch.load_file("a"), dict[str, torch.Tensor])
with safe_open("a", "pt") as f:
    assert_type(f, ckptfs.safe_open)
    assert_type(f.metadata(), dict[str, str] | None)
assert_type(SafeTensorsMetadata.from_file("a", "pt").tensors["a"][0], TensorFrame)
"""


def test_a_type_checker_accepts_them(tmp_path):
    (tmp_path / "ckptfs").mkdir()
    for stub in [*FOLDER.glob("*.pyi"), FOLDER / "py.typed"]:
        shutil.copy(stub, tmp_path / "ckptfs")
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "ckptfs", "uses.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
