"""The types of fastsafetensors: `DType`, `Device`, and `TorchTensor`, a tensor of torch with both."""

from dataclasses import dataclass
from enum import Enum

import torch

from ckptfs.dtypes import TYPES, torch_dtype, torch_shape
from ckptfs.errors import error


class DeviceType(Enum):
    """Where tensors can be."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device by its kind and number: `Device(DeviceType.CUDA, 0)`, or `Device.from_str("cuda:0")`."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self):
        """The text of torch for it."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s):
        """The device of a text of torch."""
        kind, colon, index = s.partition(":")
        if kind.lower() not in [known.value for known in DeviceType]:
            raise error(f"device {s!r} is invalid", 'name "cpu", or "cuda" with a number', ValueError)
        if colon and not index.isdecimal():
            raise error(f"device {s!r} is invalid: {index!r} is no number", also=ValueError)
        return cls(DeviceType(kind.lower()), int(index) if colon else None)


# The names in a header, and one for the type that is stored.
DType = Enum("DType", {name: name for name in (*TYPES, "AUTO")}, module=__name__)
DType.__doc__ = "The type of elements, by its name in a header; `AUTO` is the one that they are stored with."

_BY_TORCH = {getattr(torch, of): DType(name) for name, of in TYPES.items() if hasattr(torch, of)}


def as_device(value):
    """The `Device` for one of ours, of fastsafetensors or of torch, or for a text."""
    if value is None or isinstance(value, Device):
        return value
    if hasattr(value, "as_str"):
        return Device.from_str(value.as_str())
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError, ValueError) as fault:
        raise error(f"device {value!r} is invalid: {fault}", also=ValueError) from None
    return Device.from_str(str(found))


def as_dtype(value):
    """The `DType` for one of ours, of fastsafetensors or of torch, or for a text."""
    if isinstance(value, torch.dtype):
        if value in _BY_TORCH:
            return _BY_TORCH[value]
    else:
        name = getattr(value, "value", value)
        if isinstance(name, str) and name in DType.__members__:
            return DType(name)
    raise error(f"dtype {value!r} is invalid", "give one of ckptfs.fastsafetensors.DType", ValueError)


def cast(name, tensor, stored, dtype):
    """A tensor of torch with elements of another type than `stored`."""
    if dtype in (DType.AUTO, stored):
        return tensor
    # Two elements of F4 share a byte. A complex number would lose its imaginary part.
    if {stored, dtype} & {DType.F4, DType.C64}:
        raise error(f"{name}: cannot be cast from {stored.value} to {dtype.value}",
                    "load it as it is, with DType.AUTO")  # fmt: skip
    return tensor.to(torch_dtype(dtype.value))


def native(dtype, shape):
    """The shape that torch has for a shape in a header."""
    return torch_shape(dtype.value, shape)


@dataclass
class TorchTensor:
    """A tensor with its `device` and `dtype`; `get_raw()` is torch's."""

    device: Device
    dtype: DType
    real_tensor: torch.Tensor

    def get_raw(self):
        """The tensor of torch."""
        return self.real_tensor

    def get_shape(self):
        """The shape in a header, which counts elements even where several share a byte."""
        shape = list(self.real_tensor.shape)
        return [*shape[:-1], shape[-1] * 2] if self.dtype is DType.F4 else shape

    def get_nbytes(self):
        """The bytes of its elements."""
        return self.real_tensor.nbytes

    def copy_to_buffer(self, buf):
        """Writes its bytes, in order, to the start of a writable buffer."""
        if self.real_tensor.numel():
            flat = self.real_tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            torch.frombuffer(buf, dtype=torch.uint8, count=flat.numel()).copy_(flat)

    def to(self, device=None, dtype=DType.AUTO):
        """The same values on another device or of another type; itself if nothing differs."""
        device, dtype = as_device(device) or self.device, as_dtype(dtype)
        result = cast("a tensor", self.real_tensor, self.dtype, dtype)
        if device != self.device:
            result = result.to(device.as_str())
        if result is self.real_tensor:
            return self
        return TorchTensor(device, self.dtype if dtype is DType.AUTO else dtype, result)

    def view(self, dtype):
        """The same bytes as elements of another type."""
        dtype = as_dtype(dtype)
        return TorchTensor(self.device, dtype, self.real_tensor.view(torch_dtype(dtype.value)))

    def clone(self):
        """A copy of the tensor."""
        return self._with(self.real_tensor.clone())

    def detach(self):
        """The same tensor without its autograd history."""
        return self._with(self.real_tensor.detach())

    def contiguous(self):
        """The tensor with its elements in order."""
        return self._with(self.real_tensor.contiguous())

    def reshape(self, shape):
        """The tensor in another shape."""
        return self._with(self.real_tensor.reshape(shape))

    def data_ptr(self):
        """The address of its first element."""
        return self.real_tensor.data_ptr()

    def __getitem__(self, index):
        return self._with(self.real_tensor[index])

    def _with(self, tensor):
        return TorchTensor(self.device, self.dtype, tensor)
