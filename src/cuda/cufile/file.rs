//! A file that the library reads.
//!
//! In: a file that is open. Out: its bytes in chunks on a device; or what is missing for that, found before
//! anything is read.

#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use super::block_device::BackingStorage;
use super::chunk::RegisteredChunk;
use super::library::CufileSession;
use super::{GdsUnavailable, abi, eligibility};
use crate::cuda::driver::DriverHandle;
use crate::source::{DIRECT_ALIGNMENT_BYTES, DirectFile, OpenFile};

/// A file that is registered with the library, by a descriptor of its own.
#[derive(Debug)]
pub struct RegisteredFile {
    session: Arc<CufileSession>,
    handle: DriverHandle<abi::CufileHandle>,
    /// Why a read of it failed: it is read another way from then on.
    read_failure: OnceLock<GdsUnavailable>,
    /// Closed after the handle was given up.
    _direct: DirectFile,
}

impl RegisteredFile {
    /// Registers a file, if it is one that the storage can read by itself.
    pub fn register(
        file: &OpenFile,
        session: &Arc<CufileSession>,
    ) -> Result<RegisteredFile, GdsUnavailable> {
        eligibility::check_eligible(session.properties(), &BackingStorage::of_file(file))?;
        let direct = DirectFile::open(file).ok_or(GdsUnavailable::DirectOpen)?;
        let handle = session.register_file(direct.as_fd())?;
        let (session, failed) = (Arc::clone(session), OnceLock::new());
        Ok(RegisteredFile { session, handle, read_failure: failed, _direct: direct })
    }

    /// Fills the beginning of a chunk that is idle with `len` bytes from `start` on, both aligned, of which `there`
    /// are before the file's end.
    pub fn read(
        &self,
        chunk: &mut RegisteredChunk,
        start: u64,
        len: usize,
        there: usize,
    ) -> Result<(), GdsUnavailable> {
        if let Some(failed) = self.read_failure.get() {
            return Err(failed.clone());
        }
        let mut done = 0;
        while done < there {
            let left = len - done;
            // SAFETY: the handle is of this session, and the chunk is as long, idle and this thread's.
            let read = unsafe {
                self.session.read(self.handle, (chunk.address(), done), left, start + done as u64)
            };
            let read = read.and_then(|read| {
                let is_end = done + read >= there;
                let goes_on = read > 0 && read.is_multiple_of(DIRECT_ALIGNMENT_BYTES);
                let is_right = read <= left && (is_end || goes_on);
                is_right
                    .then_some(read)
                    .ok_or(GdsUnavailable::ShortRead { read: done + read, wanted: there })
            });
            done += read.inspect_err(|failed| {
                let _ = self.read_failure.set(failed.clone());
            })?;
        }
        Ok(())
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        if self.session.is_current_process() {
            // SAFETY: it was registered here, and whoever reads has a share of this.
            unsafe { self.session.deregister_file(self.handle) };
        }
    }
}
