"""Loading several checkpoints together.

Those that can be open at once are read in one plan, on one set of threads, within one bound of memory.
"""

from ckptfs.errors import error, wrong_type
from ckptfs.load.framework import framework_named
from ckptfs.load.pipeline import load_together, open_checkpoints, select
from ckptfs.load.report import Load
from ckptfs.rlimit import max_open_files
from ckptfs.settings import LoadOptions


def load_many(filenames, framework="pt", device="cpu", *, backend=None, names=None, dtype=None, root=None,
              allow_partial=False, follow_symlinks=False, ranks=None, delta_base=None, views=None, num_threads=None, memory=None, leave_cache=False,
              cache=True, progress=False, report=None):
    """The tensors of several checkpoints, read together in their order, with the threads and the memory of one load.

    `filenames` is a list, of any length, of what `load_file` takes; then a list of dictionaries is returned. It may
    also be a dictionary with a name for each; then a dictionary with these names is returned. Everything else is as for
    `ckptfs.torch.load_file`, and holds for each. If one of them cannot be loaded, none is.

        unet, vae = ckptfs.load_many(["sdxl/unet", "sdxl/vae"], device="cuda:0")
        parts = ckptfs.load_many({"base": "models/llama", "adapter": "adapters/first"}, backend="pread")
        latents = ckptfs.load_many(glob.glob("cache/*.safetensors"), backend="pread")
    """
    if isinstance(filenames, (str, bytes)) or hasattr(filenames, "__fspath__"):
        raise error("load_many takes a list of paths, and one path was given", "give [path], or use load_file")
    if not hasattr(filenames, "__iter__"):
        raise wrong_type("filenames", "a list or a dictionary of paths", filenames)
    options = LoadOptions.resolve(
        framework_named(framework), device=device, backend=backend, dtype=dtype, root=root,
        allow_partial=allow_partial, follow_symlinks=follow_symlinks, ranks=ranks, delta_base=delta_base, views=views, num_threads=num_threads, memory=memory,
        leave_cache=leave_cache, cache=cache, progress=progress, report=report,
        names=names,
    )  # fmt: skip
    paths = list(filenames.values() if hasattr(filenames, "keys") else filenames)
    loaded = []
    with Load(progress, report) as load:
        for groups in _open_groups(paths, options, load):
            loaded += load_together(groups, options, load)
            # Closes their files before others are opened.
            groups.clear()
    return dict(zip(filenames, loaded, strict=True)) if hasattr(filenames, "keys") else loaded


def _open_groups(paths, options, load):
    """The selected tensors of each checkpoint, of as many at a time as may be open."""
    max_files, open_files, groups, notes = max_open_files(), 0, [], {}
    for checkpoint, note in open_checkpoints(paths, options, max_files // 2):
        tensors = select(checkpoint, options.names)
        load.begin(len(tensors), (tensor.nbytes for tensor in tensors), note)
        notes.update(dict.fromkeys(checkpoint.notes))
        # A checkpoint holds its directory open, too.
        open_files += checkpoint.file_count + 1
        groups.append(tensors)
        if open_files > max_files:
            yield groups
            open_files, groups = 0, []
    load.add_notes(notes)
    if groups:
        yield groups
