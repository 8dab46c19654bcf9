//! A pickle is read and never executed; one that breaks its format is refused.

use crate::common;
use crate::common::pickle::*;
use crate::common::zip::{archive, checkpoint, floats};
use ckptfs::checkpoint::{CheckpointError, PickleError, SelectError, TensorError};

/// Parses a checkpoint of which only the pickle is given.
fn read(pickle: &[u8]) -> Result<ckptfs::checkpoint::Checkpoint, CheckpointError> {
    common::torch(&archive(&checkpoint(pickle)))
}

/// The error of a pickle.
fn error(pickle: &[u8]) -> PickleError {
    match read(pickle).expect_err("refused") {
        CheckpointError::Pickle { error, .. } => error,
        other => panic!("refused for another reason: {other}"),
    }
}

/// The error of a pickle of protocol 2 with these opcodes.
fn opcodes(parts: &[&[u8]]) -> PickleError {
    error(&pickle(&parts.concat()))
}

/// The error of the only entry of a state dict.
fn entry(value: Vec<u8>) -> TensorError {
    common::refused(read(&pickle(&dict(&[("w", value)]))).expect("readable")).error
}

fn out_of_order(error: PickleError) -> bool {
    matches!(error, PickleError::OutOfOrder { .. })
}

#[test]
fn a_valid_pickle_is_read() {
    let state = dict(&[("w", Tensor::default().bytes())]);
    assert_eq!(common::tensor_bytes(read(&pickle(&state)).unwrap(), "w"), floats());
}

#[test]
fn cut_off_at_any_byte_and_continued() {
    let whole = pickle(&dict(&[("w", Tensor::default().bytes())]));
    for len in 2..whole.len() {
        assert!(matches!(error(&whole[..len]), PickleError::Truncated), "{len}");
    }
    assert!(matches!(error(&[&whole[..], b"."].concat()), PickleError::TrailingBytes(1)));
}

#[test]
fn other_protocols() {
    for protocol in [0, 1, 6, 0x80, 0xff] {
        let refused = error(&[0x80, protocol, b'}', b'.']);
        assert!(matches!(refused, PickleError::Protocol(p) if p == protocol));
    }
    assert!(matches!(error(b"}."), PickleError::Protocol(_)));
    assert!(matches!(error(b"(dp0\n."), PickleError::Protocol(_)));
}

#[test]
fn opcodes_that_do_not_exist_or_have_no_place() {
    // Two kinds of opcodes of protocols 0 to 5 are in no checkpoint: persistent ids in a line of text, and
    // buffers outside the pickle.
    for opcode in [0x00, 0x01, b'P', b'z', b'~', 0x7f, 0x80, 0x97, 0x98, 0x99, 0xfe, 0xff] {
        let refused = opcodes(&[EMPTY_DICT, &[opcode], b"\x02\n"]);
        assert!(
            matches!(refused, PickleError::Opcode { opcode: o, at: 3 } if o == opcode),
            "{opcode:#04x}: {refused}"
        );
    }
}

#[test]
fn nothing_on_the_stack() {
    for opcode in [
        &b"."[..],
        POP,
        REDUCE,
        BUILD,
        APPEND,
        PERSISTENT,
        b"2",
        b"s",
        b"q\0",
        b"\x94",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x93",
        b"\x81",
        b"\x92",
    ] {
        assert!(out_of_order(opcodes(&[opcode])), "{opcode:?}");
    }
    for opcode in [TUPLE, SET_ITEMS, APPENDS, b"1", b"d", b"l", b"o", b"\x90", b"\x91"] {
        assert!(out_of_order(opcodes(&[NONE, opcode])), "{opcode:?} without a mark");
    }
    assert!(out_of_order(opcodes(&[MARK, NONE, SET_ITEMS])), "an odd number of them");
    assert!(out_of_order(opcodes(&[EMPTY_DICT, MARK, NONE, SET_ITEMS])), "a key without a value");
}

#[test]
fn reaching_below_a_mark() {
    for opcode in [POP, APPEND, BUILD, PERSISTENT, b"s", b"\x85", b"."] {
        assert!(out_of_order(opcodes(&[EMPTY_LIST, NONE, MARK, opcode])), "{opcode:?}");
    }
}

#[test]
fn marks_left_open() {
    assert!(out_of_order(opcodes(&[MARK, EMPTY_DICT])));
    assert!(out_of_order(opcodes(&[MARK, MARK, MARK, EMPTY_DICT])));
}

#[test]
fn opcodes_on_what_they_do_not_fit() {
    assert!(out_of_order(opcodes(&[NONE, NONE, APPEND])));
    assert!(out_of_order(opcodes(&[NONE, NONE, NONE, b"s"])));
    assert!(out_of_order(opcodes(&[NONE, NONE, REDUCE])), "arguments that are no tuple");
    assert!(out_of_order(opcodes(&[NONE, NONE, b"\x93"])), "a name that is no text");
    assert!(out_of_order(opcodes(&[&get(7)])), "a slot that was never filled");
    let names = |lines: &[u8]| matches!(opcodes(&[lines]), PickleError::MalformedValue { .. });
    assert!(names(b"c\nname\n") && names(b"cmodule\n\n") && names(b"c\xff\nname\n"));
    assert!(names(b"Ix\n") && names(b"I\n") && names(b"L-L\n") && names(b"I1 \n"));
}

