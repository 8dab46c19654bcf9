//! Whether the Python environment that runs this command is enabled (`ckptfs enable`). The Python package sets it.

use std::sync::OnceLock;

/// The state of the environment, in words.
#[derive(Debug)]
pub struct PythonEnvironment {
    pub state: String,
    /// What to do; empty if there is nothing to do.
    pub remedy: String,
}

static ENVIRONMENT: OnceLock<PythonEnvironment> = OnceLock::new();

/// Sets the state. Only the first call counts: a process is one command.
#[cfg(feature = "python")]
pub fn set(state: String, remedy: String) {
    let _ = ENVIRONMENT.set(PythonEnvironment { state, remedy });
}

/// The state, if Python runs this command.
pub fn get() -> Option<&'static PythonEnvironment> {
    ENVIRONMENT.get()
}
