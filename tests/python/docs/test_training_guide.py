"""The code of docs/training.md runs as it stands there, and keeps what the guide promises."""

import os
import random
import signal
import subprocess
import sys
import time

import ckptfs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptfs.torch import load_file, load_model, save_sharded
from diffusers import StableDiffusionPipeline
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM

import models
from compare import check_same
from guides import blocks, ran, with_command
from pipelines import stable_diffusion
from samples import numbers

OF_RANKS, FROM_A_MOUNT, COMPUTED_ONCE, A_LORA, OF_DIFFUSERS, TO_GO_ON_FROM, OF_OTHERS = blocks("training.md")
COMMANDS_OF_RANKS, UNCHANGED = blocks("training.md", "sh")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_process_computes_a_cached_value(folder):
    """Two processes with two workers each, for two epochs."""
    captions = [f"a red cat {n}" for n in range(12)]

    def encode(text):
        with open("made", "a") as file:
            file.write(f"{text}\n")
        return torch.full((3, 4), float(text.split()[-1]))

    def epochs():
        loader = ran(COMPUTED_ONCE, captions=captions, encode=encode)["loader"]
        return [batch["embedding"] for _ in range(2) for batch in loader]

    child = os.fork()
    if child == 0:
        try:
            epochs()
            os._exit(0)
        finally:
            os._exit(1)
    got = epochs()
    assert os.waitpid(child, 0)[1] == 0
    expected = torch.arange(12.0)[:, None, None].expand(12, 3, 4)
    assert torch.equal(torch.cat(got), torch.cat([expected, expected]))
    assert sorted((folder / "made").read_text().splitlines()) == sorted(captions)
    assert len(os.listdir("cache")) == 12


TRAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
import ckptfs
print(ckptfs.stats()["loads"] > 0, ckptfs.stats()["originals"], flush=True)
"""


@pytest.mark.parametrize("line", UNCHANGED.splitlines())
def test_programs_stay_as_they_are(folder, line):
    models.save_shards(models.llama(), folder / "models/llama")
    (folder / "train.py").write_text(TRAIN)
    done = subprocess.run(
        ["sh", "-c", line], env=with_command(folder), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ranks = 2 if "nproc-per-node 2" in line else 1
    assert done.stdout.split() == ["True", "0"] * ranks, done.stdout


def test_a_lora_is_loaded_again(folder):
    base = models.llama()
    base.save_pretrained("base")
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(base, config)
    ran(A_LORA, model=model)
    with ckptfs.safe_open("lora", framework="pt") as f:
        assert f.metadata() == {"format": "pt", "base": "models/llama", "step": "100"}
        check_same(f.get_tensors(), get_peft_model_state_dict(model))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "lora")
    check_same(get_peft_model_state_dict(again), get_peft_model_state_dict(model))
    of_transformers = AutoModelForCausalLM.from_pretrained("base")
    of_transformers.load_adapter("lora")
    prompt = torch.tensor([[1, 7, 8, 9]])
    wanted = model(prompt).logits
    assert torch.equal(again.eval()(prompt).logits, wanted)
    assert torch.equal(of_transformers.eval()(prompt).logits, wanted)


def test_a_lora_of_diffusers_is_loaded_again(folder):
    pipe = stable_diffusion(folder / "tokenizer")
    pipe.save_pretrained("sd")
    config = LoraConfig(r=4, lora_alpha=7, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.unet.add_adapter(config)
    made = ran(OF_DIFFUSERS, pipe=pipe)
    with ckptfs.safe_open("style/pytorch_lora_weights.safetensors", framework="pt") as f:
        assert f.metadata() == made["metadata"]
    again = StableDiffusionPipeline.from_pretrained("sd", safety_checker=None)
    again.load_lora_weights("style")
    (loaded,) = again.unet.peft_config.values()
    assert (loaded.r, loaded.lora_alpha, loaded.target_modules) == (4, 7, {"to_q", "to_k"})
    name = again.get_active_adapters()[0]
    tensors = get_peft_model_state_dict(again.unet, adapter_name=name)
    check_same(tensors, get_peft_model_state_dict(pipe.unet))


STEPS = 12

TRAINER = """
import sys
until, steps = map(int, sys.argv[1:])
model = torch.nn.Sequential(torch.nn.Linear(8, 200), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(200))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
done = resume("last", model, optimizer)
print("resumed", done, flush=True)
for step in range(done + 1, steps + 1):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    save("last", model, optimizer, step)
    if step == until:
        print("killed in one of these", flush=True)
    while step == until:
        save("last", model, optimizer, step)
