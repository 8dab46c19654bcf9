"""A plugin of pytest: from here on `safetensors` is ckptfs."""

import importlib
import sys

import ckptfs

sys.modules["safetensors"] = ckptfs
for name in ("torch", "numpy"):
    sys.modules[f"safetensors.{name}"] = importlib.import_module(f"ckptfs.{name}")
