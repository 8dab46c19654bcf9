//! The commands, one module each, in the order of `--help`.

#[cfg(feature = "remote")]
pub mod cache;
pub mod completions;
#[cfg(feature = "mount")]
pub mod doctor;
pub mod export;
#[cfg(feature = "remote")]
pub mod fetch;
pub mod inspect;
pub mod ls;
#[cfg(feature = "mount")]
pub mod mount;
#[cfg(feature = "mount")]
pub mod status;
#[cfg(feature = "mount")]
pub mod unmount;
pub mod verify;
pub mod views;
