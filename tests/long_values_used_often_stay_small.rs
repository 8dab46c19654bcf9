//! Promise: a pickle that uses one long value in many places cannot make us take long or much memory.

mod support;

use support::bombs::{is_shown, list_of, remember, tensor};
use support::pickle::*;

/// How long a text is and how often it is used: one as long as a name may be, and one far longer.
/// Written out each time, either comes to gigabytes.
const LONG: [(usize, usize); 2] = [(4_000, 500_000), (1 << 20, 4_000)];

/// How often a value of a hundred thousand parts is used: each time looked at anew, that takes hours.
const PARTS: usize = 100_000;
const USES: usize = 200_000;

/// `n` calls of the function in one slot with the arguments in another.
fn calls(function: u32, arguments: u32, n: usize) -> Vec<u8> {
    let call = [&get(function)[..], &get(arguments), REDUCE].concat();
    [EMPTY_LIST, MARK, &call.repeat(n), APPENDS].concat()
}

/// Whether so many calls of a function of torch with the same arguments are shown.
fn are_shown(module: &str, function: &str, arguments: &[Vec<u8>]) -> bool {
    let function = remember(0, &global(module, function));
    let arguments = remember(1, &tuple(arguments));
    is_shown(&[&function[..], &arguments, &calls(0, 1, USES)].concat())
}

/// The arguments that make a tensor of the storage, with this shape and strides.
fn arguments(storage: Vec<u8>, shape: Vec<u8>) -> Vec<Vec<u8>> {
    let hooks = EMPTY_DICT.to_vec();
    vec![storage, int(0), shape.clone(), shape, FALSE.to_vec(), hooks]
}

#[test]
fn a_key_of_many_entries() {
    for (len, uses) in LONG {
        let key = "k".repeat(len);
        let shared = [remember(0, &tensor()), remember(1, NONE)].concat();
        let tensors = dict(&[("w", tensor()), (&key, list_of(0, uses))]);
        assert!(!is_shown(&[&shared[..], &tensors].concat()), "{len}");
        // Whether the one tensor among what is left out is shown is not at stake here.
        let left_out = [EMPTY_LIST, MARK, &get(1).repeat(uses), &get(0), APPENDS].concat();
        is_shown(&[&shared[..], &dict(&[("w", tensor()), (&key, left_out)])].concat());
    }
}

/// Dictionaries of one entry inside one another, all with the same long key.
fn nested(key_len: usize, inner: &[u8]) -> Vec<u8> {
    let key = remember(0, &text(&"k".repeat(key_len)));
    let levels = [EMPTY_DICT, &get(0)].concat().repeat(60);
    [&key[..], &levels, inner, &b"s".repeat(60)].concat()
}

#[test]
fn a_key_of_every_dictionary_on_the_way() {
    let shared = remember(1, &tensor());
    for (len, _) in LONG {
        // Names that are written down, names that are left out, names that a note lists.
        let tensors = list_of(1, 1_000_000);
        let left_out = [EMPTY_LIST, MARK, &NONE.repeat(3_000_000), &get(1), APPENDS].concat();
        let entries: Vec<u8> = (0..500_000).flat_map(|n| [int(n), get(1)].concat()).collect();
        let model = [&text("model")[..], EMPTY_DICT, &text("w"), &get(1), b"s"].concat();
        let others = [EMPTY_DICT, MARK, &entries, &model, SET_ITEMS].concat();
        let plain = dict(&[("x", NONE.to_vec()), ("w", get(1)), ("list", left_out)]);
        assert!(!is_shown(&[&shared[..], &nested(len, &tensors)].concat()), "{len}");
        is_shown(&[&shared[..], &nested(len, &plain)].concat());
        is_shown(&[&shared[..], &nested(len, &others)].concat());
    }
}

#[test]
fn a_storage_name_of_many_tensors() {
    for (len, uses) in LONG {
        let key: &'static str = Box::leak("0".repeat(len).into_boxed_str());
        let storage = Tensor { key, ..Tensor::default() }.storage();
        let one = arguments(storage, tuple(&[int(1)]));
        let one = call(&global("torch._utils", "_rebuild_tensor_v2"), &one);
        assert!(!is_shown(&[&remember(0, &one)[..], &list_of(0, uses)].concat()), "{len}");
    }
}

#[test]
fn a_class_name_of_many_objects() {
    for (len, uses) in LONG {
        let class = remember(0, &global("module", &"C".repeat(len)));
        assert!(!is_shown(&[&class[..], &list_of(0, uses)].concat()), "{len}");
    }
}

#[test]
fn a_shape_of_many_tensors() {
    let shape = remember(2, &tuple(&vec![int(1); PARTS]));
    let value = call(
        &global("torch._utils", "_rebuild_tensor_v2"),
        &arguments(Tensor::default().storage(), get(2)),
    );
    let one = [&shape[..], &value].concat();
    assert!(!is_shown(&[&remember(0, &one)[..], &list_of(0, USES)].concat()));
}

#[test]
fn arguments_of_many_calls() {
    let many = |key: &str, value: &[u8]| {
        let entries = [text(key), value.to_vec()].concat().repeat(PARTS);
        [EMPTY_DICT, MARK, &entries, SET_ITEMS].concat()
    };
    // Metadata of a view, in which only some entries matter.
    let mut view = arguments(Tensor::default().storage(), tuple(&[int(1)]));
    view.push(many("x", FALSE));
    are_shown("torch._utils", "_rebuild_tensor_v2", &view);
    // The attributes of a parameter, and of a subclass.
    let parameter = [tensor(), FALSE.to_vec(), EMPTY_DICT.to_vec(), many("x", NONE)];
    are_shown("torch._utils", "_rebuild_parameter_with_state", &parameter);
    let rebuild = global("torch._utils", "_rebuild_tensor_v2");
    let inner = tuple(&arguments(Tensor::default().storage(), tuple(&[int(1)])));
    let subclass = [rebuild, global("torch", "Tensor"), inner, many("x", NONE)];
    are_shown("torch._tensor", "_rebuild_from_type_v2", &subclass);
    let pairs = [EMPTY_LIST, MARK, &EMPTY_DICT.repeat(PARTS), APPENDS].concat();
    let subclass = [subclass[0].clone(), subclass[1].clone(), subclass[2].clone(), pairs];
    are_shown("torch._tensor", "_rebuild_from_type_v2", &subclass);
}
