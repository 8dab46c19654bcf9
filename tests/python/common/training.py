"""Writes training checkpoints with torch's own writers: with a process for each rank, or any boxes in one process.

    python training.py FOLDER

runs `write_by_ranks` in four processes.
"""

import contextlib
import datetime
import os
import pickle
import random
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

import ckptfs as package
from ckptfs.torch import load_distributed, load_file

from compare import check_export, check_same, check_tensors, names_of
from program import DONE

# Ranks wait this long for one another; only a failing test waits.
SECONDS = 120

# Types that torch.save and safetensors both have.
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64,
)  # fmt: skip


def any_tensor(rng, shape, dtype):
    """A tensor of random bits."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
    raw = bytearray(rng.randbytes(count * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def any_boxes(rng, shape, cuts):
    """Random boxes (start, counts) that cover a shape, from this number of cuts."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(cuts):
        start, counts = boxes.pop(rng.randrange(len(boxes)))
        axes = [axis for axis, count in enumerate(counts) if count > 1]
        if not axes:
            boxes.append((start, counts))
            continue
        axis = rng.choice(axes)
        first = rng.randrange(1, counts[axis])
        boxes.append((start, (*counts[:axis], first, *counts[axis + 1 :])))
        rest = (*start[:axis], start[axis] + first, *start[axis + 1 :])
        boxes.append((rest, (*counts[:axis], counts[axis] - first, *counts[axis + 1 :])))
    rng.shuffle(boxes)
    return boxes


def whole_box(tensor):
    return [((0,) * tensor.dim(), tuple(tensor.shape))]


def part_of(tensor, box):
    return tensor[tuple(slice(start, start + count) for start, count in zip(*box, strict=True))]


class _Pieces(SavePlanner):
    """Gives the writer the boxes of whole tensors. `store` decides how they lie in memory."""

    def __init__(self, tensors, store):
        self.tensors, self.store = tensors, store

    def set_up_planner(self, *_, **__):
        pass

    create_local_plan = create_global_plan = finish_plan = set_up_planner

    def resolve_data(self, item):
        chunk = item.tensor_data.chunk
        return self.store(part_of(self.tensors[item.index.fqn], (chunk.offsets, chunk.sizes)))


