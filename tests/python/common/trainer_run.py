"""Trains a small Llama with transformers' Trainer on processors, one process a rank:
`trainer_run.py KIND RANKS FOLDER RESUME`.

KIND is `fsdp` or `zero3`. Trainer saves after each of two steps. With a RESUME that is not empty, it resumes from that
folder instead of beginning. The whole tensors that the library itself gathers go to FOLDER.expected, and the config to
FOLDER.config.

accelerate has neither FSDP nor DeepSpeed for processors: it asks for an accelerator's name, and nothing else of it. The
two replaced lines give it one. What is saved, and how, is theirs.
"""

import importlib
import os
import socket
import sys

import torch

kind, ranks, folder, resume = sys.argv[1:]

if kind == "fsdp":
    os.environ["ACCELERATE_USE_CPU"] = "true"
else:
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
    # Else it compiles a kernel.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

import transformers.training_args
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

# Small enough that a layer is cut, and a norm is not a multiple of the ranks.
CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=36, intermediate_size=45, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip

FSDP = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}

AUTO = dict.fromkeys(["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto")
ZERO = AUTO | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def arguments():
    common = {
        "max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 0.01, "report_to": [],
        "logging_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    if kind == "fsdp":
        arguments = TrainingArguments(folder, use_cpu=True, fsdp=True, fsdp_config=FSDP, **common)
        arguments.device
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        return arguments
    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_CPU)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    return TrainingArguments(folder, bf16=True, deepspeed=ZERO, **common)


def whole_state(model):
    if kind == "fsdp":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).detach().clone() for name, p in model.module.named_parameters()}


def fork_ranks(world):
    """Goes on as every rank: this process as rank 0, and its forks, which import nothing again, as the others. Returns the
    ids of the forks to this process."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    forks = []
    for rank in range(world - 1, -1, -1):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        child = os.fork() if rank else None
        if child == 0:
            return []
        forks += [child] if child else []
    return forks


forks = fork_ranks(int(ranks))
torch.manual_seed(0)
torch.set_num_threads(1)
data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(16)]
trainer = Trainer(model=LlamaForCausalLM(CONFIG), args=arguments(), train_dataset=data)
trainer.train(resume_from_checkpoint=resume or None)
state = whole_state(trainer.model_wrapped)
if trainer.is_world_process_zero():
    torch.save(state, f"{folder}.expected")
    CONFIG.save_pretrained(f"{folder}.config")
torch.distributed.barrier()
failed = [child for child in forks if os.waitpid(child, 0)[1]]
# Past the interpreter's own end, which threads of gloo can make fail.
os._exit(len(failed))
