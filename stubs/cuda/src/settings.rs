//! The settings of the stub, read from the environment.
//!
//! An invalid setting ends the process: a test must not pass because of a typo.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::codes::Code;
use crate::names;

/// The attributes of a device that are not 0. What concerns kernels is that of an H100.
const ATTRIBUTES: [(&str, i32, i32); 45] = [
    ("MAX_THREADS_PER_BLOCK", 1, 1024),
    ("MAX_BLOCK_DIM_X", 2, 1024),
    ("MAX_BLOCK_DIM_Y", 3, 1024),
    ("MAX_BLOCK_DIM_Z", 4, 64),
    ("MAX_GRID_DIM_X", 5, i32::MAX),
    ("MAX_GRID_DIM_Y", 6, 65535),
    ("MAX_GRID_DIM_Z", 7, 65535),
    ("MAX_SHARED_MEMORY_PER_BLOCK", 8, 49152),
    ("TOTAL_CONSTANT_MEMORY", 9, 65536),
    ("WARP_SIZE", 10, 32),
    ("MAX_PITCH", 11, i32::MAX),
    ("MAX_REGISTERS_PER_BLOCK", 12, 65536),
    ("MULTIPROCESSOR_COUNT", 16, 132),
    ("INTEGRATED", 18, 0),
    ("CAN_MAP_HOST_MEMORY", 19, 1),
    ("COMPUTE_MODE", 20, 0),
    ("CONCURRENT_KERNELS", 31, 1),
    ("ECC_ENABLED", 32, 1),
    ("PCI_BUS_ID", 33, 0),
    ("PCI_DEVICE_ID", 34, 0),
    ("GLOBAL_MEMORY_BUS_WIDTH", 37, 5120),
    ("L2_CACHE_SIZE", 38, 52428800),
    ("MAX_THREADS_PER_MULTIPROCESSOR", 39, 2048),
    ("ASYNC_ENGINE_COUNT", 40, 2),
    ("UNIFIED_ADDRESSING", 41, 1),
    ("PCI_DOMAIN_ID", 50, 0),
    ("COMPUTE_CAPABILITY_MAJOR", 75, 9),
    ("COMPUTE_CAPABILITY_MINOR", 76, 0),
    ("STREAM_PRIORITIES_SUPPORTED", 78, 1),
    ("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", 81, 233472),
    ("MAX_REGISTERS_PER_MULTIPROCESSOR", 82, 65536),
    ("MANAGED_MEMORY", 83, 1),
    ("PAGEABLE_MEMORY_ACCESS", 88, 0),
    ("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", 91, 1),
    ("COOPERATIVE_LAUNCH", 95, 1),
    ("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 97, 232448),
    ("HOST_REGISTER_SUPPORTED", 99, 1),
    ("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES", 100, 0),
    ("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST", 101, 0),
    ("MAX_BLOCKS_PER_MULTIPROCESSOR", 106, 32),
    ("READ_ONLY_HOST_REGISTER_SUPPORTED", 113, 1),
    ("MEMORY_POOLS_SUPPORTED", 115, 1),
    ("GPU_DIRECT_RDMA_SUPPORTED", 116, 0),
    ("NUMA_ID", 131, -1),
    ("HOST_NUMA_ID", 134, 0),
];

/// Whether a device has no memory of its own.
pub const INTEGRATED: i32 = 18;
pub const PCI_BUS_ID: i32 = 33;
pub const PCI_DEVICE_ID: i32 = 34;
pub const PCI_DOMAIN_ID: i32 = 50;
pub const HOST_REGISTER_SUPPORTED: i32 = 99;
pub const READ_ONLY_HOST_REGISTER_SUPPORTED: i32 = 113;

/// One more than the largest number of an attribute.
const ATTRIBUTES_END: i32 = 160;

/// A planned failure of a call.
#[derive(Debug, PartialEq)]
pub struct Failure {
    pub name: String,
    /// The call of that name in this process that fails, counted from 1.
    pub nth: u64,
    pub code: Code,
}

#[derive(Debug)]
pub struct Settings {
    pub driver_version: i32,
    /// The attributes of each device that are not 0.
    pub devices: Vec<BTreeMap<i32, i32>>,
    /// The memory of each device, in bytes.
    pub memory: usize,
    /// The host memory that can be pinned, in bytes.
    pub pinned: usize,
    pub faults_abort: bool,
    pub pageable_is_a_fault: bool,
    pub destroying_is_a_fault: bool,
    pub failures: Vec<Failure>,
    pub report: Option<PathBuf>,
}

impl Settings {
    /// Reads the environment.
    pub fn from_environment() -> Settings {
        let read = Settings::read(|name| std::env::var(format!("STUB_CUDA_{name}")).ok());
        read.unwrap_or_else(|words| {
            eprintln!("stub CUDA: {words}");
            std::process::abort();
        })
    }

    fn read(value: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        let number = |name: &str, default: usize| match value(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("STUB_CUDA_{name}={text}: no number")),
        };
        let choice = |name: &str, [usual, other]: [&str; 2]| match value(name).as_deref() {
            None => Ok(true),
            Some(text) if text == usual => Ok(true),
            Some(text) if text == other => Ok(false),
            Some(text) => Err(format!("STUB_CUDA_{name}={text}: say {usual} or {other}")),
        };
        let mut devices: Vec<BTreeMap<i32, i32>> = (0..number("DEVICES", 1)?)
            .map(|device| {
                let usual = ATTRIBUTES.iter().map(|&(_, number, value)| (number, value));
                usual.chain([(PCI_BUS_ID, device as i32 + 1)]).collect()
            })
            .collect();
        for entry in entries(&value("ATTRIBUTES")) {
            let words = || format!("STUB_CUDA_ATTRIBUTES: {entry}: say NAME=1 or DEVICE.NAME=1");
            let (name, value) = entry.split_once('=').ok_or_else(words)?;
            let value: i32 = value.parse().map_err(|_| words())?;
            let (device, name) = match name.split_once('.') {
                None => (None, name),
                Some((device, name)) => (Some(device.parse::<usize>().map_err(|_| words())?), name),
            };
            let known = ATTRIBUTES.iter().find(|known| known.0 == name).map(|known| known.1);
            let number = known.or_else(|| name.parse().ok()).ok_or_else(words)?;
            let chosen = match device {
                None => &mut devices[..],
                Some(one) => devices.get_mut(one..one + 1).ok_or_else(words)?,
            };
            for attributes in chosen {
                attributes.insert(number, value);
            }
        }
        let failures = entries(&value("FAIL")).map(failure).collect::<Result<_, _>>()?;
        Ok(Settings {
            driver_version: number("DRIVER_VERSION", 12080)? as i32,
            devices,
            memory: number("MEMORY", 8 << 30)?,
            pinned: number("PINNED", usize::MAX)?,
            faults_abort: choice("FAULTS", ["abort", "count"])?,
            pageable_is_a_fault: !choice("PAGEABLE", ["count", "fault"])?,
            destroying_is_a_fault: choice("DESTROY", ["fault", "allow"])?,
            failures,
            report: value("REPORT").map(PathBuf::from),
        })
    }

    /// An attribute of a device, if it exists.
    pub fn attribute(&self, device: usize, number: i32) -> Option<i32> {
        let known = (1..ATTRIBUTES_END).contains(&number).then_some(0);
        self.devices.get(device)?.get(&number).copied().or(known)
    }
}

