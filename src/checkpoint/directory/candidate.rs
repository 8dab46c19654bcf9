//! A checkpoint found by the names in a directory, not yet read.

use std::path::PathBuf;

use super::training_folder::TrainingFolder;

/// The files of one checkpoint in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The name to call it by: its file's, its index's, or a numbered set's without the numbers.
    pub name: String,
    /// The name that it would have as one file of its own format.
    pub unsharded_name: String,
    /// The files that make it up.
    pub files: CandidateFiles,
}

/// The files of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CandidateFiles {
    /// A file by itself.
    Single,
    /// An index, and the shards that it names. `unindexed` are numbered files of the same stem that it does not name.
    Indexed {
        /// The shards that it names, in order; none where it cannot be read.
        shards: Vec<String>,
        /// Names that no loader would read.
        unindexed: Vec<String>,
    },
    /// A version that is a delta on others.
    Delta {
        /// The files with its changes, in order.
        shards: Vec<String>,
        /// The paths of its chain, from the root. Their state decides what it is, too.
        chain: Vec<PathBuf>,
        /// Its base, if the versions before it lead to one.
        base: Option<BaseVersion>,
    },
    /// The files of many ranks.
    Ranks(TrainingFolder),
    /// A numbered set without an index.
    Numbered {
        /// The shards that are there, in order.
        shards: Vec<String>,
        /// How many there should be.
        total: u64,
        /// Why it cannot be joined.
        error: Option<NumberedSetError>,
    },
}

/// The full version that deltas begin with, by its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseVersion {
    /// The number of the version.
    pub version: u64,
    /// The path from the root to its folder, which need not be there for version 0.
    pub folder: PathBuf,
}

/// Why the files of a numbered set cannot be joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumberedSetError {
    /// Shards are missing; this is the first of them.
    MissingShard(String),
    /// The set is complete both when counted from 0 and when counted from 1.
    AmbiguousNumbering,
}

impl Candidate {
    /// A file by itself.
    pub fn single(name: String) -> Candidate {
        Candidate { unsharded_name: name.clone(), name, files: CandidateFiles::Single }
    }

    /// The checkpoint of a training folder, called by the name of its virtual file.
    pub fn from_training_folder(folder: TrainingFolder) -> Candidate {
        let name = folder.virtual_name.clone();
        Candidate { unsharded_name: name.clone(), name, files: CandidateFiles::Ranks(folder) }
    }

    /// Whether its files are torch's by their names.
    pub fn is_torch(&self) -> bool {
        !self.unsharded_name.ends_with(".safetensors") && !self.unsharded_name.ends_with(".sft")
    }

    /// Whether it is one file that is safetensors by its name, which is shown as it is.
    pub fn is_safetensors_file(&self) -> bool {
        self.files == CandidateFiles::Single && !self.is_torch()
    }

    /// The index by which loaders of safetensors know its files, if it has one.
    pub fn index_name(&self) -> Option<&str> {
        let is_one = !self.is_torch() && matches!(self.files, CandidateFiles::Indexed { .. });
        is_one.then_some(self.name.as_str())
    }

    /// The order in which loaders prefer candidates: lowest first.
    pub fn loader_rank(&self) -> u8 {
        match (self.is_torch(), &self.files) {
            (false, CandidateFiles::Single) => 0,
            (false, _) => 1,
            (true, CandidateFiles::Single) => 2,
            (true, _) => 3,
        }
    }

    /// The names of its files that the virtual file hides.
    pub fn hidden_names(&self) -> Vec<String> {
        match &self.files {
            CandidateFiles::Ranks(folder) if !folder.hides_files() => Vec::new(),
            _ => self.original_names(),
        }
    }

    /// Whether its virtual file cannot be shown beside its files.
    pub fn excludes_originals(&self) -> bool {
        match &self.files {
            CandidateFiles::Ranks(folder) => folder.hides_files(),
            // Its files have other bytes under the names of the same tensors.
            CandidateFiles::Delta { .. } => true,
            _ => false,
        }
    }

    /// The paths from the root whose state decides what it is, beside those in its directory.
    pub fn watched_root_paths(&self) -> &[PathBuf] {
        match &self.files {
            CandidateFiles::Delta { chain, .. } => chain,
            _ => &[],
        }
    }

    /// The paths in its directory whose state decides what it is: its files, and the folders in which it is looked for.
    pub fn watched_paths(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> =
            self.original_names().into_iter().map(PathBuf::from).collect();
        if let CandidateFiles::Ranks(folder) = &self.files {
            paths.extend(folder.other_folders());
        }
        paths
    }

    /// The names of its files, with its index and the files beside the index.
    pub fn original_names(&self) -> Vec<String> {
        match &self.files {
            CandidateFiles::Single => vec![self.name.clone()],
            CandidateFiles::Indexed { shards, unindexed: beside } => {
                let mut names = vec![self.name.clone()];
                names.extend(shards.iter().chain(beside).cloned());
                names
            }
            CandidateFiles::Delta { shards, .. } => {
                std::iter::once(&self.name).chain(shards).cloned().collect()
            }
            CandidateFiles::Numbered { shards, .. } => shards.clone(),
            CandidateFiles::Ranks(folder) => folder.paths(),
        }
    }
}

/// Stems of names that loaders look for: of the torch file, and of the same as safetensors.
const LOADER_STEMS: [(&str, &str); 5] = [
    ("pytorch_model", "model"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    ("adapter_model", "adapter_model"),
    ("pytorch_lora_weights", "pytorch_lora_weights"),
    // Never written by torch.save under this name.
    ("", "model"),
];

/// The name of a file that loaders look for, whatever its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderName<'a> {
    /// The stem that the name has as safetensors.
    pub stem: &'static str,
    /// The variant with its leading dot; empty if there is none.
    pub variant: &'a str,
}

impl<'a> LoaderName<'a> {
    /// Parses the name of a whole file; `None` if no loader looks for it.
    pub fn parse(file_name: &'a str) -> Option<Self> {
        let (name, extension) = file_name.rsplit_once('.')?;
        let is_torch = match extension {
            "bin" => true,
            "safetensors" => false,
            _ => return None,
        };
        LOADER_STEMS.iter().find_map(|&(torch, stem)| {
            let variant = name.strip_prefix(if is_torch { torch } else { stem })?;
            let is_one =
                (variant.is_empty() || variant.starts_with('.')) && !(is_torch && torch.is_empty());
            is_one.then_some(LoaderName { stem, variant })
        })
    }
}
