"""Loads a language model with transformers, in whatever files it is: shards, pickles, old or new.

    python load_with_transformers.py MODEL_DIR

Wants `ckptfs` on the PATH. Nothing is converted and no byte of a pickle is executed.
"""

import subprocess
import sys
import tempfile
from contextlib import contextmanager

from transformers import AutoModelForCausalLM


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


with mounted(sys.argv[1]) as folder:
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(f"{type(model).__name__} with {model.num_parameters()} parameters")
