//! Runs readers on the processors near a device, from where pinned memory has the shortest way to it.

use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Buses, devices and processors.
const SYSFS_PATH: &str = "/sys";

/// The processors that readers run on; `None` if it makes no difference, or is unknown.
#[derive(Debug, Default)]
pub struct NumaAffinity(Option<CpuSet>);

impl NumaAffinity {
    /// The processors of the node of all devices, by their PCI addresses.
    pub fn for_devices<'a>(buses: impl IntoIterator<Item = &'a str>) -> NumaAffinity {
        let Ok(allowed) = sched_getaffinity(None) else { return NumaAffinity(None) };
        NumaAffinity(common_node_cpus(Path::new(SYSFS_PATH), buses, &allowed))
    }

    /// Runs `work` on these processors, and restores the thread's affinity.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some(processors) = &self.0 else { return work() };
        let Ok(before) = sched_getaffinity(None) else { return work() };
        // If the system refuses, the work runs on any processor.
        let _ = sched_setaffinity(None, processors);
        let result = work();
        let _ = sched_setaffinity(None, &before);
        result
    }
}

/// The allowed processors of the node of all devices; `None` if the devices are at several.
fn common_node_cpus<'a>(
    system: &Path,
    buses: impl IntoIterator<Item = &'a str>,
    allowed: &CpuSet,
) -> Option<CpuSet> {
    let mut nodes = buses.into_iter().map(|bus| device_node(system, bus));
    let first = nodes.next()??;
    if !nodes.all(|node| node == Some(first)) {
        return None;
    }
    let list = system.join(format!("devices/system/node/node{first}/cpulist"));
    let list = fs::read_to_string(list).ok()?;
    let mut near = CpuSet::new();
    parse_cpu_list(&list)?.filter(|&cpu| cpu < CpuSet::MAX_CPU).for_each(|cpu| {
        if allowed.is_set(cpu) {
            near.set(cpu);
        }
    });
    // With all allowed processors there, none is nearer than another.
    (near.count() > 0 && near.count() < allowed.count()).then_some(near)
}

/// The node of a device; `None` if the system reports -1, for no node.
fn device_node(system: &Path, bus: &str) -> Option<u32> {
    // The driver writes the same address in capitals and with longer numbers.
    let is_part = |byte: u8| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.';
    if !bus.bytes().all(is_part) {
        return None;
    }
    let devices = system.join("bus/pci/devices");
    let bus = bus.to_ascii_lowercase();
    let short = bus.strip_prefix("0000").unwrap_or(&bus);
    let found = [&*bus, short].into_iter().map(|bus| devices.join(bus).join("numa_node"));
    let node = found.into_iter().find_map(|path| fs::read_to_string(path).ok())?;
    node.trim().parse().ok()
}

/// Parses a list of processors such as `0-3,8`.
fn parse_cpu_list(list: &str) -> Option<impl Iterator<Item = usize>> {
    let parts = list.trim().split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    });
    Some(parts.collect::<Option<Vec<_>>>()?.into_iter().flatten().take(CpuSet::MAX_CPU))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu_set(all: impl IntoIterator<Item = usize>) -> CpuSet {
        let mut set = CpuSet::new();
        all.into_iter().for_each(|cpu| set.set(cpu));
        set
    }

    /// A system with a device at each of two nodes, and one that is at none.
    fn system() -> tempfile::TempDir {
        let system = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = system.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("devices/system/node/node0/cpulist", "0-2,6\n");
        write("devices/system/node/node1/cpulist", "3-5,7\n");
        write("bus/pci/devices/0000:3b:00.0/numa_node", "0\n");
        write("bus/pci/devices/0000:af:00.0/numa_node", "1\n");
        write("bus/pci/devices/0000:b0:00.0/numa_node", "1\n");
        write("bus/pci/devices/0000:01:00.0/numa_node", "-1\n");
        system
    }

    #[test]
    fn allowed_processors_of_the_node_are_found() {
        let system = system();
        let near = |buses: &[&str], allowed: CpuSet| {
            common_node_cpus(system.path(), buses.iter().copied(), &allowed)
        };
        assert_eq!(near(&["0000:3B:00.0"], cpu_set(0..8)), Some(cpu_set([0, 1, 2, 6])));
        assert_eq!(near(&["00000000:AF:00.0"], cpu_set(0..8)), Some(cpu_set([3, 4, 5, 7])));
        assert_eq!(near(&["0000:af:00.0", "0000:b0:00.0"], cpu_set(2..5)), Some(cpu_set([3, 4])));
        let elsewhere: [(&[&str], CpuSet); 7] = [
            // Of two nodes, of none, of nothing that is known.
            (&["0000:3b:00.0", "0000:af:00.0"], cpu_set(0..8)),
            (&["0000:01:00.0"], cpu_set(0..8)),
            (&["0000:99:00.0"], cpu_set(0..8)),
            (&["../../../etc"], cpu_set(0..8)),
            (&[], cpu_set(0..8)),
            // Nothing near may be used, or nothing else.
            (&["0000:3b:00.0"], cpu_set(3..6)),
            (&["0000:3b:00.0"], cpu_set(0..3)),
        ];
        for (buses, allowed) in elsewhere {
            assert_eq!(near(buses, allowed), None, "{buses:?}");
        }
    }

    #[test]
    fn processor_lists_are_parsed() {
        let all = |list: &str| parse_cpu_list(list).map(Iterator::collect::<Vec<_>>);
        assert_eq!(all("0-2,6\n"), Some(vec![0, 1, 2, 6]));
        assert_eq!(all("4"), Some(vec![4]));
        for wrong in ["", "a", "1-", "1-x"] {
            assert_eq!(all(wrong), None, "{wrong}");
        }
        assert!(all("0-99999999999").unwrap().len() <= CpuSet::MAX_CPU);
    }

    #[test]
    fn the_affinity_is_restored() {
        let before = sched_getaffinity(None).unwrap();
        let one = (0..CpuSet::MAX_CPU).find(|&one| before.is_set(one)).unwrap();
        let there = NumaAffinity(Some(cpu_set([one]))).run(|| sched_getaffinity(None).unwrap());
        assert_eq!(there, cpu_set([one]));
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
