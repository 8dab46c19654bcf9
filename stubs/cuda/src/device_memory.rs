//! "Device" memory: addresses that the host cannot touch, and their bytes, which are kept elsewhere.
//!
//! An address is given out once only, so that every use after free is seen.

use std::collections::BTreeMap;
use std::ops::Range;

/// The content of memory before anything is written to it, and of its guards.
pub const POISON: u8 = 0xD5;
const GUARD: u8 = 0x6B;
const GUARD_BYTES: usize = 256;

/// The alignment of the real driver. Allocations whose sizes are multiples of it are adjacent, as on a device.
const ALIGNMENT: u64 = 512;

/// The addresses of one process: none is used twice.
const ADDRESS_SPACE_BYTES: usize = 1 << 40;

pub struct Allocation {
    /// The bytes, with a guard on both sides.
    guarded: Vec<u8>,
    pub device: usize,
    pub context: u64,
    /// Whether a `cuMemFreeAsync` is queued.
    pub ends: bool,
}

impl Allocation {
    pub fn len(&self) -> usize {
        self.guarded.len() - 2 * GUARD_BYTES
    }

    fn has_whole_guards(&self) -> bool {
        let (before, rest) = self.guarded.split_at(GUARD_BYTES);
        let after = &rest[self.len()..];
        before.iter().chain(after).all(|&byte| byte == GUARD)
    }
}

#[derive(Default)]
pub struct DeviceMemory {
    addresses: Range<u64>,
    next: u64,
    pub live: BTreeMap<u64, Allocation>,
    freed: BTreeMap<u64, usize>,
    pub bytes: usize,
    pub peak: usize,
}

impl DeviceMemory {
    /// Whether an address belongs to a device, allocated or not.
    pub fn is_device_address(&self, address: u64) -> bool {
        self.addresses.contains(&address)
    }

    /// The allocated bytes of a device.
    pub fn used(&self, device: usize) -> usize {
        self.live.values().filter(|one| one.device == device).map(Allocation::len).sum()
    }

    /// Allocates memory; `None` if there are no addresses left.
    pub fn allocate(&mut self, bytes: usize, device: usize, context: u64) -> Option<u64> {
        if self.addresses.is_empty() {
            self.addresses = reserve()?;
            self.next = self.addresses.start;
        }
        let address = self.next.next_multiple_of(ALIGNMENT);
        let end = address.checked_add(bytes as u64)?;
        if end > self.addresses.end {
            return None;
        }
        let mut guarded = vec![GUARD; bytes + 2 * GUARD_BYTES];
        guarded[GUARD_BYTES..][..bytes].fill(POISON);
        self.live.insert(address, Allocation { guarded, device, context, ends: false });
        self.next = end;
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
        Some(address)
    }

    /// Frees the memory that begins at an address. A description of the fault if its guards were written to.
    pub fn free(&mut self, address: u64) -> Option<String> {
        let gone = self.live.remove(&address)?;
        self.bytes -= gone.len();
        self.freed.insert(address, gone.len());
        (!gone.has_whole_guards()).then(|| broken(address, &gone))
    }

    /// Descriptions of all live memory whose guards were written to.
    pub fn broken_guards(&self) -> Vec<String> {
        let broken_ones = self.live.iter().filter(|(_, one)| !one.has_whole_guards());
        broken_ones.map(|(&address, one)| broken(address, one)).collect()
    }

    /// The allocation of a range and its start; otherwise a description of the fault.
    pub fn find(&self, address: u64, bytes: usize) -> Result<(u64, &Allocation), String> {
        let before = self.live.range(..=address).next_back();
        if let Some((&base, one)) = before {
            let offset = (address - base) as usize;
            if offset < one.len() || (offset == one.len() && bytes == 0) {
                if bytes <= one.len() - offset {
                    return Ok((base, one));
                }
                return Err(format!(
                    "{bytes} bytes at {address:#x} leave the {} bytes of device memory at {base:#x}",
                    one.len()
                ));
            }
        }
        let freed = self.freed.range(..=address).next_back();
        let freed = freed.filter(|&(&base, &len)| address - base < len as u64);
        Err(match freed {
            Some((base, len)) => {
                format!(
                    "{address:#x} lies in {len} bytes of device memory at {base:#x} that were freed"
                )
            }
            None => format!("there is no device memory at {address:#x}"),
        })
    }

    /// The bytes of a range.
    pub fn bytes(&self, address: u64, bytes: usize) -> Result<&[u8], String> {
        let (base, one) = self.find(address, bytes)?;
        Ok(&one.guarded[GUARD_BYTES + (address - base) as usize..][..bytes])
    }

    pub fn bytes_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], String> {
        let (base, _) = self.find(address, bytes)?;
        self.unchecked_mut(base, (address - base) as isize, bytes)
    }

    /// Bytes counted from the start of an allocation, the guards included.
    pub fn unchecked_mut(
        &mut self,
        base: u64,
        offset: isize,
        bytes: usize,
    ) -> Result<&mut [u8], String> {
        let words = || format!("no {bytes} bytes at {base:#x} {offset:+}, guards included");
        let one = self.live.get_mut(&base).ok_or_else(words)?;
        let start = GUARD_BYTES.checked_add_signed(offset).ok_or_else(words)?;
        let end = start.checked_add(bytes).ok_or_else(words)?;
        one.guarded.get_mut(start..end).ok_or_else(words)
    }
}

fn broken(address: u64, one: &Allocation) -> String {
    format!("somebody wrote beside the {} bytes of device memory at {address:#x}", one.len())
}

/// Addresses that cannot be read or written, and that nothing else will be given.
fn reserve() -> Option<Range<u64>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses changes nothing that is there.
    let start = unsafe {
        libc::mmap(std::ptr::null_mut(), ADDRESS_SPACE_BYTES, libc::PROT_NONE, flags, -1, 0)
    };
    (start != libc::MAP_FAILED).then(|| start as u64..start as u64 + ADDRESS_SPACE_BYTES as u64)
}
