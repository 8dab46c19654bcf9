"""The ranks that load together: copies of tensors between them, and their agreement to go on.

Every rank makes the same calls in the same order. Tensors travel as bytes, so that backends also carry types that they
do not know.
"""

import contextlib
import math

import torch
import torch.distributed

from ckptfs.errors import error, in_words


class SingleGroup:
    """The group of one process that loads for itself; the same as `None`."""

    def size(self):
        """The number of ranks."""
        return 1

    def rank(self):
        """The rank of this process."""
        return 0


class Group:
    """What a loader needs of a group: `size()`, `rank()`, and copies between ranks."""

    def __init__(self, pg):
        self.real_pg = _real(pg)
        self._size = self.real_pg.size() if self.real_pg else 1
        self._rank = self.real_pg.rank() if self.real_pg else 0

    def size(self):
        """The number of ranks."""
        return self._size

    def rank(self):
        """The rank of this process."""
        return self._rank

    def close(self):
        """Drops the process group. Its threads may abort a process that ends while something still holds it, even after
        `destroy_process_group()`."""
        self.real_pg = None

    def carries(self, kind):
        """Whether it copies tensors on devices of a kind."""
        if self.real_pg is None:
            return True
        backends = torch.distributed.get_backend_config(self.real_pg)
        return kind in [part.partition(":")[0] for part in str(backends).split(",")]

    def all_gather(self, value):
        """The value of each rank, any object of a few bytes, in the order of the ranks."""
        if self.real_pg is None:
            return [value]
        with self._failing("could not learn what every rank says"):
            return self._all_gather(value)

    def _all_gather(self, value):
        values = [None] * self.size()
        torch.distributed.all_gather_object(values, value, group=self.real_pg)
        return values

    def agreeing(self, device=None):
        """A block that all ranks complete, or that fails on all: with its own error where it failed, elsewhere with the
        message of that one. `device` is where every rank has tensors for the group; `None` while that is not known."""
        return _AgreementBlock(self, device)

    def agree(self, reason, device):
        """Exchanges with all ranks whether each goes on; `reason` is the message of one that does not."""
        if self.real_pg is None:
            return
        with self._failing("could not learn whether every rank goes on"):
            if device is not None:
                flag = torch.tensor([reason is not None], dtype=torch.int32, device=device)
                torch.distributed.all_reduce(flag, group=self.real_pg)
                if not flag.item():
                    return
            answers = self._all_gather(reason)
        others = [(rank, reason) for rank, reason in enumerate(answers) if reason is not None]
        if reason is not None or not others:
            return
        [(rank, reason), *_] = others
        raise error(f"rank {rank} of {self.size()} could not load: {reason}",
                    "fix that, and load again on all ranks: no rank has loaded anything", RuntimeError)  # fmt: skip

    def broadcast(self, name, tensor, source):
        """Copies a rank's tensor into those of the others."""
        with self._copying(name, tensor, f"from rank {source}") as data:
            if data is not None:
                torch.distributed.broadcast(data, group=self.real_pg, group_src=source)

    def scatter(self, name, parts, shapes, kind, source, device):
        """Gives each rank its part. The rank that has them passes `parts`; all pass `shapes`, which may differ.

        Collectives need parts of one size: each is sent with as many elements as the largest has."""
        counts = [math.prod(shape) for shape in shapes]
        max_count, own_rank = max(counts), self.rank()
        flat = torch.empty(max_count, dtype=kind, device=device)
        sent = [_bytes(_padded(part, max_count)) for part in parts] if parts else None
        with self._copying(name, flat, f"from rank {source}") as data:
            if data is not None:
                torch.distributed.scatter(data, sent, group=self.real_pg, group_src=source)
        part = flat[: counts[own_rank]].view(shapes[own_rank])
        # A copy frees what was sent behind it.
        return part if counts[own_rank] == max_count else part.clone()

    def send(self, name, tensor, target):
        """Gives a tensor to one rank, which receives it."""
        with self._copying(name, tensor, f"to rank {target}") as data:
            if data is not None:
                torch.distributed.send(data, group=self.real_pg, group_dst=target)

    def receive(self, name, tensor, source):
        """Fills a tensor with what a rank sends."""
        with self._copying(name, tensor, f"from rank {source}") as data:
            if data is not None:
                torch.distributed.recv(data, group=self.real_pg, group_src=source)

    @contextlib.contextmanager
    def _copying(self, name, tensor, where):
        """A block with the bytes to copy, or `None` if there are none, which all ranks know alike."""
        data = _bytes(tensor) if tensor.numel() else None
        with self._failing(f"{name}: could not be copied {where}"):
            yield data

    @contextlib.contextmanager
    def _failing(self, action):
        """A block in which an error of the group, as when a rank is gone, becomes a refusal."""
        try:
            yield
        except RuntimeError as fault:
            raise error(
                f"{action}, by rank {self.rank()} of {self.size()}: {fault}",
                "see why the other rank ended or came too late, and whether every rank makes the same "
                "calls in the same order; then start all of them again", RuntimeError,
            ) from fault  # fmt: skip


class _AgreementBlock:
    """A class, not a generator, which would keep an exception, and with it memory and files of a load that failed."""

    def __init__(self, group, device):
        self._group, self._device = group, device

    def __enter__(self):
        pass

    def __exit__(self, kind, fault, trace):
        if fault is None or isinstance(fault, Exception):
            reason = None if fault is None else in_words(fault) or kind.__name__
            self._group.agree(reason, self._device)


def _real(pg):
    """The group of torch.distributed, or `None` for a single process."""
    if pg is None or isinstance(pg, torch.distributed.ProcessGroup):
        return pg
    if pg is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise error("this process is no member of pg", "load only in processes that are")
    # Other packages have a class for a group of one, too.
    if callable(getattr(pg, "size", None)) and pg.size() == 1:
        return None
    raise error(f"pg must be a torch.distributed.ProcessGroup, got {type(pg).__name__}",
                "give torch.distributed.group.WORLD, or None for one process")  # fmt: skip


def _bytes(tensor):
    """A view of the bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def _padded(part, count):
    """The elements of a part in order, padded to a count."""
    flat = part.contiguous().view(-1)
    if flat.numel() == count:
        return flat
    padded = torch.zeros(count * part.element_size(), dtype=torch.uint8, device=part.device).view(part.dtype)
    padded.view(torch.uint8)[: flat.nbytes] = _bytes(flat)
    return padded
