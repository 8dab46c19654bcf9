//! Reads the files of a DeepSpeed folder: a rank's description of the model, and its part of the 32-bit weights.

use std::collections::HashMap;

use crate::checkpoint::tensor::{Dtype, OriginId, Shape, Tensor, TensorBytes, TensorName};
use crate::checkpoint::torch::pickle::{Arena, Node, NodeId};
use crate::checkpoint::torch::{TorchError, TorchValues, as_count, as_counts, entry};
use crate::checkpoint::training_error::TrainingError;
use crate::source::{OpenFile, ReadAt};

use super::super::folder::RankFileError;

/// Keys, by version of DeepSpeed, that list layers whose experts are divided over ranks of their own.
const EXPERT_LAYER_KEYS: [&str; 2] = ["autoep_layers", "ds_autoep_layers"];

/// A rank's description of the model: names, shapes, and the tensors that the optimizer does not have.
#[derive(Debug)]
pub struct ModelStates {
    pub file: OpenFile,
    /// The tensors of the module in their order. At stage 3, parameters are empty.
    pub module: Vec<Tensor>,
    pub buffers: Vec<String>,
    /// The parameters of each group of the optimizer, in the order of their values there.
    pub groups: Vec<Vec<(String, Shape)>>,
    /// Parameters that the optimizer does not have.
    pub frozen_shapes: Vec<(String, Shape)>,
    /// The values of frozen parameters, or this rank's part of them.
    pub frozen: HashMap<String, Tensor>,
    /// Tied parameters: an alias, and the name under which the parameter is saved.
    pub shared: Vec<(String, String)>,
    pub step: Option<u64>,
}

/// A rank's part of the 32-bit weights.
#[derive(Debug)]
pub struct OptimStates {
    pub file: OpenFile,
    pub stage: u64,
    pub rank_count: u64,
    /// The steps that the optimizer has taken. `None` if it has taken none.
    pub step: Option<OptimizerStep>,
    /// The flat part of each group.
    pub groups: Vec<Tensor>,
    /// Values between the parameters of each group, where this version writes them.
    pub paddings: Option<Vec<Vec<u64>>>,
}

/// The steps that an optimizer has taken, as it keeps them: a number, or a tensor of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizerStep {
    bytes: Vec<u8>,
    /// The number, if it is whole and of a type that optimizers use.
    pub count: Option<u64>,
}

impl OptimizerStep {
    fn new(bytes: Vec<u8>, dtype: Dtype) -> OptimizerStep {
        let from_float = |step: f64| {
            let is_count = step.fract() == 0.0 && (0.0..9e15).contains(&step);
            is_count.then_some(step as u64)
        };
        let count = match (dtype, &*bytes) {
            (Dtype::F32, &[a, b, c, d]) => from_float(f32::from_le_bytes([a, b, c, d]).into()),
            (Dtype::I32, &[a, b, c, d]) => u64::try_from(i32::from_le_bytes([a, b, c, d])).ok(),
            (Dtype::F64, &[a, b, c, d, e, f, g, h]) => {
                from_float(f64::from_le_bytes([a, b, c, d, e, f, g, h]))
            }
            (Dtype::I64, &[a, b, c, d, e, f, g, h]) => {
                u64::try_from(i64::from_le_bytes([a, b, c, d, e, f, g, h])).ok()
            }
            _ => None,
        };
        OptimizerStep { bytes, count }
    }
}

/// The values of one file, with its origin, and its name for errors.
struct StatesFile<'a> {
    file: &'a dyn ReadAt,
    values: TorchValues<'a>,
    origin: OriginId,
    name: &'a str,
}

