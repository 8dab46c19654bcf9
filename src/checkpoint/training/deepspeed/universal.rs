//! Reads DeepSpeed's universal checkpoint: the whole 32-bit weights of each parameter in a file of its own.
//!
//! What the optimizer does not have, buffers and frozen parameters, is in the files of the model, in its own type.
//! Without those files, the files of the parameters are all that is shown.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::contents::{Checkpoint, MAX_TENSOR_COUNT};
use crate::checkpoint::directory::parameter_of_path;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::Format;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::tensor::{
    Origin, OriginId, Shape, Tensor, TensorBytes, TensorName, boxes_of_values,
};
use crate::checkpoint::training_error::TrainingError;
use crate::source::{OpenFile, Root, SourceError, SourceFile};
use crate::threads::parallel_map;

use super::super::folder::{check_no_root_key, folder_path, in_folder};
use super::states::{ModelStates, UniversalWeight};
use super::zero_files::ZeroFiles;
use super::{insert, join_frozen, value_count};

/// The file of the model that a folder of stage 3 must have.
const FIRST_MODEL_NAME: &str = "zero_pp_rank_0_mp_rank_00_model_states.pt";

/// Reads a folder. `names` has those of the model's files, and the paths of the parameters' files.
pub fn read_universal_folder(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    names: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let folder = folder_path(root, directory);
    let error = in_folder(&folder);
    let (paths, states): (Vec<&String>, Vec<&String>) =
        names.iter().partition(|name| parameter_of_path(name).is_some());
    let states: Vec<String> = states.into_iter().cloned().collect();
    let ZeroFiles { models, detached, .. } = ZeroFiles::from_names(&states).map_err(error)?;
    if let Some(file) = detached.into_iter().next() {
        return Err(error(TrainingError::MissingFile { name: file.missing }));
    }
    check_no_root_key(options).map_err(error)?;
    if paths.len() > MAX_TENSOR_COUNT {
        return Err(CheckpointError::TooManyTensors { path, limit: MAX_TENSOR_COUNT });
    }
    let numbered: Vec<(usize, &String)> = models.iter().enumerate().collect();
    let read = |&(number, name): &(usize, &String)| {
        let file = OpenFile::open_in_root(root, &directory.join(name))?;
        let states = ModelStates::read(file, OriginId(number as u32), name);
        states.map_err(|e| e.into_checkpoint_error(name, error))
    };
    let read = parallel_map(&numbered, root.reader_threads(), read);
    let states = read.into_iter().collect::<Result<Vec<ModelStates>, CheckpointError>>()?;
    // Each is closed again: there may be more of them than a process may hold open.
    let read = |&(number, path): &(usize, &&String)| {
        let file = match OpenFile::open_in_root(root, &directory.join(path)) {
            Err(SourceError::Missing { .. }) => {
                return Err(error(TrainingError::MissingFile { name: (*path).clone() }));
            }
            file => file?,
        };
        let origin = OriginId((models.len() + number) as u32);
        let parameter = parameter_of_path(path).unwrap_or_default();
        let weight = UniversalWeight::read(&file, origin, path, parameter);
        let weight = weight.map_err(|e| e.into_checkpoint_error(path, error))?;
        file.check_unchanged()?;
        Ok((Arc::clone(file.file()), weight))
    };
    let numbered: Vec<(usize, &&String)> = paths.iter().enumerate().collect();
    let read = parallel_map(&numbered, root.reader_threads(), read);
    type FileAndWeight = (Arc<SourceFile>, UniversalWeight);
    let read = read.into_iter().collect::<Result<Vec<FileAndWeight>, CheckpointError>>()?;
    let (files, weights): (Vec<Arc<SourceFile>>, Vec<UniversalWeight>) = read.into_iter().unzip();
    let tensors = join_weights(&states, &models, weights).map_err(error)?;
    for states in &states {
        states.file.check_unchanged()?;
    }
    let step = states.first().and_then(|model| model.step);
    let step = step.map(|step| format!(", step {step}")).unwrap_or_default();
    let obvious_choices =
        vec![format!("joined from DeepSpeed's universal checkpoint, in 32 bits{step}")];
    let is_without_model = states.is_empty();
    let note = || "buffers may be missing: no file `*_model_states.pt` is there".to_owned();
    let notes = is_without_model.then(note).into_iter().collect();
    let models = states.iter().map(|states| Arc::clone(states.file.file()));
    Ok(Checkpoint {
        path,
        format: Format::DeepSpeed,
        is_sharded: true,
        origins: models.chain(files).map(Origin::File).collect(),
        open_file: None,
        index_files: Vec::new(),
        tensors,
        metadata: None,
        header: None,
        obvious_choices,
        notes,
        refused: Vec::new(),
        options: options.clone(),
        recipe: None,
    })
}

