//! The state of the process, and what is the same for all calls: counting, planned failures, and the need for a
//! context.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::codes::{self, Code, Done};
use crate::contexts::Contexts;
use crate::device_memory::DeviceMemory;
use crate::host_memory::HostMemory;
use crate::settings::Settings;
use crate::streams::Streams;

/// Handles are no valid addresses: a dereference crashes at once.
const HANDLES: u64 = 0x5AFE_0000_0000_0000;

/// The condition of a call.
#[derive(Clone, Copy, PartialEq)]
pub enum Needs {
    Nothing,
    /// `cuInit` has succeeded.
    Init,
    /// An event or a stream is named; no context need be current.
    Handle,
    /// A context is current in this thread.
    Context,
}

pub struct Driver {
    pub settings: Settings,
    pub initialised: bool,
    /// The call that is running, and the current context of its thread (0: none).
    pub call: &'static str,
    pub here: u64,
    pub calls: BTreeMap<&'static str, u64>,
    pub faults: Vec<String>,
    /// The code that corrupted the contexts.
    pub sticky: Option<Code>,
    /// The number of queued copies whose host side is not pinned.
    pub pageable: u64,
    pub contexts: Contexts,
    pub device: DeviceMemory,
    pub host: HostMemory,
    pub streams: Streams,
    handles: u64,
}

impl Driver {
    fn new(settings: Settings) -> Driver {
        Driver {
            contexts: Contexts::new(settings.devices.len()),
            device: DeviceMemory::default(),
            host: HostMemory::default(),
            streams: Streams::default(),
            settings,
            initialised: false,
            call: "",
            here: 0,
            calls: BTreeMap::new(),
            faults: Vec::new(),
            sticky: None,
            pageable: 0,
            handles: HANDLES,
        }
    }

    /// A handle that was never used before.
    pub fn new_handle(&mut self) -> u64 {
        self.handles += 16;
        self.handles
    }

    /// Whether a handle was ever given out, even if its object is gone.
    pub fn was_issued(&self, handle: u64) -> bool {
        (HANDLES + 1..=self.handles).contains(&handle)
    }

    fn enter(&mut self, name: &'static str, needs: Needs) -> Done {
        (self.call, self.here) = (name, 0);
        let nth = self.calls.entry(name).or_default();
        *nth += 1;
        let nth = *nth;
        if let Some(code) = self.planned_failure(name, nth) {
            return Err(code);
        }
        if needs == Needs::Nothing {
            return Ok(());
        }
        if !self.initialised {
            return Err(codes::NOT_INITIALIZED);
        }
        if matches!(needs, Needs::Handle | Needs::Context) {
            self.sticky.map_or(Ok(()), Err)?;
        }
        self.here = crate::contexts::current();
        if needs == Needs::Context {
            self.check_current()?;
        }
        Ok(())
    }

    fn check_current(&mut self) -> Done {
        if self.here == 0 {
            let words = "no context is current in this thread: call cuCtxSetCurrent first";
            return Err(self.fault(codes::INVALID_CONTEXT, words));
        }
        if self.contexts.device_of(self.here).is_none() {
            let words = "the context that is current in this thread was released for good";
            return Err(self.fault(codes::CONTEXT_IS_DESTROYED, words));
        }
        Ok(())
    }
}

static DRIVER: OnceLock<Mutex<Driver>> = OnceLock::new();

/// The state. The first call creates it and registers the report at exit.
pub fn driver() -> MutexGuard<'static, Driver> {
    let driver = DRIVER.get_or_init(|| {
        // SAFETY: `at_exit` is a function of C without arguments, and this library is never unloaded.
        unsafe { libc::atexit(at_exit) };
        Mutex::new(Driver::new(Settings::from_environment()))
    });
    driver.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn at_exit() {
    driver().end();
}

/// Runs a call.
pub fn call(name: &'static str, needs: Needs, body: impl FnOnce(&mut Driver) -> Done) -> Code {
    let mut driver = driver();
    let spoiled = driver.sticky;
    let done = driver.enter(name, needs).and_then(|()| body(&mut driver));
    // An error in queued work is the result of the call that waits for it.
    let in_work = driver.sticky.filter(|_| spoiled.is_none());
    done.err().or(in_work).unwrap_or(codes::SUCCESS)
}
