//! Turns a view of a storage into the place of its bytes. Every bound of a tensor is checked here.

use crate::checkpoint::refusal::TensorError;
use crate::checkpoint::tensor::{Axis, ByteRun, OriginId, Tensor, TensorBytes, TensorName};

use super::names::shorten_name;
use super::tensor_view::TensorView;

/// The place of a storage.
#[derive(Clone, Copy, Debug)]
pub struct StorageLocation {
    pub origin: OriginId,
    pub start: u64,
    pub len: u64,
}

/// The tensor of a view of a storage, which may be in the other byte order.
pub fn locate_tensor(
    name: TensorName,
    view: &TensorView<'_>,
    location: StorageLocation,
    is_swapped: bool,
) -> Result<Tensor, TensorError> {
    let storage = &view.storage;
    let element_bytes = storage.element_bytes;
    let out_of_bounds = |needs, has| {
        Err(TensorError::OutOfBounds { storage: shorten_name(storage.key), needs, has })
    };
    let stated = u128::from(storage.element_count) * u128::from(element_bytes);
    if stated != u128::from(location.len) {
        return Err(TensorError::StorageSize {
            storage: shorten_name(storage.key),
            stated,
            has: location.len,
        });
    }
    // The part of the storage that this tensor may see.
    let (window_start, window_len) = match storage.window {
        None => (0, location.len),
        Some((first, count)) => {
            let end = (u128::from(first) + u128::from(count)) * u128::from(element_bytes);
            if end > stated {
                return out_of_bounds(end, location.len);
            }
            (first * element_bytes, count * element_bytes)
        }
    };
    if view.shape.len() != view.stride.len() {
        return Err(TensorError::Malformed {
            what: "its shape and its strides do not belong together",
        });
    }
    let packing = view.dtype.torch_packing();
    let item_bytes = u64::from(view.dtype.bits()) * packing / 8;
    let mut shape = view.shape.clone();
    if packing > 1 {
        let last = shape
            .last_mut()
            .ok_or(TensorError::UnsupportedKind { kind: "a single packed pair".to_owned() })?;
        *last = last.checked_mul(packing).ok_or(TensorError::Overflow)?;
    }
    let len = view.dtype.byte_len(&shape).ok_or(TensorError::Overflow)?;
    let bytes = if len == 0 {
        TensorBytes::Run(ByteRun { origin: location.origin, offset: location.start, len: 0 })
    } else {
        let dims = || view.shape.iter().zip(&view.stride);
        // Saturating: 64 products of two 64-bit numbers need a little more than 128 bits.
        let last = dims().fold(u128::from(view.offset), |at, (&d, &s)| {
            at.saturating_add(u128::from(d - 1) * u128::from(s))
        });
        let needs = last.saturating_add(1).saturating_mul(u128::from(item_bytes));
        if needs > u128::from(window_len) {
            return out_of_bounds(needs, window_len);
        }
        let base = location.start + window_start + view.offset * item_bytes;
        // Strides of axes with more than one step are bounded by the check above.
        let axes = dims()
            .filter(|(d, _)| **d > 1)
            .map(|(&count, &stride)| Axis { count, stride: stride * item_bytes });
        TensorBytes::from_axes(location.origin, base, axes, item_bytes)
    };
    let unit_bytes = view.dtype.swap_unit_bytes();
    let bytes = if is_swapped && unit_bytes > 1 {
        TensorBytes::Swapped { unit_bytes, inner: Box::new(bytes) }
    } else {
        bytes
    };
    Ok(Tensor { name, dtype: view.dtype, shape: shape.into(), bytes })
}
