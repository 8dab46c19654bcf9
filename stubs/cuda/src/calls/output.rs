//! Output pointers of C.

use std::mem::MaybeUninit;

use crate::codes::{self, Done};

/// An output pointer of C.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a value to an output pointer.
pub fn put<T>(place: Out<'_, T>, value: T) -> Done {
    place.ok_or(codes::INVALID_VALUE)?.write(value);
    Ok(())
}

/// Writes a C string, truncated to the room for it.
pub fn put_text(place: Out<'_, u8>, room: i32, text: &str) -> Done {
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
