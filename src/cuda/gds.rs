//! Reading without the host's memory: which files and devices can, and doing it.
//!
//! In: stretches of files, and where their pieces belong on one device. Out: copies on the stream of that device,
//! out of chunks that storage wrote to; or what is missing, and then nothing was done. A [`Straight`] is a
//! loader's, an [`OfLoad`] one load's.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use crate::source::{self, DIRECT_ALIGNMENT_BYTES, OpenFile};
use crate::threads::lock;

use super::CudaError;
use super::chunk_lease::ChunkLease;
use super::cufile::{CufileSession, GdsUnavailable, RegisteredChunk, RegisteredFile};
use super::destination::DeviceDestination;
use super::ring::Ring;
use super::stream::CudaStream;

/// Chunks of each device, of 4 MiB: as many as threads that read, so that each has one that storage fills.
const CHUNKS_PER_DEVICE: usize = 16;

/// Files that one load keeps registered: each has a descriptor more, and those that are read at one time are few.
const MAX_REGISTERED_FILES: usize = 64;

/// What the kernel shows of its part.
const KERNEL_MODULE_PATH: &str = "/proc/driver/nvidia-fs";

/// Whether a loader uses GPUDirect Storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpudirectMode {
    /// Where the kernel has its part of it, `nvidia-fs`: without that the library is not asked, which takes it
    /// long to say the same, and leaves a log.
    #[default]
    Auto,
    /// Where the library says so, whatever the kernel shows.
    On,
    /// Nowhere.
    Never,
}

/// What a loader has for it.
#[derive(Debug, Default)]
pub struct GdsState {
    pub mode: GpudirectMode,
    /// Of each device. Dropped first: chunks wait for the copies out of them.
    rings: Mutex<BTreeMap<usize, Arc<Ring<RegisteredChunk>>>>,
    session: OnceLock<Result<Arc<CufileSession>, GdsUnavailable>>,
}

impl GdsState {
    fn session(&self) -> Result<&Arc<CufileSession>, GdsUnavailable> {
        if self.mode == GpudirectMode::Never {
            return Err(GdsUnavailable::Disabled);
        }
        // Asked once: this is called for every stretch.
        let begin =
            || match self.mode == GpudirectMode::Auto && !Path::new(KERNEL_MODULE_PATH).exists() {
                true => Err(GdsUnavailable::Module),
                false => CufileSession::open(),
            };
        let session = self.session.get_or_init(begin).as_ref().map_err(GdsUnavailable::clone)?;
        session.is_current_process().then_some(session).ok_or(GdsUnavailable::Forked)
    }

    fn ring(&self, on: usize) -> Arc<Ring<RegisteredChunk>> {
        let mut rings = lock(&self.rings);
        Arc::clone(rings.entry(on).or_insert_with(|| Arc::new(Ring::new(CHUNKS_PER_DEVICE))))
    }

    /// Gives the chunks back that are idle.
    pub fn trim(&self) {
        let rings: Vec<_> = lock(&self.rings).values().map(Arc::clone).collect();
        rings.iter().for_each(|ring| ring.shrink(0, drop));
    }
}

/// Why a stretch is not read so.
#[derive(Debug)]
pub enum GdsFailure {
    /// Another way is taken.
    Unavailable(GdsUnavailable),
    /// The file is not what was parsed.
    Source(source::SourceError),
    /// The device fails.
    Device(CudaError),
}

impl From<GdsUnavailable> for GdsFailure {
    fn from(missing: GdsUnavailable) -> Self {
        GdsFailure::Unavailable(missing)
    }
}

impl From<CudaError> for GdsFailure {
    fn from(error: CudaError) -> Self {
        GdsFailure::Device(error)
    }
}

/// A file of a load, by its address, and what became of registering it.
type RegistrationSlot = (usize, Arc<OnceLock<Result<RegisteredFile, GdsUnavailable>>>);

