//! Host memory that a device can access: pinned, or registered.
//!
//! Pinned memory that was freed stays inaccessible for good: touching it crashes at once.

use std::collections::BTreeMap;

/// The content of pinned memory before anything is written to it.
pub const POISON: u8 = 0xAB;

/// The kind of a range of host memory.
#[derive(Debug, PartialEq)]
pub enum HostKind {
    /// Pinned or registered as a whole: the start and the size of that memory.
    Pinned(usize, usize),
    Registered(usize, usize),
    Pageable,
    /// A description of the fault.
    Wrong(String),
}

#[derive(Default)]
pub struct HostMemory {
    pub pinned: BTreeMap<usize, usize>,
    pub registered: BTreeMap<usize, usize>,
    freed: BTreeMap<usize, usize>,
    /// Bytes that are pinned or registered.
    pub bytes: usize,
    pub peak: usize,
}

impl HostMemory {
    /// Maps pinned memory, if the system has it.
    pub fn allocate(&mut self, bytes: usize) -> Option<usize> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses changes nothing that is there.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: so many bytes were mapped there just now, to be written to.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), POISON, bytes) };
        self.pinned.insert(start as usize, bytes);
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
        Some(start as usize)
    }

    /// Frees the pinned memory that begins at an address. Returns whether there was any.
    pub fn free(&mut self, address: usize) -> bool {
        let Some(bytes) = self.pinned.remove(&address) else {
            return false;
        };
        self.bytes -= bytes;
        self.freed.insert(address, bytes);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the range is a mapping of ours, and its owner has just given it up.
        unsafe { libc::mmap(address as *mut _, bytes, libc::PROT_NONE, flags, -1, 0) };
        true
    }

    /// Notes that a range is registered.
    pub fn register(&mut self, address: usize, bytes: usize) {
        self.registered.insert(address, bytes);
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
    }

    /// Notes that the range which begins at an address is no longer registered.
    pub fn unregister(&mut self, address: usize) {
        self.bytes -= self.registered.remove(&address).unwrap_or(0);
    }

    /// Whether pinned memory at this start was freed.
    pub fn was_freed(&self, address: usize) -> bool {
        self.freed.contains_key(&address)
    }

    /// Whether any of a range is pinned or registered.
    pub fn touches(&self, address: usize, bytes: usize) -> bool {
        [&self.pinned, &self.registered].iter().any(|all| overlap(all, address, bytes).is_some())
    }

    /// The kind of a range. A range that is pinned in part is a fault.
    pub fn kind(&self, address: usize, bytes: usize) -> HostKind {
        let inside = |&(base, len): &(usize, usize)| {
            address.checked_add(bytes).is_some_and(|end| base <= address && end <= base + len)
        };
        let [pinned, registered, freed] = [&self.pinned, &self.registered, &self.freed]
            .map(|all| overlap(all, address, bytes.max(1)));
        if let Some((base, len)) = pinned.filter(inside) {
            return HostKind::Pinned(base, len);
        }
        if let Some((base, len)) = registered.filter(inside) {
            return HostKind::Registered(base, len);
        }
        let left = pinned.map(|one| (one, "pinned")).or(registered.map(|one| (one, "registered")));
        if let Some(((base, len), kind)) = left {
            return HostKind::Wrong(format!(
                "{bytes} bytes at {address:#x} leave the {len} bytes of {kind} memory at {base:#x}"
            ));
        }
        match freed {
            Some((base, len)) => HostKind::Wrong(format!(
                "{address:#x} lies in {len} bytes of pinned memory at {base:#x} that were freed"
            )),
            None => HostKind::Pageable,
        }
    }
}

/// The last of these ranges that overlaps another.
fn overlap(all: &BTreeMap<usize, usize>, address: usize, bytes: usize) -> Option<(usize, usize)> {
    let end = address.saturating_add(bytes);
    let (&base, &len) = all.range(..end).next_back()?;
    (base + len > address).then_some((base, len))
}

/// Whether all pages of a range are mapped.
pub fn is_mapped(address: usize, bytes: usize) -> bool {
    // SAFETY: the call of the system only reads a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let start = address - address % page;
    // SAFETY: it changes no byte, and says no where a page is missing.
    unsafe { libc::msync(start as *mut _, address + bytes - start, libc::MS_ASYNC) == 0 }
}
