//! A checkpoint found by the names in a directory, not yet read.

/// The files of one checkpoint in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The name to call it by: its file's, its index's, or a numbered set's without the numbers.
    pub name: String,
    /// The name that it would have as one file of its own format.
    pub whole: String,
    /// Its files.
    pub members: Members,
}

/// The files of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Members {
    /// A file by itself.
    File,
    /// An index, and the shards that it names. `beside` are numbered files of the same stem that it
    /// does not name.
    Index {
        /// The shards that it names, in order; none where it cannot be read.
        shards: Vec<String>,
        /// Names that no loader would read.
        beside: Vec<String>,
    },
    /// A numbered set without an index.
    Numbered {
        /// The shards that are there, in order.
        shards: Vec<String>,
        /// How many there should be.
        of: u64,
        /// Why it cannot be joined.
        fault: Option<SetFault>,
    },
}

/// Why the files of a numbered set cannot be joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetFault {
    /// Shards are missing; this is the first of them.
    Missing(String),
    /// The set is complete both when counted from 0 and when counted from 1.
    AmbiguousNumbering,
}

impl Candidate {
    /// Whether its files are torch's by their names.
    pub fn is_torch(&self) -> bool {
        !self.whole.ends_with(".safetensors") && !self.whole.ends_with(".sft")
    }

    /// Whether it is one file that is safetensors by its name, which is shown as it is.
    pub fn is_safetensors_file(&self) -> bool {
        self.members == Members::File && !self.is_torch()
    }

    /// The index by which loaders of safetensors know its files, if it has one.
    pub fn index(&self) -> Option<&str> {
        let is_one = !self.is_torch() && matches!(self.members, Members::Index { .. });
        is_one.then_some(self.name.as_str())
    }

    /// The order in which loaders prefer candidates: lowest first.
    pub fn rank(&self) -> u8 {
        match (self.is_torch(), &self.members) {
            (false, Members::File) => 0,
            (false, _) => 1,
            (true, Members::File) => 2,
            (true, _) => 3,
        }
    }

    /// The names of its files, with its index and the files beside the index.
    pub fn originals(&self) -> Vec<String> {
        match &self.members {
            Members::File => vec![self.name.clone()],
            Members::Index { shards, beside } => {
                let mut names = vec![self.name.clone()];
                names.extend(shards.iter().chain(beside).cloned());
                names
            }
            Members::Numbered { shards, .. } => shards.clone(),
        }
    }
}

/// Stems of names that loaders look for: of the torch file, and of the same as safetensors.
const STEMS: [(&str, &str); 5] = [
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
    pub fn of(whole: &'a str) -> Option<Self> {
        let (name, extension) = whole.rsplit_once('.')?;
        let is_torch = match extension {
            "bin" => true,
            "safetensors" => false,
            _ => return None,
        };
        STEMS.iter().find_map(|&(torch, stem)| {
            let variant = name.strip_prefix(if is_torch { torch } else { stem })?;
            let is_one =
                (variant.is_empty() || variant.starts_with('.')) && !(is_torch && torch.is_empty());
            is_one.then_some(LoaderName { stem, variant })
        })
    }
}