fn entries(list: &Option<String>) -> impl Iterator<Item = &str> {
    list.iter().flat_map(|list| list.split(',')).filter(|entry| !entry.is_empty())
}

/// Parses a planned failure, `name:nth=code`.
fn failure(entry: &str) -> Result<Failure, String> {
    let read = || {
        let (call, code) = entry.split_once('=')?;
        let (name, nth) = call.split_once(':')?;
        Some(Failure { name: name.to_owned(), nth: nth.parse().ok()?, code: code.parse().ok()? })
    };
    let words = || format!("STUB_CUDA_FAIL: {entry}: say CALL:NTH=CODE, as in cuMemAlloc_v2:1=2");
    let failure = read().ok_or_else(words)?;
    match names::is_known(&failure.name) {
        true if failure.nth > 0 => Ok(failure),
        true => Err(words()),
        false => Err(format!("STUB_CUDA_FAIL: {}: there is no such call", failure.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &'static str, text: &'static str) -> Result<Settings, String> {
        Settings::read(|other| (other == name).then(|| text.to_owned()))
    }

    #[test]
    fn attributes_are_set_for_one_device_or_all() {
        let both = |name: &str| (name == "DEVICES").then(|| "2".to_owned());
        let attributes = "INTEGRATED=1,1.PCI_BUS_ID=7,0.13=5".to_owned();
        let read = Settings::read(|name| {
            both(name).or((name == "ATTRIBUTES").then(|| attributes.clone()))
        });
        let read = read.unwrap();
        let of = |number| [0, 1].map(|device| read.attribute(device, number));
        assert_eq!(of(18), [Some(1), Some(1)]);
        assert_eq!(of(PCI_BUS_ID), [Some(1), Some(7)]);
        assert_eq!(of(13), [Some(5), Some(0)]);
        assert_eq!(of(ATTRIBUTES_END), [None, None]);
    }

    #[test]
    fn invalid_settings_are_refused() {
        for (name, text) in [
            ("DEVICES", "two"),
            ("FAULTS", "ignore"),
            ("FAIL", "cuMemAlloc_v2=2"),
            ("FAIL", "cuMemAlloc_v2:0=2"),
            ("FAIL", "cuMemAloc_v2:1=2"),
            ("ATTRIBUTES", "INTEGRATD=1"),
            ("ATTRIBUTES", "1.INTEGRATED=1"),
        ] {
            let words = of(name, text).map(|_| ()).unwrap_err();
            assert!(words.contains("STUB_CUDA_"), "{words}");
        }
    }

    #[test]
    fn failing_calls_are_read() {
        let read = of("FAIL", "cuMemHostAlloc:2=2,cuMemcpyHtoDAsync_v2:5=700").unwrap();
        let names: Vec<_> =
            read.failures.iter().map(|f| (f.name.as_str(), f.nth, f.code)).collect();
        assert_eq!(names, [("cuMemHostAlloc", 2, 2), ("cuMemcpyHtoDAsync_v2", 5, 700)]);
    }
}
