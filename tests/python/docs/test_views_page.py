"""The recipes of docs/views.md run as they stand there, and libraries load what they show."""

import json
from collections import OrderedDict

import pytest
import torch
from ckptfs.torch import load_file
from diffusers import StableDiffusionPipeline
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
from compare import check_same
from guides import blocks
from mounts import until
from pipelines import check_same_pipeline, loaded, sd_checkpoint, stable_diffusion
from program import DONE
from samples import numbers
from versions import name_of, write_delta, write_whole
from zero import Run

(EVERY_STEP,) = blocks("views.md", "toml", "A recipe")
(CHAIN,) = blocks("views.md", "toml", "The newest version of a chain")
HF_FOLDER, SINGLE_FILE, LORA, PART_OF_A_MODEL, EXPERTS, RANK, SEVERAL = blocks("views.md", "toml", "Recipes for common needs")


@pytest.fixture
def shown(mounts, ckptfs, tmp_path):
    """Mounts the folder "models" with a recipe, which must be right."""
    (tmp_path / "models").mkdir()

    def mount(text):
        recipe = tmp_path / "views.toml"
        recipe.write_text(text)
        checked = ckptfs("views", "check", recipe, tmp_path / "models")
        assert checked.code == DONE, checked
        return mounts(tmp_path / "models", "--views", recipe).point

    return mount


@pytest.fixture
def source(tmp_path):
    return tmp_path / "models"


def write_zero3(folder, tensors):
    """Writes a checkpoint of the Trainer with DeepSpeed ZeRO-3, of two ranks."""
    run = Run(1, stage=3, world=2)
    run.groups, run.frozen, run.buffers, run.shared = [OrderedDict(tensors)], {}, {}, {}
    run.write(folder / "global_step500")
    (folder / "latest").write_text("global_step500")


def test_a_recipe_with_every_step_is_right(shown, source):
    (source / "llama").mkdir(parents=True)
    tensors = {f"model.layers.{n}.w": numbers(n, 4, 6) for n in range(3)}
    tensors |= {"model.layers.0.q_proj.weight": numbers(3, 8, 2), "model.final.norm.weight": numbers(4, 5)}
    tensors |= {"model.experts.w": numbers(5, 2, 3), "model.rotary.inv_freq": numbers(6, 2)}
    save_file(tensors, source / "llama/model.safetensors")
    (source / "llama/config.json").write_text('{"dtype": "float32", "layers": 3}')
    (source / "llama/tokenizer.json").write_text("{}")
    point = shown(EVERY_STEP)
    expected = {"layers.w": torch.stack([tensors[f"model.layers.{n}.w"] for n in range(3)]).bfloat16()}
    expected |= {f"experts.{n}.w": tensors["model.experts.w"][n].bfloat16() for n in range(2)}
    expected["layers.0.q_proj.weight"] = tensors["model.layers.0.q_proj.weight"].chunk(4)[0].bfloat16()
    expected["final.norm.weight"] = tensors["model.final.norm.weight"]
    check_same(load_file(point / "llama-bf16/model.safetensors"), expected)
    assert json.loads((point / "llama-bf16/config.json").read_text()) == {"dtype": "bfloat16", "layers": 3}
    assert (point / "llama-bf16/tokenizer.json").read_text() == "{}"


def test_a_zero3_checkpoint_is_a_hugging_face_folder_in_bf16(shown, source, tmp_path):
    model = models.llama().float()
    model.config.dtype = torch.float32
    write_zero3(source / "checkpoint-500", model.state_dict())
    model.config.save_pretrained(source / "checkpoint-500")
    models.tokenizer().save_pretrained(source / "checkpoint-500")
    assert json.loads((source / "checkpoint-500/config.json").read_text())["dtype"] == "float32"
    point = shown(HF_FOLDER)
    served, info = AutoModelForCausalLM.from_pretrained(point / "served", dtype="auto", output_loading_info=True)
    assert served.dtype == torch.bfloat16 and not any(info.values()), info
    model.save_pretrained(tmp_path / "fp32")
    models.check_same(served, AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16))
    tokenizer = AutoTokenizer.from_pretrained(point / "served")
    assert tokenizer.get_vocab() == models.tokenizer().get_vocab()


