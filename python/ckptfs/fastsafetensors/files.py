"""A checkpoint as fastsafetensors sees a file: its metadata at once, its tensors when they are asked for.

Each tensor has memory of its own.
"""

from ckptfs.fastsafetensors.metadata import SafeTensorsMetadata
from ckptfs.fastsafetensors.types import DType, TorchTensor, cast
from ckptfs.load.handle import Handle
from ckptfs.load.pipeline import batches, load_parts, can_load_directly
from ckptfs.load.torch import Torch
from ckptfs.settings import LoadOptions

# Bytes on the host at once of what goes elsewhere or is cast.
_BATCH_BYTES = 256 << 20


class File:
    """One checkpoint. Its files stay open as long as this object exists."""

    def __init__(self, path, options):
        self._handle = Handle(path, options)
        with self._handle.use() as checkpoint:
            self.metadata = SafeTensorsMetadata.of(checkpoint, path)

    def read(self, names, device, dtype):
        """The tensors of these names, as `TorchTensor` by name."""
        target = Torch.parse_device(device.as_str())
        loaded_tensors, options = {}, LoadOptions(framework=Torch)
        with self._handle.use() as checkpoint:
            tensors = [checkpoint.tensor(name) for name in names]
            direct = target if can_load_directly(target, options) else None
            options = LoadOptions(framework=Torch, device=direct)
            is_final = target == direct and dtype is DType.AUTO
            for batch in [tensors] if is_final else batches(tensors, _BATCH_BYTES):
                loaded = load_parts([(tensor, tensor.shape) for tensor in batch], options)
                # Taken out one by one, so that none is held longer than it must be.
                loaded.reverse()
                for tensor in batch:
                    raw, stored = loaded.pop(), DType(tensor.dtype)
                    raw = Torch.move(cast(tensor.name, raw, stored, dtype), target)
                    loaded_tensors[tensor.name] = TorchTensor(device, stored if dtype is DType.AUTO else dtype, raw)
        return loaded_tensors
