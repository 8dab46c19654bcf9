"""Writes checkpoints of DeepSpeed: some with DeepSpeed itself, in an environment of its own, and small ones in the same
layout without it."""

import json
import os
import random
import subprocess
import warnings
from collections import OrderedDict

import torch

from program import COMMON

# Seconds. DeepSpeed takes ten to start, and each rank trains several runs.
PATIENCE = 400

INTERPRETER = os.environ.get("CKPTFS_DEEPSPEED_PYTHON")

MISSING = "NOT TESTED: checkpoints by DeepSpeed itself; `. scripts/setup.sh` sets CKPTFS_DEEPSPEED_PYTHON"

if INTERPRETER is None:
    warnings.warn(MISSING, stacklevel=1)


def run_deepspeed(folder, mounted, runs):
    """Trains and saves runs of zero_run.py. `runs` has their names by the number of ranks."""
    words = [INTERPRETER, COMMON / "zero_run.py", folder, mounted, json.dumps(runs)]
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:]


def numbers(rng, count, dtype=torch.float32):
    return torch.frombuffer(bytearray(rng.randbytes(4 * count) + bytes(8)), dtype=torch.float32)[:count].to(dtype)


class Run:
    """A run of random parameters, laid out as DeepSpeed does, without its classes."""

    def __init__(self, seed, stage=None, world=None):
        rng = self.rng = random.Random(seed)
        self.stage = stage or rng.randint(1, 3)
        self.world = world or rng.randint(1, 4)
        shape = lambda: [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
        value = lambda dtype: (lambda dims: numbers(rng, torch.Size(dims).numel(), dtype).reshape(dims))(shape())
        self.groups = [
            OrderedDict((f"group{g}.{n}.weight", value(torch.float32)) for n in range(rng.randint(1, 4)))
            for g in range(rng.randint(1, 3))
        ]
        self.frozen = {f"frozen.{n}": value(torch.bfloat16) for n in range(rng.randint(0, 2))}
        self.buffers = {"buffer": torch.arange(3) << 40, "half": value(torch.float16), "mask": torch.tensor([True])}
        owner = next(iter(self.groups[0]))
        self.shared = {"tied.weight": owner}
        # Stages 1 and 2 may put paddings between parameters.
        self.paddings = None
        if self.stage < 3 and rng.random() < 0.5:
            self.paddings = [[rng.randint(0, 3) for _ in group] for group in self.groups]
        self.partition_count = self.world
        self.step = 7

    @property
    def expected(self):
        weights = {name: value for group in self.groups for name, value in group.items()}
        tied = {alias: weights[owner] for alias, owner in self.shared.items()}
        return weights | tied | self.frozen | self.buffers

    def padding(self, count):
        """Values between and after parameters, which must never be shown."""
        return torch.full((count,), -6.8e27)

    def padded(self, value):
        """The parts of a tensor at stage 3: one for each rank, of the same length, with padding at the end."""
        part = -(-value.numel() // self.world)
        end = self.padding(part * self.world - value.numel()).to(value.dtype)
        return torch.cat([value.flatten(), end]).reshape(self.world, part)

    def optimizer_groups(self):
        """The flat part of each group, in a list for each rank."""
        if self.stage == 3:
            whole = torch.cat([self.padded(value) for group in self.groups for value in group.values()], dim=1)
            # Sub-groups may end anywhere, also within a parameter.
            cuts = sorted(self.rng.randint(0, whole.shape[1]) for _ in range(self.rng.randint(0, 3)))
            return [list(map(torch.clone, row.tensor_split(cuts))) for row in whole]
        parts = [[] for _ in range(self.world)]
        for g, group in enumerate(self.groups):
            pieces = []
            for n, value in enumerate(group.values()):
                pieces.append(value.flatten())
                if self.paddings:
                    pieces.append(self.padding(self.paddings[g][n]))
            flat = torch.cat(pieces)
            length = -(-flat.numel() // (2 * self.world)) * 2
            # The padding at the end of a group is not stored.
            for rank, part in enumerate(parts):
                part.append(flat[rank * length : (rank + 1) * length].clone())
        return parts

    def model_states(self, rank):
        is_cut = self.stage == 3
        parameters = {n: v for n, v in self.expected.items() if n not in self.buffers}
        shown = {n: torch.empty(0, dtype=torch.bfloat16) if is_cut else v.bfloat16() for n, v in parameters.items()}
        fragment = lambda value: self.padded(value)[rank].clone() if is_cut else value
        return {
            "module": OrderedDict(shown | self.buffers),
            "buffer_names": list(self.buffers),
            "param_shapes": [OrderedDict((n, v.shape) for n, v in group.items()) for group in self.groups],
            "frozen_param_shapes": {n: v.shape for n, v in self.frozen.items()},
            "frozen_param_fragments": {n: fragment(v) for n, v in self.frozen.items()},
            "shared_params": self.shared if rank == 0 else {},
            "global_steps": self.step,
            "ds_version": "0.19.8",
        }

    def optim_states(self, parts):
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        count = self.partition_count if self.stage == 3 else [self.partition_count] * len(self.groups)
        own = {"state": {0: {"step": torch.tensor(float(self.step)), "exp_avg": torch.zeros(2)}}, "param_groups": [{}]}
        states = {"zero_stage": self.stage, "partition_count": count, key: parts}
        states["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"] = own
        if self.paddings:
            states["param_alignment_paddings"] = self.paddings
        return {"optimizer_state_dict": states, "ds_version": "0.19.8"}

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        ranks = range(self.world) if self.stage == 3 else [0]
        for rank in ranks:
            torch.save(self.model_states(rank), folder / self.model_name(rank))
        for rank, parts in enumerate(self.optimizer_groups()):
            torch.save(self.optim_states(parts), folder / self.optim_name(rank))
        return self.expected

    def model_name(self, rank):
        return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if self.stage == 3 else "mp_rank_00_model_states.pt"

    def optim_name(self, rank):
        return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def write_universal(self, folder, states=True):
        """Writes a universal checkpoint. Stage 3 writes vectors; other stages also write frozen parameters and buffers."""
        weights = {name: value for group in self.groups for name, value in group.items()}
        for name, value in weights.items():
            self.write_weight(folder, name, value.flatten() if self.stage == 3 else {"param": value, "cat_dim": 0})
        for name, value in self.model_states(0)["module"].items():
            if self.stage < 3 and name not in weights:
                self.write_weight(folder, name, {"param": value.float()})
        torch.save({"param_groups": []}, folder / "zero/optimizer_state.pt")
        for rank in range(self.world if self.stage == 3 else 1) if states else ():
            torch.save(self.model_states(rank), folder / self.model_name(rank))
        return self.expected

    def write_weight(self, folder, name, value):
        (folder / "zero" / name).mkdir(parents=True)
        torch.save(value, folder / "zero" / name / "fp32.pt")
        torch.save({"param": torch.zeros(2)}, folder / "zero" / name / "exp_avg.pt")


def load(path):
    return torch.load(path)
