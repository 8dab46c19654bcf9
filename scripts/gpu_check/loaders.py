"""What is measured: ways to have the tensors of a model on a device.

Each imports what it needs and gives what loads: files in, tensors by name out, each the caller's own. What must
stay alive for them it keeps in `kept`.
"""

import os

kept = []


def ckptfs(device, **how):
    from ckptfs.torch import load_file

    return lambda files: load_file(os.path.dirname(files[0]), device=device, **how)


def safetensors(device):
    from safetensors.torch import load_file

    return lambda files: {name: tensor for file in files for name, tensor in load_file(file, device=device).items()}


def safetensors_prefetch(device):
    from safetensors import safe_open

    def load(files):
        tensors = {}
        for file in files:
            with safe_open(file, "pt", device=device) as f, f.prefetch() as loader:
                tensors |= dict(loader)
        return tensors

    return load


def fastsafetensors(device, **how):
    from fastsafetensors import SafeTensorsFileLoader

    def load(files):
        loader = SafeTensorsFileLoader(None, device, **how)
        loader.add_filenames({0: files})
        buffer = loader.copy_files_to_device()
        kept.append((loader, buffer))
        return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return load


def fastsafetensors_nogds(device):
    return fastsafetensors(device, nogds=True)


def runai(device):
    from runai_model_streamer import SafetensorsStreamer

    def load(files):
        with SafetensorsStreamer() as streamer:
            # It gives tensors of the caller's own, on the device that is named.
            streamer.stream_files(files, device=device)
            return dict(streamer.get_tensors())

    return load


def instanttensor(device):
    from instanttensor import safe_open

    def load(files):
        with safe_open(files, framework="pt", device=device) as f:
            return dict(f.tensors())

    return load


# Names in the table, what loads, and the packages that it needs.
LOADERS = {
    "ckptfs": (ckptfs, ["ckptfs"]),
    "safetensors 0.8 load_file": (safetensors, ["safetensors 0.8"]),
    "safetensors 0.9 load_file": (safetensors, ["safetensors 0.9"]),
    "safetensors 0.9 prefetch": (safetensors_prefetch, ["safetensors 0.9"]),
    "fastsafetensors nogds": (fastsafetensors_nogds, ["fastsafetensors"]),
    "fastsafetensors": (fastsafetensors, ["fastsafetensors"]),
    "runai-model-streamer": (runai, ["runai", "humanize"]),
    "instanttensor": (instanttensor, ["instanttensor"]),
}
