//! A file that the library reads into chunks. Whether it can is found out before anything is read.

#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use super::block_device::BackingStorage;
use super::chunk::RegisteredChunk;
use super::library::CufileSession;
use super::unavailable::GdsUnavailable;
use super::{abi, eligibility};
use crate::cuda::driver::DriverHandle;
use crate::source::{DIRECT_ALIGNMENT_BYTES, DirectFile, OpenFile};

/// A file that is registered with the library, with a descriptor of its own.
#[derive(Debug)]
pub struct RegisteredFile {
    session: Arc<CufileSession>,
    handle: DriverHandle<abi::CufileHandle>,
    /// The first failed read: no other is tried.
    read_failure: OnceLock<GdsUnavailable>,
    /// Closed after the handle is deregistered.
    _direct: DirectFile,
}

impl RegisteredFile {
    /// Registers a file, if GPUDirect Storage supports it.
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

    /// Fills the start of an idle chunk with `len` bytes from `start` on, both aligned. The first `in_file` of these
    /// bytes exist.
    pub fn read(
        &self,
        chunk: &mut RegisteredChunk,
        start: u64,
        len: usize,
        in_file: usize,
    ) -> Result<(), GdsUnavailable> {
        if let Some(failed) = self.read_failure.get() {
            return Err(failed.clone());
        }
        let mut done = 0;
        while done < in_file {
            let left = len - done;
            // SAFETY: the handle is of this session; the chunk is long enough, idle, and this thread's alone.
            let read = unsafe {
                self.session.read(self.handle, (chunk.address(), done), left, start + done as u64)
            };
            let read = read.and_then(|read| {
                let is_end = done + read >= in_file;
                let goes_on = read > 0 && read.is_multiple_of(DIRECT_ALIGNMENT_BYTES);
                let is_right = read <= left && (is_end || goes_on);
                is_right
                    .then_some(read)
                    .ok_or(GdsUnavailable::ShortRead { read: done + read, wanted: in_file })
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
            // SAFETY: it was registered here, and every reader holds a reference to this file.
            unsafe { self.session.deregister_file(self.handle) };
        }
    }
}
