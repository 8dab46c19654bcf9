"""Loads a pipeline from a mount and from its original under the environment's settings of diffusers, and fails if
they differ.

    parallel_pipeline_load.py MOUNTED ORIGINAL [--pickles]
"""

import sys

from diffusers import StableDiffusionPipeline
from diffusers.utils.constants import HF_ENABLE_PARALLEL_LOADING

from pipelines import check_same_pipeline

mounted, original, *pickles = sys.argv[1:]
assert HF_ENABLE_PARALLEL_LOADING, "not asked to load in parallel"
asked = {"use_safetensors": False} if pickles else {}
check_same_pipeline(
    StableDiffusionPipeline.from_pretrained(mounted),
    StableDiffusionPipeline.from_pretrained(original, **asked),
)
