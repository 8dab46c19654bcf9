//! In a process of its own, because it measures the peak of its process's memory.
//!
//! A pickle that uses one long value in many places cannot make parsing take long or much memory.

mod common;

use common::bombs::{alone, is_shown, list_of, remember, tensor};
use common::pickle::*;

/// How long a text is and how often it is used: one as long as a name may be, and one far longer. Written
/// out each time, either takes gigabytes.
const LONG: [(usize, usize); 2] = [(4_000, 500_000), (1 << 20, 4_000)];

/// How often a value of a hundred thousand parts is used: visiting all parts each time takes hours.
const PARTS: usize = 100_000;
const USES: usize = 200_000;

/// `n` calls of the function in one slot with the arguments in another.
fn calls(function: u32, arguments: u32, n: usize) -> Vec<u8> {
    let call = [&get(function)[..], &get(arguments), REDUCE].concat();
    [EMPTY_LIST, MARK, &call.repeat(n), APPENDS].concat()
}

/// Parses so many calls of a torch function, all with the same arguments. Whether their results are shown
/// does not matter here.
fn read_calls(module: &str, function: &str, arguments: &[Vec<u8>]) {
    let function = remember(0, &global(module, function));
    let arguments = remember(1, &tuple(arguments));
    is_shown(&[&function[..], &arguments, &calls(0, 1, USES)].concat());
}

/// The arguments that make a tensor of the storage, with this shape and strides.
fn arguments(storage: Vec<u8>, shape: Vec<u8>) -> Vec<Vec<u8>> {
    let hooks = EMPTY_DICT.to_vec();
    vec![storage, int(0), shape.clone(), shape, FALSE.to_vec(), hooks]
}

#[test]
fn a_key_of_many_entries() {
    let _alone = alone();
    for (len, uses) in LONG {
        let key = "k".repeat(len);
        let shared = [remember(0, &tensor()), remember(1, NONE)].concat();
        let tensors = dict(&[("w", tensor()), (&key, list_of(0, uses))]);
        assert!(!is_shown(&[&shared[..], &tensors].concat()), "{len}");
        // Whether the one tensor among the skipped entries is shown does not matter here.
        let left_out = [EMPTY_LIST, MARK, &get(1).repeat(uses), &get(0), APPENDS].concat();
        is_shown(&[&shared[..], &dict(&[("w", tensor()), (&key, left_out)])].concat());
    }
}

/// Nested dictionaries, all with the same long key, with or without another entry.
fn nested(key_len: usize, beside: &[u8], inner: &[u8]) -> Vec<u8> {
    let key = remember(0, &text(&"k".repeat(key_len)));
    let open = [EMPTY_DICT, MARK, beside, &get(0)].concat().repeat(60);
    [&key[..], &open, inner, &SET_ITEMS.repeat(60)].concat()
}

/// Parses `inner`, which uses a remembered tensor, inside all those dictionaries.
fn is_shown_nested(beside: &[u8], inner: &[u8]) -> bool {
    let tensor = remember(1, &tensor());
    LONG.iter().any(|&(len, _)| is_shown(&[&tensor[..], &nested(len, beside, inner)].concat()))
}

#[test]
fn a_key_of_every_dictionary_on_the_way_to_tensors() {
    let _alone = alone();
    let beside = [&text("n")[..], NONE].concat();
    assert!(!is_shown_nested(&beside, &list_of(1, 1_000_000)));
}

#[test]
fn a_key_of_every_dictionary_on_the_way_to_what_is_left_out() {
    let _alone = alone();
    let beside = [&text("n")[..], NONE].concat();
    // Whether the one tensor among them is shown does not matter here.
    is_shown_nested(
        &beside,
        &[EMPTY_LIST, MARK, &NONE.repeat(7_500_000), &get(1), APPENDS].concat(),
    );
}

#[test]
fn a_key_of_every_dictionary_on_the_way_to_what_a_note_lists() {
    let _alone = alone();
    let others: Vec<u8> = (0..3_000_000).flat_map(|n| [int(n), get(1)].concat()).collect();
    let model = [&text("model")[..], EMPTY_DICT, &text("w"), &get(1), b"s"].concat();
    is_shown_nested(b"", &[EMPTY_DICT, MARK, &others, &model, SET_ITEMS].concat());
}

#[test]
fn a_storage_name_of_many_tensors() {
    let _alone = alone();
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
    let _alone = alone();
    for (len, uses) in LONG {
        let class = remember(0, &global("module", &"C".repeat(len)));
        assert!(!is_shown(&[&class[..], &list_of(0, uses)].concat()), "{len}");
    }
}

#[test]
fn a_shape_of_many_tensors() {
    let _alone = alone();
    let shape = remember(2, &tuple(&vec![int(1); PARTS]));
    let value = call(
        &global("torch._utils", "_rebuild_tensor_v2"),
        &arguments(Tensor::default().storage(), get(2)),
    );
    let one = [&shape[..], &value].concat();
    assert!(!is_shown(&[&remember(0, &one)[..], &list_of(0, USES)].concat()));
}

/// A dictionary of many entries.
fn many(key: &str, value: &[u8]) -> Vec<u8> {
    let entries = [text(key), value.to_vec()].concat().repeat(PARTS);
    [EMPTY_DICT, MARK, &entries, SET_ITEMS].concat()
}

#[test]
fn the_metadata_of_many_views() {
    let _alone = alone();
    let mut view = arguments(Tensor::default().storage(), tuple(&[int(1)]));
    view.push(many("x", FALSE));
    read_calls("torch._utils", "_rebuild_tensor_v2", &view);
}

#[test]
fn the_attributes_of_many_parameters_and_subclasses() {
    let _alone = alone();
    let parameter = [tensor(), FALSE.to_vec(), EMPTY_DICT.to_vec(), many("x", NONE)];
    read_calls("torch._utils", "_rebuild_parameter_with_state", &parameter);
    let rebuild = global("torch._utils", "_rebuild_tensor_v2");
    let inner = tuple(&arguments(Tensor::default().storage(), tuple(&[int(1)])));
    let dictionaries = [EMPTY_LIST, MARK, &EMPTY_DICT.repeat(PARTS), APPENDS].concat();
    for state in [many("x", NONE), dictionaries] {
        let subclass = [rebuild.clone(), global("torch", "Tensor"), inner.clone(), state];
        read_calls("torch._tensor", "_rebuild_from_type_v2", &subclass);
    }
}
