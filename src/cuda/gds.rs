//! Reading without the host's memory: which files and devices can, and doing it.
//!
//! In: stretches of files, and where their pieces belong on one device. Out: copies on the stream of that device,
//! out of chunks that storage wrote to; or what is missing, and then nothing was done. A [`Straight`] is a
//! loader's, an [`OfLoad`] one load's.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use crate::source::{self, DIRECT_ALIGNMENT, OpenFile};
use crate::threads::lock;

use super::Error;
use super::chunk_lease::Taken;
use super::cufile::{Missing, Registered, Registration, Session};
use super::destination::Place;
use super::ring::Ring;
use super::stream::Stream;

/// Chunks of each device, of 4 MiB: as many as threads that read, so that each has one that storage fills.
const CHUNKS: usize = 16;

/// Files that one load keeps registered: each has a descriptor more, and those that are read at one time are few.
const FILES: usize = 64;

/// What the kernel shows of its part.
const MODULE: &str = "/proc/driver/nvidia-fs";

/// Whether a loader uses GPUDirect Storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gpudirect {
    /// Where the kernel has its part of it, `nvidia-fs`: without that the library is not asked, which takes it
    /// long to say the same, and leaves a log.
    #[default]
    Auto,
    /// Where the library says so, whatever the kernel shows.
    Asked,
    /// Nowhere.
    Never,
}

/// What a loader has for it.
#[derive(Debug, Default)]
pub struct Straight {
    pub choice: Gpudirect,
    /// Of each device. Dropped first: chunks wait for the copies out of them.
    rings: Mutex<BTreeMap<usize, Arc<Ring<Registered>>>>,
    session: OnceLock<Result<Arc<Session>, Missing>>,
}

impl Straight {
    fn session(&self) -> Result<&Arc<Session>, Missing> {
        if self.choice == Gpudirect::Never {
            return Err(Missing::Unwanted);
        }
        // Asked once: this is called for every stretch.
        let begin = || match self.choice == Gpudirect::Auto && !Path::new(MODULE).exists() {
            true => Err(Missing::Module),
            false => Session::begin(),
        };
        let session = self.session.get_or_init(begin).as_ref().map_err(Missing::clone)?;
        session.is_here().then_some(session).ok_or(Missing::Forked)
    }

    fn ring(&self, on: usize) -> Arc<Ring<Registered>> {
        let mut rings = lock(&self.rings);
        Arc::clone(rings.entry(on).or_insert_with(|| Arc::new(Ring::new(CHUNKS))))
    }

    /// Gives the chunks back that are idle.
    pub fn trim(&self) {
        let rings: Vec<_> = lock(&self.rings).values().map(Arc::clone).collect();
        rings.iter().for_each(|ring| ring.shrink(0, drop));
    }
}

/// Why a stretch is not read so.
#[derive(Debug)]
pub enum Without {
    /// Another way is taken.
    Missing(Missing),
    /// The file is not what was parsed.
    Source(source::Error),
    /// The device fails.
    Fault(Error),
}

impl From<Missing> for Without {
    fn from(missing: Missing) -> Self {
        Without::Missing(missing)
    }
}

impl From<Error> for Without {
    fn from(error: Error) -> Self {
        Without::Fault(error)
    }
}

/// A file of a load, by its address, and what became of registering it.
type Known = (usize, Arc<OnceLock<Result<Registration, Missing>>>);

/// What one load has for it.
#[derive(Debug)]
pub struct OfLoad<'a> {
    straight: &'a Straight,
    /// The last of the files that were read.
    files: Mutex<VecDeque<Known>>,
    /// Why devices have no chunks.
    without: Mutex<BTreeMap<usize, Missing>>,
    why: OnceLock<Missing>,
}

impl<'a> OfLoad<'a> {
    /// Nothing yet.
    pub fn new(straight: &'a Straight) -> OfLoad<'a> {
        let (files, without) = Default::default();
        OfLoad { straight, files, without, why: OnceLock::new() }
    }

    /// Keeps why a stretch went another way, if it is the first.
    pub fn is_missing(&self, missing: Missing) {
        if self.why.set(missing).is_ok() {
            tracing::debug!(why = self.why(), "read by way of the host's memory");
        }
    }

    /// Why the first stretch that went another way did.
    pub fn why(&self) -> Option<String> {
        self.why.get().map(Missing::to_string)
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
        pieces: &[(u64, Place)],
        streams: &[Arc<Stream>],
    ) -> Result<(), Without> {
        let session = self.straight.session()?;
        let on = pieces.first().map(|(_, first)| first.stream);
        let on = on.filter(|on| pieces.iter().all(|(_, place)| place.stream == *on));
        let device = streams[on.ok_or(Missing::Devices)?].device();
        let known = self.known(file);
        let registered = known.get_or_init(|| Registration::of(file, session));
        let registered = registered.as_ref().map_err(Missing::clone)?;
        if let Some(missing) = lock(&self.without).get(&device.ordinal()) {
            return Err(missing.clone().into());
        }
        let ring = self.straight.ring(device.ordinal());
        let made = || Registered::on(device, session).map_err(Without::from);
        let taken = Taken::from(&ring, made).inspect_err(|without| {
            if let Without::Missing(missing) = without {
                lock(&self.without).insert(device.ordinal(), missing.clone());
            }
        });
        let mut taken = taken?;
        let Some(chunk) = taken.chunk() else { return Ok(()) };
        const ALIGNMENT: u64 = DIRECT_ALIGNMENT as u64;
        let start = range.start / ALIGNMENT * ALIGNMENT;
        let end = range.end.next_multiple_of(ALIGNMENT);
        let there = end.min(file.file().identity().size).saturating_sub(start);
        {
            let _entered = device.enter()?;
            registered.read(chunk, start, (end - start) as usize, there as usize)?;
        }
        file.check_unchanged().map_err(Without::Source)?;
        // SAFETY: the caller's word.
        unsafe { taken.copy(start, pieces, streams) }.map_err(Without::from)
    }

    /// What is known of a file. It lives as long as the load, so that its address is its alone.
    fn known(&self, file: &OpenFile) -> Arc<OnceLock<Result<Registration, Missing>>> {
        let address = std::ptr::from_ref(file).addr();
        let mut files = lock(&self.files);
        if let Some((_, known)) = files.iter().find(|(known, _)| *known == address) {
            return Arc::clone(known);
        }
        let gone = if files.len() < FILES { None } else { files.pop_front() };
        let known = Arc::new(OnceLock::new());
        files.push_back((address, Arc::clone(&known)));
        drop(files);
        // Outside the lock: it may be given up here.
        drop(gone);
        known
    }
}