def test_a_diffusion_model_loads_by_renamed_keys(shown, source, tmp_path):
    made = stable_diffusion(tmp_path / "tokenizer")
    made.save_pretrained(tmp_path / "configs")
    for weights in (tmp_path / "configs").rglob("*.safetensors"):
        weights.unlink()
    state = sd_checkpoint(made)["state_dict"]
    trained = {f"module.{name}": tensor for name, tensor in state.items()}
    trained |= {f"model_ema.{name}": tensor + 1 for name, tensor in state.items()}
    torch.save({"state_dict": trained, "global_step": 7}, source / "trained.ckpt")
    point = shown(SINGLE_FILE)
    assert load_file(point / "sd/model.safetensors").keys() == state.keys()
    load = StableDiffusionPipeline.from_single_file
    pipeline, _ = loaded(load, point / "sd/model.safetensors", config=str(tmp_path / "configs"))
    check_same_pipeline(pipeline, made)


@pytest.mark.parametrize("prefix", ["transformer", "diffusion_model"])
def test_peft_loads_a_lora_of_another_prefix(shown, source, tmp_path, prefix):
    base = models.llama()
    # The weights differ from those that a new adapter gets.
    torch.manual_seed(3)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/adapter_model.safetensors", backend="pread")
    assert all(name.startswith("base_model.model.") for name in saved)
    (source / "lora").mkdir()
    renamed = {name.replace("base_model.model", prefix, 1): tensor for name, tensor in saved.items()}
    save_file(renamed, source / "lora/adapter_model.safetensors")
    (tmp_path / "saved/adapter_config.json").rename(source / "lora/adapter_config.json")
    point = shown(LORA)
    models.check_same(PeftModel.from_pretrained(models.llama(), point / "lora-peft"), model)


def test_a_language_model_is_shown_without_the_rest(shown, source):
    (source / "vlm").mkdir(parents=True)
    language = {"model.embed.weight": numbers(1, 5, 3), "lm_head.weight": numbers(2, 5, 3)}
    tensors = {f"language_model.{name}": tensor for name, tensor in language.items()}
    save_file(tensors | {"vision_tower.patch.weight": numbers(3, 4)}, source / "vlm/model.safetensors")
    check_same(load_file(shown(PART_OF_A_MODEL) / "text/model.safetensors"), language)


def test_experts_are_stacked_in_each_layer(shown, source):
    (source / "moe").mkdir(parents=True)
    name = "model.layers.{}.mlp.experts.{}.{}.weight".format
    places = [(layer, n, part) for layer in range(2) for n in range(11) for part in ("up", "down")]
    tensors = {name(*place): numbers(seed, 3, 2) for seed, place in enumerate(places)}
    norm = {"model.norm.weight": numbers(99, 3)}
    save_file(tensors | norm, source / "moe/model.safetensors")
    expected = {
        f"model.layers.{layer}.mlp.experts.{part}.weight": torch.stack([tensors[name(layer, n, part)] for n in range(11)])
        for layer in range(2) for part in ("up", "down")
    }  # fmt: skip
    check_same(load_file(shown(EXPERTS) / "stacked/model.safetensors"), expected | norm)


def test_a_rank_has_its_part_of_the_attention(shown, source):
    models.save_shards(models.llama(), source / "llama")
    expected = load_file(source / "llama")
    for name, tensor in expected.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            expected[name] = tensor.chunk(2, 0)[0]
        elif name.endswith("o_proj.weight"):
            expected[name] = tensor.chunk(2, 1)[0].contiguous()
    check_same(load_file(shown(RANK) / "rank0/model.safetensors"), expected)


def test_the_newest_version_of_a_chain_is_followed(shown, source):
    states = [{"w": numbers(seed, 40, 30), "b": numbers(9, 30)} for seed in range(3)]
    folder = write_whole(source, 1, states[0])
    models.tokenizer().save_pretrained(folder)
    write_delta(source, 2, states[0], states[1])
    latest = shown(CHAIN) / "latest/model.safetensors"
    states_fp16 = [{name: tensor.half() for name, tensor in state.items()} for state in states]
    check_same(load_file(latest), states_fp16[1])
    assert {"config.json", "tokenizer.json"} <= {path.name for path in latest.parent.iterdir()}
    write_delta(source, 3, states[1], states[2])
    until(f"{name_of(3)} is shown", lambda: torch.equal(load_file(latest)["w"], states_fp16[2]["w"]))


def test_files_are_joined(shown, source):
    unet, vae = {"unet.w": numbers(1, 3, 4)}, {"vae.w": numbers(2, 5)}
    torch.save(unet, source / "unet.ckpt")
    save_file(vae, source / "vae.safetensors")
    point = shown(SEVERAL)
    check_same(load_file(point / "pipeline.safetensors"), unet | vae)
    assert load_file(point / "vae.safetensors").keys() == vae.keys()
