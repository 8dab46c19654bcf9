//! The functions of the C interface, by subject: see NVIDIA's runtime API.
//!
//! An output pointer of C is a reference that may be absent: a null pointer gives "invalid value". Handles and
//! addresses are numbers.

#![allow(non_snake_case)] // The names are NVIDIA's.

mod copy;
mod device;
mod event;
mod launch;
mod library;
mod memory;
mod properties;
mod stream;
mod unsupported;

use std::mem::MaybeUninit;

use crate::codes::{self, Code, Done};

/// An output pointer of C.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a value to an output pointer.
fn put<T>(place: Out<'_, T>, value: T) -> Done {
    place.ok_or(codes::INVALID_VALUE)?.write(value);
    Ok(())
}

/// Writes to an output pointer the value that the driver returns.
fn forward<T: Default>(place: Out<'_, T>, ask: impl FnOnce(&mut T) -> Done) -> Done {
    let place = place.ok_or(codes::INVALID_VALUE)?;
    let mut value = T::default();
    ask(&mut value)?;
    place.write(value);
    Ok(())
}

/// The value that the driver writes to its output pointer.
fn query<T: Default>(ask: impl FnOnce(&mut T) -> Done) -> Result<T, Code> {
    let mut value = T::default();
    ask(&mut value)?;
    Ok(value)
}
