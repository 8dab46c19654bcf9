//! The primary contexts of the devices, and the current context of each thread.

use std::cell::RefCell;

use crate::codes::{self, Code};
use crate::handles::Handles;

#[derive(Clone, Default)]
pub struct Primary {
    /// The handle since the context was last created. A released handle is never used again.
    pub handle: u64,
    pub retained: u32,
    pub flags: u32,
}

pub struct Contexts {
    pub primary: Vec<Primary>,
}

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The current context of this thread; 0 without one.
pub fn current() -> u64 {
    stack(|stack| stack.last().copied()).unwrap_or(0)
}

/// Replaces the current context; 0 leaves none.
pub fn set_current(handle: u64) {
    stack(|stack| {
        stack.pop();
        stack.extend((handle != 0).then_some(handle));
        Some(())
    });
}

/// Makes a context current until it is popped.
pub fn push(handle: u64) {
    stack(|stack| {
        stack.push(handle);
        Some(())
    });
}

/// Pops the current context.
pub fn pop() -> Option<u64> {
    stack(Vec::pop)
}

/// A thread that is ending has no contexts any more.
fn stack<T>(see: impl FnOnce(&mut Vec<u64>) -> Option<T>) -> Option<T> {
    STACK.try_with(|stack| see(&mut stack.borrow_mut())).ok().flatten()
}

impl Contexts {
    pub fn new(devices: usize) -> Contexts {
        Contexts { primary: vec![Primary::default(); devices] }
    }

    /// The number of an existing device as an index.
    pub fn device(&self, device: i32) -> Result<usize, Code> {
        let known = usize::try_from(device).ok().filter(|&n| n < self.primary.len());
        known.ok_or(codes::INVALID_DEVICE)
    }

    /// The device of an existing context.
    pub fn device_of(&self, handle: u64) -> Option<usize> {
        self.primary.iter().position(|p| p.retained > 0 && p.handle == handle)
    }

    /// Retains the primary context of a device.
    pub fn retain(&mut self, device: usize, handles: &mut Handles) -> u64 {
        let primary = &mut self.primary[device];
        if primary.retained == 0 {
            primary.handle = handles.issue();
        }
        primary.retained += 1;
        primary.handle
    }
}
