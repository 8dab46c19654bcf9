//! The virtual index of a set that is shown as one file: it names that file for every tensor.
//!
//! Loaders that take every `.safetensors` of a folder leave out what an index does not name. Loaders of any
//! model find a file that is not called `model.safetensors` by the index alone. There the index must stay,
//! and be true of what is shown.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};

use serde::Serialize;

use crate::virtual_file::VirtualFile;

use super::rules::VirtualFilePlan;

#[derive(Serialize)]
struct VirtualIndexJson<'a> {
    metadata: VirtualIndexMetadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct VirtualIndexMetadata {
    total_size: u64,
}

/// How virtual files begin that loaders find by name, whatever the model: with a variant or without.
const DEFAULT_NAME_PREFIX: &str = "model.";

/// The indexes that stay, and the place of each one's set among `files`. An index stays beside another
/// `.safetensors`, or where loaders do not find the virtual file by its name. `originals` maps each name of
/// the directory that belongs to a set to its place.
pub fn kept_indexes<'a>(
    files: &[VirtualFilePlan],
    names: impl Iterator<Item = &'a OsStr> + Clone,
    originals: &HashMap<OsString, usize>,
) -> HashMap<OsString, usize> {
    let is_safetensors = |name: &OsStr| name.as_encoded_bytes().ends_with(b".safetensors");
    let is_beside_another = |n| {
        let is_other = |name: &OsStr| originals.get(name) != Some(&n);
        files.len() > 1 || names.clone().any(|name| is_safetensors(name) && is_other(name))
    };
    let indexes = files.iter().enumerate().filter_map(|(n, file)| {
        let index = file.index_name()?;
        let stays = !file.name.starts_with(DEFAULT_NAME_PREFIX) || is_beside_another(n);
        stays.then(|| (OsString::from(index), n))
    });
    indexes.collect()
}

/// The text of the index: equal for equal virtual files of equal names.
pub fn index_json(file: &VirtualFile, name: &str) -> Vec<u8> {
    let tensors = file.tensors().iter();
    let index = VirtualIndexJson {
        metadata: VirtualIndexMetadata { total_size: file.size() - file.header_size() },
        weight_map: tensors.map(|tensor| (&*tensor.name, name)).collect(),
    };
    // Strings and a number always have a JSON form.
    serde_json::to_vec_pretty(&index).unwrap_or_default()
}
