//! Joins the 32-bit weights of a DeepSpeed run with ZeRO, at stages 1 to 3.
//!
//! The optimizer of each rank holds flat parts of all parameters. `states` reads the files; here each parameter is
//! found in the flat parts. What the optimizer does not have, buffers and frozen parameters, keeps its own type.

mod states;
mod universal;
mod zero_files;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::contents::Checkpoint;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::Format;
use crate::checkpoint::options::ParseOptions;
use crate::checkpoint::tensor::{
    ByteRun, Dtype, Origin, OriginId, Shape, Tensor, TensorBox, TensorBytes, TensorName,
    boxes_of_values,
};
use crate::source::{OpenFile, Root};
use crate::threads::parallel_map;

use super::folder::{check_no_root_key, check_rank_count, folder_path, in_folder, origin_note};
use crate::checkpoint::training_error::TrainingError;
use states::{ModelStates, OptimStates};
pub use universal::read_universal_folder;
use zero_files::ZeroFiles;

/// Bytes of a 32-bit weight.
const WEIGHT_BYTES: u64 = 4;

/// The contents of a file.
enum RankStates {
    Model(ModelStates),
    Optim(OptimStates),
}

/// Reads a folder with files of these names.
pub fn read_folder(
    root: &Arc<Root>,
    directory: &Path,
    path: PathBuf,
    names: &[String],
    options: &ParseOptions,
) -> Result<Checkpoint, CheckpointError> {
    let folder = folder_path(root, directory);
    let error = in_folder(&folder);
    let files = ZeroFiles::from_names(names).and_then(ZeroFiles::require_both);
    let ZeroFiles { models, optims, detached } = files.map_err(error)?;
    check_no_root_key(options).map_err(error)?;
    let all: Vec<(usize, &String)> = models.iter().chain(&optims).enumerate().collect();
    let read = |&(number, name): &(usize, &String)| {
        let file = OpenFile::open_in_root(root, &directory.join(name))?;
        let origin = OriginId(number as u32);
        let states = match number < models.len() {
            true => ModelStates::read(file, origin, name).map(RankStates::Model),
            false => OptimStates::read(file, origin, name).map(RankStates::Optim),
        };
        states.map_err(|e| e.into_checkpoint_error(name, error))
    };
    let (mut model_states, mut optim_states) = (Vec::new(), Vec::new());
    for states in parallel_map(&all, root.reader_threads(), read) {
        match states? {
            RankStates::Model(states) => model_states.push(states),
            RankStates::Optim(states) => optim_states.push(states),
        }
    }
    let run = ZeroRun::new(&model_states, &optim_states, &models, &optims).map_err(error)?;
    if let Some(file) = detached.into_iter().next() {
        return Err(error(file.into_error(optim_states.len() as u64)));
    }
    let tensors = run.join().map_err(error)?;
    let files = model_states.iter().map(|states| &states.file);
    let files: Vec<&OpenFile> =
        files.chain(optim_states.iter().map(|states| &states.file)).collect();
    for file in &files {
        file.check_unchanged()?;
    }
    let library = format!("DeepSpeed ZeRO-{}, in 32 bits", run.stage);
    let ranks = optim_states.len() as u64;
    check_rank_count(ranks, options).map_err(error)?;
    let obvious_choices = vec![origin_note(&library, &folder, ranks)];
    Ok(Checkpoint {
        path,
        format: Format::DeepSpeed,
        is_sharded: true,
        origins: files.iter().map(|file| Origin::File(Arc::clone(file.file()))).collect(),
        open_file: None,
        index_files: Vec::new(),
        tensors,
        metadata: None,
        header: None,
        obvious_choices,
        notes: Vec::new(),
        refused: Vec::new(),
        options: options.clone(),
        recipe: None,
    })
}

/// The states that all ranks saved.
struct ZeroRun<'a> {
    stage: u64,
    /// The first rank's states, which have the names of all parameters.
    model: &'a ModelStates,
    models: &'a [ModelStates],
    optims: &'a [OptimStates],
    first_optim: &'a str,
}

