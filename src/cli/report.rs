//! What `inspect` tells, as values: the JSON that docs/formats.md documents, and the source of the text.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::checkpoint::{Checkpoint, Format, Layout, sharing};
use crate::image::Image;

#[derive(Debug, Serialize)]
pub struct Report {
    pub format: Option<Format>,
    pub files: Vec<File>,
    pub tensors: Vec<Tensor>,
    pub metadata: BTreeMap<String, String>,
    pub notes: Vec<String>,
    pub refused: Vec<Refused>,
    pub image: Option<ImageReport>,
}

#[derive(Debug, Serialize)]
pub struct File {
    pub path: String,
    pub size: u64,
}

#[derive(Debug, Serialize)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub nbytes: u64,
    pub layout: Layout,
    pub shares_with: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Refused {
    /// `None` where it is the whole checkpoint.
    pub tensor: Option<String>,
    pub path: Option<String>,
    pub reason: String,
    pub remedy: String,
}

#[derive(Debug, Serialize)]
pub struct ImageReport {
    pub size: u64,
    pub header_size: u64,
    pub layout: String,
    pub identity: String,
}

impl Report {
    /// What a checkpoint that could be read holds; its image is still to be said.
    pub fn of(checkpoint: &Checkpoint) -> Report {
        let shares = sharing(&checkpoint.tensors);
        let name = |place: usize| checkpoint.tensors[place].name.to_string();
        let tensors = checkpoint.tensors.iter().zip(shares).map(|(tensor, shares)| Tensor {
            name: tensor.name.to_string(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.to_vec(),
            nbytes: tensor.bytes.len(),
            layout: tensor.layout(&checkpoint.origins),
            shares_with: shares.into_iter().map(name).collect(),
        });
        let refused = checkpoint.refused.iter().map(|entry| Refused {
            tensor: Some(entry.name.clone()),
            path: Some(checkpoint.path.display().to_string()),
            reason: entry.fault.to_string(),
            remedy: entry.fault.remedy().to_owned(),
        });
        let files = checkpoint.files();
        Report {
            format: Some(checkpoint.format),
            files: files
                .map(|file| File {
                    path: file.path().display().to_string(),
                    size: file.identity().size,
                })
                .collect(),
            tensors: tensors.collect(),
            metadata: checkpoint.metadata.clone().unwrap_or_default(),
            notes: checkpoint.notes.clone(),
            refused: refused.collect(),
            image: None,
        }
    }

    /// A checkpoint that could not be read at all.
    pub fn refusal(path: Option<String>, reason: String, remedy: &str) -> Report {
        Report {
            format: None,
            files: Vec::new(),
            tensors: Vec::new(),
            metadata: BTreeMap::new(),
            notes: Vec::new(),
            refused: vec![Refused { tensor: None, path, reason, remedy: remedy.to_owned() }],
            image: None,
        }
    }

    /// Adds what the checkpoint looks like as one file.
    pub fn set_image(&mut self, image: &Image) {
        self.metadata = image.metadata().clone();
        self.image = Some(ImageReport {
            size: image.size(),
            header_size: image.header_size(),
            layout: image.layout().to_string(),
            identity: image.identity().to_string(),
        });
    }
}
