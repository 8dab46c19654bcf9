//! Turns a view of a storage into the place of its bytes: every bound is checked here.

use crate::checkpoint::{
    Axis, ByteRun, Dtype, OriginId, Tensor, TensorBytes, TensorError, TensorName,
};

use super::interpret::{TensorView, shorten_name};

/// Where a storage lies.
#[derive(Clone, Copy, Debug)]
pub struct StorageLocation {
    pub origin: OriginId,
    pub start: u64,
    pub len: u64,
}

/// The tensor of a view, given where its storage lies and whether it is in the other byte order.
pub fn locate_tensor(
    name: TensorName,
    view: &TensorView<'_>,
    stored: StorageLocation,
    swapped: bool,
) -> Result<Tensor, TensorError> {
    let storage = &view.storage;
    let stated = u128::from(storage.element_count) * u128::from(storage.element_bytes);
    if stated != u128::from(stored.len) {
        return Err(TensorError::StorageSize {
            storage: shorten_name(storage.key),
            stated,
            has: stored.len,
        });
    }
    // The part of the storage that this tensor may see.
    let (window_start, window_len) = match storage.window {
        None => (0, stored.len),
        Some((first, count)) => {
            let end = (u128::from(first) + u128::from(count)) * u128::from(storage.element_bytes);
            if end > stated {
                return Err(TensorError::OutOfBounds {
                    storage: shorten_name(storage.key),
                    needs: end,
                    has: stored.len,
                });
            }
            (first * storage.element_bytes, count * storage.element_bytes)
        }
    };
    if view.shape.len() != view.stride.len() {
        return Err(TensorError::Malformed {
            what: "its shape and its strides do not belong together",
        });
    }
    let mut shape = view.shape.clone();
    let item = if view.dtype == Dtype::F4 {
        // Two values a byte: what torch counts as one element is two in a header.
        let last = shape
            .last_mut()
            .ok_or(TensorError::UnsupportedKind { kind: "a single packed pair".to_owned() })?;
        *last = last.checked_mul(2).ok_or(TensorError::Overflow)?;
        1
    } else {
        u64::from(view.dtype.bits() / 8)
    };
    let len = view.dtype.byte_len(&shape).ok_or(TensorError::Overflow)?;
    let start = stored.start + window_start;
    let bytes = if len == 0 {
        TensorBytes::Run(ByteRun { origin: stored.origin, offset: stored.start, len: 0 })
    } else {
        let dims = || view.shape.iter().zip(&view.stride);
        // Saturating: 64 products of two 64-bit numbers need a little more than 128 bits.
        let last = dims().fold(u128::from(view.offset), |at, (&d, &s)| {
            at.saturating_add(u128::from(d - 1) * u128::from(s))
        });
        let needs = last.saturating_add(1).saturating_mul(u128::from(item));
        if needs > u128::from(window_len) {
            return Err(TensorError::OutOfBounds {
                storage: shorten_name(storage.key),
                needs,
                has: window_len,
            });
        }
        let base = start + view.offset * item;
        // Strides of axes with more than one step are bounded by the check above.
        let axes = dims()
            .filter(|(d, _)| **d > 1)
            .map(|(&count, &stride)| Axis { count, stride: stride * item });
        TensorBytes::from_axes(stored.origin, base, axes, item)
    };
    let unit = view.dtype.swap_unit_bytes();
    let bytes = if swapped && unit > 1 {
        TensorBytes::Swapped { unit_bytes: unit, inner: Box::new(bytes) }
    } else {
        bytes
    };
    Ok(Tensor { name, dtype: view.dtype, shape: shape.into(), bytes })
}