impl<'a> ZeroRun<'a> {
    fn new(
        models: &'a [ModelStates],
        optims: &'a [OptimStates],
        model_names: &'a [String],
        optim_names: &'a [String],
    ) -> Result<ZeroRun<'a>, TrainingError> {
        let (Some(model), Some(first), Some(first_optim)) =
            (models.first(), optims.first(), optim_names.first())
        else {
            return Err(TrainingError::NoTensors);
        };
        let mixed = |first: &String, second: &String| TrainingError::MixedSaves {
            first: first.clone(),
            second: second.clone(),
        };
        for (states, name) in optims.iter().zip(optim_names) {
            let is_same = (states.stage, states.rank_count, &states.step)
                == (first.stage, first.rank_count, &first.step);
            if !is_same {
                return Err(mixed(first_optim, name));
            }
        }
        for (states, name) in models.iter().zip(model_names) {
            if states.step != model.step || states.groups != model.groups {
                return Err(mixed(&model_names[0], name));
            }
        }
        // Steps whose gradients overflowed are counted by the model alone.
        let optimizer_steps = first.step.as_ref().and_then(|step| step.count);
        if let (Some(own), Some(all)) = (optimizer_steps, model.step)
            && own > all
        {
            return Err(mixed(&model_names[0], &optim_names[0]));
        }
        let stage = first.stage;
        let rename =
            |name: &String, rank: u64| name.replacen("rank_0_", &format!("rank_{rank}_"), 1);
        let found = optims.len() as u64;
        if found < first.rank_count {
            let name = rename(first_optim, found);
            return Err(TrainingError::MissingFile { name });
        }
        if found > first.rank_count {
            return Err(mixed(first_optim, &optim_names[optims.len() - 1]));
        }
        let has_frozen = !model.frozen_shapes.is_empty();
        if stage == 3 && has_frozen && (models.len() as u64) < found {
            let name = rename(&model_names[0], models.len() as u64);
            return Err(TrainingError::MissingFile { name });
        }
        if !matches!(stage, 1..=3) {
            return Err(TrainingError::Unsupported { what: format!("ZeRO stage {stage}") });
        }
        Ok(ZeroRun { stage, model, models, optims, first_optim })
    }

    /// All tensors, in the order of the module.
    fn join(&self) -> Result<Vec<Tensor>, TrainingError> {
        let mut found: HashMap<&str, Tensor> = HashMap::new();
        match self.stage {
            3 => self.join_stage_3(&mut found)?,
            _ => self.join_stages_1_and_2(&mut found)?,
        }
        join_frozen(self.models, self.stage == 3, self.first_optim, &mut found)?;
        let buffers: HashSet<&str> = self.model.buffers.iter().map(String::as_str).collect();
        for tensor in self.model.module.iter().filter(|tensor| buffers.contains(&*tensor.name)) {
            found.entry(&tensor.name).or_insert_with(|| tensor.clone());
        }
        for (alias, owner) in &self.model.shared {
            if let Some(tensor) = found.get(owner.as_str()).cloned() {
                found.entry(alias).or_insert(Tensor { name: TensorName::from(&**alias), ..tensor });
            }
        }
        let mut tensors = Vec::with_capacity(found.len());
        for tensor in &self.model.module {
            match found.remove(&*tensor.name) {
                Some(tensor) => tensors.push(tensor),
                // An alias whose parameter is saved only under its other name: the module has it whole.
                None if self.stage < 3 => tensors.push(tensor.clone()),
                None => {
                    return Err(TrainingError::MalformedStates {
                        name: self.first_optim.to_owned(),
                        what: "a parameter of the module is in no rank's part",
                    });
                }
            }
        }
        let mut others: Vec<Tensor> = found.into_values().collect();
        others.sort_by(|a, b| (*a.name).cmp(&b.name));
        tensors.extend(others);
        Ok(tensors)
    }

    /// Each group is one vector, cut over the ranks. Its parameters follow one another.
    fn join_stages_1_and_2<'b>(
        &'b self,
        found: &mut HashMap<&'b str, Tensor>,
    ) -> Result<(), TrainingError> {
        let mismatch =
            |what| TrainingError::MalformedStates { name: self.first_optim.to_owned(), what };
        let paddings = &self.optims[0].paddings;
        if self.optims.iter().any(|states| states.groups.len() != self.model.groups.len()) {
            return Err(mismatch("it has another number of groups than the model"));
        }
        for (g, shapes) in self.model.groups.iter().enumerate() {
            let padding = match paddings {
                Some(paddings) => {
                    let padding = paddings.get(g).filter(|padding| padding.len() == shapes.len());
                    Some(
                        padding
                            .ok_or(mismatch("its paddings do not fit the groups of the model"))?,
                    )
                }
                None => None,
            };
            let parts = self.optims.iter().map(|states| flat_run(&states.groups[g]));
            let parts: Vec<ByteRun> = parts.collect::<Option<_>>().ok_or(mismatch(NOT_FLAT))?;
            let flat = FlatVector::new(&parts);
            let mut at = 0u64;
            for (n, (name, shape)) in shapes.iter().enumerate() {
                let count = value_count(shape).ok_or(mismatch(TOO_LARGE))?;
                let end = at.checked_add(count).ok_or(mismatch(TOO_LARGE))?;
                let mut boxes = Vec::new();
                flat.append_boxes(at..end, 0, shape, &mut boxes);
                insert(found, name, shape, Dtype::F32, boxes)?;
                let skip = padding.map_or(0, |padding| padding[n]);
                at = end.checked_add(skip).ok_or(mismatch(TOO_LARGE))?;
            }
        }
        Ok(())
    }

    /// All groups of a rank are one vector. Every rank has equally many values of a parameter, at the same offset.
    fn join_stage_3<'b>(
        &'b self,
        found: &mut HashMap<&'b str, Tensor>,
    ) -> Result<(), TrainingError> {
        let mismatch =
            |what| TrainingError::MalformedStates { name: self.first_optim.to_owned(), what };
        let mut vectors = Vec::with_capacity(self.optims.len());
        for states in self.optims {
            let parts = states.groups.iter().map(flat_run);
            let parts: Vec<ByteRun> = parts.collect::<Option<_>>().ok_or(mismatch(NOT_FLAT))?;
            vectors.push(FlatVector::new(&parts));
        }
        let ranks = self.optims.len() as u64;
        let mut at = 0u64;
        for (name, shape) in self.model.groups.iter().flatten() {
            let count = value_count(shape).ok_or(mismatch(TOO_LARGE))?;
            let part = count.div_ceil(ranks);
            let mut boxes = Vec::new();
            for (rank, vector) in (0..).zip(&vectors) {
                let first = part.saturating_mul(rank).min(count);
                // What follows the last value is padding.
                let len = part.min(count - first);
                vector.append_boxes(at..at + len, first, shape, &mut boxes);
            }
            insert(found, name, shape, Dtype::F32, boxes)?;
            at = at.checked_add(part).ok_or(mismatch(TOO_LARGE))?;
        }
        Ok(())
    }
}

