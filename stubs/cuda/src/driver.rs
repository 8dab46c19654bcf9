//! The state of the process, and what all calls share: counting, planned failures, the need for a context, and
//! faults. Its waits do queued work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::codes::{self, Code, Done};
use crate::contexts::{self, Contexts, Primary};
use crate::faults::Fault;
use crate::handles::Handles;
use crate::kernels::Kernel;
use crate::memory::{Memory, Side};
use crate::report::Report;
use crate::settings::{Failure, INTEGRATED, Settings};
use crate::streams::{Event, Point, Streams, Work};

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

/// A module, which has one kernel.
pub struct Module {
    pub context: u64,
    pub kernel: Arc<Kernel>,
}

pub struct Driver {
    pub settings: Settings,
    pub initialised: bool,
    /// The call that is running, and the current context of its thread (0: none).
    call: &'static str,
    pub here: u64,
    calls: BTreeMap<&'static str, u64>,
    pub faults: Vec<String>,
    /// The code that corrupted the contexts.
    sticky: Option<Code>,
    /// The number of queued copies whose host side is not pinned.
    pageable: u64,
    pub contexts: Contexts,
    pub memory: Memory,
    pub streams: Streams,
    pub modules: BTreeMap<u64, Module>,
    pub handles: Handles,
}

impl Driver {
    fn new(settings: Settings) -> Driver {
        Driver {
            contexts: Contexts::new(settings.devices.len()),
            memory: Memory::default(),
            streams: Streams::default(),
            modules: BTreeMap::new(),
            handles: Handles::default(),
            settings,
            initialised: false,
            call: "",
            here: 0,
            calls: BTreeMap::new(),
            faults: Vec::new(),
            sticky: None,
            pageable: 0,
        }
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
        self.here = contexts::current();
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

    /// Prints and counts a fault of the caller. It ends the process, unless the settings ask for a code instead.
    pub fn fault(&mut self, code: Code, words: impl AsRef<str>) -> Code {
        let words = format!("{}: {}", self.call, words.as_ref());
        eprintln!("stub CUDA: fault in {words}");
        self.faults.push(words);
        if self.settings.faults_abort {
            self.write_report();
            std::process::abort();
        }
        code
    }

    /// Plans a failure of the nth call of a name from now on.
    pub fn plan_failure(&mut self, name: String, nth: u64, code: Code) {
        let nth = nth + self.calls.get(name.as_str()).copied().unwrap_or(0);
        self.settings.failures.push(Failure { name, nth, code });
    }

    /// The planned code of the nth call of a name.
    fn planned_failure(&mut self, name: &str, nth: u64) -> Option<Code> {
        let found = self.settings.failures.iter().find(|f| f.name == name && f.nth == nth)?;
        let code = found.code;
        if codes::is_sticky(code) {
            self.sticky = Some(code);
        }
        Some(code)
    }

    /// The report of the state as it is.
    pub fn report(&self) -> Report<'_> {
        Report {
            calls: &self.calls,
            faults: &self.faults,
            sticky: self.sticky,
            pageable: self.pageable,
            contexts: &self.contexts,
            memory: &self.memory,
            streams: &self.streams,
            modules: self.modules.len(),
        }
    }

    /// Writes the report that the settings ask for.
    fn write_report(&self) {
        if let Some(path) = &self.settings.report
            && let Err(error) = self.report().write_to(path)
        {
            eprintln!("stub CUDA: {}: {error}", path.display());
        }
    }

    /// The end of the process: checks what is left behind, and writes the report.
    fn end(&mut self) {
        self.call = "the end of the process";
        for words in self.memory.device.broken_guards() {
            self.fault(codes::ILLEGAL_ADDRESS, words);
        }
        self.write_report();
    }

    /// The device of the current context.
    pub fn device_here(&self) -> Result<usize, Code> {
        self.contexts.device_of(self.here).ok_or(codes::INVALID_CONTEXT)
    }

