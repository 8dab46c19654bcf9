//! The state of the process: what is open and registered, what was called, what went wrong.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::settings::Settings;

/// Handles are no valid addresses, and none is given out twice.
const HANDLES: usize = 0x5AFF_0000_0000_0000;

/// A registered file.
#[derive(Clone, Copy)]
pub struct File {
    pub descriptor: i32,
    /// Device and inode, by which a closed descriptor is noticed.
    pub identity: (u64, u64),
    /// The reads in flight.
    pub reads: usize,
}

pub struct Library {
    pub settings: Settings,
    /// The process of this state: a fork of it must not call the library.
    process: u32,
    pub open: usize,
    pub files: BTreeMap<usize, File>,
    /// The start and the length of registered device memory.
    pub buffers: BTreeMap<u64, usize>,
    pub calls: BTreeMap<&'static str, u64>,
    pub read: u64,
    most_files: usize,
    handles: usize,
}

impl Library {
    /// Begins a call. Returns the code of a planned failure.
    fn enter(&mut self, name: &'static str) -> Option<i32> {
        if self.process != std::process::id() {
            self.fault(name, "is called in a process that was forked");
        }
        let nth = self.calls.entry(name).or_default();
        *nth += 1;
        let nth = *nth;
        let found = self.settings.failures.iter().find(|f| f.name == name && f.nth == nth);
        found.map(|failure| failure.code)
    }

    /// Ends the process with a message.
    pub fn fault(&self, call: &str, words: &str) -> ! {
        eprintln!("stub cuFile: fault in {call}: {words}");
        std::process::abort();
    }

    /// Adds a file under a new handle.
    pub fn keep(&mut self, file: File) -> usize {
        self.handles += 16;
        self.files.insert(self.handles, file);
        self.most_files = self.most_files.max(self.files.len());
        self.handles
    }

    fn report(&self, path: &Path) {
        let calls: Vec<String> =
            self.calls.iter().map(|(name, times)| format!("\"{name}\":{times}")).collect();
        let report = format!(
            "{{\"calls\":{{{}}},\"open\":{},\"files\":{},\"buffers\":{},\"read\":{},\"most_files\":{}}}\n",
            calls.join(","),
            self.open,
            self.files.len(),
            self.buffers.len(),
            self.read,
            self.most_files,
        );
        if let Err(error) = std::fs::write(path, report) {
            eprintln!("stub cuFile: {}: {error}", path.display());
        }
    }
}

static LIBRARY: OnceLock<Mutex<Library>> = OnceLock::new();

/// The state. The first call creates it and registers the report at exit.
pub fn library() -> MutexGuard<'static, Library> {
    let library = LIBRARY.get_or_init(|| {
        // SAFETY: a function of C without arguments, and this library is never unloaded.
        unsafe { libc::atexit(at_exit) };
        Mutex::new(Library {
            settings: Settings::from_environment(),
            process: std::process::id(),
            open: 0,
            files: BTreeMap::new(),
            buffers: BTreeMap::new(),
            calls: BTreeMap::new(),
            read: 0,
            most_files: 0,
            handles: HANDLES,
        })
    });
    library.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn at_exit() {
    let library = library();
    if let Some(path) = &library.settings.report {
        library.report(path);
    }
}

/// Runs a call, or fails it as planned.
pub fn call<T>(
    name: &'static str,
    planned: impl FnOnce(&mut Library, i32) -> T,
    body: impl FnOnce(&mut Library) -> T,
) -> T {
    let mut library = library();
    match library.enter(name) {
        Some(code) => planned(&mut library, code),
        None => body(&mut library),
    }
}
