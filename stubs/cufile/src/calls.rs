//! The functions of the C interface: see NVIDIA's header.

#![allow(non_snake_case)] // The names are NVIDIA's.

use std::mem::MaybeUninit;

use crate::cuda;
use crate::library::{File, Library, call, library};

const INVALID_VALUE: i32 = 5022;
const NOT_SUPPORTED: i32 = 5008;
/// Errors of the library are above this, and those of the system below.
const BASE: i32 = 5000;

/// The alignment of offsets, lengths and addresses in reads without a bounce buffer.
const ALIGNMENT: u64 = 4096;

/// The content of a chunk where nothing was read to.
const POISON: u8 = 0xEE;

/// The header's `CUfileError_t`.
#[repr(C)]
pub struct Status {
    error: i32,
    of_driver: i32,
}

fn status(error: i32) -> Status {
    Status { error, of_driver: 0 }
}

fn planned(_: &mut Library, code: i32) -> Status {
    status(code)
}

/// Opens the library, which counts how often.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    call("cuFileDriverOpen", planned, |library| {
        library.open += 1;
        status(0)
    })
}

/// Closes the library. Everything must be deregistered first.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> Status {
    call("cuFileDriverClose_v2", planned, |library| {
        if library.open == 0 {
            library.fault("cuFileDriverClose_v2", "it is not open");
        }
        // Calls with a planned failure may leave something registered.
        let is_clean = library.files.is_empty() && library.buffers.is_empty();
        if library.open == 1 && !is_clean && library.settings.failures.is_empty() {
            library.fault("cuFileDriverClose_v2", "files or memory are still registered");
        }
        library.open -= 1;
        status(0)
    })
}

/// The header's `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Default)]
pub struct Properties {
    version: [u32; 2],
    sizes: [usize; 2],
    status: u32,
    control: u32,
    others: [u32; 6],
}

/// The properties, as the settings have them.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverGetProperties(place: Option<&mut MaybeUninit<Properties>>) -> Status {
    call("cuFileDriverGetProperties", planned, |library| {
        let (major, minor) = library.settings.version;
        let Some(place) = place else { return status(INVALID_VALUE) };
        place.write(Properties {
            version: [major, minor],
            sizes: [4, 16384],
            status: library.settings.status,
            control: library.settings.control,
            others: [0; 6],
        });
        status(0)
    })
}

/// The header's `CUfileDescr_t`.
#[repr(C)]
pub struct Description {
    kind: i32,
    _before: i32,
    descriptor: i32,
    _rest: i32,
    operations: usize,
}

/// Registers a file that is open with `O_DIRECT`.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleRegister(
    handle: Option<&mut MaybeUninit<usize>>,
    description: Option<&Description>,
) -> Status {
    const NAME: &str = "cuFileHandleRegister";
    call(NAME, planned, |library| {
        let (Some(handle), Some(description)) = (handle, description) else {
            return status(INVALID_VALUE);
        };
        if library.open == 0 {
            library.fault(NAME, "the library is not open");
        }
        let Description { kind, descriptor, operations, .. } = *description;
        if (kind, operations) != (1, 0) {
            return status(INVALID_VALUE);
        }
        // SAFETY: it only asks, and is told if the descriptor is none.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        if flags < 0 || flags & libc::O_DIRECT == 0 {
            library.fault(NAME, "the descriptor is not open with O_DIRECT");
        }
        if library.files.values().any(|file| file.descriptor == descriptor) {
            library.fault(NAME, "the descriptor is registered already");
        }
        let Some(identity) = identity(descriptor) else { return status(NOT_SUPPORTED) };
        handle.write(library.keep(File { descriptor, identity, reads: 0 }));
        status(0)
    })
}

fn identity(descriptor: i32) -> Option<(u64, u64)> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: there is room for the answer, which is there if the call says so.
    unsafe {
        let done = libc::fstat(descriptor, stat.as_mut_ptr()) == 0;
        done.then(|| stat.assume_init()).map(|stat| (stat.st_dev, stat.st_ino))
    }
}

/// Deregisters a file, whose descriptor must still be open.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: usize) {
    const NAME: &str = "cuFileHandleDeregister";
    call(
        NAME,
        |_, _| (),
        |library| {
            let Some(file) = library.files.remove(&handle) else {
                library.fault(NAME, "no file has this handle");
            };
            if file.reads > 0 {
                library.fault(NAME, "the file is being read");
            }
            if identity(file.descriptor) != Some(file.identity) {
                library.fault(NAME, "its descriptor was closed");
            }
        },
    );
}

