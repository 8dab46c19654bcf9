"""Tensors of torch: `load_file`, and the framework that makes them of memory.

torch is not imported before a tensor of it is made.
"""

from ckptfs.dtypes import torch_dtype, torch_shape
from ckptfs.errors import error, refuse_target
from ckptfs.load.pipeline import load_named, open_checkpoint
from ckptfs.settings import MMAP, LoadOptions


class DeviceMap(dict):
    """Names of modules with a device for each, as accelerate has them; `None` is the host.

    The device of a tensor is that of the longest name that its own begins with."""

    def device_of(self, name):
        """Where the tensor of a name goes."""
        module = name
        while module not in self:
            if not module:
                raise error(f"{name}: device= names no device for it",
                            'add one for "", which stands for all other tensors')  # fmt: skip
            module = module.rpartition(".")[0]
        return self[module]


class Torch:
    """The framework of torch."""

    # As in safetensors: tensors are used where they lie in their file.
    BACKEND = MMAP
    VECTOR_ALIGNED = False

    dtype, shape = staticmethod(torch_dtype), staticmethod(torch_shape)

    @staticmethod
    def parse_dtype(value):
        """A type of torch, by itself or by its name; refuses one that nothing can be cast to."""
        import torch

        found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if not isinstance(found, torch.dtype):
            raise error(f"{value!r} is no type of torch")
        try:
            torch.empty(1, dtype=torch.float32, device="cpu").to(found)
        except RuntimeError as fault:
            raise error(f"nothing can be cast to {found}: {fault}", "load it as it is") from None
        return found

    @staticmethod
    def parse_device(value):
        """A device of torch or a `DeviceMap`; `None` for the host."""
        if value is None or value == "cpu":
            return None
        if isinstance(value, dict):
            return DeviceMap({module: Torch.parse_device(device) for module, device in value.items()})
        import torch

        try:
            device = torch.device(value)
        except TypeError:
            raise error(f"device {value!r} is invalid", 'give text such as "cuda:0", a number or a device of torch',
                        TypeError) from None  # fmt: skip
        except (RuntimeError, ValueError) as fault:
            raise error(f"device {value} is invalid: {fault}") from None
        return None if device.type == "cpu" else device

    @staticmethod
    def devices(device, tensors):
        """The device of each tensor."""
        if isinstance(device, DeviceMap):
            return [device.device_of(tensor.name) for tensor in tensors]
        return [device] * len(tensors)

    @staticmethod
    def device_obstacle(device):
        """Why the Rust part cannot load to a device; `None` if it can."""
        from ckptfs.load import cuda

        return cuda.obstacle(device)

    @staticmethod
    def load_to_devices(parts, devices, load):
        """A tensor of each part, on its CUDA device."""
        from ckptfs.load import cuda

        return cuda.load_to_devices(parts, devices, load)

    @staticmethod
    def fill_on_devices(parts, targets, load):
        """Loads each part into a tensor on a CUDA device. Returns what was done."""
        from ckptfs.load import cuda

        return cuda.fill_on_devices(parts, targets, load)

    @staticmethod
    def from_memory(memory, name, shape):
        """A tensor of these bytes, which it keeps alive."""
        import torch

        dtype = torch_dtype(name)
        if name == "F4":
            shape = torch_shape(name, shape)
        if len(memory) == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype)
        # A view of numbers one by one takes half as long as one of a list.
        return flat if len(shape) == 1 else flat.view(*shape) if shape else flat.view(shape)

    @staticmethod
    def reshape(tensor, name, shape):
        """The same bytes in another shape, as a header counts."""
        return tensor.view(torch_shape(name, shape))

    @staticmethod
    def empty(dtype, shape, device):
        """A tensor without values."""
        import torch

        return torch.empty(shape, dtype=dtype, device=device or "cpu")

    @staticmethod
    def cast(tensor, dtype):
        """The same values in another type."""
        return tensor.to(dtype)

    @staticmethod
    def move(tensor, device):
        """The same tensor on a device; itself for the host."""
        return tensor if device is None else tensor.to(device)

    @staticmethod
    def copy(target, source):
        """Copies values, cast to the type of the target."""
        import torch

        with torch.no_grad():
            target.copy_(source)

    @staticmethod
    def target_address(name, target, dtype, shape):
        """The address of a tensor to load into; refuses one that cannot be loaded into."""
        import torch

        if not isinstance(target, torch.Tensor):
            raise TypeError(f"{name}: expected torch.Tensor to load into, got {type(target)}")
        if target.is_nested:
            raise refuse_target(name, *memory_obstacle(target))
        if target.layout != torch.strided or target.device.type == "meta":
            raise refuse_target(name, f"it is {target.layout} on {target.device}")
        if (target.dtype, list(target.shape)) != (dtype, shape):
            raise refuse_target(name, f"it is {target.dtype} {list(target.shape)}, not {dtype} {shape}")
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            raise refuse_target(name, "it is not contiguous")
        obstacle = memory_obstacle(target)
        if obstacle:
            raise refuse_target(name, *obstacle)
        return target.data_ptr()

    @staticmethod
    def memory_key(target):
        """Equal for targets that are the same memory; `None` for one without."""
        import torch

        if not isinstance(target, torch.Tensor) or target.layout != torch.strided or memory_obstacle(target):
            return None
        if not target.nbytes:
            return None
        return target.device, target.data_ptr(), target.dtype, target.shape, target.stride()

    @staticmethod
    def device_of(target):
        """The device of a tensor; `None` for the host."""
        return None if target.device.type == "cpu" else target.device

    @staticmethod
    def mark_changed(targets):
        """Tells autograd that tensors have other values now."""
        import torch

        # Versions of torch without it notice no change that torch did not make.
        increment = getattr(torch.autograd.graph, "increment_version", None)
        for target in targets if increment else ():
            increment(target)