"""


def train(folder, until=None):
    """Trains in a process of its own, to the end or until it is killed while it saves a step. Gives the step that it
    began after."""
    folder.mkdir(exist_ok=True)
    program = f"import torch\ntorch.manual_seed(0)\n{TO_GO_ON_FROM.replace('2GB', '10kB')}\n{TRAINER}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen(
        [sys.executable, "-c", program, str(until or -1), str(STEPS)],
        cwd=folder, env=env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with running.stdout:
        began = int(running.stdout.readline().split()[1])
        if until is not None:
            assert "killed" in running.stdout.readline()
            time.sleep(random.random() / 10)
            running.send_signal(signal.SIGKILL)
        assert running.wait() == (0 if until is None else -signal.SIGKILL)
    return began


def test_killed_and_resumed_it_ends_at_the_same_weights(folder):
    assert train(folder / "whole") == 0
    assert train(folder / "broken", until=3) == 0
    assert train(folder / "broken", until=7) == 3
    assert train(folder / "broken") == 7
    assert len(os.listdir(folder / "broken/last")) > 2
    check_same(load_file(folder / "broken/last"), load_file(folder / "whole/last"))


def zeroed(tensors):
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    return tensors


def test_a_model_alone_is_saved_and_loaded_into(folder):
    model = models.llama()
    model.config.save_pretrained("models/mine")
    save_sharded(model.state_dict(), "models/mine", max_shard_size="20kB")
    models.check_same(AutoModelForCausalLM.from_pretrained("models/mine"), model)
    load_file("models/mine", into=zeroed(model.state_dict()))
    models.check_same(model, models.llama())


def test_tied_weights_are_loaded_into_a_model(folder):
    model = models.gpt2()
    save_sharded(model.state_dict(), "last")
    load_file("last", into=zeroed(model.state_dict()))
    models.check_same(model, models.gpt2())
    zeroed(model.state_dict())
    load_model(model, "last")
    models.check_same(model, models.gpt2())


def test_tied_weights_are_resumed(folder):
    made = ran(TO_GO_ON_FROM)
    model = models.gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    expected = models.fingerprints(models.tensors_of(model))
    made["save"]("last", model, optimizer, 5)
    zeroed(model.state_dict())
    assert made["resume"]("last", model, optimizer) == 5
    assert models.fingerprints(models.tensors_of(model)) == expected


def test_the_parts_of_other_programs_checkpoints_load(folder):
    class Runs:
        def __reduce__(self):
            return open, ("ran", "w")

    (folder / "runs").mkdir()
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["head"](model["encoder"](numbers(1, 5, 3))).sum().backward()
    optimizer.step()
    ema = {name: numbers(3, *tensor.shape) for name, tensor in model.state_dict().items()}
    trained, moments = model.state_dict(), optimizer.state_dict()
    everything = {"state_dict": trained, "ema": ema, "optimizer": moments, "epoch": 3, "callbacks": Runs()}
    torch.save(everything, "runs/last.ckpt")
    made = ran(OF_OTHERS)
    assert not os.path.exists("ran")
    check_same(made["trained"], trained)
    check_same(made["averaged"], {name: ema[name] for name in ("encoder.weight", "encoder.bias")})
    check_same(made["moments"], {f"0.{key}": value for key, value in moments["state"][0].items()})
    told = subprocess.run(
        ["ckptfs", "inspect", "runs/last.ckpt"], env=with_command(folder), capture_output=True, text=True
    )
    assert "shown: `state_dict`" in told.stdout and "choose with --root: `ema`, `optimizer`" in told.stdout


def save_by_trainer(model, folder):
    """Saves as Trainer and accelerate do with FSDP: the model in a folder of its own, beside the config."""
    model.config.save_pretrained(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0", no_dist=True)
    return folder


def save_by_torchtitan(model, folder):
    moments = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    state = {**model.state_dict(), "optimizer": {"state": moments}, "train_state": {"step": torch.tensor(9)}}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    model.config.save_pretrained(folder)
    return folder


def save_by_automodel(model, folder):
    index = dict.fromkeys(model.state_dict(), 1)
    writer = HuggingFaceStorageWriter(f"{folder}/model", fqn_to_index_mapping=index, save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    model.config.save_pretrained(f"{folder}/model")
    return folder / "model"


def save_by_verl(model, folder):
    (folder / "actor").mkdir(parents=True)
    torch.save(model.state_dict(), folder / "actor/model_world_size_1_rank_0.pt")
    model.config.save_pretrained(folder / "actor/huggingface")
    return folder / "actor/huggingface"


SAVERS = [save_by_trainer, save_by_torchtitan, save_by_automodel, save_by_verl]


@pytest.mark.parametrize("save", SAVERS)
def test_transformers_loads_what_a_trainer_left_through_a_mount(folder, save):
    model = models.llama()
    (folder / "runs").mkdir()
    where = save(model, folder / "runs/checkpoint-500")
    with ckptfs.mount("runs", "runs"):
        check_same(AutoModelForCausalLM.from_pretrained(where).state_dict(), model.state_dict())


def test_the_code_for_runs_of_several_ranks_loads_them(folder):
    model = models.llama()
    save_by_trainer(model, folder / "runs/checkpoint-500")
    save_by_torchtitan(model, folder / "runs/step-9000")
    made = ran(OF_RANKS)
    check_same(made["weights"], model.state_dict())
    assert set(made["moments"]) == {f"state.{name}" for name in model.state_dict()}
    assert torch.equal(made["rows"], model.state_dict()["lm_head.weight"][:16])
    (folder / "mnt").mkdir()
    done = subprocess.run(
        ["sh", "-ec", COMMANDS_OF_RANKS], env=with_command(folder), capture_output=True, text=True, timeout=120
    )
    try:
        assert done.returncode == 0, done.stderr
        assert "joined from torch.distributed.checkpoint: 1 rank, step 500" in done.stdout
        check_same(load_file("model.safetensors"), model.state_dict())
        check_same(ran(FROM_A_MOUNT)["model"].state_dict(), model.state_dict())
    finally:
        subprocess.run([sys.executable, "-P", "-m", "ckptfs", "unmount", "mnt"], timeout=60, check=True)
