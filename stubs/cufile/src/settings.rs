//! The settings of the stub, read from the environment.
//!
//! An invalid setting ends the process: a test must not pass because of a typo.

use std::path::PathBuf;

/// The kinds of storage that nvidia-fs may support, by their bits.
const STATUS: [(&str, u32); 10] = [
    ("LUSTRE", 0),
    ("WEKAFS", 1),
    ("NFS", 2),
    ("GPFS", 3),
    ("NVME", 4),
    ("NVMEOF", 5),
    ("SCSI", 6),
    ("SCALEFLUX", 7),
    ("NVMESH", 8),
    ("BEEGFS", 9),
];

/// Every kind of disk, so that a test may have its files anywhere.
const DISKS: &str = "NVME,NVMEOF,SCSI,SCALEFLUX";

/// The library's own settings, by their bits.
const CONTROL: [(&str, u32); 2] = [("COMPAT", 1), ("POSIX", 2)];

/// The functions of the library, which a planned failure may name.
pub const CALL_NAMES: [&str; 8] = [
    "cuFileBufDeregister",
    "cuFileBufRegister",
    "cuFileDriverClose_v2",
    "cuFileDriverGetProperties",
    "cuFileDriverOpen",
    "cuFileHandleDeregister",
    "cuFileHandleRegister",
    "cuFileRead",
];

/// A planned failure of a call.
#[derive(Debug, PartialEq)]
pub struct Failure {
    pub name: String,
    /// The call of that name in this process that fails, counted from 1.
    pub nth: u64,
    pub code: i32,
}

#[derive(Debug)]
pub struct Settings {
    /// The version of nvidia-fs; 0.0 if it is not loaded.
    pub version: (u32, u32),
    pub status: u32,
    pub control: u32,
    pub failures: Vec<Failure>,
    /// The maximum bytes of one read.
    pub max_read: usize,
    /// The read after which its file changes, counted from 1.
    pub touch: Option<u64>,
    pub report: Option<PathBuf>,
}

impl Settings {
    /// Reads the environment.
    pub fn from_environment() -> Settings {
        let read = Settings::read(|name| std::env::var(format!("STUB_CUFILE_{name}")).ok());
        read.unwrap_or_else(|words| {
            eprintln!("stub cuFile: {words}");
            std::process::abort();
        })
    }

    fn read(value: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        let version = value("NVFS").unwrap_or_else(|| "2.22".to_owned());
        let parts = version.split_once('.');
        let parts = parts.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let number = |name: &str| {
            let read = |text: String| {
                text.parse::<u64>().map_err(|_| format!("STUB_CUFILE_{name}={text}: no number"))
            };
            value(name).map(read).transpose()
        };
        let failures = value("FAIL").unwrap_or_default();
        let failures = failures.split(',').filter(|entry| !entry.is_empty()).map(failure);
        Ok(Settings {
            version: parts.ok_or(format!("STUB_CUFILE_NVFS={version}: say 2.22"))?,
            status: bits("STATUS", &value("STATUS").unwrap_or_else(|| DISKS.to_owned()), &STATUS)?,
            control: bits("CONTROL", &value("CONTROL").unwrap_or_default(), &CONTROL)?,
            failures: failures.collect::<Result<_, _>>()?,
            max_read: number("MAX_READ")?.map_or(usize::MAX, |bytes| bytes as usize),
            touch: number("TOUCH")?,
            report: value("REPORT").map(PathBuf::from),
        })
    }
}

fn bits(setting: &str, list: &str, known: &[(&str, u32)]) -> Result<u32, String> {
    list.split(',').filter(|name| !name.is_empty()).try_fold(0, |bits, name| {
        let bit = known.iter().find(|known| known.0 == name);
        let bit = bit.ok_or(format!("STUB_CUFILE_{setting}: {name}: there is no such"))?;
        Ok(bits | 1 << bit.1)
    })
}

/// Parses a planned failure, `name:nth=code`.
fn failure(entry: &str) -> Result<Failure, String> {
    let read = || {
        let (call, code) = entry.split_once('=')?;
        let (name, nth) = call.split_once(':')?;
        let name = CALL_NAMES.iter().find(|known| **known == name)?.to_string();
        let nth = nth.parse().ok().filter(|nth| *nth > 0)?;
        Some(Failure { name, nth, code: code.parse().ok()? })
    };
    read().ok_or(format!("STUB_CUFILE_FAIL: {entry}: say CALL:NTH=CODE, as cuFileRead:1=5030"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &'static str, text: &'static str) -> Result<Settings, String> {
        Settings::read(|other| (other == name).then(|| text.to_owned()))
    }

    #[test]
    fn invalid_settings_are_refused() {
        for (name, text) in [
            ("NVFS", "2"),
            ("STATUS", "NVME,NFSS"),
            ("CONTROL", "compat"),
            ("MAX_READ", "4k"),
            ("TOUCH", "first"),
            ("FAIL", "cuFileRead=1"),
            ("FAIL", "cuFileRead:0=1"),
            ("FAIL", "cuFileReed:1=1"),
        ] {
            let words = of(name, text).map(|_| ()).unwrap_err();
            assert!(words.contains("STUB_CUFILE_"), "{words}");
        }
    }

    #[test]
    fn settings_are_read() {
        assert_eq!(of("STATUS", "NVME,NFS").unwrap().status, 0b10100);
        assert_eq!(of("CONTROL", "POSIX").unwrap().control, 0b100);
        assert_eq!(of("NVFS", "0.0").unwrap().version, (0, 0));
        let failures = of("FAIL", "cuFileRead:2=5030").unwrap().failures;
        let name = "cuFileRead".to_owned();
        assert_eq!(failures, [Failure { name, nth: 2, code: 5030 }]);
    }
}