impl<'a> StatesFile<'a> {
    fn read(
        file: &'a dyn ReadAt,
        origin: OriginId,
        name: &'a str,
    ) -> Result<StatesFile<'a>, RankFileError> {
        Ok(StatesFile { file, values: TorchValues::read(file)?, origin, name })
    }

    fn malformed(&self, what: &'static str) -> RankFileError {
        RankFileError::Training(TrainingError::MalformedStates { name: self.name.to_owned(), what })
    }

    fn arena(&self) -> &Arena {
        &self.values.arena
    }

    /// The value of a key of a dictionary, unless it is `None`.
    fn get(&self, dictionary: NodeId, key: &str) -> Option<NodeId> {
        let value = entry(self.arena(), dictionary, key)?;
        (self.arena().node(value) != Node::None).then_some(value)
    }

    fn tensor(&mut self, name: &str, id: NodeId) -> Result<Tensor, RankFileError> {
        let TorchValues { arena, storages, .. } = &mut self.values;
        let mut tensor = storages.tensor(arena, TensorName::from(name), id).map_err(|error| {
            RankFileError::Training(TrainingError::Tensor { tensor: name.to_owned(), error })
        })?;
        if tensor.bytes.has_repeats() {
            return Err(self.malformed("a tensor repeats its bytes"));
        }
        tensor.bytes.embed(self.origin, 0);
        Ok(tensor)
    }

    /// The names and shapes in a dictionary, in order.
    fn shapes(&self, dictionary: NodeId) -> Result<Vec<(String, Shape)>, RankFileError> {
        let malformed = || self.malformed("a parameter has no name and shape");
        let arena = self.arena();
        let entries = arena.entries(dictionary).ok_or_else(malformed)?;
        let shape = |&(name, shape): &(NodeId, NodeId)| {
            let shape = as_counts(arena, shape).ok_or_else(malformed)?;
            Ok((arena.text(name).ok_or_else(malformed)?.to_owned(), shape.into()))
        };
        entries.iter().map(shape).collect()
    }

    /// The pairs of texts in a dictionary.
    fn text_pairs(&self, dictionary: NodeId) -> Vec<(String, String)> {
        let text = |id: &NodeId| self.arena().text(*id).map(str::to_owned);
        let entries = self.arena().entries(dictionary).unwrap_or_default();
        entries.iter().filter_map(|(key, value)| text(key).zip(text(value))).collect()
    }

    /// Fails if storages had to be unpacked: their bytes are not in the file.
    fn finish(self) -> Result<(), RankFileError> {
        let name = self.name.to_owned();
        match self.values.storages.into_unpacked().is_empty() {
            true => Ok(()),
            false => Err(RankFileError::Training(TrainingError::Compressed { name })),
        }
    }
}

impl ModelStates {
    /// Reads a file, which becomes the origin of that number.
    pub fn read(
        file: OpenFile,
        origin: OriginId,
        name: &str,
    ) -> Result<ModelStates, RankFileError> {
        let mut states = StatesFile::read(&file, origin, name)?;
        let top = states.values.top;
        let unsupported = |what: &str| {
            RankFileError::Training(TrainingError::Unsupported { what: what.to_owned() })
        };
        if EXPERT_LAYER_KEYS.iter().any(|key| {
            let layers = states.get(top, key).and_then(|layers| states.arena().items(layers));
            layers.is_some_and(|layers| !layers.is_empty())
        }) {
            return Err(unsupported("expert parallelism (AutoEP)"));
        }
        let parallel = states.get(top, "mp_world_size").and_then(|id| as_count(states.arena(), id));
        if parallel.is_some_and(|ranks| ranks > 1) {
            return Err(unsupported("tensor parallelism (mp_world_size > 1)"));
        }
        let shapes = states.get(top, "param_shapes");
        let shapes = shapes.ok_or_else(|| states.malformed("it has no param_shapes"))?;
        // Older versions have one dictionary for all groups.
        let groups = states.arena().items(shapes).unwrap_or(std::slice::from_ref(&shapes)).to_vec();
        let groups = groups.into_iter().map(|group| states.shapes(group));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let frozen_shapes = match states.get(top, "frozen_param_shapes") {
            Some(shapes) => states.shapes(shapes)?,
            None => Vec::new(),
        };
        let module =
            states.get(top, "module").ok_or_else(|| states.malformed("it has no module"))?;
        let module = states.tensors(module)?;
        let frozen = match states.get(top, "frozen_param_fragments") {
            Some(fragments) => states.tensors(fragments)?,
            None => Vec::new(),
        };
        let buffers = states.get(top, "buffer_names");
        let buffers = buffers.and_then(|names| states.arena().items(names)).unwrap_or_default();
        let buffers = buffers.iter().filter_map(|&name| states.arena().text(name));
        let buffers = buffers.map(str::to_owned).collect();
        let shared = states.get(top, "shared_params");
        let shared = shared.map(|shared| states.text_pairs(shared)).unwrap_or_default();
        let step = states.get(top, "global_steps").and_then(|id| as_count(states.arena(), id));
        states.finish()?;
        let frozen = frozen.into_iter().map(|tensor| (tensor.name.to_string(), tensor)).collect();
        Ok(ModelStates { file, module, buffers, groups, frozen_shapes, frozen, shared, step })
    }
}

