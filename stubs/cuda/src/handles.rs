//! Handles of contexts, streams and events. None is used twice.

/// Handles are no valid addresses: a dereference crashes at once.
const FIRST_HANDLE: u64 = 0x5AFE_0000_0000_0000;

pub struct Handles {
    last: u64,
}

impl Default for Handles {
    fn default() -> Handles {
        Handles { last: FIRST_HANDLE }
    }
}

impl Handles {
    /// A handle that was never used before.
    pub fn issue(&mut self) -> u64 {
        self.last += 16;
        self.last
    }

    /// Whether a handle was ever given out, even if its object is gone.
    fn was_issued(&self, handle: u64) -> bool {
        (FIRST_HANDLE + 1..=self.last).contains(&handle)
    }

    /// Describes the fault of a handle that is no object of a kind.
    pub fn describe_missing(&self, handle: u64, kind: &str) -> String {
        let was = if self.was_issued(handle) { "no longer" } else { "not" };
        format!("{handle:#x} is {was} {kind}")
    }
}
