"""Each reason to leave a call to safetensors is logged once, for any number of files, and so is an unknown version. A
missing file gives no warning."""

from pathlib import Path

import ckptfs
import ckptfs.torch
import pytest
import safetensors
import safetensors.torch

from ckptfs import settings
from ckptfs.shims import calls

from compare import check_same
from installed import ORIGINALS, file, nothing_is_left, originals, run

__all__ = ["file", "nothing_is_left"]


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.name == "ckptfs" and record.levelname == level]


def test_a_thousand_files_of_one_reason_are_one_warning(tmp_path, monkeypatch, caplog):
    # The first use of the logger sets its level.
    caplog.set_level("DEBUG", settings.logger().name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    paths = [f"a folder/{n}.safetensors" for n in range(250)] + [f"x{n}.safetensors" for n in range(250)]
    paths += [tmp_path / f"{name}.safetensors" for name in ("a", "b", "ü b")]
    for path in paths:
        Path(path).write_bytes(b"\xff" * 64)
    before = originals()
    with ckptfs.installed():
        for path in paths:
            with pytest.raises(safetensors.SafetensorError):
                safetensors.torch.load_file(path)
            with pytest.raises(safetensors.SafetensorError):
                safetensors.safe_open(path, "pt")
    assert originals() == before + 2 * len(paths)
    assert [line.split(":")[0] for line in lines(caplog, "WARNING")] == [
        "left to safetensors.torch.load_file", "left to safetensors.safe_open",
    ]  # fmt: skip
    assert len(lines(caplog, "DEBUG")) == 2 * len(paths) - 2
    assert any("x249.safetensors" in line for line in lines(caplog, "DEBUG"))


def test_a_missing_file_is_no_warning(file, tmp_path, caplog):
    caplog.set_level("DEBUG", settings.logger().name)
    path, _ = file
    before = originals()
    with ckptfs.installed():
        for missing in (tmp_path / "adapter_model.safetensors", path / "model.safetensors"):
            for call in (safetensors.torch.load_file, lambda missing: safetensors.safe_open(missing, "pt")):
                with pytest.raises(Exception) as refused:
                    call(missing)
                # Raised by the original.
                assert not isinstance(refused.value, ckptfs.SafetensorError)
    assert originals() == before + 4
    assert not lines(caplog, "WARNING") and len(lines(caplog, "DEBUG")) == 4


def test_another_reason_is_another_warning(file, tmp_path, caplog):
    path, _ = file
    for name, size in [("short", 4), ("long", 64), ("longer", 80)]:
        (tmp_path / f"{name}.safetensors").write_bytes(b"\xff" * size)
    with ckptfs.installed(), safetensors.safe_open(path, "pt") as f:
        for name in ("short", "long", "longer"):
            with pytest.raises(Exception):
                safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
        for name in ("layers.0.weight", "layers.1.weight"):
            with pytest.raises(safetensors.SafetensorError):
                f.get_tensor(name)
    said = lines(caplog, "WARNING")
    assert [sum(word in line for line in said) for word in ("short", "long", "get_tensor")] == [1, 1, 1]
    assert len(said) == 3


def test_the_record_of_reasons_is_bounded(file, monkeypatch, caplog):
    path, tensors = file
    number = [0]

    class Speechless(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def fails(*given, **how):
        number[0] += 1
        if number[0] == 1:
            raise Speechless
        words = "".join(chr(ord("a") + int(digit)) for digit in str(number[0]))
        raise RuntimeError(f"{words} " * 10_000)

    monkeypatch.setattr(ckptfs.load.torch, "load_file", fails)
    monkeypatch.setattr("logging.raiseExceptions", False)
    before = originals()
    with ckptfs.installed():
        for _ in range(200):
            check_same(safetensors.torch.load_file(path), tensors)
    assert originals() == before + 200
    assert len(calls._logged) == 64 and sum(len(reason[2]) for reason in calls._logged) <= 64 * 500


@pytest.mark.parametrize("version", ["0.3.9", "0.10.0", "1.0.0", "new", None])
def test_an_unknown_version_is_left_alone(file, monkeypatch, caplog, version):
    path, tensors = file
    monkeypatch.setattr(safetensors, "__version__", version)
    monkeypatch.setattr("ckptfs.shims.install._unknown", set())
    if version is None:
        monkeypatch.delattr(safetensors, "__version__")
    with ckptfs.installed():
        assert (safetensors.safe_open, safetensors.torch.load_file) == ORIGINALS
        check_same(safetensors.torch.load_file(path), tensors)
    # Once, for any number of modules and installs.
    with ckptfs.installed():
        assert caplog.text.count("not known") == 1


@pytest.mark.parametrize("version, known", [("0.12.0", False), ("0.9.0", True)])
def test_an_unknown_version_imported_later_is_left_alone(tmp_path, version, known):
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors/__init__.py").write_text(f"__version__ = {version!r}\ndef safe_open(): return 1\n")
    (tmp_path / "safetensors/torch.py").write_text("def load_file(): return 2\n")
    code = """
import json, logging, sys
import ckptfs
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ckptfs").addHandler(handler)
ckptfs.install()
sys.path.insert(0, sys.argv[1])
import safetensors.torch
from safetensors import safe_open
theirs = [call.__module__ + call.__code__.co_filename if hasattr(call, "__code__") else "a class"
          for call in (safe_open, safetensors.torch.load_file)]
ckptfs.uninstall()
print(json.dumps([theirs, said, safetensors.safe_open(), safetensors.torch.load_file()]))
"""
    theirs, said, *given = run(code, tmp_path)
    assert given == [1, 2]
    if known:
        assert "shims" in theirs[1] and theirs[0] == "a class" and not said
    else:
        assert all(str(tmp_path) in where for where in theirs)
        assert said and all("safetensors 0.12.0 is not known" in line for line in said)