#[test]
fn lengths_past_the_end() {
    for opcode in [b'T', b'X', b'B', 0x8b] {
        let refused = opcodes(&[&[opcode], &u32::MAX.to_le_bytes()]);
        assert!(
            matches!(refused, PickleError::Truncated | PickleError::CountLimit { .. }),
            "{opcode}"
        );
    }
    for opcode in [0x8d, 0x8e, 0x96, 0x95] {
        for len in [1 << 20, 1 << 62, u64::MAX] {
            let refused = opcodes(&[&[opcode], &len.to_le_bytes()]);
            assert!(matches!(refused, PickleError::Truncated), "{opcode:#x} {len}");
        }
    }
    let long = [&[0x8b][..], &2000u32.to_le_bytes(), &[1; 2000]].concat();
    assert!(matches!(opcodes(&[&long]), PickleError::CountLimit { .. }));
}

#[test]
fn nothing_is_ever_called() {
    for (module, name) in [
        ("os", "system"),
        ("posix", "system"),
        ("nt", "system"),
        ("builtins", "eval"),
        ("__builtin__", "exec"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("builtins", "getattr"),
    ] {
        let callable = global(module, name);
        let value = call(&callable, &[text("touch /tmp/owned")]);
        let TensorError::Object { class } = entry(value.clone()) else {
            panic!("{module}.{name} was not opaque")
        };
        assert_eq!(class, format!("{module}.{name}"));
        // As the whole pickle, and as a tensor's argument.
        let top = read(&pickle(&value)).unwrap_err();
        assert!(
            matches!(top, CheckpointError::Selection { error: SelectError::Object { .. }, .. }),
            "{top}"
        );
        let rebuilt = call(&global("torch._utils", "_rebuild_parameter"), &[value]);
        assert!(matches!(entry(rebuilt), TensorError::Malformed { .. }));
    }
    // By an opcode that calls a function.
    let eval = [global("builtins", "eval"), text("1"), tuple(&[text("1")])];
    let from_type = call(&global("torch._tensor", "_rebuild_from_type_v2"), &eval);
    assert!(matches!(entry(from_type), TensorError::Malformed { .. }));
    // By names that are put together from the stack.
    let by_stack = [text("os"), text("system"), vec![0x93]].concat();
    assert!(matches!(entry(call(&by_stack, &[text("id")])), TensorError::Object { .. }));
    // By state that is set on an object, and on a tensor.
    let built = [Tensor::default().bytes(), dict(&[("x", NONE.to_vec())]), BUILD.to_vec()].concat();
    assert!(matches!(entry(built), TensorError::Modified));
}

#[test]
fn what_stands_in_for_a_tensor() {
    for function in ["_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor"] {
        let value = call(&global("torch._utils", function), &[NONE.to_vec(), NONE.to_vec()]);
        assert!(matches!(entry(value), TensorError::UnsupportedKind { .. }), "{function}");
    }
    let meta = Tensor { location: "meta", ..Tensor::default() };
    assert!(matches!(entry(meta.bytes()), TensorError::UnsupportedKind { .. }));
    let unknown = Tensor { function: "_rebuild_anything", ..Tensor::default() };
    assert!(matches!(entry(unknown.bytes()), TensorError::Malformed { .. }));
    for class in ["QInt8Storage", "ComplexDoubleStorage"] {
        let tensor = Tensor { class, ..Tensor::default() };
        assert!(matches!(entry(tensor.bytes()), TensorError::UnsupportedDtype { .. }), "{class}");
    }
    let class = Tensor { class: "Storage", ..Tensor::default() };
    assert!(matches!(entry(class.bytes()), TensorError::Malformed { .. }));
    assert!(matches!(entry(Tensor::default().storage()), TensorError::Object { .. }));
}

#[test]
fn views_whose_bytes_are_not_their_values() {
    let with = |metadata: Vec<u8>| {
        let tensor = Tensor::default().bytes();
        // Before the arguments are closed and the call is made.
        entry([&tensor[..tensor.len() - 2], &metadata, TUPLE, REDUCE].concat())
    };
    assert!(matches!(with(dict(&[("conj", TRUE.to_vec())])), TensorError::LazyView { .. }));
    assert!(matches!(with(dict(&[("neg", TRUE.to_vec())])), TensorError::LazyView { .. }));
    assert!(matches!(with(dict(&[("new", TRUE.to_vec())])), TensorError::Malformed { .. }));
    assert!(matches!(with(list(&[])), TensorError::Malformed { .. }));
}

#[test]
fn storages_that_are_not_what_they_state() {
    let tensor = |tensor: Tensor| entry(tensor.bytes());
    for count in [5, 7, i128::from(i64::MAX)] {
        let refused = tensor(Tensor { count, ..Tensor::default() });
        assert!(matches!(refused, TensorError::StorageSize { has: 24, .. }), "{count}");
    }
    let halves = tensor(Tensor { class: "HalfStorage", ..Tensor::default() });
    assert!(matches!(halves, TensorError::StorageSize { stated: 12, has: 24, .. }));
    for count in [-1, 1 << 64, 1 << 100] {
        let refused = tensor(Tensor { count, ..Tensor::default() });
        assert!(matches!(refused, TensorError::Malformed { .. }), "{count}");
    }
    for key in ["1", "", "../byteorder", "0/", "00"] {
        let refused = tensor(Tensor { key, ..Tensor::default() });
        assert!(matches!(refused, TensorError::MissingStorage { .. }), "{key:?}");
    }
}

#[test]
fn views_that_reach_past_their_storage() {
    let view = |offset: i128, shape: &[i128], stride: &[i128]| {
        let (shape, stride) = (shape.to_vec(), stride.to_vec());
        entry(Tensor { offset, shape, stride, ..Tensor::default() }.bytes())
    };
    let far = i128::from(i64::MAX);
    for (offset, shape, stride) in [
        (1, &[2, 3][..], &[3, 1][..]),
        (6, &[1], &[1]),
        (0, &[7], &[1]),
        (0, &[2], &[6]),
        (0, &[2, 2], &[3, 3]),
        (far, &[1], &[1]),
        (0, &[2], &[far]),
        (far, &[2, 2], &[far, far]),
        (0, &[3, 3], &[far, far]),
    ] {
        let refused = view(offset, shape, stride);
        assert!(
            matches!(refused, TensorError::OutOfBounds { .. }),
            "{offset} {shape:?} {stride:?}"
        );
    }
    for (offset, shape, stride) in [
        (-1, &[1][..], &[1][..]),
        (0, &[-1], &[1]),
        (0, &[2], &[-1]),
        (0, &[2, 3], &[1]),
        (0, &[2], &[1, 1]),
        (0, &[1; 65], &[1; 65]),
        (1 << 64, &[1], &[1]),
    ] {
        let refused = view(offset, shape, stride);
        assert!(matches!(refused, TensorError::Malformed { .. }), "{offset} {shape:?} {stride:?}");
    }
}

/// The reason why a tensor of this shape that repeats its first element is refused.
fn repeated(shape: &[i128]) -> TensorError {
    let stride = vec![0; shape.len()];
    entry(Tensor { shape: shape.to_vec(), stride, ..Tensor::default() }.bytes())
}

#[test]
fn shapes_that_overflow_or_repeat_beyond_reason() {
    let far = i128::from(i64::MAX);
    assert!(matches!(repeated(&[far, far]), TensorError::Overflow));
    assert!(matches!(repeated(&[1 << 62]), TensorError::Overflow));
    assert!(matches!(repeated(&[1 << 32, 1 << 32, 1 << 32]), TensorError::Overflow));
    assert!(matches!(repeated(&[1 << 40]), TensorError::Expansion { .. }));
    assert!(matches!(repeated(&[2; 40]), TensorError::Expansion { .. }));
}

/// The reference reader multiplies the dimensions in their order and never reaches the zero: it would refuse
/// the virtual file.
#[test]
fn shapes_that_overflow_on_the_way_to_an_empty_tensor() {
    let far = i128::from(i64::MAX);
    assert!(matches!(repeated(&[far, far, 0]), TensorError::Overflow));
}

#[test]
fn shapes_that_can_change_after_the_call() {
    let mut args = [Tensor::default().storage(), int(0), list(&[int(6)]), list(&[int(1)])].to_vec();
    args.extend([FALSE.to_vec(), NONE.to_vec()]);
    let value = call(&global("torch._utils", "_rebuild_tensor_v2"), &args);
    assert!(matches!(entry(value), TensorError::Malformed { .. }));
}

#[test]
fn names_that_meet_or_are_reserved() {
    let tensor = || Tensor::default().bytes();
    let nested = dict(&[("b", tensor()), ("x", NONE.to_vec())]);
    let both = pickle(&dict(&[("a.b", tensor()), ("a", nested)]));
    let error = read(&both).unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::Selection { error: SelectError::NameCollision { .. }, .. }
        ),
        "{error}"
    );
    let reserved = read(&pickle(&dict(&[("__metadata__", tensor())]))).unwrap();
    assert!(matches!(common::refused(reserved).error, TensorError::ReservedName));
}

/// A file may repeat at most 4 GiB of bytes: a small tensor still fits after a third large one was refused.
#[test]
fn bytes_repeated_by_many_tensors() {
    let repeated = |count: i128| {
        Tensor { shape: vec![count, 1], stride: vec![0, 1], ..Tensor::default() }.bytes()
    };
    let half = repeated(1 << 29);
    let few = repeated(2);
    let state =
        dict(&[("a", half.clone()), ("b", repeated((1 << 29) - 2)), ("c", half), ("d", few)]);
    let checkpoint = common::torch(&archive(&checkpoint(&pickle(&state)))).unwrap();
    let shown: Vec<&str> = checkpoint.tensors.iter().map(|t| &*t.name).collect();
    assert_eq!(shown, ["a", "b", "d"]);
    assert!(matches!(checkpoint.refused[0].error, TensorError::Expansion { .. }));
}