    /// Releases the primary context of a device. The last release must leave no work.
    pub fn release(&mut self, device: usize) -> Done {
        let Primary { handle, retained, .. } = self.contexts.primary[device];
        match retained {
            0 => {
                let words = format!("the primary context of device {device} is released too often");
                return Err(self.fault(codes::INVALID_CONTEXT, words));
            }
            1 => {
                let left = self.streams.pending(handle, None);
                if left > 0 {
                    let words = format!(
                        "the primary context of device {device} is released for good with {left} \
                         operations to do"
                    );
                    return Err(self.fault(codes::INVALID_CONTEXT, words));
                }
                self.finish(handle);
            }
            _ => {}
        }
        self.contexts.primary[device].retained -= 1;
        Ok(())
    }

    /// The stream of a handle; null is that of the current context.
    pub fn stream(&mut self, handle: u64) -> Result<u64, Code> {
        let found = self.streams.stream(handle, self.here, &mut self.handles);
        found.map_err(|Fault { code, words }| self.fault(code, words))
    }

    /// A stream of the current context.
    pub fn stream_here(&mut self, handle: u64) -> Result<u64, Code> {
        let id = self.stream(handle)?;
        match self.streams.streams.get(&id).is_some_and(|stream| stream.context == self.here) {
            true => Ok(id),
            false => {
                let words = format!("the stream {handle:#x} is not of the current context");
                Err(self.fault(codes::INVALID_CONTEXT, words))
            }
        }
    }

    /// An existing event.
    pub fn event(&mut self, handle: u64) -> Result<&mut Event, Code> {
        if let Err(Fault { code, words }) = self.streams.event(handle, &self.handles) {
            return Err(self.fault(code, words));
        }
        self.streams.event(handle, &self.handles).map_err(|fault| fault.code)
    }

    /// Copies before it returns, after all work that the legacy stream waits for.
    pub fn copy_now(&mut self, to: Side, from: Side, bytes: usize) -> Done {
        let [to, from] = [to, from].map(|side| self.resolved(side, bytes));
        for side in [to, from] {
            self.check(side, bytes)?;
        }
        self.finish_legacy();
        self.perform(Work::Copy { to, from, bytes });
        Ok(())
    }

    /// Queues a copy on a stream.
    pub fn copy_later(&mut self, to: Side, from: Side, bytes: usize, stream: u64) -> Done {
        let [to, from] = [to, from].map(|side| self.resolved(side, bytes));
        let mut is_pageable = false;
        for side in [to, from] {
            is_pageable |= self.check(side, bytes)?;
        }
        let stream = self.stream_here(stream)?;
        if !is_pageable || bytes == 0 {
            self.streams.queue(stream, Work::Copy { to, from, bytes });
            return Ok(());
        }
        self.pageable += 1;
        if self.settings.pageable_is_a_fault {
            let words = "a copy given to a stream has a host side that is not pinned";
            return Err(self.fault(codes::INVALID_VALUE, words));
        }
        match (to, from) {
            // As the real one does: the bytes are read now.
            (Side::Device(to), Side::Host(from)) => {
                let mut taken = vec![0; bytes];
                // SAFETY: by the interface so many bytes can be read at `from` while the call lasts.
                unsafe {
                    std::ptr::copy_nonoverlapping(from as *const u8, taken.as_mut_ptr(), bytes)
                };
                self.streams.queue(stream, Work::Write { to, bytes: taken });
            }
            // As the real one does: the call returns when the bytes are there.
            _ => {
                let end = self.streams.queue(stream, Work::Copy { to, from, bytes });
                self.wait_for(end);
            }
        }
        Ok(())
    }

    /// Queues a copy from the memory of one context to that of another.
    pub fn copy_between(&mut self, [to, from]: [(u64, u64); 2], bytes: usize, stream: u64) -> Done {
        for (address, context) in [to, from] {
            let checked = self.memory.check_device(address, bytes, context, self.here);
            checked.map_err(|words| self.fault(codes::INVALID_VALUE, words))?;
        }
        let stream = self.stream_here(stream)?;
        let [to, from] = [to, from].map(|(address, _)| Side::Device(address));
        self.streams.queue(stream, Work::Copy { to, from, bytes });
        Ok(())
    }