def memory_obstacle(tensor):
    """Why the bytes of a tensor are not all in memory of its own, and what to do; `None` if they are.

    Only where they are may the address of a tensor be used."""
    import torch

    if tensor.is_nested:
        return "it is nested", "give its parts one by one, such as of .unbind()"
    is_wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    try:
        if not tensor.nbytes:
            return None
        storage = tensor.untyped_storage()
        address = tensor.data_ptr() if storage.device.type == tensor.device.type else 0
        held = storage.nbytes()
        needed = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    except Exception:
        address = held = needed = 0
    if address and needed <= held:
        return None
    if is_wrapper:
        return (f"it is a {type(tensor).__name__}, which has no memory of its own",
                "give its local tensor, such as .to_local()")  # fmt: skip
    if not address:
        return "it has no memory: that was freed, or never there", "give a tensor that has"
    return f"its memory has {held} bytes, and it needs {needed}", "give a tensor that has them"


def load_file(filename, device="cpu", *, backend=None, names=None, into=None, dtype=None,
              root=None, allow_partial=False, follow_symlinks=False, ranks=None, delta_base=None, views=None, num_threads=None, memory=None,
              leave_cache=False, cache=True, progress=False, report=None):
    """The tensors of a checkpoint, by their names.

    `filename` is any checkpoint: a `.safetensors` file, a directory of shards, a `.bin`, `.pt` or `.ckpt`, a file of a
    ckptfs mount. If a directory has a model in several formats or variants, the one that transformers takes is loaded.
    The report says what was left out. Where `x.safetensors` is missing and `x.pt` exists, `x.pt` is loaded,
    and the report says so.
    `device` is where the tensors go: to a CUDA device directly, in memory of torch's own. It may also be a dictionary
    of names of modules with a device for each, as accelerate has them, and `""` for all others.

    `backend`: "mmap", the default, uses tensors where they lie in their file; "pread" gives each memory of its own.
    `help(ckptfs.safe_open)` says when to choose which.
    `names`: what to load: a list of whole names, or one string, which may be a glob such as "model.layers.0.*". A list
    has no globs.
    `into`: tensors by their names to load into. Each has the type and shape of what is loaded, is contiguous, on any
    device, and shares its memory with no other. For a DTensor pass what `.to_local()` returns. Without `names` all of
    `into` are loaded. The call returns them; after an error their contents are undefined.
    `dtype`: the type that floating-point tensors are cast to; others stay as they are.
    `root`: the dictionary of a pickle to load, as a dotted path. `allow_partial` leaves out what cannot be loaded.
    `follow_symlinks` lets links lead out of a directory. `ranks`: the number of ranks of a training run; per-rank files
    of any other number are refused. `delta_base`: the model that training began with, for deltas of its versions.
    `views`: a recipe that says how tensors are cast, renamed, selected, sliced, stacked or split (docs/views.md). A dictionary
    of steps is for the checkpoint at `filename`; of the path of a recipe, `filename` is a file that it shows.
    `num_threads` threads read at once. `memory`: bytes, or text such as "64M", that may be held beside the result;
    16 MiB is plenty. With `leave_cache` the page cache keeps only what it had, except of mapped tensors.
    Without `cache` tensors of stores are neither read from the cache on disk nor kept there.
    `progress` shows a bar. `report` is called with the `ckptfs.Report` that `ckptfs.last_report()` returns.

        from ckptfs.torch import load_file

        tensors = load_file("models/llama", device="cuda:0")
        halves = load_file("runs/last.ckpt", root="ema", dtype=torch.float16, names="encoder.*")
        load_file("models/llama", into=model.state_dict())
    """
    # Wrong arguments are refused even where the file is missing: `cached` asks first, and then makes it.
    options = LoadOptions.resolve(
        Torch, device=device, backend=backend, names=names, into=into, dtype=dtype, root=root,
        allow_partial=allow_partial, follow_symlinks=follow_symlinks, ranks=ranks, delta_base=delta_base, views=views, num_threads=num_threads, memory=memory,
        leave_cache=leave_cache, cache=cache, progress=progress, report=report,
    )  # fmt: skip
    checkpoint, note = open_checkpoint(filename, options)
    return load_named(checkpoint, options, note)
