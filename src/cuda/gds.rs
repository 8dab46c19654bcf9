//! Reads files straight to a device with GPUDirect Storage, where the file and the device support it.
//!
//! Storage writes to chunks on the device; pieces are copied out of them on the device's stream. If anything is
//! missing, nothing was done, and the read goes through pinned memory. [`GdsState`] lives as long as the loader,
//! [`GdsLoad`] as long as one load.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use crate::source::{self, DIRECT_ALIGNMENT_BYTES, OpenFile};
use crate::threads::lock;

use super::chunk_lease::ChunkLease;
use super::cufile::{CufileSession, GdsUnavailable, RegisteredChunk, RegisteredFile};
use super::destination::DeviceDestination;
use super::error::CudaError;
use super::ring::Ring;
use super::stream::CudaStream;

/// Chunks of 4 MiB on each device: as many as reader threads, so that storage fills one for each.
const CHUNKS_PER_DEVICE: usize = 16;

/// Files that one load keeps registered. Each takes one more descriptor, and few are read at a time.
const MAX_REGISTERED_FILES: usize = 64;

/// The kernel shows here that its module is loaded.
const KERNEL_MODULE_PATH: &str = "/proc/driver/nvidia-fs";

/// Whether a loader uses GPUDirect Storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpudirectMode {
    /// Where the kernel module `nvidia-fs` is loaded. Otherwise the library is not asked: it takes long to find out
    /// the same, and leaves a log.
    #[default]
    Auto,
    /// Where the library supports it, whatever the kernel shows.
    On,
    /// Not at all.
    Never,
}

/// The library's session and the chunks of a loader.
#[derive(Debug, Default)]
pub struct GdsState {
    pub mode: GpudirectMode,
    /// Chunks by device. Dropped before the session: each waits for the copies out of it.
    rings: Mutex<BTreeMap<usize, Arc<Ring<RegisteredChunk>>>>,
    session: OnceLock<Result<Arc<CufileSession>, GdsUnavailable>>,
}

impl GdsState {
    fn session(&self) -> Result<&Arc<CufileSession>, GdsUnavailable> {
        if self.mode == GpudirectMode::Never {
            return Err(GdsUnavailable::Disabled);
        }
        // Once: this is called for every extent.
        let open = || {
            if self.mode == GpudirectMode::Auto && !Path::new(KERNEL_MODULE_PATH).exists() {
                return Err(GdsUnavailable::Module);
            }
            CufileSession::open()
        };
        let session = self.session.get_or_init(open).as_ref().map_err(GdsUnavailable::clone)?;
        session.is_current_process().then_some(session).ok_or(GdsUnavailable::Forked)
    }

    fn ring(&self, device: usize) -> Arc<Ring<RegisteredChunk>> {
        let mut rings = lock(&self.rings);
        Arc::clone(rings.entry(device).or_insert_with(|| Arc::new(Ring::new(CHUNKS_PER_DEVICE))))
    }

    /// Frees idle chunks.
    pub fn trim(&self) {
        let rings: Vec<_> = lock(&self.rings).values().map(Arc::clone).collect();
        rings.iter().for_each(|ring| ring.shrink(0, drop));
    }
}

/// A read that was not done.
#[derive(Debug)]
pub enum GdsFailure {
    /// The read goes through pinned memory instead.
    Unavailable(GdsUnavailable),
    /// The file cannot be read, or has changed.
    Source(source::SourceError),
    /// The device failed.
    Device(CudaError),
}

impl From<GdsUnavailable> for GdsFailure {
    fn from(reason: GdsUnavailable) -> Self {
        GdsFailure::Unavailable(reason)
    }
}

impl From<CudaError> for GdsFailure {
    fn from(error: CudaError) -> Self {
        GdsFailure::Device(error)
    }
}

/// The registration of a file, which one thread makes.
type RegistrationSlot = Arc<OnceLock<Result<RegisteredFile, GdsUnavailable>>>;

