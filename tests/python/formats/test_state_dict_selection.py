"""Which dictionary of a torch checkpoint is shown, and under which names.

The rule, first match first. 1: the top if all in it are tensors. 2: the value of a usual key (repeatedly). 3: the value
of a dictionary with one entry. 4: the one dictionary of weights beside training state. 5: all of it, with nested names
joined by dots. `--root KEY` chooses otherwise.
"""

from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file

from compare import check_export
from program import REFUSED

A, B, C = torch.arange(3.0), torch.arange(4), torch.ones(2, 2, dtype=torch.float16)
WEIGHTS = {"a": A, "b": B}
OTHERS = {"a": B, "c": C}


@pytest.fixture(params=["zip", "legacy"])
def saved(request, tmp_path):
    """Saves a value as `model.pt`, in either form."""

    def save(value):
        path = tmp_path / "model.pt"
        torch.save(value, path, _use_new_zipfile_serialization=request.param == "zip")
        return path

    return save


@pytest.fixture
def shows(ckptfs, tmp_path):
    """Asserts the tensors that a checkpoint is shown as, and gives its notes."""

    def check(path, expected, *options):
        check_export(ckptfs, path, expected, tmp_path / "out.safetensors", "--force", *options)
        return ckptfs.inspect(path, *options)["notes"]

    return check


@pytest.fixture
def refuses(ckptfs, tmp_path):
    """Asserts that export and inspect refuse, in words that contain the given ones."""

    def check(path, *words, options=()):
        out = tmp_path / "out.safetensors"
        for outcome in (
            ckptfs("export", path, out, *options),
            ckptfs("inspect", "--json", path, *options),
        ):
            assert outcome.code == REFUSED, outcome
            for word in (path.name, "what to do", *words):
                assert word in outcome.error
        assert not out.exists()
        report = outcome.json()
        assert report["virtual_file"] is None
        assert all(entry["reason"] and entry["remedy"] for entry in report["refused"])
        return report

    return check


def noted(notes, *words):
    """Asserts that one note has all the words."""
    return any(all(word in note for word in words) for note in notes)


WHERE_IT_LIES = {
    "top": WEIGHTS,
    "top-with-a-tensor-called-model": {"model": A, "b": B},
    "state_dict": {"epoch": 1, "state_dict": WEIGHTS},
    "state_dict-in-state_dict": {"state_dict": {"state_dict": WEIGHTS, "v": 1}, "epoch": 1},
    "model": {"epoch": 1, "model": WEIGHTS},
    "module": {"epoch": 1, "module": WEIGHTS},
    "model-in-state_dict": {"state_dict": {"model": WEIGHTS, "v": 1}, "epoch": 1},
    "state_dict-in-model": {"model": {"state_dict": WEIGHTS, "v": 1}, "epoch": 1},
    "one-entry": {"weights": WEIGHTS},
    "state_dict-in-one-entry": {"wrapped": {"state_dict": WEIGHTS, "v": 1}},
    "state_dict-before-model": {"model": OTHERS, "module": OTHERS, "state_dict": WEIGHTS},
    "model-before-module": {"module": OTHERS, "model": WEIGHTS},
    "beside-tensors": {"mean": C, "model": WEIGHTS},
}


@pytest.mark.parametrize("where", WHERE_IT_LIES)
def test_the_state_dict_is_found(saved, shows, where):
    expected = {"model": A, "b": B} if where == "top-with-a-tensor-called-model" else WEIGHTS
    shows(saved(WHERE_IT_LIES[where]), expected)


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_a_usual_key_without_tensors_is_not_chosen(saved, shows, key):
    shows(saved({key: "resnet50", "tower": WEIGHTS, "epoch": 1}), {"tower.a": A, "tower.b": B})


