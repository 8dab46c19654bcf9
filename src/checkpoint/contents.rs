//! What a checkpoint holds, read except for the bytes of its tensors.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::source::{OpenFile, SourceFile};

use super::format::Format;
use super::options::ParseOptions;
use super::refusal::RefusedEntry;
use super::tensor::{Origin, Tensor};

/// Maximum number of tensors in a checkpoint: ten times the largest ever seen. A header of more would
/// exceed the 100,000,000 bytes that every reader takes.
pub const MAX_TENSOR_COUNT: usize = 2_000_000;

/// A checkpoint: one file, or a set of shards.
#[derive(Debug)]
pub struct Checkpoint {
    /// The path to print: the file, the index, or the name of a numbered set.
    pub path: PathBuf,
    /// The format of its files; of the first, should they differ.
    pub format: Format,
    /// Whether it is a set of shards.
    pub is_sharded: bool,
    /// What holds the bytes. Each file is followed by the storages that were unpacked from it.
    pub origins: Vec<Origin>,
    /// The single file of the checkpoint, still open so that the caller can read it at once. Layout closes it.
    pub open_file: Option<OpenFile>,
    /// The index of a set of shards, or the tables of a training folder. They are sources too: another index is another
    /// checkpoint.
    pub index_files: Vec<Arc<SourceFile>>,
    /// The tensors, in the order of the source.
    pub tensors: Vec<Tensor>,
    /// The metadata of the source, which may be empty; `None` if the source has none.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The raw header of a single safetensors file, with its length prefix. `None` for other formats and several files.
    pub header: Option<Arc<[u8]>>,
    /// Choices that need no note, in words: only training state was left out, or ranks were joined.
    pub obvious_choices: Vec<String>,
    /// What else was chosen and what was left out, in words.
    pub notes: Vec<String>,
    /// Entries that cannot be shown. Any entry refuses the checkpoint, unless the options allow a part.
    pub refused: Vec<RefusedEntry>,
    /// The options that it was read with.
    pub options: ParseOptions,
    /// What was done with the tensors since they were read, in a canonical form; `None` if nothing. It is part of the
    /// virtual file's layout hash and identity.
    pub recipe: Option<Arc<str>>,
}

impl Checkpoint {
    /// The source files, including the index.
    pub fn source_files(&self) -> impl Iterator<Item = &Arc<SourceFile>> {
        self.origins.iter().filter_map(Origin::file).chain(&self.index_files)
    }

    /// Appends the tensors of another checkpoint, with what else is known of them. Names are not compared.
    pub fn append(&mut self, other: Checkpoint) {
        let Checkpoint {
            path: _,
            format: _,
            is_sharded: _,
            origins,
            open_file: _,
            index_files,
            tensors,
            metadata,
            header: _,
            obvious_choices,
            notes,
            refused,
            options: _,
            recipe,
        } = other;
        self.header = None;
        let first_origin = self.origins.len() as u32;
        self.origins.extend(origins.into_iter().map(|mut origin| {
            origin.shift_origins(first_origin);
            origin
        }));
        self.index_files.extend(index_files);
        self.tensors.extend(tensors.into_iter().map(|mut tensor| {
            tensor.bytes.shift_origin(first_origin);
            tensor
        }));
        self.refused.extend(refused);
        if let Some(recipe) = recipe {
            let first = self.recipe.as_deref().unwrap_or_default();
            self.recipe = Some(format!("{first}{recipe}").into());
        }
        let add = |to: &mut Vec<String>, notes: Vec<String>| {
            for note in notes {
                if !to.contains(&note) {
                    to.push(note);
                }
            }
        };
        add(&mut self.obvious_choices, obvious_choices);
        add(&mut self.notes, notes);
        if let Some(metadata) = metadata {
            merge_metadata(self.metadata.get_or_insert_default(), metadata, &mut self.notes);
        }
    }
}

/// Adds the metadata of a part. Of values that differ, that of the first part stays, with a note.
fn merge_metadata(
    whole: &mut BTreeMap<String, String>,
    part: BTreeMap<String, String>,
    notes: &mut Vec<String>,
) {
    for (key, value) in part {
        match whole.get(&key) {
            None => drop(whole.insert(key, value)),
            Some(first) if *first == value => {}
            Some(_) => {
                let note =
                    format!("metadata `{key}` differs between shards: that of the first is kept");
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
    }
}

/// What one file holds, without what is known of the file itself. Origin 0 is the file.
#[derive(Debug)]
pub struct FileContents {
    /// The tensors, in the order of the file.
    pub tensors: Vec<Tensor>,
    /// Storages that were unpacked into memory: origin 1 and on.
    pub unpacked: Vec<Origin>,
    /// The metadata of the file; `None` if it has none.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The raw header, with its length prefix; `None` if the file is not safetensors.
    pub header: Option<Arc<[u8]>>,
    /// Choices that need no note, in words: only training state was left out.
    pub obvious_choices: Vec<String>,
    /// What else was chosen and what was left out, in words.
    pub notes: Vec<String>,
    /// Entries that cannot be shown.
    pub refused: Vec<RefusedEntry>,
}
