//! The primary contexts of the devices, and the current context of each thread.

use std::cell::RefCell;

use crate::codes::{self, Done};
use crate::driver::Driver;

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

    /// The device of an existing context.
    pub fn device_of(&self, handle: u64) -> Option<usize> {
        self.primary.iter().position(|p| p.retained > 0 && p.handle == handle)
    }
}

impl Driver {
    /// The number of an existing device as an index.
    pub fn device(&self, device: i32) -> Result<usize, codes::Code> {
        let known = usize::try_from(device).ok().filter(|&n| n < self.contexts.primary.len());
        known.ok_or(codes::INVALID_DEVICE)
    }

    /// The device of the current context.
    pub fn device_here(&self) -> Result<usize, codes::Code> {
        self.contexts.device_of(self.here).ok_or(codes::INVALID_CONTEXT)
    }

    /// Retains the primary context of a device.
    pub fn retain(&mut self, device: usize) -> u64 {
        if self.contexts.primary[device].retained == 0 {
            self.contexts.primary[device].handle = self.new_handle();
        }
        self.contexts.primary[device].retained += 1;
        self.contexts.primary[device].handle
    }

    /// Does all work of a context.
    pub fn finish(&mut self, context: u64) {
        for point in self.streams.all_of(context) {
            self.wait_for(point);
        }
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
}
