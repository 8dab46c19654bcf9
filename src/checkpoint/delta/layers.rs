//! Reads the headers of the files of deltas: which tensors each changes, and where the changes lie.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::contents::{Checkpoint, MAX_TENSOR_COUNT};
use crate::checkpoint::delta_error::DeltaError;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::Format;
use crate::checkpoint::name_index::NameIndex;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::shard_index::{IndexError, ShardIndex, parse_index_or_empty};
use crate::checkpoint::single_file::read_file;
use crate::checkpoint::tensor::{
    ByteRun, Dtype, OriginId, PatchLayer, Tensor, TensorBytes, TensorChecksum,
};
use crate::source::{OpenFile, SourceError, SourceFile};
use crate::threads::parallel_map;

use super::chain::{DeltaChain, DeltaVersion, error_at};

/// The changes of one tensor of the base. The origin of a blob is the number of its file.
pub struct TensorPatch {
    /// The index of the tensor in the base.
    pub tensor: usize,
    /// The earliest first. Never empty.
    pub layers: Vec<PatchLayer>,
}

/// A file of a delta.
struct DeltaShard<'a> {
    delta: &'a DeltaVersion,
    /// The number of the delta in its chain.
    number: usize,
    index: &'a ShardIndex<'a>,
    name: &'a str,
}

/// Reads the headers of all deltas. Returns their files, and the changed tensors in the order of the base.
pub fn read_layers(
    chain: &DeltaChain,
    base: &Checkpoint,
) -> Result<(Vec<Arc<SourceFile>>, Vec<TensorPatch>), CheckpointError> {
    let indexes = chain.deltas.iter().map(parse_index).collect::<Result<Vec<_>, _>>()?;
    for (number, index) in indexes.iter().enumerate() {
        check_unnamed_files(chain, number, index)?;
    }
    let shards_of = |(number, index)| {
        let delta = &chain.deltas[number];
        let shards: &[String] = ShardIndex::shards(index);
        shards.iter().map(move |name| DeltaShard { delta, number, index, name })
    };
    // The earliest delta first.
    let shards: Vec<DeltaShard<'_>> =
        indexes.iter().enumerate().rev().flat_map(shards_of).collect();
    let contents = parallel_map(&shards, chain.root.reader_threads(), |shard| shard.read(chain));
    let unknown_tensor = |tensor: &str| {
        let (tensor, base) = (tensor.to_owned(), base.path.clone());
        DeltaError::UnknownTensor { tensor, base }
    };
    // Names are unique in every checkpoint.
    let names = NameIndex::build(base.tensors.len(), |n| &base.tensors[n].name).unwrap_or_default();
    let mut patches: BTreeMap<usize, TensorPatch> = BTreeMap::new();
    let mut files = Vec::with_capacity(shards.len());
    let mut layer_count = 0;
    for (shard, contents) in shards.iter().zip(contents) {
        let contents = contents?;
        let origin = OriginId(files.len() as u32);
        files.extend(contents.source_files().next().cloned());
        layer_count += contents.tensors.len();
        if layer_count > MAX_TENSOR_COUNT {
            let path = chain.deltas[0].file.file().path();
            return Err(error_at(path, DeltaError::TooManyLayers { limit: MAX_TENSOR_COUNT }));
        }
        for blob in &contents.tensors {
            let layer = shard.layer(blob, origin, &contents).map_err(|error| shard.error(error))?;
            let tensor = names.find(&blob.name, |n| &base.tensors[n].name);
            let tensor = tensor.ok_or_else(|| shard.error(unknown_tensor(&blob.name)))?;
            let empty = TensorPatch { tensor, layers: Vec::new() };
            patches.entry(tensor).or_insert(empty).layers.push(layer);
        }
    }
    Ok((files, patches.into_values().collect()))
}

fn parse_index(delta: &DeltaVersion) -> Result<ShardIndex<'_>, CheckpointError> {
    let path = delta.file.file().path();
    parse_index_or_empty(&delta.json, false).map_err(|error| CheckpointError::Index { path, error })
}

