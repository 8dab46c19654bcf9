//! The functions of the C interface, by what they are about. In and out: as NVIDIA's runtime API says.
//!
//! A place for an answer is a reference that may be absent, which is what a pointer of C is here; a null
//! pointer is answered "invalid value". Handles and addresses are numbers.

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

/// Where an answer goes.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Answers a value.
fn put<T>(place: Out<'_, T>, value: T) -> Done {
    place.ok_or(codes::INVALID_VALUE)?.write(value);
    Ok(())
}

/// Answers what the driver writes to a place.
fn fetch<T: Default>(place: Out<'_, T>, ask: impl FnOnce(&mut T) -> Done) -> Done {
    let place = place.ok_or(codes::INVALID_VALUE)?;
    let mut value = T::default();
    ask(&mut value)?;
    place.write(value);
    Ok(())
}

/// What the driver writes to a place.
fn asked<T: Default>(ask: impl FnOnce(&mut T) -> Done) -> Result<T, Code> {
    let mut value = T::default();
    ask(&mut value)?;
    Ok(value)
}
