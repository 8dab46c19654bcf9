"""sentence-transformers loads models of several modules from a mount as from the original, and encodes the same. Each
module has a folder of its own, with pickles or shards."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import (
    CNN, LSTM, Dense, LayerNorm, Normalize, Pooling, StaticEmbedding, Transformer, WeightedLayerPooling,
    WordEmbeddings,
)  # fmt: skip
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import models
from models import check_loads_same, on_show

MODULES = ["dense", "cnn", "layers", "static", "words", "older", "sharded"]
SENTENCES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w90"]


def save_pickled(model, folder):
    """As releases without safetensors wrote it: every module, the transformer included."""
    model.save(str(folder), create_model_card=False, safe_serialization=False)
    for whole in list(folder.rglob("model.safetensors")):
        (transformer,) = (module for module in model if isinstance(module, Transformer))
        torch.save(transformer.model.state_dict(), whole.with_name("pytorch_model.bin"))
        whole.unlink()
    assert not list(folder.rglob("*.safetensors"))


def of_modules(base):
    """Modules with weights of their own, by their names in the folder."""
    made = {
        "dense": [Pooling(32), Dense(32, 8), LayerNorm(8), Normalize()],
        "cnn": [CNN(32, 8), Pooling(24)],
        "layers": [WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1), Pooling(32)],
    }
    for name, modules in made.items():
        more = {"config_kwargs": {"output_hidden_states": True}} if name == "layers" else {}
        yield name, [Transformer(str(base), **more), *modules]


def in_a_folder_of_its_own(folder, older):
    """The transformer, which old releases did not put at the top."""
    shutil.copytree(folder, older)
    inside = older / "0_Transformer"
    inside.mkdir()
    for file in [path for path in older.iterdir() if path.is_file()]:
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(inside / file.name)
    modules = json.loads((older / "modules.json").read_text())
    modules[0]["path"] = inside.name
    (older / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sentences")
    source, base = folder / "source", folder / "base"
    models.save_shards(models.bert(), base)
    models.tokenizer().save_pretrained(base)
    names = []
    for name, modules in of_modules(base):
        save_pickled(SentenceTransformer(modules=modules, device="cpu"), source / name)
        names.append(name)
    words = WhitespaceTokenizer([f"w{n}" for n in range(96)], stop_words=[])
    made = {
        "static": [StaticEmbedding(models.tokenizer(), embedding_dim=16), Dense(16, 4)],
        "words": [WordEmbeddings(words, torch.randn(96, 16)), LSTM(16, 8), Pooling(16)],
    }
    for name, modules in made.items():
        save_pickled(SentenceTransformer(modules=modules, device="cpu"), source / name)
        names.append(name)
    in_a_folder_of_its_own(source / "dense", source / "older")
    # The transformer itself in shards.
    sharded = source / "sharded"
    SentenceTransformer(modules=[Transformer(str(base)), Pooling(32)], device="cpu").save(str(sharded))
    (sharded / "model.safetensors").unlink()
    models.save_shards(models.bert(), sharded)
    with on_show(folder) as mount:
        assert MODULES == [*names, "older", "sharded"]
        yield SimpleNamespace(source=source, mount=mount.point)


@pytest.mark.parametrize("name", MODULES)
def test_models_of_several_modules_encode_the_same(shelf, name):
    assert not list((shelf.mount / name).rglob("*.bin"))
    assert not list((shelf.mount / name).rglob("*.index.json"))

    def load(folder):
        return SentenceTransformer(str(folder), device="cpu")

    first, second = check_loads_same(load, shelf.source / name, shelf.mount / name)
    vectors = [model.encode(SENTENCES, convert_to_tensor=True) for model in (first, second)]
    assert torch.equal(*vectors)


def config():
    return BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, num_labels=1,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [CrossEncoder, SparseEncoder])
@pytest.mark.parametrize("save", [models.save_bin, models.save_bin_shards, models.save_shards])
def test_cross_and_sparse_encoders_encode_the_same(mounts, tmp_path, kind, save):
    inner = BertForSequenceClassification if kind is CrossEncoder else BertForMaskedLM
    torch.manual_seed(0)
    source = tmp_path / "source"
    if kind is SparseEncoder:
        base = tmp_path / "base"
        inner(config()).save_pretrained(base)
        models.tokenizer().save_pretrained(base)
        SparseEncoder(modules=[MLMTransformer(str(base)), SpladePooling()], device="cpu").save(str(source))
        (source / "model.safetensors").unlink()
    save(inner(config()), source)
    models.tokenizer().save_pretrained(source)
    point = mounts(source).point

    def load(folder):
        return kind(str(folder), device="cpu")

    first, second = check_loads_same(load, source, point)
    if kind is CrossEncoder:
        pairs = [("w1 w2", "w3"), ("w4", "w5 w6")]
        assert (first.predict(pairs) == second.predict(pairs)).all()
    else:
        assert torch.equal(*(model.encode(SENTENCES).to_dense() for model in (first, second)))