/// Refuses files beside an index that it does not name: trainers' engines would read them.
fn check_unnamed_files(
    chain: &DeltaChain,
    number: usize,
    index: &ShardIndex<'_>,
) -> Result<(), CheckpointError> {
    let names = chain.root.listed_file_names(&chain.folders[number])?.unwrap_or_default();
    let is_unnamed = |name: &String| {
        name.ends_with(".safetensors") && index.shards().binary_search(name).is_err()
    };
    match names.into_iter().find(is_unnamed) {
        Some(name) => {
            let path = chain.deltas[number].file.file().path();
            Err(error_at(path, DeltaError::UnnamedFile { name }))
        }
        None => Ok(()),
    }
}

impl DeltaShard<'_> {
    fn error(&self, error: DeltaError) -> CheckpointError {
        error_at(self.delta.file.file().path(), error)
    }

    /// Reads the header, and checks that it has exactly the tensors that the index says.
    fn read(&self, chain: &DeltaChain) -> Result<Checkpoint, CheckpointError> {
        let index_error =
            |error| CheckpointError::Index { path: self.delta.file.file().path(), error };
        let path = chain.folders[self.number].join(self.name);
        let file = OpenFile::open_in_root(&chain.root, &path).map_err(|error| match error {
            SourceError::Missing { .. } => {
                index_error(IndexError::MissingShard { shard: self.name.to_owned() })
            }
            error => error.into(),
        })?;
        let contents = read_file(&file, &ParseOptions::default())?;
        if contents.format != Format::Safetensors {
            return Err(self.shard_error("it is no safetensors file"));
        }
        let is_own = |tensor: &str| {
            let shard = self.index.shard_of(tensor).map(|n| &*self.index.shards()[n]);
            shard == Some(self.name)
        };
        if let Some(blob) = contents.tensors.iter().find(|blob| !is_own(&blob.name)) {
            let (tensor, shard) = (blob.name.to_string(), self.name.to_owned());
            return Err(self.error(DeltaError::Misplaced { tensor, shard }));
        }
        let number = self.index.shards().binary_search_by(|name| (**name).cmp(self.name));
        let named = number.map_or(0, |number| self.index.tensor_count_in(number));
        if contents.tensors.len() < named {
            let is_missing =
                |name: &&str| !contents.tensors.iter().any(|tensor| *tensor.name == **name);
            let missing = number.ok().and_then(|n| self.index.tensors_in(n).find(is_missing));
            let (tensor, shard) = (missing.unwrap_or_default().to_owned(), self.name.to_owned());
            return Err(index_error(IndexError::MissingTensor { tensor, shard }));
        }
        Ok(contents)
    }

    fn shard_error(&self, what: &'static str) -> CheckpointError {
        self.error(DeltaError::Shard { shard: self.name.to_owned(), what })
    }

    /// The changes in a tensor of the file.
    fn layer(
        &self,
        tensor: &Tensor,
        origin: OriginId,
        contents: &Checkpoint,
    ) -> Result<PatchLayer, DeltaError> {
        match tensor.bytes {
            TensorBytes::Run(run) if tensor.dtype == Dtype::U8 && tensor.shape.len() == 1 => {
                let blob = ByteRun { origin, ..run };
                let checksum = self.checksum(&tensor.name, contents)?;
                Ok(PatchLayer { blob, encoding: self.delta.metadata.encoding, checksum })
            }
            _ => Err(DeltaError::Shard {
                shard: self.name.to_owned(),
                what: "a tensor of it is not a list of bytes",
            }),
        }
    }

    /// The checksum of a tensor, which the metadata of the file has under its name.
    fn checksum(&self, tensor: &str, contents: &Checkpoint) -> Result<TensorChecksum, DeltaError> {
        let format = self.delta.metadata.checksum;
        let stated = contents.metadata.as_ref().and_then(|metadata| metadata.get(tensor));
        let is_valid = |digits: &&String| {
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            digits.len() == format.digit_count() && digits.bytes().all(is_digit)
        };
        match stated.filter(is_valid) {
            Some(digits) => Ok(TensorChecksum { format, digits: digits.as_str().into() }),
            None => {
                Err(DeltaError::Checksum { tensor: tensor.to_owned(), shard: self.name.to_owned() })
            }
        }
    }
}
