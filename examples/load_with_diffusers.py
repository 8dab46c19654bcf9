"""Loads an image pipeline with diffusers, in any file format of its parts.

    python load_with_diffusers.py PIPELINE_DIR [VARIANT]

Needs `ckptfs` on the PATH. No byte of a pickle that the mount shows as safetensors is executed.
"""

import subprocess
import sys
import tempfile
from contextlib import contextmanager

from diffusers import DiffusionPipeline


@contextmanager
def mounted(models):
    """The directory as ckptfs shows it, mounted during this block."""
    with tempfile.TemporaryDirectory() as point:
        subprocess.run(["ckptfs", "mount", models, point], check=True)
        try:
            yield point
        finally:
            # Lazily: weights may still be mapped, and stay valid until they are unmapped. The command would
            # print that they are in use.
            unmount = ["ckptfs", "unmount", "--lazy", point]
            subprocess.run(unmount, check=True, stdout=subprocess.DEVNULL)


models, *variant = sys.argv[1:]
with mounted(models) as folder:
    options = {"variant": variant[0]} if variant else {}
    pipeline = DiffusionPipeline.from_pretrained(folder, **options)
    print(f"{type(pipeline).__name__} of {', '.join(sorted(pipeline.components))}")