def piece_item(name, tensor, box, size=None):
    """The plan of a rank to write a box of a tensor."""
    chunk = ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(size or tensor.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def save_pieces(writer, tensors, ranks, *, keys=None, sizes=None, store=torch.Tensor.contiguous, change=None):
    """Saves boxes of tensors as if ranks had them: `ranks` has the (name, box) pairs of each.

    `keys` has the keys that lead to each name. `sizes` replaces the recorded sizes of whole tensors. `change` changes
    the table before it is written.
    """
    sizes = sizes or {}
    planner = _Pieces(tensors, store)
    writer.set_up_storage_writer(True)
    items = [[piece_item(name, tensors[name], box, sizes.get(name)) for name, box in rank] for rank in ranks]
    plans = [writer.prepare_local_plan(SavePlan(rank)) for rank in items]
    plans, table = create_default_global_save_plan(plans)
    table.planner_data = {name: (name,) for name in tensors} if keys is None else keys
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    if change:
        change(table, results)
    writer.finish(table, results)


def deal_boxes(rng, tensors, ranks, cuts):
    """Gives random boxes of the tensors to random ranks. Returns the (name, box) pairs of each rank."""
    by_rank = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        for box in any_boxes(rng, tensor.shape, rng.randint(0, cuts)):
            rng.choice(by_rank).append((name, box))
    return by_rank


def random_store(rng):
    """A random way to store a piece in memory."""
    turned = lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.contiguous()
    return rng.choice([torch.Tensor.contiguous, turned, lambda tensor: tensor])


def save_random_pieces(rng, folder, tensors):
    """Saves random boxes of tensors as if ranks had them, with random options of the writer."""
    writer = FileSystemWriter(
        folder, single_file_per_rank=rng.random() < 0.7, sync_files=False, thread_count=rng.randint(1, 3)
    )
    ranks = deal_boxes(rng, tensors, rng.randint(1, 5), cuts=rng.choice((0, 3, 12)))
    key = rng.choice(["", "model."])
    keys = {f"{key}{name}": ("model", name) for name in tensors} if key else {}
    ranks = [[(f"{key}{name}", box) for name, box in rank] for rank in ranks]
    whole = {f"{key}{name}": tensor for name, tensor in tensors.items()}
    save_pieces(writer, whole, ranks, keys=keys, store=random_store(rng))


def save_whole(folder, state, **options):
    """Saves a state from this process alone."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=FileSystemWriter(folder, sync_files=False, **options), no_dist=True)


def consolidate(folder):
    """The tensors of a folder by their names, joined by torch."""
    path = Path(f"{folder}.pt")
    dcp_to_torch_save(folder, path)
    state = torch.load(path, weights_only=False)
    path.unlink()
    return names_of(state)


def edit_table(folder, change, name=".metadata"):
    """Unpickles a table, changes it, and writes it again."""
    path = Path(folder) / name
    table = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(table) or table))


def run_ranks(world, function, *args):
    """Runs `function(rank, *args)` in `world` forks of this process, which are one gloo group."""
    store = Path(args[0]) / "store"
    mp.start_processes(_begin, args=(world, str(store), function, args), nprocs=world, start_method="fork")
    store.unlink(missing_ok=True)


def _begin(rank, world, store, function, args):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A store in a file needs no port, which another process could have.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def check_doors(ckptfs, folder, expected, out):
    """Asserts that the command and the package give the expected tensors of a folder, whole, in slices and in place."""
    check_export(ckptfs, folder, expected, out)
    assert ckptfs("verify", folder, "--against", out).code == DONE
    listed = {tensor["name"]: tensor["shape"] for tensor in ckptfs.inspect(folder)["tensors"]}
    assert listed == {name: list(tensor.shape) for name, tensor in expected.items()}
    targets = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    check_same(load_file(folder, into=targets), expected)
    check_same(targets, expected)
    (loaded,) = package.load_many([folder])
    check_same(loaded, expected)


def check_mounted(path, expected, out):
    """Asserts that a file of a mount has the expected tensors, and the bytes of an export in any range of it."""
    check_tensors(path, expected)
    whole = out.read_bytes()
    rng = random.Random(str(path))
    with path.open("rb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_size == len(whole)
        for _ in range(50):
            start = rng.randrange(len(whole))
            length = rng.choice((1, 7, 300, 5000, len(whole)))
            assert os.pread(file.fileno(), length, start) == whole[start : start + length]


def sharded_state(mesh):
    """A model's state cut over a mesh of one axis, and its whole tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rng = random.Random("sharded")
    full = torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4)
    cut = {
        "rows": (full, Shard(0)),
        "columns": (full + 100, Shard(1)),
        "last": (any_tensor(rng, (3, 2, 5), torch.float32), Shard(2)),
        "middle": (any_tensor(rng, (2, 5, 3), torch.int16), Shard(1)),
        "replicated": (full + 200, Replicate()),
        "uneven": (torch.ones(1, 3), Shard(0)),
        "uneven_columns": (torch.ones(3, 1), Shard(1)),
        "nothing": (torch.empty(0, 3), Shard(0)),
        "turned": (full.t(), Shard(0)),
        "turned_columns": (full.t(), Shard(1)),
        **{f"of.{dtype}".replace("torch.", ""): (any_tensor(rng, (5, 3), dtype), Shard(n % 2))
           for n, dtype in enumerate(DTYPES)},
    }  # fmt: skip
    plain = {
        "plain": any_tensor(rng, (3,), torch.bfloat16), "plain_turned": full.t(), "scalar": torch.tensor(3),
        "empty": torch.empty(0), "f8": torch.ones(4).to(torch.float8_e4m3fn), "stepped": full[::2, 1::2],
    }  # fmt: skip
    parts = {name: distribute_tensor(tensor, mesh, [placement], src_data_rank=None) for name, (tensor, placement) in cut.items()}
    parts |= plain
    parts["tied"] = parts["rows"]
    layers = [{"w": distribute_tensor(full + n, mesh, [Shard(0)], src_data_rank=None), "b": torch.ones(n)} for n in range(3)]
    parts["layers"] = layers
    whole = {name: tensor for name, (tensor, _) in cut.items()} | plain | {"tied": full}
    whole |= {f"layers.{n}.w": full + n for n in range(3)} | {f"layers.{n}.b": torch.ones(n) for n in range(3)}
    return {name: tensor.contiguous() for name, tensor in whole.items()}, parts