/// All tensors, in the order of the module. `names` are those of the files of the model.
fn join_weights(
    models: &[ModelStates],
    names: &[String],
    weights: Vec<UniversalWeight>,
) -> Result<Vec<Tensor>, TrainingError> {
    let mut by_name: HashMap<String, UniversalWeight> =
        weights.into_iter().map(|weight| (weight.tensor.name.to_string(), weight)).collect();
    let Some((model, name)) = models.first().zip(names.first()) else {
        let mut weights: Vec<UniversalWeight> = by_name.into_values().collect();
        if weights.iter().any(|weight| weight.is_flat) {
            return Err(TrainingError::MissingFile { name: FIRST_MODEL_NAME.to_owned() });
        }
        weights.sort_by(|a, b| (*a.tensor.name).cmp(&b.tensor.name));
        return Ok(weights.into_iter().map(|weight| weight.tensor).collect());
    };
    let is_cut = name.contains("zero_pp_rank_");
    let mut found: HashMap<&str, Tensor> = HashMap::new();
    for (parameter, shape) in model.groups.iter().flatten() {
        let missing = || TrainingError::MissingFile { name: format!("zero/{parameter}/fp32.pt") };
        let weight = by_name.remove(parameter).ok_or_else(missing)?;
        insert_weight(&mut found, parameter, shape, weight)?;
    }
    join_frozen(models, is_cut, name, &mut found)?;
    let buffers: HashSet<&str> = model.buffers.iter().map(String::as_str).collect();
    for tensor in model.module.iter().filter(|tensor| buffers.contains(&*tensor.name)) {
        found.entry(&tensor.name).or_insert_with(|| tensor.clone());
    }
    for (alias, owner) in &model.shared {
        if let Some(tensor) = found.get(owner.as_str()).cloned() {
            found.entry(alias).or_insert(Tensor { name: TensorName::from(&**alias), ..tensor });
        }
    }
    // In the module, parameters are empty at stage 3. At other stages, each tensor is whole.
    for tensor in model.module.iter().filter(|_| !is_cut) {
        found.entry(&tensor.name).or_insert_with(|| tensor.clone());
    }
    let mut tensors: Vec<Tensor> =
        model.module.iter().filter_map(|tensor| found.remove(&*tensor.name)).collect();
    let mut others: Vec<Tensor> = found.into_values().collect();
    let shown: HashSet<&str> = tensors.iter().chain(&others).map(|tensor| &*tensor.name).collect();
    let unnamed = by_name.values().filter(|weight| !shown.contains(&*weight.tensor.name));
    let unnamed: Vec<Tensor> = unnamed.map(|weight| weight.tensor.clone()).collect();
    if by_name.values().any(|weight| weight.is_flat) {
        return Err(TrainingError::MalformedStates {
            name: name.clone(),
            what: "it does not have the shape of a parameter",
        });
    }
    others.extend(unnamed);
    others.sort_by(|a, b| (*a.name).cmp(&b.name));
    tensors.extend(others);
    Ok(tensors)
}

/// Adds a parameter in its shape.
fn insert_weight<'a>(
    found: &mut HashMap<&'a str, Tensor>,
    name: &'a str,
    shape: &Shape,
    weight: UniversalWeight,
) -> Result<(), TrainingError> {
    let UniversalWeight { tensor, is_flat } = weight;
    let malformed =
        |what| TrainingError::MalformedStates { name: format!("zero/{name}/fp32.pt"), what };
    if !is_flat {
        // Its own shape counts: it is without the padding of a vocabulary, for example.
        return match found.insert(name, tensor) {
            None => Ok(()),
            Some(_) => Err(TrainingError::DuplicateTensor { tensor: name.to_owned() }),
        };
    }
    let TensorBytes::Run(run) = tensor.bytes else {
        return Err(malformed("its weights are not contiguous"));
    };
    let item_bytes = tensor.dtype.torch_item_bytes();
    let count = value_count(shape).filter(|count| count.checked_mul(item_bytes) == Some(run.len));
    let count = count.ok_or(malformed("its weights do not fill the shape in the model's file"))?;
    let boxes = boxes_of_values(shape, item_bytes, 0..count, run);
    insert(found, name, shape, tensor.dtype, boxes)
}
