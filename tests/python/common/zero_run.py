"""Trains a small model with DeepSpeed on CPUs, saves it, and writes the tensors that a correct reader must find. Runs in
DeepSpeed's own environment: `zero_run.py FOLDER MOUNTED RUNS`.

RUNS is a JSON object that has names of runs by the number of ranks. Each run goes to FOLDER/RANKS/NAME. MOUNTED is the
same folder through a mount, from which training resumes."""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, zero_to_fp32

BFLOAT16 = {"bf16": {"enabled": True}}

# Sub-groups so small that there are several.
STAGE_3 = {"stage": 3, "sub_group_size": 40, "stage3_param_persistence_threshold": 5}

RUNS = {
    "stage1": BFLOAT16 | {"zero_optimization": {"stage": 1}},
    "stage2": BFLOAT16 | {"zero_optimization": {"stage": 2}},
    "stage3": BFLOAT16 | {"zero_optimization": STAGE_3},
    "round-robin": BFLOAT16 | {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "aligned": BFLOAT16 | {"zero_optimization": {"stage": 1, "parameter_alignment": True}},
    "float32": {"zero_optimization": {"stage": 2}},
    "gradients32": BFLOAT16 | {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
}  # fmt: skip

STEPS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(11, 5), torch.nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.a, self.b = torch.nn.Linear(5, 7), torch.nn.Linear(7, 5)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        # DeepSpeed cannot gather an empty parameter, so no module that runs has it.
        self.unused = torch.nn.Module()
        self.unused.none = torch.nn.Parameter(torch.empty(0, 3))
        self.frozen = torch.nn.Linear(5, 5)
        self.frozen.weight.requires_grad = False
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("count", torch.arange(4) << 33)
        self.register_buffer("mask", torch.tensor([[True, False, True]]))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x):
        hidden = self.embed(x) + self.mean.to(self.a.weight.dtype)
        return self.head(self.frozen(self.b(self.a(hidden).relu())) * self.scale).float().logsumexp(-1).sum()


def groups_of(model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    is_plain = lambda name: name.endswith("bias") or name == "scale"
    return [
        {"params": [p for name, p in named if not is_plain(name)], "weight_decay": 0.1},
        {"params": [p for name, p in named if is_plain(name)], "weight_decay": 0.0},
    ]


def start(run, seed):
    torch.manual_seed(seed)
    model = Model()
    # Values that rounding to bfloat16 changes.
    for parameter in model.parameters():
        parameter.data.add_(1e-3 * torch.randn(parameter.shape))
    base = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=base | RUNS[run])[0]


def whole_state(engine):
    """The whole tensors of the model: 32-bit weights as the optimizer has them, others in their own type."""
    module = engine.module
    is_cut = engine.zero_optimization_stage() == 3
    state = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name == "unused.none":
            state[name] = parameter.detach().new_empty(0, 3)
        elif parameter.requires_grad:
            state[name] = safe_get_full_fp32_param(parameter).detach().clone()
            assert state[name].dtype == torch.float32, name
        else:
            with deepspeed.zero.GatheredParameters([parameter]) if is_cut else contextlib.nullcontext():
                state[name] = parameter.detach().clone()
    persistent = module.state_dict()
    state |= {name: b.clone() for name, b in module.named_buffers() if name in persistent}
    return state


def optimizer_state(engine):
    """This rank's part of the momenta, without the padding at the end of a group."""
    parts = [group["params"] for group in engine.optimizer.optimizer.param_groups]
    states = [engine.optimizer.optimizer.state[p] for part in parts for p in part]
    paddings = getattr(engine.optimizer, "groups_padding", [0] * len(states))
    ends = [-padding or None if isinstance(padding, int) else None for padding in paddings]
    return [state["exp_avg"].detach().clone()[:end] for state, end in zip(states, ends)]


def write_layout(folder, tag):
    """Writes how the first rank's part is laid out, which only this environment can load."""
    (path,) = (folder / tag).glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    states = torch.load(path, weights_only=False)["optimizer_state_dict"]
    paddings = states.get("param_alignment_paddings") or []
    groups = states.get("fp32_flat_groups") or states["single_partition_of_fp32_groups"]
    layout = {"padding": sum(map(sum, paddings)), "groups": len(groups), "has_stage": "zero_stage" in states}
    (folder / "layout.json").write_text(json.dumps(layout))


def convert_by_deepspeed(folder, tag):
    """Converts the checkpoint with DeepSpeed's own `zero_to_fp32` and `ds_to_universal`."""
    try:
        joined = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
        torch.save({name: tensor.clone() for name, tensor in joined.items()}, folder / "zero_to_fp32.pt")
    except Exception as error:
        (folder / "zero_to_fp32.error").write_text(repr(error))
    try:
        safe = folder / "safe_serialization"
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(safe), safe_serialization=True)
    except Exception as error:
        (folder / "safe_serialization.error").write_text(repr(error))
    try:
        words = ["", "--input_folder", folder / tag, "--output_folder", folder / "universal"]
        words += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        sys.argv = list(map(str, words))
        ds_to_universal.main(ds_to_universal.parse_arguments())
    except Exception as error:
        (folder / "universal.error").write_text(repr(error))


def same(got, expected):
    bits = lambda tensor: tensor.contiguous().flatten().view(torch.uint8)
    return (got.dtype, got.shape) == (expected.dtype, expected.shape) and torch.equal(bits(got), bits(expected))


def train(rank, folder, mounted, world, runs):
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + world)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    # Otherwise it compiles a kernel.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    for run in runs:
        engine = start(run, seed=1)
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            engine.backward(engine(torch.randint(0, 11, (3,))))
            engine.step()
        target = Path(folder) / run
        engine.save_checkpoint(str(target), tag="global_step2")
        expected, momenta = whole_state(engine), optimizer_state(engine)
        if rank == 0:
            torch.save(expected, target / "expected.pt")
            write_layout(target, "global_step2")
            convert_by_deepspeed(target, "global_step2")
        torch.distributed.barrier()
        resumed = start(run, seed=2)
        path, _ = resumed.load_checkpoint(str(Path(mounted) / run))
        state, parts = whole_state(resumed), optimizer_state(resumed)
        wrong = [name for name in expected if not same(state[name], expected[name])]
        wrong += [f"momenta {n}" for n, (got, want) in enumerate(zip(parts, momenta)) if not same(got, want)]
        outcome = {"from": path, "wrong": wrong, "steps": resumed.global_steps}
        (target / f"resumed{rank}.json").write_text(json.dumps(outcome))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder, mounted, runs = sys.argv[1:]
    for world, names in json.loads(runs).items():
        args = f"{folder}/{world}", f"{mounted}/{world}", int(world), names
        # Forked, so that DeepSpeed is imported once.
        mp.start_processes(train, args=args, nprocs=int(world), start_method="fork")
