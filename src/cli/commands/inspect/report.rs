//! The report of `ckptfs inspect`: its JSON (docs/formats.md), and the source of its text.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::checkpoint::{Checkpoint, Format, LayoutKind, find_overlaps};
use crate::virtual_file::VirtualFile;

use crate::cli::error::CommandError;

#[derive(Debug, Default, Serialize)]
pub struct InspectReport {
    /// The path of the command.
    pub path: String,
    pub format: Option<Format>,
    pub files: Vec<FileReport>,
    pub tensors: Vec<TensorReport>,
    pub metadata: BTreeMap<String, String>,
    pub notes: Vec<String>,
    pub refused: Vec<RefusalReport>,
    pub virtual_file: Option<VirtualFileReport>,
    /// Why it cannot be shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<CommandError>,
}

#[derive(Debug, Serialize)]
pub struct FileReport {
    pub path: String,
    pub size: u64,
}

#[derive(Debug, Serialize)]
pub struct TensorReport {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub nbytes: u64,
    pub layout: LayoutKind,
    pub shares_with: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct RefusalReport {
    /// `None` if the whole checkpoint is refused.
    pub tensor: Option<String>,
    pub path: Option<String>,
    pub reason: String,
    pub remedy: String,
}

#[derive(Debug, Serialize)]
pub struct VirtualFileReport {
    pub size: u64,
    pub header_size: u64,
    pub layout: String,
    pub identity: String,
}

impl InspectReport {
    /// The report of a checkpoint that could be parsed, still without its virtual file.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> InspectReport {
        let shares = find_overlaps(&checkpoint.tensors);
        let name = |index: usize| checkpoint.tensors[index].name.to_string();
        let tensors = checkpoint.tensors.iter().zip(shares).map(|(tensor, shares)| TensorReport {
            name: tensor.name.to_string(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.to_vec(),
            nbytes: tensor.bytes.len(),
            layout: tensor.layout_kind(&checkpoint.origins),
            shares_with: shares.into_iter().map(name).collect(),
        });
        let may_leave_out = !checkpoint.tensors.is_empty() && !checkpoint.options.allow_partial;
        let refused = checkpoint.refused.iter().map(|entry| RefusalReport {
            tensor: Some(entry.name.clone()),
            path: Some(checkpoint.path.display().to_string()),
            reason: entry.error.to_string(),
            remedy: entry.error.remedy(may_leave_out).into_owned(),
        });
        let files = checkpoint.source_files();
        InspectReport {
            format: Some(checkpoint.format),
            files: files
                .map(|file| FileReport {
                    path: file.path().display().to_string(),
                    size: file.identity().size,
                })
                .collect(),
            tensors: tensors.collect(),
            metadata: checkpoint.metadata.clone().unwrap_or_default(),
            notes: [&*checkpoint.obvious_choices, &*checkpoint.notes].concat(),
            refused: refused.collect(),
            ..InspectReport::default()
        }
    }

    /// The report of a checkpoint that could not be parsed.
    pub fn from_refusal(path: Option<String>, reason: String, remedy: &str) -> InspectReport {
        InspectReport {
            refused: vec![RefusalReport { tensor: None, path, reason, remedy: remedy.to_owned() }],
            ..InspectReport::default()
        }
    }

    /// Whether it reports a refusal, of the whole or of entries.
    pub fn is_refusal(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Adds the virtual file.
    pub fn set_virtual_file(&mut self, virtual_file: &VirtualFile) {
        self.metadata = virtual_file.metadata().clone();
        self.virtual_file = Some(VirtualFileReport {
            size: virtual_file.size(),
            header_size: virtual_file.header_size(),
            layout: virtual_file.layout_hash().to_string(),
            identity: virtual_file.identity().to_string(),
        });
    }
}
