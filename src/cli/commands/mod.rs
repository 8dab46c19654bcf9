//! The commands, one module each, in the order of `--help`.

pub mod completions;
#[cfg(feature = "mount")]
pub mod doctor;
pub mod export;
pub mod inspect;
pub mod ls;
#[cfg(feature = "mount")]
pub mod mount;
#[cfg(feature = "mount")]
pub mod status;
#[cfg(feature = "mount")]
pub mod unmount;
pub mod verify;
