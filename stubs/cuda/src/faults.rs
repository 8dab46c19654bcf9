//! Faults of the caller, as values.

use crate::codes::Code;

/// A fault, and the code of the call that makes it if the process goes on.
pub struct Fault {
    pub code: Code,
    pub words: String,
}

impl Fault {
    pub fn new(code: Code, words: impl Into<String>) -> Fault {
        Fault { code, words: words.into() }
    }
}
