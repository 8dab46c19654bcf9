"""Which tensor goes to which device, where that is said for parts of a model.

In: names of modules with a device for each, as accelerate and transformers have them. Out: a device for each
tensor; the longest name that it begins with counts.
"""

from ckptfs._errors import error


class Placement(dict):
    """Names of modules, and the device of each; nothing stands for this machine's memory."""

    def of(self, name):
        """Where a tensor goes."""
        module = name
        while module not in self:
            if not module:
                raise error(f"{name}: the devices that are given have none for it",
                            'give one for "", which stands for all others')  # fmt: skip
            module = module.rpartition(".")[0]
        return self[module]


def place_each(device, tensors):
    """The device of each tensor: that of a placement, or one for all."""
    if isinstance(device, Placement):
        return [device.of(tensor.name) for tensor in tensors]
    return [device] * len(tensors)
