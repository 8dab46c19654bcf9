"""Chooses the experts of a mixture that a rank loads; has the calls of `fastsafetensors.ep_slice`."""

import os
import re

import torch.distributed

from ckptfs.errors import error

# The number of an expert in the name of a tensor, as in "model.layers.3.mlp.experts.42.w1.weight".
_PATTERN = re.compile(r"\.experts\.(\d+)\.")


def owned_expert_range(num_experts, ep_size, ep_rank):
    """The first expert of a rank, and the one after its last. Ranks have equal numbers of experts, in order. Where
    experts do not divide evenly, the first ranks have one more."""
    if ep_size <= 0:
        raise error(f"ep_size must be positive, got {ep_size}", also=ValueError)
    if not 0 <= ep_rank < ep_size:
        raise error(f"ep_rank {ep_rank} is no rank of {ep_size}", also=ValueError)
    share, more = divmod(num_experts, ep_size)
    start = ep_rank * share + min(ep_rank, more)
    return start, start + share + (ep_rank < more)


def expert_parallel_filter(num_experts, ep_size, ep_rank, pattern=_PATTERN):
    """A filter for `SafeTensorsFileLoader.set_tensor_filter`: a rank loads its own experts, and all tensors that
    belong to no expert. `pattern` finds an expert's number in a name.

        loader.set_tensor_filter(expert_parallel_filter(num_experts=256, ep_size=2, ep_rank=rank))
    """
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name):
        found = pattern.search(name)
        return found is None or first <= int(found[1]) < end

    return keep


def expert_parallel_filter_from_env():
    """A filter from the environment; `None`, which means all tensors, if the environment asks for none.

    FASTSAFETENSORS_EP_SLICE=1 asks for a filter, and FASTSAFETENSORS_EP_NUM_EXPERTS is the number of experts.
    FASTSAFETENSORS_EP_SIZE and FASTSAFETENSORS_EP_RANK default to those of torch.distributed, or without a process
    group to WORLD_SIZE and RANK."""
    experts = _number("FASTSAFETENSORS_EP_NUM_EXPERTS", 0)
    if os.environ.get("FASTSAFETENSORS_EP_SLICE") != "1" or experts <= 0:
        return None
    size, rank = _number("FASTSAFETENSORS_EP_SIZE", 0), _number("FASTSAFETENSORS_EP_RANK", -1)
    is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if size <= 0:
        size = torch.distributed.get_world_size() if is_grouped else _number("WORLD_SIZE", 1)
    if rank < 0:
        rank = torch.distributed.get_rank() if is_grouped else _number("RANK", 0)
    return expert_parallel_filter(experts, size, rank) if size > 1 else None


def _number(name, default):
    value = os.environ.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise error(f"{name}={value!r} is no number", "set it to one, or unset it", ValueError) from None
