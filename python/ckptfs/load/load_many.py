"""Loading several checkpoints together.

In: their paths. Out: the tensors of each. Those that can be open at once are read in one plan, on one set of
threads, within one bound of memory.
"""

from ckptfs import settings
from ckptfs.load import dtype_cast, pipeline
from ckptfs._errors import error
from ckptfs.load.torch import framework as framework_of
from ckptfs.rlimit import most_open
from ckptfs.load.report import Load
from ckptfs.load.handle import open_each, options


def load_many(filenames, framework="pt", device="cpu", *, backend=None, names=None, dtype=None, root=None,
              allow_partial=False, follow_symlinks=False, num_threads=None, memory=None, leave_cache=False,
              progress=False, report=None):
    """The tensors of several checkpoints, read together: one after the other in the order given, and at no time
    by more threads or with more memory than one load has. Any number of files may be given.

    `filenames` is a list of what `load_file` takes, and a list of dictionaries comes back; or a dictionary with
    a name for each, and a dictionary with these names comes back. Everything else is that of
    `ckptfs.torch.load_file`, and holds for each. If one of them cannot be loaded none is.

        unet, vae = ckptfs.load_many(["sdxl/unet", "sdxl/vae"], device="cuda:0")
        parts = ckptfs.load_many({"base": "models/llama", "adapter": "adapters/first"}, backend="pread")
        latents = ckptfs.load_many(glob.glob("cache/*.safetensors"), backend="pread")
    """
    if isinstance(filenames, (str, bytes)) or hasattr(filenames, "__fspath__"):
        raise error("load_many takes a list of paths, and one path was given", "give [path], or use load_file")
    framework = framework_of(framework)
    num_threads, memory = settings.limits(num_threads, memory)
    how = options(root, allow_partial, follow_symlinks, num_threads,
                  dtype_cast.for_reading(memory, dtype), leave_cache)
    way, device = settings.backend(backend, framework.BACKEND), framework.device(device)
    # For each the same, also if it can be asked but once.
    names = names if names is None or isinstance(names, str) else list(names)
    paths = list(filenames.values() if hasattr(filenames, "keys") else filenames)
    loaded = []
    with Load(progress, report) as load:
        for checkpoints in _groups(paths, names, how, load):
            loaded += pipeline.load_each(checkpoints, framework, way, load, device=device, dtype=dtype, memory=memory)
            # Their files are closed before others are opened.
            checkpoints.clear()
    return dict(zip(filenames, loaded, strict=True)) if hasattr(filenames, "keys") else loaded


def _groups(paths, names, how, load):
    """The tensors of each, of as many at a time as may be open."""
    most, held, group, notes = most_open(), 0, [], {}
    for opened, why in open_each(paths, how, most // 2):
        tensors = pipeline.chosen(opened, names)
        load.begins(len(tensors), (tensor.nbytes for tensor in tensors), why)
        notes.update(dict.fromkeys(opened.notes))
        # Beside its files a checkpoint holds its directory.
        held += opened.files + 1
        group.append(tensors)
        if held > most:
            yield group
            held, group = 0, []
    load.noted(notes)
    if group:
        yield group
