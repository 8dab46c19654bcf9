//! The options that a checkpoint is read with.

use std::path::PathBuf;

use crate::source::LinkPolicy;

/// How a checkpoint is read. Each option is part of the virtual file's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ParseOptions {
    /// The dictionary to show, as a dotted path from the top of a torch checkpoint.
    pub root_key: Option<String>,
    /// Leave out what cannot be shown, with a note, instead of refusing the checkpoint.
    pub allow_partial: bool,
    /// Let links and index entries lead out of the directory.
    pub follow_symlinks: bool,
    /// The number of ranks of the training run, for folders that do not record it.
    pub ranks: Option<u32>,
    /// The model that training began with: the base of the first delta. `None` is the folder of version 0.
    pub delta_base: Option<PathBuf>,
}

impl ParseOptions {
    /// Where links may lead.
    pub fn link_policy(&self) -> LinkPolicy {
        if self.follow_symlinks { LinkPolicy::Anywhere } else { LinkPolicy::Inside }
    }

    /// The same options for a checkpoint that need not have the dictionary: the default one is shown.
    pub fn without_root_key(&self) -> ParseOptions {
        ParseOptions { root_key: None, ..self.clone() }
    }

    /// The same options for the base of a delta.
    pub fn without_delta_base(&self) -> ParseOptions {
        ParseOptions { delta_base: None, ..self.clone() }
    }
}
