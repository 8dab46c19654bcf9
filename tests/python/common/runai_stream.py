"""Streams a file under the environment's settings of the Run:ai Model Streamer, and fails if its tensors are not
those of another file.

    runai_stream.py FILE EXPECTED
"""

import sys

import torch
from runai_model_streamer import SafetensorsStreamer
from safetensors.torch import load_file

from compare import bits

path, expected = sys.argv[1:]
expected = load_file(expected)
with SafetensorsStreamer() as streamer:
    streamer.stream_file(path)
    for name, tensor in streamer.get_tensors():
        assert torch.equal(bits(tensor), bits(expected.pop(name))), name
assert not expected, f"not streamed: {expected.keys()}"
