//! In a process of its own, because it measures the peak of its process's memory.
//!
//! A small pickle cannot make parsing take long or much memory, whatever it does with its memo.

mod common;

use ckptfs::checkpoint::ParseOptions;
use common::bombs::{
    alone, are_shown_together, is_shown, is_shown_packed, is_shown_with, list_of, remember, tensor,
};
use common::pickle::*;

/// `{"a": inner, "b": inner}`, again and again.
fn doubling(levels: u32, inner: &[u8]) -> Vec<u8> {
    let mut value = inner.to_vec();
    for level in 0..levels {
        value.extend(put(level));
        value.extend(POP);
        let twice = [text("a"), get(level), text("b"), get(level)].concat();
        value.extend([EMPTY_DICT, MARK, &twice, SET_ITEMS].concat());
    }
    value
}

#[test]
fn dictionaries_that_double_at_every_level() {
    let _alone = alone();
    assert!(is_shown(&doubling(6, &tensor())), "64 names of one tensor");
    for levels in [20, 23, 30, 60, 100, 5_000] {
        assert!(!is_shown(&doubling(levels, &tensor())), "{levels}");
        assert!(!is_shown(&doubling(levels, NONE)), "{levels}, without tensors");
    }
}

#[test]
fn tuples_that_double_at_every_level() {
    let _alone = alone();
    let mut value = tensor();
    for _ in 0..60 {
        value.extend(b"2\x86");
    }
    assert!(!is_shown(&value));
}

#[test]
fn containers_inside_themselves() {
    let _alone = alone();
    let dict_in_itself =
        [EMPTY_DICT, &put(0), MARK, &text("w"), &tensor(), &text("a"), &get(0), SET_ITEMS].concat();
    assert!(!is_shown(&dict_in_itself));
    let only_entry = [EMPTY_DICT, &put(0), MARK, &text("model"), &get(0), SET_ITEMS].concat();
    assert!(!is_shown(&only_entry));
    let list_in_itself = [EMPTY_LIST, &put(0), MARK, &tensor(), &get(0), APPENDS].concat();
    assert!(!is_shown(&list_in_itself));
    let twice = [EMPTY_LIST, &put(0), MARK, &tensor(), &get(0), &get(0), APPENDS].concat();
    assert!(!is_shown(&twice));
}

#[test]
fn nesting_deeper_than_any_stack() {
    let _alone = alone();
    const DEPTH: usize = 1_000_000;
    let tuples = [&tensor()[..], &b"\x85".repeat(DEPTH)].concat();
    assert!(!is_shown(&tuples));
    assert!(!is_shown(&MARK.repeat(DEPTH)));
    let lists = [&EMPTY_LIST.repeat(DEPTH)[..], &tensor(), &APPEND.repeat(DEPTH)].concat();
    assert!(!is_shown(&lists));
    let parameter = global("torch._utils", "_rebuild_parameter");
    let wrapped = [&parameter.repeat(10_000)[..], &tensor(), &b"\x85R".repeat(10_000)].concat();
    assert!(!is_shown(&dict(&[("w", wrapped)])));
}

/// An ordered dictionary is made of a list of pairs, each time anew.
#[test]
fn one_long_list_made_into_dictionaries_again_and_again() {
    let _alone = alone();
    const PAIRS: usize = 500_000;
    const CALLS: usize = 50_000;
    let ordered = remember(0, &global("collections", "OrderedDict"));
    let pair = remember(1, &tuple(&[text("k"), NONE.to_vec()]));
    let calls = [&get(0)[..], &get(3), REDUCE, POP].concat().repeat(CALLS);
    for last in [&get(1)[..], NONE] {
        // The last item decides whether it is a list of pairs at all.
        let long = [EMPTY_LIST, MARK, &get(1).repeat(PAIRS), last, APPENDS].concat();
        let arguments = remember(3, &tuple(&[long]));
        assert!(!is_shown(&[&ordered[..], &pair, &arguments, &calls, NONE].concat()));
    }
}

#[test]
fn a_path_that_many_equal_keys_begin() {
    let _alone = alone();
    const KEYS: usize = 100_000;
    let inner = [EMPTY_DICT, MARK, &[text("bx"), get(1)].concat().repeat(KEYS), SET_ITEMS].concat();
    let outer = [EMPTY_DICT, MARK, &[text("a"), get(0)].concat().repeat(KEYS), SET_ITEMS].concat();
    let value = [&remember(1, &tensor())[..], &remember(0, &inner), &outer].concat();
    let options = ParseOptions { root_key: Some("a.b".to_owned()), ..ParseOptions::default() };
    assert!(!is_shown_with(&value, options));
}

/// Pickles of some million bytes that take a few kilobytes in their files.
#[test]
fn a_compressed_pickle_takes_no_more_memory_than_a_small_one() {
    let _alone = alone();
    const MANY: usize = 4_000_000;
    const MIB: u64 = 1 << 20;
    let beside = |value: Vec<u8>| dict(&[("w", tensor()), ("x", value)]);
    let bombs = [
        beside([NONE, &b"\x85".repeat(MANY)].concat()),
        beside(tuple(&[EMPTY_LIST.repeat(MANY)])),
        beside(tuple(&[EMPTY_DICT.repeat(MANY)])),
        beside([NONE, &b"\x94".repeat(MANY)].concat()),
        beside(list(&[NONE.repeat(MANY)])),
        beside(list(&[int(70_000).repeat(MANY / 4)])),
        [&remember(0, &tensor())[..], &dict(&[("w", list_of(0, MANY / 4))])].concat(),
    ];
    for bomb in &bombs {
        // Only the memory matters here, not whether it is shown.
        is_shown_packed(bomb, 96 * MIB);
    }
}

/// Each takes some 60 MB beside its bytes.
#[test]
fn large_pickles_are_parsed_one_at_a_time() {
    let _alone = alone();
    let nested = [NONE, &b"\x85".repeat(4_000_000)].concat();
    are_shown_together(&dict(&[("w", tensor()), ("x", nested)]), 8, 256 << 20);
}

/// Thousands of tensors, and lists of as many numbers, compressed or not.
#[test]
fn large_pickles_of_training_are_shown() {
    let _alone = alone();
    let state = |n: usize| dict(&[("exp_avg", tensor()), ("step", int(n as i128))]);
    let name = |n: usize| format!("model.layers.{n}.self_attn.q_proj.weight");
    let pairs = |n: usize| [text(&name(n)), put(n as u32 + 7), tensor(), int(n as i128), state(n)];
    let entries: Vec<u8> = (0..20_000).flat_map(pairs).flatten().collect();
    let numbers: Vec<Vec<u8>> = (0..300_000).map(|n| int(n * 7 % 90_000)).collect();
    let value = [EMPTY_DICT, MARK, &entries, &text("numbers"), &list(&numbers), SET_ITEMS].concat();
    assert!(is_shown(&value));
    assert!(is_shown_packed(&value, 512 << 20));
}
