//! The index of a set that is shown as one file: it names that file for every tensor.
//!
//! In: what is planned for a directory, and an image and its name. Out: which indexes stay, and their
//! text. Loaders that take every `.safetensors` of a folder leave out what an index does not name, and
//! loaders of any model find a file that is not called `model.safetensors` by the index alone: there the
//! index must go on being there, and be true of what is shown.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use serde::Serialize;

use crate::virtual_file::VirtualFile;

use super::build::PlannedFile;

#[derive(Serialize)]
struct VirtualIndexJson<'a> {
    metadata: VirtualIndexMetadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct VirtualIndexMetadata {
    total_size: u64,
}

/// What the images are called that loaders find by name, whatever the model: with a variant or without.
const DEFAULT_NAME_PREFIX: &str = "model.";

/// The indexes by which sets are found or told from others, by name, and to which of the planned each
/// belongs: of those beside which another `.safetensors` is to be seen, and of those whose image is not
/// found by name. `originals` says what the names in the directory become part of.
pub fn kept_indexes<'a>(
    planned: &[Arc<PlannedFile>],
    names: impl Iterator<Item = &'a OsStr> + Clone,
    originals: &HashMap<OsString, usize>,
) -> HashMap<OsString, usize> {
    let is_safetensors = |name: &OsStr| name.as_encoded_bytes().ends_with(b".safetensors");
    let is_beside = |n| {
        let is_other = |name: &OsStr| originals.get(name) != Some(&n);
        planned.len() > 1 || names.clone().any(|name| is_safetensors(name) && is_other(name))
    };
    let indexes = planned.iter().enumerate().filter_map(|(n, planned)| {
        let index = planned.plan.candidate.index_name()?;
        let stays = !planned.plan.name.starts_with(DEFAULT_NAME_PREFIX) || is_beside(n);
        stays.then(|| (OsString::from(index), n))
    });
    indexes.collect()
}

/// The same image by the same name has the same text.
pub fn index_json(image: &VirtualFile, name: &str) -> Vec<u8> {
    let tensors = image.tensors().iter();
    let index = VirtualIndexJson {
        metadata: VirtualIndexMetadata { total_size: image.size() - image.header_size() },
        weight_map: tensors.map(|tensor| (&*tensor.name, name)).collect(),
    };
    // Of strings and a number, which JSON always has.
    serde_json::to_vec_pretty(&index).unwrap_or_default()
}
