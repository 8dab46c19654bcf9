//! A legacy torch file is refused if any part of it is missing, superfluous or contradicts another.

use crate::common;
use crate::common::legacy::{Legacy, Window, one_tensor};
use crate::common::pickle::{NONE, Tensor, dict, int, list, pickle, text};
use crate::common::zip::floats;
use ckptfs::checkpoint::{CheckpointError, LegacyError, TensorError};

fn valid() -> Legacy {
    one_tensor(&Tensor::default(), None)
}

/// The error of a valid file after a change.
fn error(change: impl Fn(&mut Legacy)) -> LegacyError {
    let mut legacy = valid();
    change(&mut legacy);
    match common::torch(&legacy.bytes()).expect_err("refused") {
        CheckpointError::Legacy { error, .. } => error,
        other => panic!("refused for another reason: {other}"),
    }
}

/// The reason why the only tensor of a file is refused.
fn refused(tensor: Tensor, window: Window) -> TensorError {
    let bytes = one_tensor(&tensor, window).bytes();
    common::refused(common::torch(&bytes).expect("readable")).error
}

#[test]
fn a_valid_file_is_read() {
    let checkpoint = common::torch(&valid().bytes()).unwrap();
    assert_eq!(common::tensor_bytes(checkpoint, "w"), floats());
}

#[test]
fn cut_off_at_any_byte() {
    let bytes = valid().bytes();
    for len in 0..bytes.len() {
        assert!(common::torch(&bytes[..len]).is_err(), "accepted when cut off at {len}");
    }
}

#[test]
fn bytes_after_the_last_storage() {
    let trailing = error(|legacy| legacy.storages.push((0, Vec::new())));
    assert!(matches!(trailing, LegacyError::TrailingBytes(8)));
}

#[test]
fn another_magic_number_or_protocol() {
    for magic in [int(0x1950_A86A_20F9_469C_FC6D), int(1), NONE.to_vec()] {
        let mut legacy = valid();
        legacy.magic = pickle(&magic);
        assert!(matches!(
            common::torch(&legacy.bytes()),
            Err(CheckpointError::UnreadFormat { .. })
        ));
    }
    assert!(matches!(error(|legacy| legacy.protocol = 1000), LegacyError::Protocol));
}

#[test]
fn counts_that_are_not_those_of_the_pickle() {
    for count in [5, 7, 0, -1, i64::MAX, i64::MIN] {
        let wrong = error(|legacy| legacy.storages[0].0 = count);
        assert!(matches!(wrong, LegacyError::CountMismatch { stated: 6, has, .. } if has == count));
    }
    let huge = Tensor { count: i128::from(i64::MAX), ..Tensor::default() };
    let mut legacy = one_tensor(&huge, None);
    legacy.storages[0].0 = i64::MAX;
    let cut_off = common::torch(&legacy.bytes());
    assert!(matches!(
        cut_off,
        Err(CheckpointError::Legacy { error: LegacyError::Truncated(_), .. })
    ));
}

#[test]
fn lists_of_storages_that_do_not_fit_the_pickle() {
    assert!(matches!(error(|legacy| legacy.keys = NONE.to_vec()), LegacyError::StorageKeys));
    assert!(matches!(error(|legacy| legacy.keys = list(&[int(0)])), LegacyError::StorageKeys));
    let unknown = error(|legacy| legacy.keys = list(&[text("1")]));
    assert!(matches!(unknown, LegacyError::UnknownStorage(key) if key == "1"));
    let twice = error(|legacy| {
        legacy.keys = list(&[text("0"), text("0")]);
        legacy.storages.push((6, floats()));
    });
    assert!(matches!(twice, LegacyError::DuplicateStorage(key) if key == "0"));
    let two_sizes = error(|legacy| {
        let other = Tensor { count: 3, ..Tensor::default() };
        legacy.state = dict(&[("a", Tensor::default().bytes()), ("b", other.bytes())]);
    });
    assert!(matches!(two_sizes, LegacyError::DuplicateStorage(key) if key == "0"));
    let mut unlisted = valid();
    (unlisted.keys, unlisted.storages) = (list(&[]), Vec::new());
    let unlisted = common::refused(common::torch(&unlisted.bytes()).unwrap());
    assert!(matches!(unlisted.error, TensorError::MissingStorage { .. }));
}

#[test]
fn parts_of_storages() {
    let part = |shape, offset| Tensor { shape, stride: vec![1], offset, ..Tensor::default() };
    let bytes = one_tensor(&part(vec![2], 1), Some((3, 3))).bytes();
    let checkpoint = common::torch(&bytes).unwrap();
    assert_eq!(common::tensor_bytes(checkpoint, "w"), floats()[16..24]);

    let bounds = |error| matches!(error, TensorError::OutOfBounds { .. });
    assert!(bounds(refused(part(vec![1], 0), Some((6, 1)))), "it begins at the end");
    assert!(bounds(refused(part(vec![1], 0), Some((0, 7)))), "it is longer than the whole");
    assert!(bounds(refused(part(vec![3], 0), Some((3, 2)))), "the tensor is longer than it");
    let far = i128::from(i64::MAX);
    assert!(bounds(refused(part(vec![1], 0), Some((far, far)))));
    // Then no storage of that name is known.
    let negative = common::torch(&one_tensor(&part(vec![1], 0), Some((-1, 3))).bytes());
    assert!(matches!(
        negative,
        Err(CheckpointError::Legacy { error: LegacyError::UnknownStorage(_), .. })
    ));
}

#[test]
fn a_pickle_that_is_no_file_of_torch() {
    let plain = pickle(&dict(&[("a", int(1))]));
    assert!(matches!(common::torch(&plain), Err(CheckpointError::UnreadFormat { .. })));
}
