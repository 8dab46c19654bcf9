//! Images that somebody has open, each once, and the descriptors that they hold.
//!
//! The sources of an image are open as long as it is; where that would be more descriptors than the
//! system allows, those of the image that was not read for longest are closed, and opened again, their
//! state verified, when it is read again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::cache::{Cache, Served};
use crate::image::{self, Image};
use crate::threads::lock;

/// An image that is open at least once.
pub struct OpenImage {
    now: Mutex<Now>,
    /// When it was last read, in reads of any.
    used: AtomicU64,
}

/// What reads go by. All who have the image open share it.
struct Now {
    image: Arc<Image>,
    /// Nothing where its sources were closed.
    served: Option<Arc<Served>>,
}

impl OpenImage {
    /// The device of its first source: who opens it waits for that.
    pub fn device(&self) -> u64 {
        self.image().files().first().map_or(0, |file| file.identity().dev)
    }

    fn image(&self) -> Arc<Image> {
        Arc::clone(&lock(&self.now).image)
    }
}

/// All of them.
pub struct OpenImages {
    cache: Arc<Cache>,
    /// By number of inode, and how often each is open.
    open: Mutex<HashMap<u64, (Arc<OpenImage>, usize)>>,
    /// Descriptors that they may hold together.
    limit: usize,
    clock: AtomicU64,
}

/// Descriptors for everything else: directories, files passed through, the device.
const RESERVED: u64 = 128;

/// How often a source is opened: for the page cache, past it, and for reads of which the kernel reads nothing ahead.
const PER_FILE: usize = 3;

impl OpenImages {
    pub fn new(cache: Arc<Cache>) -> OpenImages {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let limit = limit.current.unwrap_or(u64::MAX).saturating_sub(RESERVED).max(RESERVED);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        OpenImages { cache, open: Mutex::default(), limit, clock: AtomicU64::new(0) }
    }

    /// Opens an image once more. One that is open already is verified to be what its sources are.
    ///
    /// Unless what was read before still holds, nothing of it is used: `image` gives the image anew, and from now
    /// on all reads go by that.
    pub fn open(
        &self,
        number: u64,
        holds: bool,
        image: impl FnOnce() -> Result<Arc<Image>, crate::view::Error>,
    ) -> Result<Arc<OpenImage>, crate::view::Error> {
        let known = || lock(&self.open).get(&number).map(|(open, _)| Arc::clone(open));
        let opened = match holds.then(known).flatten() {
            Some(open) => open,
            None => {
                let now = Mutex::new(Now { image: image()?, served: None });
                Arc::new(OpenImage { now, used: AtomicU64::new(0) })
            }
        };
        let served = self.served(&opened)?;
        served.reader().check_all_untouched()?;
        let mut open = lock(&self.open);
        let (shared, count) = open.entry(number).or_insert_with(|| (Arc::clone(&opened), 0));
        *count += 1;
        let shared = Arc::clone(shared);
        drop(open);
        if !holds && !Arc::ptr_eq(&shared, &opened) {
            let new = Now { image: opened.image(), served: Some(served) };
            let old = std::mem::replace(&mut *lock(&shared.now), new);
            // Its blocks go, and its files are closed, outside the lock.
            drop(old);
        }
        Ok(shared)
    }

    pub fn close(&self, number: u64) {
        let mut open = lock(&self.open);
        let Some((_, count)) = open.get_mut(&number) else { return };
        *count -= 1;
        if *count == 0 {
            let gone = open.remove(&number);
            drop(open);
            // Closing files can take its time.
            drop(gone);
        }
    }

    /// What reads an image, if its sources are open.
    pub fn at_hand(&self, open: &OpenImage) -> Option<Arc<Served>> {
        open.used.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        lock(&open.now).served.clone()
    }

    /// The same; its sources are opened if they are not, which may wait for them.
    pub fn served(&self, open: &OpenImage) -> Result<Arc<Served>, image::Error> {
        loop {
            if let Some(served) = self.at_hand(open) {
                return Ok(served);
            }
            let image = open.image();
            self.make_room(image.files().len());
            let reader = Arc::new(image.open()?);
            let mut now = lock(&open.now);
            // Another may have opened it meanwhile, or read it anew.
            if Arc::ptr_eq(&now.image, &image) {
                let served = now.served.get_or_insert_with(|| self.cache.serve(reader));
                return Ok(Arc::clone(served));
            }
        }
    }

    fn make_room(&self, files: usize) {
        let mut holding: Vec<Arc<OpenImage>> = lock(&self.open)
            .values()
            .filter(|(open, _)| lock(&open.now).served.is_some())
            .map(|(open, _)| Arc::clone(open))
            .collect();
        let held = |open: &Arc<OpenImage>| open.image().files().len() * PER_FILE;
        let mut total = files * PER_FILE + holding.iter().map(held).sum::<usize>();
        if total <= self.limit {
            return;
        }
        holding.sort_by_key(|open| open.used.load(Ordering::Relaxed));
        for open in holding {
            if total <= self.limit {
                break;
            }
            total -= held(&open);
            let gone = lock(&open.now).served.take();
            drop(gone);
        }
    }

    /// How many are open, and what they weigh.
    pub fn count(&self) -> (u64, u64) {
        let open = lock(&self.open);
        (open.len() as u64, open.values().map(|(open, _)| open.image().weight()).sum())
    }
}
