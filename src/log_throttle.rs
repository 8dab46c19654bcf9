//! Limits log lines to one a minute for each path. A file that fails can fail a thousand times a second; each
//! failure is reported to its caller, and only few to the log.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::threads::lock;

/// Time between two log lines for one path.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Remembered paths: more than fail at once, and a few hundred KB.
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
    /// Whether to log a line about this path now; if so, not again for a minute.
    pub fn should_log(&self, path: &Path) -> bool {
        self.should_log_at(path, Instant::now())
    }

    fn should_log_at(&self, path: &Path, now: Instant) -> bool {
        let mut logged = lock(&self.0);
        let is_recent = |logged: &Instant| now.duration_since(*logged) < LOG_INTERVAL;
        if logged.get(path).is_some_and(is_recent) {
            return false;
        }
        logged.put(path.to_path_buf(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_is_logged_once_a_minute() {
        let (throttle, began) = (LogThrottle::default(), Instant::now());
        let at = |path: &str, seconds| {
            throttle.should_log_at(Path::new(path), began + Duration::from_secs(seconds))
        };
        assert!(at("a", 0) && at("b", 1));
        assert!(!at("a", 0) && !at("a", 59) && !at("b", 60));
        assert!(at("a", 60) && !at("a", 119) && at("b", 61));
    }
}
