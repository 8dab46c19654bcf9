//! Promise: a small pickle cannot make us take long or much memory, whatever it does with its memo.

mod support;

use std::fs;
use std::sync::{Mutex, PoisonError};

use ckptfs::checkpoint::{self, Options};
use ckptfs::image::Image;
use support::pickle::*;
use support::zip::{archive, checkpoint};

/// The most memory that reading any of these may take: each is a few megabytes at the most, and what
/// reading it should take is a small multiple of that.
const MEMORY: u64 = 512 << 20;

/// Held while memory is measured: it is measured for the whole program.
static ALONE: Mutex<()> = Mutex::new(());

/// Reads a checkpoint with that value as its pickle all the way to an image, and says whether there
/// is one. It must not take long, nor much memory.
fn is_shown(value: &[u8]) -> bool {
    is_shown_with(value, Options::default())
}

fn is_shown_with(value: &[u8], options: Options) -> bool {
    let bytes = archive(&checkpoint(&pickle(value)));
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    fs::write("/proc/self/clear_refs", "5").expect("the peak can be reset");
    let before = memory("VmRSS:");
    let shown = support::in_bounded_time(move || {
        let parsed = checkpoint::parse_bytes(&bytes, "x.pt".as_ref(), &options);
        parsed.is_ok_and(|parsed| Image::new(parsed).is_ok())
    });
    let taken = memory("VmHWM:").saturating_sub(before);
    assert!(taken < MEMORY, "{} MB were taken", taken >> 20);
    shown
}

/// What the system says of this program's memory, in bytes.
fn memory(what: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("readable");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("the line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn tensor() -> Vec<u8> {
    Tensor::default().bytes()
}

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

/// `n` times the value remembered in a slot, in a list.
fn list_of(slot: u32, n: usize) -> Vec<u8> {
    [EMPTY_LIST, MARK, &get(slot).repeat(n), APPENDS].concat()
}

/// A value that is remembered and taken off the stack.
fn remember(slot: u32, value: &[u8]) -> Vec<u8> {
    [value, &put(slot), POP].concat()
}

#[test]
fn dictionaries_that_double_at_every_level() {
    assert!(is_shown(&doubling(6, &tensor())), "64 names of one tensor");
    for levels in [20, 23, 30, 60, 100, 5_000] {
        assert!(!is_shown(&doubling(levels, &tensor())), "{levels}");
        assert!(!is_shown(&doubling(levels, NONE)), "{levels}, without tensors");
    }
}

#[test]
fn tuples_that_double_at_every_level() {
    let mut value = tensor();
    for _ in 0..60 {
        value.extend(b"2\x86");
    }
    assert!(!is_shown(&value));
}

#[test]
fn containers_inside_themselves() {
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
fn one_long_key_over_many_entries() {
    let key = "k".repeat(1 << 20);
    let shared = [remember(0, &tensor()), remember(1, NONE)].concat();
    let tensors = dict(&[("w", tensor()), (&key, list_of(0, 4_000))]);
    assert!(!is_shown(&[&shared[..], &tensors].concat()));
    // Whether the one tensor among them is shown is not at stake here.
    let left_out = [EMPTY_LIST, MARK, &get(0), &get(1).repeat(4_000), APPENDS].concat();
    is_shown(&[&shared[..], &dict(&[("w", tensor()), (&key, left_out)])].concat());
}

#[test]
fn one_long_key_in_every_dictionary_on_the_way() {
    let mut value =
        [&remember(0, &text(&"k".repeat(1 << 20)))[..], &remember(1, &tensor())].concat();
    let many: Vec<u8> = (0..4_000).flat_map(|n| [int(n), get(1)].concat()).collect();
    value.extend([EMPTY_DICT, MARK, &many, &text("x"), NONE, SET_ITEMS].concat());
    for slot in 2..40 {
        value.extend(remember(slot, b""));
        value.extend([EMPTY_DICT, MARK, &get(0), &get(slot), SET_ITEMS].concat());
    }
    assert!(!is_shown(&value));
}

#[test]
fn one_long_storage_name_in_many_tensors() {
    let key: &'static str = Box::leak("0".repeat(1 << 20).into_boxed_str());
    let storage = remember(0, &Tensor { key, ..Tensor::default() }.storage());
    let arguments = [
        get(0),
        int(0),
        tuple(&[int(6)]),
        tuple(&[int(1)]),
        FALSE.to_vec(),
        call(&global("collections", "OrderedDict"), &[]),
    ];
    let one = call(&global("torch._utils", "_rebuild_tensor_v2"), &arguments);
    assert!(!is_shown(&[&storage[..], &list(&vec![one; 4_000])].concat()));
}

#[test]
fn one_long_class_name_in_many_objects() {
    let class = remember(0, &global("module", &"C".repeat(1 << 20)));
    let many = list_of(0, 4_000);
    assert!(!is_shown(&[&class[..], &many].concat()));
}

#[test]
fn one_long_shape_in_many_tensors() {
    let (shape, storage) = (tuple(&vec![int(1); 200_000]), Tensor::default().storage());
    let arguments =
        [&storage[..], &int(0), &get(0), &get(0), FALSE, EMPTY_DICT].map(<[u8]>::to_vec);
    let one = call(&global("torch._utils", "_rebuild_tensor_v2"), &arguments);
    assert!(!is_shown(&[&remember(0, &shape)[..], &list(&vec![one; 10_000])].concat()));
}

#[test]
fn a_path_that_many_equal_keys_begin() {
    const KEYS: usize = 100_000;
    let inner = [EMPTY_DICT, MARK, &[text("bx"), get(1)].concat().repeat(KEYS), SET_ITEMS].concat();
    let outer = [EMPTY_DICT, MARK, &[text("a"), get(0)].concat().repeat(KEYS), SET_ITEMS].concat();
    let value = [&remember(1, &tensor())[..], &remember(0, &inner), &outer].concat();
    let options = Options { root_key: Some("a.b".to_owned()), ..Options::default() };
    assert!(!is_shown_with(&value, options));
}
