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
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Paths that are remembered: more than go wrong at once, and a few hundred KB.
const MAX_PATH_COUNT: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();

/// The paths that were logged, and when.
#[derive(Debug)]
pub struct LogThrottle(Mutex<LruCache<PathBuf, Instant>>);

impl Default for LogThrottle {
    fn default() -> Self {
        LogThrottle(Mutex::new(LruCache::new(MAX_PATH_COUNT)))
    }
}

impl LogThrottle {
    /// Whether something about this path is to be logged now; if so, not again for a while.
    pub fn should_log(&self, path: &Path) -> bool {
        self.should_log_at(path, Instant::now())
    }

    fn should_log_at(&self, path: &Path, now: Instant) -> bool {
        let mut said = lock(&self.0);
        let is_fresh = |said: &Instant| now.duration_since(*said) < LOG_INTERVAL;
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
        let (said, began) = (LogThrottle::default(), Instant::now());
        let at = |path: &str, seconds| {
            said.should_log_at(Path::new(path), began + Duration::from_secs(seconds))
        };
        assert!(at("a", 0) && at("b", 1));
        assert!(!at("a", 0) && !at("a", 59) && !at("b", 60));
        assert!(at("a", 60) && !at("a", 119) && at("b", 61));
    }
}