/// The registered files of one load.
#[derive(Debug)]
pub struct GdsLoad<'a> {
    state: &'a GdsState,
    /// The files that were read last, by the address of the open file.
    files: Mutex<VecDeque<(usize, RegistrationSlot)>>,
    /// Devices that have no chunks, with the reason.
    unavailable_devices: Mutex<BTreeMap<usize, GdsUnavailable>>,
    first_reason: OnceLock<GdsUnavailable>,
}

impl<'a> GdsLoad<'a> {
    pub fn new(state: &'a GdsState) -> GdsLoad<'a> {
        GdsLoad {
            state,
            files: Mutex::default(),
            unavailable_devices: Mutex::default(),
            first_reason: OnceLock::new(),
        }
    }

    /// Keeps the reason why an extent went through pinned memory, if it is the first.
    pub fn record_unavailable(&self, reason: GdsUnavailable) {
        if self.first_reason.set(reason).is_ok() {
            tracing::debug!(why = self.reason(), "read by way of the host's memory");
        }
    }

    /// The first reason why an extent went through pinned memory.
    pub fn reason(&self) -> Option<String> {
        self.first_reason.get().map(GdsUnavailable::to_string)
    }

    /// Reads an extent into a chunk on the device of all pieces, checks that the file is unchanged, and queues the
    /// copies of the pieces.
    ///
    /// # Safety
    ///
    /// The bytes at the addresses of the pieces must belong to the caller until the streams have done this work.
    #[allow(unsafe_code)]
    pub unsafe fn read(
        &self,
        file: &OpenFile,
        range: &Range<u64>,
        pieces: &[(u64, DeviceDestination)],
        streams: &[Arc<CudaStream>],
    ) -> Result<(), GdsFailure> {
        let session = self.state.session()?;
        let stream = pieces.first().map(|(_, first)| first.stream);
        let stream = stream.filter(|only| pieces.iter().all(|(_, piece)| piece.stream == *only));
        let device = streams[stream.ok_or(GdsUnavailable::SeveralDevices)?].device();
        let slot = self.registration_slot(file);
        let registered = slot.get_or_init(|| RegisteredFile::register(file, session));
        let registered = registered.as_ref().map_err(GdsUnavailable::clone)?;
        if let Some(reason) = lock(&self.unavailable_devices).get(&device.ordinal()) {
            return Err(reason.clone().into());
        }
        let ring = self.state.ring(device.ordinal());
        let allocate = || RegisteredChunk::allocate(device, session).map_err(GdsFailure::from);
        let lease = ChunkLease::take(&ring, allocate).inspect_err(|failure| {
            if let GdsFailure::Unavailable(reason) = failure {
                lock(&self.unavailable_devices).insert(device.ordinal(), reason.clone());
            }
        });
        let mut lease = lease?;
        let Some(chunk) = lease.chunk() else { return Ok(()) };
        const ALIGNMENT_BYTES: u64 = DIRECT_ALIGNMENT_BYTES as u64;
        let start = range.start / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        let end = range.end.next_multiple_of(ALIGNMENT_BYTES);
        let in_file = end.min(file.file().identity().size).saturating_sub(start);
        {
            let _context = device.enter()?;
            registered.read(chunk, start, (end - start) as usize, in_file as usize)?;
        }
        file.check_unchanged().map_err(GdsFailure::Source)?;
        // SAFETY: the caller guarantees the addresses.
        unsafe { lease.copy_out(start, pieces, streams) }.map_err(GdsFailure::from)
    }

    /// The slot of a file. The file stays open as long as the load, so that its address is unique.
    fn registration_slot(&self, file: &OpenFile) -> RegistrationSlot {
        let address = std::ptr::from_ref(file).addr();
        let mut files = lock(&self.files);
        if let Some((_, slot)) = files.iter().find(|(known, _)| *known == address) {
            return Arc::clone(slot);
        }
        let oldest = if files.len() < MAX_REGISTERED_FILES { None } else { files.pop_front() };
        let slot = RegistrationSlot::default();
        files.push_back((address, Arc::clone(&slot)));
        drop(files);
        // Without the lock: this may deregister the file.
        drop(oldest);
        slot
    }
}