    pub fn fill(&mut self, to: u64, value: u8, bytes: usize, stream: Option<u64>) -> Done {
        self.check(Side::Device(to), bytes)?;
        let work = Work::Fill { to, value, bytes };
        match stream {
            Some(stream) => {
                let stream = self.stream_here(stream)?;
                self.streams.queue(stream, work);
            }
            None => {
                self.finish_legacy();
                self.perform(work);
            }
        }
        Ok(())
    }

    /// The side that an address is really on.
    fn resolved(&self, side: Side, bytes: usize) -> Side {
        let device = self.contexts.device_of(self.here).unwrap_or(0);
        match self.settings.attribute(device, INTEGRATED) {
            Some(1) => self.memory.side_of_integrated(side, bytes),
            _ => side,
        }
    }

    /// Checks one side of a copy, and returns whether it is pageable.
    fn check(&mut self, side: Side, bytes: usize) -> Result<bool, Code> {
        let checked = self.memory.check(side, bytes, self.here);
        checked.map_err(|words| self.fault(codes::INVALID_VALUE, words))
    }

    /// Frees device memory that no queued work may need; otherwise a description of the fault.
    pub fn free(&mut self, address: u64) -> Result<(), String> {
        let (base, one) = self.memory.device.find(address, 0)?;
        if base != address {
            return Err(format!("{address:#x} is not where device memory begins"));
        }
        if let Some(work) = self.streams.device_memory_needed_by(base, one.len()) {
            return Err(format!("the device memory at {address:#x} is freed and {work}"));
        }
        self.memory.device.free(address).map_or(Ok(()), Err)
    }

    /// Does all work of a context.
    pub fn finish(&mut self, context: u64) {
        for point in self.streams.all_of(context) {
            self.wait_for(point);
        }
    }

    fn finish_legacy(&mut self) {
        for point in self.streams.before_legacy(self.here) {
            self.wait_for(point);
        }
    }

    /// Does the work of a stream up to a point.
    pub fn wait_for(&mut self, point: Point) {
        while !self.streams.is_done(point) {
            self.step(point.stream);
        }
    }

    /// Whether a point was reached before. If not, this does one more piece of work towards it.
    pub fn poll(&mut self, points: &[Point]) -> Done {
        match points.iter().find(|&&point| !self.streams.is_done(point)) {
            None => Ok(()),
            Some(point) => {
                self.step(point.stream);
                Err(codes::NOT_READY)
            }
        }
    }

    /// Does one piece of work: the next of a stream, or the next of what that waits for.
    fn step(&mut self, stream: u64) {
        if let Some(work) = self.streams.take_next(stream) {
            self.perform(work);
        }
    }

    /// Does a piece of work that was queued.
    fn perform(&mut self, work: Work) {
        let device = &mut self.memory.device;
        let done = match work {
            Work::Copy { to, from, bytes } => self.memory.copy(to, from, bytes),
            Work::Write { to, bytes } => {
                device.bytes_mut(to, bytes.len()).map(|place| place.copy_from_slice(&bytes))
            }
            Work::Fill { to, value, bytes } => {
                device.bytes_mut(to, bytes).map(|place| place.fill(value))
            }
            Work::Run { kernel, launch } => kernel.run(&launch, &mut self.memory),
            Work::Free { address } => self.free(address),
            Work::Record { event } => {
                if let Some(event) = self.streams.events.get_mut(&event) {
                    event.time = Some(Instant::now());
                }
                Ok(())
            }
            Work::Wait(_) => Ok(()),
        };
        if let Err(words) = done {
            self.sticky = Some(self.fault(codes::ILLEGAL_ADDRESS, words));
        }
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