/// What one load has for it.
#[derive(Debug)]
pub struct GdsLoad<'a> {
    state: &'a GdsState,
    /// The last of the files that were read.
    files: Mutex<VecDeque<RegistrationSlot>>,
    /// Why devices have no chunks.
    unavailable_devices: Mutex<BTreeMap<usize, GdsUnavailable>>,
    first_reason: OnceLock<GdsUnavailable>,
}

impl<'a> GdsLoad<'a> {
    /// Nothing yet.
    pub fn new(straight: &'a GdsState) -> GdsLoad<'a> {
        let (files, without) = Default::default();
        GdsLoad {
            state: straight,
            files,
            unavailable_devices: without,
            first_reason: OnceLock::new(),
        }
    }

    /// Keeps why a stretch went another way, if it is the first.
    pub fn record_unavailable(&self, missing: GdsUnavailable) {
        if self.first_reason.set(missing).is_ok() {
            tracing::debug!(why = self.reason(), "read by way of the host's memory");
        }
    }

    /// Why the first stretch that went another way did.
    pub fn reason(&self) -> Option<String> {
        self.first_reason.get().map(GdsUnavailable::to_string)
    }

    /// Reads a stretch into a chunk of the device that all pieces belong to, sees that the file is what it was, and
    /// has the pieces copied out.
    ///
    /// # Safety
    ///
    /// The bytes at the addresses of the pieces must be the caller's until the streams have done this.
    #[allow(unsafe_code)]
    pub unsafe fn read(
        &self,
        file: &OpenFile,
        range: &Range<u64>,
        pieces: &[(u64, DeviceDestination)],
        streams: &[Arc<CudaStream>],
    ) -> Result<(), GdsFailure> {
        let session = self.state.session()?;
        let on = pieces.first().map(|(_, first)| first.stream);
        let on = on.filter(|on| pieces.iter().all(|(_, place)| place.stream == *on));
        let device = streams[on.ok_or(GdsUnavailable::SeveralDevices)?].device();
        let known = self.registration_slot(file);
        let registered = known.get_or_init(|| RegisteredFile::register(file, session));
        let registered = registered.as_ref().map_err(GdsUnavailable::clone)?;
        if let Some(missing) = lock(&self.unavailable_devices).get(&device.ordinal()) {
            return Err(missing.clone().into());
        }
        let ring = self.state.ring(device.ordinal());
        let made = || RegisteredChunk::allocate(device, session).map_err(GdsFailure::from);
        let taken = ChunkLease::take(&ring, made).inspect_err(|without| {
            if let GdsFailure::Unavailable(missing) = without {
                lock(&self.unavailable_devices).insert(device.ordinal(), missing.clone());
            }
        });
        let mut taken = taken?;
        let Some(chunk) = taken.chunk() else { return Ok(()) };
        const ALIGNMENT: u64 = DIRECT_ALIGNMENT_BYTES as u64;
        let start = range.start / ALIGNMENT * ALIGNMENT;
        let end = range.end.next_multiple_of(ALIGNMENT);
        let there = end.min(file.file().identity().size).saturating_sub(start);
        {
            let _entered = device.enter()?;
            registered.read(chunk, start, (end - start) as usize, there as usize)?;
        }
        file.check_unchanged().map_err(GdsFailure::Source)?;
        // SAFETY: the caller's word.
        unsafe { taken.copy_out(start, pieces, streams) }.map_err(GdsFailure::from)
    }

    /// What is known of a file. It lives as long as the load, so that its address is its alone.
    fn registration_slot(
        &self,
        file: &OpenFile,
    ) -> Arc<OnceLock<Result<RegisteredFile, GdsUnavailable>>> {
        let address = std::ptr::from_ref(file).addr();
        let mut files = lock(&self.files);
        if let Some((_, known)) = files.iter().find(|(known, _)| *known == address) {
            return Arc::clone(known);
        }
        let gone = if files.len() < MAX_REGISTERED_FILES { None } else { files.pop_front() };
        let known = Arc::new(OnceLock::new());
        files.push_back((address, Arc::clone(&known)));
        drop(files);
        // Outside the lock: it may be given up here.
        drop(gone);
        known
    }
}
