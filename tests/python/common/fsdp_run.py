"""Trains small models with FSDP2, tensor parallelism and FSDP1 on CPUs, and saves each with one torch.save per rank:
`fsdp_run.py FOLDER`. The whole tensors that torch itself gathers go to RUN.expected beside each folder RUN."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm = torch.nn.Linear(5, 10), torch.nn.LayerNorm(5)
        self.down = torch.nn.Linear(10, 5, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.arange(5.0).bfloat16())

    def forward(self, x):
        return self.norm(self.down(self.up(x).relu())) * self.scale


def step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


def save(folder, run, state, name):
    rank, world = dist.get_rank(), dist.get_world_size()
    target = folder / f"{run}-{world}"
    target.mkdir(exist_ok=True)
    torch.save(state, target / name(rank, world))


def save_fsdp2(folder, run, model):
    step(model)
    state = model.state_dict()
    save(folder, run, state, lambda rank, world: f"model_world_size_{world}_rank_{rank}.pt")
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{run}-{dist.get_world_size()}.expected")


def save_fsdp1(folder):
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    step(model)
    name = lambda rank, world: f"pytorch_model_fsdp_0_rank{rank}.bin"
    kinds = {"fsdp1": StateDictType.SHARDED_STATE_DICT, "local": StateDictType.LOCAL_STATE_DICT}
    for run, kind in kinds.items():
        config = ShardedStateDictConfig() if run == "fsdp1" else None
        with FullyShardedDataParallel.state_dict_type(model, kind, config):
            save(folder, run, model.state_dict(), name)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"fsdp1-{dist.get_world_size()}.expected")


def train_in(rank, folder, world):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29700 + world)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    save_fsdp2(folder, "fsdp2", fully_shard(Model(), mesh=init_device_mesh("cpu", (world,))))
    save_fsdp1(folder)
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        save_fsdp2(folder, "hybrid", fully_shard(Model(), mesh=mesh))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        both = parallelize_module(Model(), mesh["tensor"], plan)
        save_fsdp2(folder, "fsdp-and-tensor-parallel", fully_shard(both, mesh=mesh["data"]))
        # Each of two groups of ranks has the whole model.
        save_fsdp2(folder, "tensor-parallel", parallelize_module(Model(), mesh["tensor"], plan))
    dist.barrier()
    dist.destroy_process_group()


def run(rank, folder):
    torch.set_num_threads(1)
    train_in(rank, Path(folder), 4)
    if rank < 2:
        train_in(rank, Path(folder), 2)


if __name__ == "__main__":
    # Forked, so that torch is imported once.
    mp.start_processes(run, args=(sys.argv[1],), nprocs=4, start_method="fork")
