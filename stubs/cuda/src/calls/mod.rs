//! The functions of the C interface, by subject: see NVIDIA's driver API.
//!
//! An output pointer of C is a reference that may be absent: a null pointer gives `INVALID_VALUE`. Handles and
//! addresses are numbers.

#![allow(non_snake_case)] // The names are NVIDIA's.

pub mod context;
pub mod copy;
pub mod device;
pub mod event;
pub mod library;
pub mod memory;
pub mod stream;
pub mod test;
pub mod unsupported;

use std::ffi::c_void;
use std::mem::MaybeUninit;

use crate::codes::{self, Done};

/// An output pointer of C.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// A function and its name.
pub type Entry = (&'static str, *const c_void);

/// Names the functions of a module.
macro_rules! table {
    ($($name:ident),* $(,)?) => {
        /// The functions of this module.
        pub fn table() -> Vec<$crate::calls::Entry> {
            vec![$((stringify!($name), $name as *const std::ffi::c_void)),*]
        }
    };
}
pub(crate) use table;

/// All functions of the interface.
pub fn all() -> impl Iterator<Item = Entry> {
    let tables = [
        context::table,
        copy::table,
        device::table,
        event::table,
        library::table,
        memory::table,
        stream::table,
        unsupported::table,
    ];
    tables.into_iter().flat_map(|table| table())
}

/// A function by its name.
pub fn find(name: &str) -> Option<Entry> {
    all().find(|entry| entry.0 == name)
}

/// Writes a value to an output pointer.
fn put<T>(place: Out<'_, T>, value: T) -> Done {
    place.ok_or(codes::INVALID_VALUE)?.write(value);
    Ok(())
}

/// Writes a C string, truncated to the room for it.
fn put_text(place: Out<'_, u8>, room: i32, text: &str) -> Done {
    let place = place.ok_or(codes::INVALID_VALUE)?.as_mut_ptr();
    let room = usize::try_from(room).ok().filter(|&room| room > 0).ok_or(codes::INVALID_VALUE)?;
    let taken = text.len().min(room - 1);
    // SAFETY: by the interface there is room for so many bytes at the place.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place, taken);
        place.add(taken).write(0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_function_is_found_by_its_name() {
        let sources = [
            include_str!("context.rs"),
            include_str!("copy.rs"),
            include_str!("device.rs"),
            include_str!("event.rs"),
            include_str!("library.rs"),
            include_str!("memory.rs"),
            include_str!("stream.rs"),
        ];
        let mut names = 0;
        for rest in sources.iter().flat_map(|source| source.split("extern \"C\" fn ").skip(1)) {
            let name = &rest[..rest.find(['(', '<']).unwrap()];
            assert!(super::find(name).is_some(), "{name} is missing in its table");
            assert!(rest.contains(&format!("call(\"{name}\"")), "{name} says another name");
            names += 1;
        }
        assert!(names > 50, "{names}");
    }
}