/// Registers device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(base: u64, len: usize, _flags: i32) -> Status {
    const NAME: &str = "cuFileBufRegister";
    let (is_there, is_in_context) = (cuda::is_there(base, len), cuda::is_in_context());
    call(NAME, planned, |library| {
        if library.open == 0 || !is_in_context {
            library.fault(NAME, "the library is not open, or no context is current");
        }
        if !is_there || len == 0 {
            library.fault(NAME, "it is no device memory");
        }
        if !base.is_multiple_of(ALIGNMENT) {
            library.fault(NAME, "it is not aligned: what is read to it would be copied");
        }
        let before = library.buffers.range(..base + len as u64).next_back();
        if before.is_some_and(|(&other, &its)| other + its as u64 > base) {
            library.fault(NAME, "some of it is registered already");
        }
        library.buffers.insert(base, len);
        status(0)
    })
}

/// Deregisters device memory, which must still exist.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(base: u64) -> Status {
    const NAME: &str = "cuFileBufDeregister";
    let is_there = cuda::is_there(base, 1);
    call(NAME, planned, |library| {
        if library.buffers.remove(&base).is_none() {
            library.fault(NAME, "it is not registered");
        }
        if !is_there {
            library.fault(NAME, "the memory was freed before");
        }
        status(0)
    })
}

/// Reads at once, without a wait for queued work. Bytes of the chunk that were not read are poisoned.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileRead(handle: usize, base: u64, len: usize, offset: i64, at: i64) -> isize {
    const NAME: &str = "cuFileRead";
    let is_in_context = cuda::is_in_context();
    let begun = call(
        NAME,
        |_, code| Err(code),
        |library| {
            let Some(&registered) = library.buffers.get(&base) else {
                library.fault(NAME, "the memory is not registered");
            };
            let end = usize::try_from(at).ok().and_then(|at| at.checked_add(len));
            if end.is_none_or(|end| end > registered) {
                library.fault(NAME, "it leads out of the memory that is registered");
            }
            if ![offset as u64, at as u64, len as u64].iter().all(|n| n.is_multiple_of(ALIGNMENT)) {
                library.fault(NAME, "it is not aligned: it would be read by way of other memory");
            }
            if !is_in_context {
                library.fault(NAME, "no context is current");
            }
            let max_read = library.settings.max_read;
            let touches = library.settings.touch.as_ref() == library.calls.get(NAME);
            let Some(file) = library.files.get_mut(&handle) else {
                library.fault(NAME, "no file has this handle");
            };
            file.reads += 1;
            Ok((file.descriptor, max_read, touches))
        },
    );
    let mut bytes = Aligned::of(len);
    let read = begun.and_then(|(descriptor, max_read, touches)| {
        let read = pread(descriptor, bytes.as_mut(), offset);
        if touches {
            touch(descriptor);
        }
        read.map(|read| read.min(max_read))
    });
    let there = read.unwrap_or(0);
    bytes.as_mut()[there..].fill(POISON);
    let is_written = cuda::write(base + at as u64, bytes.as_mut());
    let mut library = library();
    if begun.is_ok()
        && let Some(file) = library.files.get_mut(&handle)
    {
        file.reads -= 1;
    }
    library.read += there as u64;
    if !is_written {
        library.fault(NAME, "the memory was freed while it was read to");
    }
    match read {
        Ok(read) => read as isize,
        Err(code) if code > BASE => -(code as isize),
        Err(code) => {
            // SAFETY: it is this thread's.
            unsafe { *libc::__errno_location() = code };
            -1
        }
    }
}

/// Aligned memory for reads with `O_DIRECT`.
struct Aligned {
    bytes: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    fn of(len: usize) -> Aligned {
        let bytes = vec![0; len + ALIGNMENT as usize];
        let from = bytes.as_ptr().align_offset(ALIGNMENT as usize);
        Aligned { bytes, from, len }
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.len]
    }
}

/// Changes a file as a writer does: its modification time becomes the epoch.
fn touch(descriptor: i32) {
    let times = [libc::UTIME_OMIT, 0].map(|tv_nsec| libc::timespec { tv_sec: 0, tv_nsec });
    // SAFETY: both times are there.
    if unsafe { libc::futimens(descriptor, times.as_ptr()) } != 0 {
        library().fault("cuFileRead", "the file cannot be changed");
    }
}

/// Reads until the buffer is full or the file ends.
fn pread(descriptor: i32, to: &mut [u8], offset: i64) -> Result<usize, i32> {
    let place = to.as_mut_ptr().cast();
    // SAFETY: there is room for so many bytes.
    let read = unsafe { libc::pread(descriptor, place, to.len(), offset) };
    let error = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    usize::try_from(read).map_err(|_| error())
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_function_can_be_named_in_the_settings() {
        let source = include_str!("calls.rs");
        let functions = source.split("extern \"C\" fn ").skip(1);
        let names = functions.filter_map(|rest| rest.split('(').next());
        let mut names: Vec<&str> = names.filter(|name| name.starts_with("cuFile")).collect();
        names.sort_unstable();
        assert_eq!(names, crate::settings::CALL_NAMES);
    }
}
