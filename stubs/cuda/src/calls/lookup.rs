//! Functions of the interface by their names.

use std::ffi::{CStr, c_char, c_void};

use super::output::{Out, put};
use crate::codes::{self, Code};
use crate::driver::{Needs, call};
use crate::names::{with_supported_names, with_unsupported_names};

/// The address of a function by its exact name.
fn find(name: &str) -> Option<*const c_void> {
    macro_rules! find_in {
        ($($module:ident { $($name:ident)* })*) => {
            match name {
                $($(stringify!($name) => Some(super::$module::$name as *const c_void),)*)*
                _ => None,
            }
        };
    }
    with_supported_names!(find_in).or_else(|| with_unsupported_names!(find_in))
}

/// The address of a function, of its second version where there is one.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress_v2(
    name: Option<&c_char>,
    function: Out<'_, *const c_void>,
    _version: i32,
    _flags: u64,
    status: Out<'_, i32>,
) -> Code {
    call("cuGetProcAddress_v2", Needs::Nothing, |_| {
        const FOUND: i32 = 0;
        const NOT_FOUND: i32 = 1;
        let found = by_name(name)?;
        if let Some(status) = status {
            status.write(if found.is_null() { NOT_FOUND } else { FOUND });
        }
        put(function, found)?;
        if found.is_null() { Err(codes::NOT_FOUND) } else { Ok(()) }
    })
}

/// As the second version, without the reason for a missing one.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress(
    name: Option<&c_char>,
    function: Out<'_, *const c_void>,
    _version: i32,
    _flags: u64,
) -> Code {
    call("cuGetProcAddress", Needs::Nothing, |_| {
        let found = by_name(name)?;
        put(function, found)?;
        if found.is_null() { Err(codes::NOT_FOUND) } else { Ok(()) }
    })
}

fn by_name(name: Option<&c_char>) -> Result<*const c_void, Code> {
    let name = name.ok_or(codes::INVALID_VALUE)?;
    // SAFETY: by the interface this is where a text of C begins.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let found = find(&format!("{name}_v2")).or_else(|| find(&name));
    Ok(found.unwrap_or(std::ptr::null()))
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
            include_str!("lookup.rs"),
            include_str!("memory.rs"),
            include_str!("module.rs"),
            include_str!("stream.rs"),
        ];
        let mut names = 0;
        for rest in sources.iter().flat_map(|source| source.split("extern \"C\" fn ").skip(1)) {
            let name = &rest[..rest.find(['(', '<']).unwrap()];
            assert!(super::find(name).is_some(), "{name} is missing in the names");
            assert!(rest.contains(&format!("call(\"{name}\"")), "{name} says another name");
            names += 1;
        }
        assert!(names > 50, "{names}");
    }
}
