"""Loads a language model with transformers, from shards or pickles, old or new.

    python load_with_transformers.py MODEL_DIR

Needs `ckptfs` on the PATH. Nothing is converted and no byte of a pickle is executed.
"""

import subprocess
import sys
import tempfile
from contextlib import contextmanager

from transformers import AutoModelForCausalLM


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


with mounted(sys.argv[1]) as folder:
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(f"{type(model).__name__} with {model.num_parameters()} parameters")
