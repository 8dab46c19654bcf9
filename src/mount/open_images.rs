//! Images that somebody has open, each once, with the descriptors and the memory that they hold.
//!
//! The sources of an image are open, and what is known of its tensors is held, as long as it is. Where that would
//! be more descriptors than the system allows, or more memory than the budget has, those of the image that was not
//! read for longest go. When it is read again its sources are opened and read again, and verified to be the same.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::cache::{Cache, Served};
use crate::image::Image;
use crate::threads::lock;
use crate::view::{self, Shown, View};

/// An image that is open at least once.
pub struct OpenImage {
    shown: Arc<Shown>,
    /// The device of its first source: a read of it waits for that.
    pub device: u64,
    /// What reads go by, shared by all handles of it; nothing where it went.
    now: Mutex<Option<Now>>,
    /// When it was last read, in reads of any.
    used: AtomicU64,
}

#[derive(Clone)]
struct Now {
    served: Arc<Served>,
    held: Held,
}

/// Descriptors and bytes of memory.
#[derive(Clone, Copy, Default)]
struct Held {
    descriptors: u64,
    bytes: u64,
}

impl Held {
    fn by(image: &Image) -> Held {
        Held { descriptors: (image.files().len() * PER_FILE) as u64, bytes: image.weight() }
    }

    fn fits(&self, limit: &Held) -> bool {
        self.descriptors <= limit.descriptors && self.bytes <= limit.bytes
    }
}

impl std::ops::AddAssign for Held {
    fn add_assign(&mut self, other: Held) {
        self.descriptors += other.descriptors;
        self.bytes += other.bytes;
    }
}

impl std::ops::SubAssign for Held {
    fn sub_assign(&mut self, other: Held) {
        self.descriptors -= other.descriptors;
        self.bytes -= other.bytes;
    }
}

/// All of them.
pub struct OpenImages {
    view: Arc<View>,
    cache: Arc<Cache>,
    /// By number of inode, and how often each is open.
    open: Mutex<HashMap<u64, (Arc<OpenImage>, usize)>>,
    /// What they may hold together.
    limit: Held,
    clock: AtomicU64,
}

/// Descriptors for everything else: directories, files passed through, the device.
const RESERVED: u64 = 128;

/// How often a source is opened: for the page cache, past it, and for reads of which the kernel reads nothing ahead.
const PER_FILE: usize = 3;

impl OpenImages {
    /// Images that together take so many bytes; a single one may be larger.
    pub fn new(view: Arc<View>, cache: Arc<Cache>, bytes: u64) -> OpenImages {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let descriptors = limit.current.unwrap_or(u64::MAX).saturating_sub(RESERVED).max(RESERVED);
        let limit = Held { descriptors, bytes };
        OpenImages { view, cache, open: Mutex::default(), limit, clock: AtomicU64::new(0) }
    }

    /// Opens an image once more. One that is open already is verified to be what its sources are.
    ///
    /// Unless what was read before still holds, nothing of it is used: the sources are read anew, and from now on
    /// all reads go by that.
    pub fn open(
        &self,
        number: u64,
        shown: &Arc<Shown>,
        holds: bool,
    ) -> Result<Arc<OpenImage>, view::Error> {
        let known = || lock(&self.open).get(&number).map(|(open, _)| Arc::clone(open));
        let known = holds.then(known).flatten();
        let (opened, now) = match known {
            Some(open) => {
                let served = self.served(&open)?;
                (open, Now { held: Held::by(served.image()), served })
            }
            None => {
                let now = self.made(shown)?;
                let files = now.served.image().files();
                let device = files.first().map_or(0, |file| file.identity().dev);
                let used = AtomicU64::new(self.tick());
                let shown = Arc::clone(shown);
                let held = Mutex::new(Some(now.clone()));
                (Arc::new(OpenImage { shown, device, now: held, used }), now)
            }
        };
        now.served.reader().check_all_untouched().map_err(view::Error::from)?;
        let mut open = lock(&self.open);
        let (shared, count) = open.entry(number).or_insert_with(|| (Arc::clone(&opened), 0));
        *count += 1;
        let shared = Arc::clone(shared);
        drop(open);
        if !holds && !Arc::ptr_eq(&shared, &opened) {
            let old = lock(&shared.now).replace(now);
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

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// What reads an image, if that is held.
    pub fn at_hand(&self, open: &OpenImage) -> Option<Arc<Served>> {
        open.used.store(self.tick(), Ordering::Relaxed);
        lock(&open.now).as_ref().map(|now| Arc::clone(&now.served))
    }

    /// The same; it is made again if it is not, which may wait for the sources.
    pub fn served(&self, open: &OpenImage) -> Result<Arc<Served>, view::Error> {
        if let Some(served) = self.at_hand(open) {
            return Ok(served);
        }
        let new = self.made(&open.shown)?;
        let mut now = lock(&open.now);
        // Another may have made it meanwhile.
        Ok(Arc::clone(&now.get_or_insert(new).served))
    }

    fn made(&self, shown: &Shown) -> Result<Now, view::Error> {
        let image = self.view.image(shown)?;
        let held = Held::by(&image);
        self.make_room(held);
        let reader = Arc::new(image.open()?);
        Ok(Now { served: self.cache.serve(reader), held })
    }

    /// Lets go of what others hold, least lately read first, until there is room for one more.
    fn make_room(&self, one_more: Held) {
        let mut holding: Vec<(Arc<OpenImage>, Held)> = lock(&self.open)
            .values()
            .filter_map(|(open, _)| Some((Arc::clone(open), lock(&open.now).as_ref()?.held)))
            .collect();
        let mut total = one_more;
        holding.iter().for_each(|(_, held)| total += *held);
        if total.fits(&self.limit) {
            return;
        }
        holding.sort_by_key(|(open, _)| open.used.load(Ordering::Relaxed));
        for (open, held) in holding {
            if total.fits(&self.limit) {
                break;
            }
            total -= held;
            let gone = lock(&open.now).take();
            drop(gone);
        }
    }

    /// How many are open, and how many bytes they hold.
    pub fn count(&self) -> (u64, u64) {
        let open = lock(&self.open);
        let held = open.values().filter_map(|(open, _)| Some(lock(&open.now).as_ref()?.held.bytes));
        (open.len() as u64, held.sum())
    }
}