/// Joins frozen parameters: whole in the first rank's file, or cut over the ranks at stage 3. `name` is the file that an
/// error names.
fn join_frozen<'b>(
    models: &'b [ModelStates],
    is_cut: bool,
    name: &str,
    found: &mut HashMap<&'b str, Tensor>,
) -> Result<(), TrainingError> {
    let Some(model) = models.first() else { return Ok(()) };
    let module: HashMap<&str, &Tensor> =
        model.module.iter().map(|tensor| (&*tensor.name, tensor)).collect();
    let missing = || TrainingError::MalformedStates {
        name: name.to_owned(),
        what: "a frozen parameter is in no rank's file",
    };
    for (name, shape) in &model.frozen_shapes {
        if !is_cut {
            // Stage 1 has them in the module alone.
            let whole = model.frozen.get(name);
            let whole = whole.or_else(|| module.get(name.as_str()).copied());
            let whole = whole.filter(|tensor| tensor.torch_shape() == *shape);
            found.insert(name, whole.ok_or_else(missing)?.clone());
            continue;
        }
        let parts = models.iter().map(|model| model.frozen.get(name));
        let parts: Vec<&Tensor> = parts.collect::<Option<_>>().ok_or_else(missing)?;
        let dtype = parts.first().ok_or_else(missing)?.dtype;
        let item_bytes = dtype.torch_item_bytes();
        let count = value_count(shape).ok_or_else(missing)?;
        let (mut boxes, mut first) = (Vec::new(), 0);
        for part in parts {
            let TensorBytes::Run(run) = part.bytes else { return Err(missing()) };
            if part.dtype != dtype {
                return Err(missing());
            }
            let end = (first + run.len / item_bytes).min(count);
            boxes.extend(boxes_of_values(shape, item_bytes, first..end, run));
            first = end;
        }
        insert(found, name, shape, dtype, boxes)?;
    }
    Ok(())
}

