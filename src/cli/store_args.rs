//! Options of object stores, for each command that takes a source.

/// Options of object stores; empty in a build without them.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Object stores")]
pub struct StoreArgs {
    #[cfg(feature = "remote")]
    #[command(flatten)]
    overrides: crate::source::RemoteOverrides,
}

impl StoreArgs {
    /// Sets the options of this process. A build without stores has none, and refuses their URLs.
    pub fn apply(&self) {
        #[cfg(feature = "remote")]
        crate::source::set_remote_options(self.overrides.clone());
    }
}
