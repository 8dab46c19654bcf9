//! Reads a version that a trainer wrote as a delta: its base, and the changes by all deltas since.
//!
//! Changes are not decoded here: each changed tensor becomes an origin of its own ([`PatchedBytes`]).
//! `chain` finds the deltas, and `layers` reads their headers.

mod chain;
mod layers;

use std::path::Path;
use std::sync::Arc;

use crate::source::Root;

use super::contents::Checkpoint;
use super::delta_error::DeltaError;
use super::error::CheckpointError;
use super::format::Format;
use super::options::ParseOptions;
use super::tensor::{
    ByteRun, Dtype, Origin, OriginId, PatchLayer, PatchedBytes, Tensor, TensorBytes,
};

pub use chain::DeltaVersion;
use chain::{BasePlace, find_chain};
use layers::{TensorPatch, read_layers};

/// Opens the checkpoint of a directory, given its root and the path in that.
pub type OpenBase<'a> = dyn Fn(&Arc<Root>, &Path) -> Result<Checkpoint, CheckpointError> + 'a;

/// Reads the version whose index is open. `open_directory` opens a base that lies beside it. `open_path` opens
/// one that the user named.
pub fn read_version(
    root: &Arc<Root>,
    directory: &Path,
    index: DeltaVersion,
    options: &ParseOptions,
    open_directory: &OpenBase<'_>,
    open_path: &dyn Fn(&Path) -> Result<Checkpoint, CheckpointError>,
) -> Result<Checkpoint, CheckpointError> {
    let path = index.file.file().path();
    let chain = find_chain(root, directory, index, options.delta_base.as_deref())?;
    let base = match &chain.base {
        BasePlace::Folder(folder) => open_directory(&chain.root, folder)?,
        BasePlace::Named(path) => open_path(path)?,
    };
    let (files, patches) = read_layers(&chain, &base)?;
    let note = format!(
        "version {} is {} on {}",
        chain.deltas.first().map_or(0, |delta| delta.metadata.version),
        match chain.deltas.len() {
            1 => "a delta".to_owned(),
            deltas => format!("the last of {deltas} deltas"),
        },
        base.path.display()
    );
    // Of all versions, the base included, the layout is one.
    let header = base.header.clone().filter(|_| base.is_sharded);
    let mut checkpoint = Checkpoint {
        path,
        format: Format::Delta,
        is_sharded: true,
        open_file: None,
        header,
        options: options.clone(),
        ..base
    };
    let first_file = checkpoint.origins.len() as u32;
    checkpoint.origins.extend(files.iter().map(|file| Origin::File(Arc::clone(file))));
    for TensorPatch { tensor, mut layers } in patches {
        layers.iter_mut().for_each(|layer| layer.blob.origin.0 += first_file);
        apply_patch(&mut checkpoint, tensor, layers);
    }
    checkpoint.obvious_choices.push(note);
    for delta in &chain.deltas {
        delta.file.check_unchanged()?;
        checkpoint.index_files.push(Arc::clone(delta.file.file()));
    }
    Ok(checkpoint)
}

/// Turns a tensor into a patched origin. A tensor that is patched already gets more layers.
fn apply_patch(checkpoint: &mut Checkpoint, tensor: usize, mut layers: Vec<PatchLayer>) {
    let patched_origin = OriginId(checkpoint.origins.len() as u32);
    let tensor = &mut checkpoint.tensors[tensor];
    let len = tensor.bytes.len();
    let run = TensorBytes::Run(ByteRun { origin: patched_origin, offset: 0, len });
    let mut base = std::mem::replace(&mut tensor.bytes, run);
    if let TensorBytes::Run(ByteRun { origin, .. }) = base
        && let Some(earlier) = checkpoint.origins[origin.0 as usize].patched()
    {
        layers.splice(0..0, earlier.layers.iter().cloned());
        base = earlier.base.clone();
    }
    let name = tensor.name.clone();
    let patched = PatchedBytes::new(name, base, layers.into());
    checkpoint.origins.push(Origin::Patched(Arc::new(patched)));
}

/// Whether a checkpoint is made of files of a delta: all tensors are lists of bytes, each with a checksum under its name.
pub fn holds_changes(checkpoint: &Checkpoint) -> bool {
    let metadata = checkpoint.metadata.as_ref();
    let is_blob = |tensor: &Tensor| {
        let has_checksum = |digits: &String| {
            matches!(digits.len(), 8 | 32 | 64)
                && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        tensor.dtype == Dtype::U8
            && tensor.shape.len() == 1
            && metadata.and_then(|all| all.get(&*tensor.name)).is_some_and(has_checksum)
    };
    checkpoint.format == Format::Safetensors
        && !checkpoint.tensors.is_empty()
        && checkpoint.tensors.iter().all(is_blob)
}

/// Refuses a checkpoint that is made of files of a delta without their index.
pub fn refuse_without_index(checkpoint: Checkpoint) -> Result<Checkpoint, CheckpointError> {
    match holds_changes(&checkpoint) {
        true => {
            let error = Box::new(DeltaError::MissingIndex);
            Err(CheckpointError::Delta { path: checkpoint.path, error })
        }
        false => Ok(checkpoint),
    }
}
