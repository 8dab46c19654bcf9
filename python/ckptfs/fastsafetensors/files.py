"""A checkpoint as fastsafetensors sees a file: what is in it, and its tensors.

In: a path to any checkpoint. Out: a `File`, whose `metadata` is known at once and whose tensors are read
when they are asked for, each into memory of its own.
"""

from ckptfs import settings
from ckptfs.load import pipeline
from ckptfs.fastsafetensors.metadata import SafeTensorsMetadata
from ckptfs.fastsafetensors.types import DType, TorchTensor, cast
from ckptfs.load.torch import Torch
from ckptfs.load.read import batches, is_straight
from ckptfs.load.handle import Source

# So much is in the machine's memory at once of what goes elsewhere or is cast.
_AT_ONCE = 256 << 20


class File:
    """One checkpoint. Its files stay open as long as this object exists."""

    def __init__(self, path, how):
        self._source = Source(path, how)
        with self._source.use() as opened:
            self.metadata = SafeTensorsMetadata.of(opened, path)

    def read(self, names, device, dtype):
        """Those tensors, as `TorchTensor` by their names."""
        goes = Torch.device(device.as_str())
        made = {}
        with self._source.use() as opened:
            tensors = [opened.tensor(name) for name in names]
            straight = goes if is_straight(goes, Torch) else None
            stay = goes == straight and dtype is DType.AUTO
            for batch in [tensors] if stay else batches(tensors, _AT_ONCE):
                parts = [(tensor, tensor.shape) for tensor in batch]
                loaded = pipeline.load_parts(parts, Torch, settings.PREAD, straight)
                # Taken out one by one, so that none is held longer than it must be.
                loaded.reverse()
                for tensor in batch:
                    raw, stored = loaded.pop(), DType(tensor.dtype)
                    raw = Torch.put(cast(tensor.name, raw, stored, dtype), goes)
                    kind = stored if dtype is DType.AUTO else dtype
                    made[tensor.name] = TorchTensor(device, kind, raw)
        return made
