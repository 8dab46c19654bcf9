"""Loads an image pipeline with diffusers, in whatever files its parts are.

    python load_with_diffusers.py PIPELINE_DIR [VARIANT]

Wants `ckptfs` on the PATH. No byte of a pickle that the mount shows as safetensors is executed.
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
            # Lazily: weights may still be mapped, and are then good until they are let go of. That
            # they are in use is what it would print.
            unmount = ["ckptfs", "unmount", "--lazy", point]
            subprocess.run(unmount, check=True, stdout=subprocess.DEVNULL)


models, *variant = sys.argv[1:]
with mounted(models) as folder:
    options = {"variant": variant[0]} if variant else {}
    pipeline = DiffusionPipeline.from_pretrained(folder, **options)
    print(f"{type(pipeline).__name__} of {', '.join(sorted(pipeline.components))}")
