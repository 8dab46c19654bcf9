//! What was logged of late. A file that fails fails a thousand times a second, and a thousand lines that
//! say the same help nobody: every failure is answered, and one line a minute tells of it.
//!
//! In: the path at fault. Out: whether it is to be logged.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::threads::lock;

/// How often the same path is logged.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Paths that are remembered: more than go wrong at once, and a few hundred KB.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();

/// The paths that were logged, and when.
#[derive(Debug)]
pub struct Said(Mutex<LruCache<PathBuf, Instant>>);

impl Default for Said {
    fn default() -> Self {
        Said(Mutex::new(LruCache::new(REMEMBERED)))
    }
}

impl Said {
    /// Whether something about this path is to be logged now; if so, not again for a while.
    pub fn may_say(&self, path: &Path) -> bool {
        self.may_say_at(path, Instant::now())
    }

    fn may_say_at(&self, path: &Path, now: Instant) -> bool {
        let mut said = lock(&self.0);
        let is_fresh = |said: &Instant| now.duration_since(*said) < SAY_EVERY;
        if said.get(path).is_some_and(is_fresh) {
            return false;
        }
        said.put(path.to_path_buf(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_once_a_minute() {
        let (said, began) = (Said::default(), Instant::now());
        let at = |path: &str, seconds| {
            said.may_say_at(Path::new(path), began + Duration::from_secs(seconds))
        };
        assert!(at("a", 0) && at("b", 1));
        assert!(!at("a", 0) && !at("a", 59) && !at("b", 60));
        assert!(at("a", 60) && !at("a", 119) && at("b", 61));
    }
}