def meshed_state(mesh):
    """A model's state cut over a mesh of two axes in every way, and its whole tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full = torch.arange(5 * 7, dtype=torch.float32).reshape(5, 7)
    ways = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}
    whole, parts = {}, {}
    for outer, first in ways.items():
        for inner, second in ways.items():
            name = f"{outer}.{inner}"
            whole[name] = full + len(whole) * 100
            parts[name] = distribute_tensor(whole[name], mesh, [first, second], src_data_rank=None)
    return whole, parts


def fsdp_of_tensor_parallel(mesh):
    """A model that is cut by tensor parallelism and then by FSDP2, its optimizer's state, and its whole tensors."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5, bias=False))
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    parts, state = get_state_dict(model, optimizer)
    return whole, {"model": parts, "optimizer": state}


OTHER = {"step": 5, "text": "t", "list": [torch.ones(2), 3]}

# Ways to write a DCP folder: the options of the writer, and of dcp.save.
WAYS = {
    "plain": ({}, {}),
    "threads": ({"thread_count": 3}, {}),
    "files": ({"single_file_per_rank": False}, {}),
    "tables": ({}, {"use_collectives": False}),
}


def write_by_ranks(rank, out):
    """Writes `dcp-N-WAY`, `hf-N` and others with N of four ranks, and the whole tensors of each beside it."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    def save_expected(name, whole):
        if rank == 0:
            torch.save(whole, f"{out}/{name}.expected")

    for ranks in (1, 2, 4):
        group = dist.new_group(list(range(ranks)))
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if rank >= ranks:
            continue
        whole, parts = sharded_state(mesh)
        optimizer = {"state": {"rows": {"exp_avg": parts["rows"]}}, "param_groups": [{"lr": 0.1, "params": ["rows"]}]}
        for way, (options, how) in WAYS.items():
            name = f"dcp-{ranks}-{way}"
            writer = FileSystemWriter(f"{out}/{name}", sync_files=False, **options)
            state = {"model": parts, "optimizer": optimizer, **OTHER}
            dcp.save(state, storage_writer=writer, process_group=group, **how)
            save_expected(name, whole)
        # The writer of safetensors takes no lists, and no tensors that share memory or are strided.
        skipped = ("layers", "tied", "turned", "turned_columns", "plain_turned", "stepped")
        flat = {name: tensor for name, tensor in parts.items() if name not in skipped}
        index = {name: n % 2 + 1 for n, name in enumerate(flat)}
        for name, how in ((f"hf-{ranks}", {}), (f"hf-{ranks}-parts", {"fqn_to_index_mapping": index})):
            writer = HuggingFaceStorageWriter(f"{out}/{name}", save_distributed=True, **how)
            dcp.save(flat, storage_writer=writer, process_group=group)
            save_expected(name, {name: whole[name] for name in flat})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, parts = meshed_state(mesh)
    dcp.save({"state_dict": parts}, checkpoint_id=f"{out}/mesh-4")
    dcp.save(parts, storage_writer=HuggingFaceStorageWriter(f"{out}/hf-mesh-4", save_distributed=True))
    save_expected("mesh-4", whole)
    save_expected("hf-mesh-4", whole)
    whole, state = fsdp_of_tensor_parallel(mesh)
    dcp.save(state, checkpoint_id=f"{out}/fsdp-4")
    dcp.save(state["model"], storage_writer=HuggingFaceStorageWriter(f"{out}/hf-fsdp-4", save_distributed=True))
    save_expected("fsdp-4", whole)
    save_expected("hf-fsdp-4", whole)


BY_RANKS = [f"dcp-{ranks}-{way}" for ranks in (1, 2, 4) for way in WAYS] + ["mesh-4", "fsdp-4"]
BY_RANKS_AS_SAFETENSORS = [f"hf-{ranks}{parts}" for ranks in (1, 2, 4) for parts in ("", "-parts")]
BY_RANKS_AS_SAFETENSORS += ["hf-mesh-4", "hf-fsdp-4"]


@contextlib.contextmanager
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(4, write_by_ranks, sys.argv[1])