const NOT_FLAT: &str = "its weights are not a contiguous vector of 32-bit numbers";
const TOO_LARGE: &str = "its parameters are larger than any memory";

fn value_count(shape: &[u64]) -> Option<u64> {
    let count = shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size))?;
    count.checked_mul(WEIGHT_BYTES).map(|_| count)
}

/// The bytes of a flat part.
fn flat_run(part: &Tensor) -> Option<ByteRun> {
    match part.bytes {
        TensorBytes::Run(run) if part.dtype == Dtype::F32 && part.shape.len() == 1 => Some(run),
        _ => None,
    }
}

fn insert<'b>(
    found: &mut HashMap<&'b str, Tensor>,
    name: &'b str,
    shape: &Shape,
    dtype: Dtype,
    boxes: Vec<TensorBox>,
) -> Result<(), TrainingError> {
    let tensor = Tensor::join(TensorName::from(name), dtype, shape, boxes);
    let tensor =
        tensor.map_err(|error| TrainingError::Tiling { tensor: name.to_owned(), error })?;
    match found.insert(name, tensor) {
        None => Ok(()),
        Some(_) => Err(TrainingError::DuplicateTensor { tensor: name.to_owned() }),
    }
}

/// 32-bit values in parts that follow one another.
struct FlatVector {
    /// The number of the first value of each part, and its bytes.
    parts: Vec<(u64, ByteRun)>,
}

impl FlatVector {
    fn new(parts: &[ByteRun]) -> FlatVector {
        let mut first = 0;
        let numbered = parts.iter().map(|&run| {
            let start = first;
            first += run.len / WEIGHT_BYTES;
            (start, run)
        });
        FlatVector { parts: numbered.collect() }
    }

    /// Appends the boxes of a range of the vector's values. `number` is the index of the first in the tensor. Values
    /// past the end of the vector are left out.
    fn append_boxes(
        &self,
        values: std::ops::Range<u64>,
        number: u64,
        shape: &[u64],
        boxes: &mut Vec<TensorBox>,
    ) {
        let first = self
            .parts
            .partition_point(|(start, run)| start + run.len / WEIGHT_BYTES <= values.start);
        for &(start, run) in &self.parts[first..] {
            let from = values.start.max(start);
            let end = values.end.min(start + run.len / WEIGHT_BYTES);
            if start >= values.end {
                return;
            }
            if from < end {
                let offset = run.offset + (from - start) * WEIGHT_BYTES;
                let at = number + (from - values.start);
                let run = ByteRun { offset, ..run };
                boxes.extend(boxes_of_values(shape, WEIGHT_BYTES, at..at + (end - from), run));
            }
        }
    }
}