impl OptimStates {
    /// Reads a file, which becomes the origin of that number.
    pub fn read(
        file: OpenFile,
        origin: OriginId,
        name: &str,
    ) -> Result<OptimStates, RankFileError> {
        let mut states = StatesFile::read(&file, origin, name)?;
        let top = states.values.top;
        let optimizer = states.get(top, "optimizer_state_dict");
        let optimizer =
            optimizer.ok_or_else(|| states.malformed("it has no optimizer_state_dict"))?;
        let stage = match states.get(optimizer, "zero_stage") {
            Some(id) => states.stage(id),
            // The optimizer with 32-bit gradients of a model in bfloat16 does not record it, and is laid out as stage 1.
            None => Some(1),
        };
        let stage = stage.ok_or_else(|| states.malformed("its zero_stage is not a number"))?;
        let count = states.get(optimizer, "partition_count");
        let count = count.and_then(|count| match states.arena().items(count) {
            // One count for each group. Groups of experts may have fewer.
            Some(counts) => counts.iter().map(|&id| as_count(states.arena(), id)).max().flatten(),
            None => as_count(states.arena(), count),
        });
        let rank_count = count.ok_or_else(|| states.malformed("it has no partition_count"))?;
        let step = states.optimizer_step(optimizer)?;
        let key = if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" };
        let flat = states.get(optimizer, key).and_then(|flat| states.arena().items(flat));
        let flat = flat.map(<[NodeId]>::to_vec);
        let flat = flat.ok_or_else(|| states.malformed("it has no 32-bit weights"))?;
        let groups = flat.into_iter().map(|id| states.tensor(key, id));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let paddings = match states.get(optimizer, "param_alignment_paddings") {
            Some(groups) => {
                let counts = |&group: &NodeId| {
                    let items = states.arena().items(group)?;
                    items.iter().map(|&id| as_count(states.arena(), id)).collect()
                };
                let groups = states.arena().items(groups).unwrap_or_default();
                let paddings: Option<Vec<Vec<u64>>> = groups.iter().map(counts).collect();
                Some(paddings.ok_or_else(|| states.malformed("its paddings are not counts"))?)
            }
            None => None,
        };
        states.finish()?;
        Ok(OptimStates { file, stage, rank_count, step, groups, paddings })
    }
}

/// The key of the whole parameter in a file of a universal checkpoint.
const PARAMETER_KEY: &str = "param";

/// The weights of a parameter in a universal checkpoint.
#[derive(Debug)]
pub struct UniversalWeight {
    pub tensor: Tensor,
    /// Whether its shape is not recorded beside it: stage 3 writes a vector.
    pub is_flat: bool,
}

impl UniversalWeight {
    /// Reads the file of a parameter, which becomes the origin of that number.
    pub fn read(
        file: &dyn ReadAt,
        origin: OriginId,
        path: &str,
        parameter: &str,
    ) -> Result<UniversalWeight, RankFileError> {
        let mut states = StatesFile::read(file, origin, path)?;
        let top = states.values.top;
        let whole = states.get(top, PARAMETER_KEY);
        let tensor = states.tensor(parameter, whole.unwrap_or(top))?;
        states.finish()?;
        Ok(UniversalWeight { tensor, is_flat: whole.is_none() })
    }
}

/// Keys of the state of the optimizer itself: at stages 1 and 2, and at stage 3.
const OPTIMIZER_KEYS: [&str; 2] = ["base_optimizer_state", "optimizer_state_dict"];

/// Maximum bytes of a tensor that counts steps: a single number.
const MAX_STEP_BYTES: u64 = 8;

impl StatesFile<'_> {
    /// The steps that were taken for the first group. All ranks take them together.
    fn optimizer_step(
        &mut self,
        optimizer: NodeId,
    ) -> Result<Option<OptimizerStep>, RankFileError> {
        let own = OPTIMIZER_KEYS.iter().find_map(|key| self.get(optimizer, key));
        let groups = own.and_then(|own| self.get(own, "state"));
        let first = groups.and_then(|groups| self.arena().entries(groups)?.first().copied());
        let Some(step) = first.and_then(|(_, state)| self.get(state, "step")) else {
            return Ok(None);
        };
        if let Some(step) = as_count(self.arena(), step) {
            let bytes = step.to_le_bytes().to_vec();
            return Ok(Some(OptimizerStep { bytes, count: Some(step) }));
        }
        // Other optimizers may keep anything there. Only numbers are compared.
        let Ok(tensor) = self.tensor("step", step) else { return Ok(None) };
        let dtype = tensor.dtype;
        let TensorBytes::Run(run) = tensor.bytes else { return Ok(None) };
        if run.len > MAX_STEP_BYTES || run.origin != self.origin {
            return Ok(None);
        }
        let mut bytes = vec![0; run.len as usize];
        self.file.read_exact_at(&mut bytes, run.offset).map_err(TorchError::from)?;
        Ok(Some(OptimizerStep::new(bytes, dtype)))
    }

    /// The tensors of a dictionary, in order. Other values are left out.
    fn tensors(&mut self, dictionary: NodeId) -> Result<Vec<Tensor>, RankFileError> {
        let entries = self.arena().entries(dictionary).unwrap_or_default().to_vec();
        let mut tensors = Vec::with_capacity(entries.len());
        for (name, value) in entries {
            let Some(name) = self.arena().text(name).map(str::to_owned) else { continue };
            if matches!(self.arena().node(value), Node::Call(..)) {
                tensors.push(self.tensor(&name, value)?);
            }
        }
        Ok(tensors)
    }

    /// The stage, which is a number or a value of an enumeration.
    fn stage(&self, id: NodeId) -> Option<u64> {
        match self.arena().node(id) {
            Node::Call(_, args) => match self.arena().items(args)? {
                &[stage] => as_count(self.arena(), stage),
                _ => None,
            },
            _ => as_count(self.arena(), id),
        }
    }
}
