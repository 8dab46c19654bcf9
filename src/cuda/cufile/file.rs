//! A file that the library reads.
//!
//! In: a file that is open. Out: its bytes in chunks on a device; or what is missing for that, found before
//! anything is read.

#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use super::block_device::Lies;
use super::chunk::Registered;
use super::library::Session;
use super::{Missing, abi, eligibility};
use crate::cuda::driver::Handle;
use crate::source::{DIRECT_ALIGNMENT, Direct, OpenFile};

/// A file that is registered with the library, by a descriptor of its own.
#[derive(Debug)]
pub struct Registration {
    session: Arc<Session>,
    handle: Handle<abi::Handle>,
    /// Why a read of it failed: it is read another way from then on.
    failed: OnceLock<Missing>,
    /// Closed after the handle was given up.
    _direct: Direct,
}

impl Registration {
    /// Registers a file, if it is one that the storage can read by itself.
    pub fn of(file: &OpenFile, session: &Arc<Session>) -> Result<Registration, Missing> {
        eligibility::is_offered(session.properties(), &Lies::of(file))?;
        let direct = file.direct().ok_or(Missing::Direct)?;
        let handle = session.register_file(direct.as_fd())?;
        let (session, failed) = (Arc::clone(session), OnceLock::new());
        Ok(Registration { session, handle, failed, _direct: direct })
    }

    /// Fills the beginning of a chunk that is idle with `len` bytes from `start` on, both aligned, of which `there`
    /// are before the file's end.
    pub fn read(
        &self,
        chunk: &mut Registered,
        start: u64,
        len: usize,
        there: usize,
    ) -> Result<(), Missing> {
        if let Some(failed) = self.failed.get() {
            return Err(failed.clone());
        }
        let mut done = 0;
        while done < there {
            let left = len - done;
            // SAFETY: the handle is of this session, and the chunk is as long, idle and this thread's.
            let read = unsafe {
                self.session.read(self.handle, (chunk.at(), done), left, start + done as u64)
            };
            let read = read.and_then(|read| {
                let is_end = done + read >= there;
                let goes_on = read > 0 && read.is_multiple_of(DIRECT_ALIGNMENT);
                let is_right = read <= left && (is_end || goes_on);
                is_right.then_some(read).ok_or(Missing::Short { read: done + read, wanted: there })
            });
            done += read.inspect_err(|failed| {
                let _ = self.failed.set(failed.clone());
            })?;
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.session.is_here() {
            // SAFETY: it was registered here, and whoever reads has a share of this.
            unsafe { self.session.deregister_file(self.handle) };
        }
    }
}
