"""Loads an image pipeline with diffusers, in whatever files its parts are.

    python load_with_diffusers.py PIPELINE_DIR [VARIANT]

Wants `ckptfs` on the PATH. `use_safetensors=True` refuses pickles; of these the mount shows none.
"""

import subprocess
import sys
import tempfile
from contextlib import contextmanager

from diffusers import DiffusionPipeline


@contextmanager
def mounted(models):
    """The directory as ckptfs shows it, as long as this is used."""
    with tempfile.TemporaryDirectory() as point:
        subprocess.run(["ckptfs", "mount", models, point], check=True)
        try:
            yield point
        finally:
            # Lazily: weights may still be mapped, and are then good until they are let go of.
            subprocess.run(["ckptfs", "unmount", "--lazy", point], check=True)


models, *variant = sys.argv[1:]
with mounted(models) as folder:
    options = {"variant": variant[0]} if variant else {}
    pipeline = DiffusionPipeline.from_pretrained(folder, use_safetensors=True, **options)
    print(f"{type(pipeline).__name__} of {', '.join(sorted(pipeline.components))}")