def adam():
    """The state of an optimizer after a step."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer.state_dict()


TRAINERS = {
    "the-tutorial": {
        "epoch": 1, "model_state_dict": WEIGHTS, "optimizer_state_dict": adam(), "loss": torch.tensor(0.5)
    },
    "model_state": {"step": 7, "model_state": WEIGHTS, "optimizer_state": adam()},
    "net": {"net": WEIGHTS, "acc": torch.tensor(93.1), "epoch": 2},
    "network": {"network": WEIGHTS, "optimizer": adam()},
    "network_state_dict": {"network_state_dict": WEIGHTS, "lr_scheduler": {"base_lr": A}},
    "weights": {"weights": WEIGHTS, "args": Namespace(lr=1), "rng_state": torch.get_rng_state()},
    "weight": {"weight": WEIGHTS, "config": [1, 2], "info": "1 epoch"},
    "params": {"params": WEIGHTS, "iter": 1},
    "averaged-params-first": {"params": OTHERS, "params_ema": WEIGHTS},
    "averaged-others-last": {"ema": OTHERS, "net": WEIGHTS},
    "averaged-alone": {"model_ema": WEIGHTS, "epoch": 3},
    "averaged-beside": {"model_state_dict": WEIGHTS, "ema_model_state_dict": OTHERS, "step": 1},
    "any-key-beside-an-optimizer": {"tower": WEIGHTS, "optimizer": adam()},
    "an-optimizer-by-its-contents": {"tower": WEIGHTS, "g": adam(), "others": [adam(), adam()]},
    "an-optimizer-without-tensors": {"tower": WEIGHTS, "optimizer": torch.optim.SGD([A]).state_dict()},
    "generators": {"tower": WEIGHTS, "optim_g": {"m": A}, "rng": [torch.get_rng_state()]},
    "again": {"epoch": 1, "optimizer": adam(), "checkpoint": {"net": WEIGHTS, "best_acc": A[0]}},
}  # fmt: skip


def flat(value, prefix=""):
    if isinstance(value, torch.Tensor):
        return {prefix[:-1]: value}
    if isinstance(value, (dict, list)):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: t for key, part in inside for name, t in flat(part, f"{prefix}{key}.").items()}
    return {}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_weights_of_every_trainer_are_shown(saved, shows, trainer):
    notes = shows(saved(TRAINERS[trainer]), WEIGHTS)
    for key, value in TRAINERS[trainer].items():
        if trainer != "again" and value is not WEIGHTS and flat(value):
            assert noted(notes, f"`{key}`", "choose with --root"), notes


UNCLEAR = {
    "two-beside-an-optimizer": {"G": WEIGHTS, "D": OTHERS, "optim_G": adam()},
    "two-of-which-one-is-usual": {"net": WEIGHTS, "head": OTHERS},
    "usual-beside-a-tensor": {"net": WEIGHTS, "logit_scale": C, "epoch": 1},
    "one-without-an-optimizer": {"tower": WEIGHTS, "epoch": 1},
    "a-loss-with-weights": {"net": WEIGHTS, "loss": {"centers": A}, "epoch": 1},
    "a-list": {"towers": [WEIGHTS, OTHERS], "optimizer": adam()},
    "an-optimizer-alone": adam(),
}


@pytest.mark.parametrize("unclear", UNCLEAR)
def test_an_unclear_choice_shows_all_and_the_note_has_the_keys(saved, shows, unclear):
    value = UNCLEAR[unclear]
    notes = shows(saved(value), flat(value))
    keys = [key for key, part in value.items() if isinstance(part, (dict, list)) and flat(part)]
    assert noted(notes, "shown: the whole")
    if len(keys) > 1:
        assert noted(notes, "shown: the whole", "--root", *(f"`{key}`" for key in keys)), notes


def test_a_whole_model_beside_an_optimizer_is_refused(saved, refuses):
    """Another entry with tensors must not take its place."""
    model = torch.nn.Linear(2, 2)
    refuses(saved({"model": model, "discriminator": WEIGHTS, "optimizer": adam()}), "torch.nn.modules")
    refuses(saved({"net": model, "ema": WEIGHTS}), "torch.nn.modules")


def test_nested_dictionaries_are_flattened_with_dots(saved, shows):
    nested = {"encoder": {"0": {"w": A}, "norm": B}, "head": [C, {"w": A}], "scale": C, 7: {1: B}}
    expected = {
        "encoder.0.w": A,
        "encoder.norm": B,
        "head.0": C,
        "head.1.w": A,
        "scale": C,
        "7.1": B,
    }
    shows(saved(nested), expected)


TORCH_KINDS = (torch.dtype, torch.layout, torch.qscheme)
CONSTANTS = sorted(name for name in dir(torch) if isinstance(getattr(torch, name), TORCH_KINDS))


@pytest.mark.parametrize("name", CONSTANTS)
def test_torchs_constants_are_plain_values(saved, shows, name):
    notes = shows(saved({"w": A, "constant": getattr(torch, name)}), {"w": A})
    assert noted(notes, "left out, not tensors", "`constant`")


def test_a_bare_tensor_is_called_tensor(saved, shows):
    shows(saved(A), {"tensor": A})


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_named_by_places(saved, shows, kind):
    shows(saved(kind([A, {"w": B}, [C, A]])), {"0": A, "1.w": B, "2.0": C, "2.1": A})


def test_a_modules_own_state_dict_is_shown_whole(saved, shows):
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict()
    shows(saved(state), dict(state))


def test_a_note_names_the_other_dictionaries(saved, shows):
    both = {"state_dict_ema": OTHERS, "state_dict": WEIGHTS, "optimizer": {"state": {0: A}}}
    notes = shows(saved(both), WEIGHTS)
    assert noted(notes, "`state_dict`", "`state_dict_ema`", "--root")
    assert noted(notes, "`optimizer`")


@pytest.mark.parametrize(
    "key, expected",
    [
        ("state_dict_ema", OTHERS),
        ("state_dict", WEIGHTS),
        ("averages.ema.0", OTHERS),
        ("averages.ema.1", WEIGHTS),
        ("with.dots", OTHERS),
        ("averages.with.dots", WEIGHTS),
    ],
)
def test_root_chooses_a_dictionary_by_its_key(saved, shows, key, expected):
    averages = {"ema": [OTHERS, WEIGHTS], "with.dots": WEIGHTS}
    value = {
        "state_dict": WEIGHTS,
        "state_dict_ema": OTHERS,
        "averages": averages,
        "with.dots": OTHERS,
    }
    # The user chose it: there is nothing to say.
    assert not noted(shows(saved(value), expected, "--root", key), "shown")


@pytest.mark.parametrize("key", ["ema", "state_dict.ema", "state_dict.", "epoch", "", "."])
def test_a_missing_root_is_refused(saved, refuses, key):
    path = saved({"state_dict": WEIGHTS, "epoch": 1})
    refuses(path, f"`{key}`", "state_dict", options=("--root", key))


def test_a_safetensors_file_has_no_root(tmp_path, refuses):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    refuses(path, "`model`", options=("--root", "model"))


def test_values_that_are_no_tensors_are_left_out_with_a_note(saved, shows):
    plain = {
        "epoch": 1,
        "lr": 0.1,
        "arch": "x",
        "tags": {"u"},
        "shape": torch.Size([2]),
        "none": None,
    }
    plain |= {"dtype": torch.float32, "big": 1 << 80, "raw": b"x", "config": {"depth": [1, 2]}}
    notes = shows(saved({**WEIGHTS, **plain}), WEIGHTS)
    shown = [note for note in notes if note.startswith("left out")]
    assert len(shown) == 1
    for key in list(plain)[:8]:
        assert f"`{key}`" in shown[0]
    assert "2 more" in shown[0]


def test_an_object_beside_the_chosen_dictionary_does_not_matter(saved, shows):
    shows(saved({"state_dict": WEIGHTS, "args": Namespace(lr=1)}), WEIGHTS)


@pytest.mark.parametrize("inside", [lambda x: x, lambda x: [x], lambda x: {"deep": (x,)}])
def test_an_object_in_the_chosen_dictionary_is_refused_by_name(saved, refuses, inside):
    report = refuses(
        saved({**WEIGHTS, "args": inside(Namespace(lr=1))}), "`args", "argparse.Namespace"
    )
    assert len(report["refused"]) == 1
    assert report["refused"][0]["tensor"].startswith("args")
    assert {tensor["name"] for tensor in report["tensors"]} == set(WEIGHTS)


def test_allow_partial_leaves_the_object_out(ckptfs, saved, shows):
    path = saved({**WEIGHTS, "args": Namespace(lr=1)})
    shows(path, WEIGHTS, "--allow-partial")
    refused = ckptfs.inspect(path, "--allow-partial")["refused"]
    assert [entry["tensor"] for entry in refused] == ["args"]


def test_allow_partial_of_nothing_is_refused(saved, refuses):
    refuses(saved({"args": Namespace(lr=1)}), options=("--allow-partial",))


def test_a_whole_model_is_refused_and_the_remedy_is_its_state_dict(saved, refuses):
    refuses(saved(torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear", "state_dict()")


@pytest.mark.parametrize(
    "clashing",
    [
        {"a.b": A, "a": {"b": B}},
        {"0": A, 0: B},
        {"x": {"1": A, 1: B}, "y": A},
        {"x": [A, B], "x.1": C},
    ],
)
def test_names_that_collide_are_refused(saved, refuses, clashing):
    name = {"a.b": "a.b", "0": "0", "x": "x.1"}[next(iter(clashing))]
    refuses(saved(clashing), f"`{name}`")


@pytest.mark.parametrize("value", [{}, [], 3, None, "text", {"epoch": 1}, {"state_dict": {}}])
def test_nothing_to_show_is_refused(saved, refuses, value):
    refuses(saved(value), "no tensors")


@pytest.mark.parametrize(
    "key, word",
    [
        (("a", 1), "not text"),
        (2.5, "not text"),
        ("\ud800", "not text"),
        ("__metadata__", "__metadata__"),
    ],
    ids=["tuple", "float", "lone-surrogate", "reserved"],
)
def test_a_key_that_cannot_be_a_name_is_refused(saved, refuses, key, word):
    refuses(saved({**WEIGHTS, key: A}), word)


def test_the_notes_say_which_dictionary_was_chosen_and_why(saved, shows):
    # Nothing was chosen, and nothing is noted.
    assert shows(saved(WEIGHTS), WEIGHTS) == []
    nested = {"a": WEIGHTS, "b": WEIGHTS}
    flat = {f"{key}.{name}": tensor for key in nested for name, tensor in WEIGHTS.items()}
    assert noted(shows(saved(nested), flat), "shown: the whole", "joined with dots")
    assert noted(shows(saved({"state_dict": WEIGHTS, "epoch": 3}), WEIGHTS), "`state_dict`", "usual key")
    assert noted(shows(saved({"net": WEIGHTS}), WEIGHTS), "`net`", "only entry")


@pytest.mark.parametrize(
    "beside, is_obvious",
    [
        ({"optimizer": {"state": {0: {"step": A}}, "param_groups": [{}]}, "epoch": 3}, True),
        ({"optim_d": {"moments": A}, "rng_state": B, "loss": A}, True),
        ({}, True),
        ({"ema": OTHERS}, False),
        ({"criterion": OTHERS, "optimizer": {"moments": A}}, False),
    ],
)
def test_an_obvious_choice_is_noted_by_inspect_and_not_by_export(ckptfs, saved, shows, tmp_path, beside, is_obvious):
    path = saved({"state_dict": WEIGHTS, **beside})
    assert noted(shows(path, WEIGHTS), "shown: `state_dict`")
    for words in (["export", "--force", path, tmp_path / "out.safetensors"], ["verify", path]):
        outcome = ckptfs(*words)
        assert outcome.stderr.count("note: shown: `state_dict`") == (not is_obvious), outcome
