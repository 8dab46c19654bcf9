//! Training folders: one checkpoint in the files of many ranks, found by the names of the files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::numbered_name::split_rank;
use super::shard_name::{DcpShardName, has_checkpoint_extension};

/// The folder of the parameters of DeepSpeed's universal checkpoint.
pub const UNIVERSAL_FOLDER: &str = "zero";

/// The format in which the ranks of a run saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainingFormat {
    /// torch.distributed.checkpoint: `.metadata` and `*.distcp`.
    Dcp,
    /// torch.distributed.checkpoint with a safetensors file for each rank.
    DcpSafetensors,
    /// DeepSpeed with ZeRO: the 32-bit weights are in the optimizers of all ranks.
    Zero,
    /// DeepSpeed's universal checkpoint: a file for each parameter.
    Universal,
    /// Files that each rank wrote with `torch.save`.
    RankFiles,
}

/// The files of many ranks that are one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingFolder {
    pub format: TrainingFormat,
    /// Its files, sorted.
    pub names: Vec<String>,
    /// The name of the virtual file that they are shown as.
    pub virtual_name: String,
    /// The path of the folder of the files, relative to that of the virtual file; empty if it is the same.
    pub folder: PathBuf,
    /// The file beside the virtual file that names the folder, if one does.
    pub pointer: Option<String>,
}

impl TrainingFolder {
    /// A training folder without files.
    pub fn empty(format: TrainingFormat) -> TrainingFolder {
        let virtual_name = MODEL_NAME.to_owned();
        let (names, folder, pointer) = (Vec::new(), PathBuf::new(), None);
        TrainingFolder { format, names, virtual_name, folder, pointer }
    }

    /// The same files, shown as one model in another folder, from which `folder` leads to them.
    pub fn in_folder(self, folder: &str) -> TrainingFolder {
        TrainingFolder { folder: folder.into(), virtual_name: MODEL_NAME.to_owned(), ..self }
    }

    /// Whether its files lie in the parent of the folder of the virtual file.
    pub fn is_in_parent(&self) -> bool {
        self.folder.as_os_str() == ".."
    }

    /// The folders in which its files are found, except that of the virtual file.
    pub fn other_folders(&self) -> Vec<PathBuf> {
        let mut folders = Vec::new();
        if !self.folder.as_os_str().is_empty() {
            folders.push(self.folder.clone());
        }
        if self.format == TrainingFormat::Universal {
            folders.push(self.folder.join(UNIVERSAL_FOLDER));
        }
        folders
    }

    /// The paths of the files, relative to the virtual file's folder, and that of the pointer.
    pub fn paths(&self) -> Vec<String> {
        let path = |name: &String| match self.folder.to_str() {
            Some("") | None => name.clone(),
            Some(folder) => format!("{folder}/{name}"),
        };
        self.pointer.iter().cloned().chain(self.names.iter().map(path)).collect()
    }

    /// Whether the virtual file takes the place of its files. Loaders would take pieces in safetensors files for whole
    /// tensors. Other files stay: training resumes from them.
    pub fn hides_files(&self) -> bool {
        self.format == TrainingFormat::DcpSafetensors
    }
}

/// The name of the virtual file of a folder that is one model.
pub const MODEL_NAME: &str = "model.safetensors";

/// The training folders among files of these names. `has_pieces` reads whether a file holds pieces of tensors: it is
/// called where names alone do not tell.
pub fn training_folders(
    names: &[String],
    has_pieces: &dyn Fn(&str) -> bool,
) -> Vec<TrainingFolder> {
    match find_folder(names) {
        Some(folder) => vec![folder],
        None => rank_file_sets(names, has_pieces),
    }
}

/// The training folder, if names alone tell its format.
fn find_folder(names: &[String]) -> Option<TrainingFolder> {
    let has = |is_part: fn(&str) -> bool| names.iter().any(|name| is_part(name));
    let is_zero: fn(&str) -> bool = |name| is_deepspeed(name) && name.contains("zero_pp_rank_");
    let is_dcp_shard: fn(&str) -> bool = |name| DcpShardName::parse(name).is_some();
    let (format, is_part): (TrainingFormat, fn(&str) -> bool) = if has(is_dcp_data) {
        (TrainingFormat::Dcp, is_dcp)
    } else if has(is_dcp_shard) {
        (TrainingFormat::DcpSafetensors, is_dcp_shard)
    } else if has(is_zero) && has(is_model_states) {
        // Without ZeRO, the file of the model has all of it.
        (TrainingFormat::Zero, is_deepspeed)
    } else {
        return None;
    };
    let names: BTreeSet<String> = names.iter().filter(|name| is_part(name)).cloned().collect();
    Some(TrainingFolder { names: names.into_iter().collect(), ..TrainingFolder::empty(format) })
}

/// Whether a name is that of a rank's data in a folder of torch.distributed.checkpoint.
fn is_dcp_data(name: &str) -> bool {
    name.ends_with(".distcp")
}

/// Whether a name is that of a table or of a rank's data in a folder of torch.distributed.checkpoint.
fn is_dcp(name: &str) -> bool {
    [".distcp", ".metadata", ".metadata.tmp"].iter().any(|ending| name.ends_with(ending))
}

/// Whether a name is that of a file in which DeepSpeed saves a model.
pub fn is_model_states(name: &str) -> bool {
    // Pipelines write `layer_00-model_00-model_states.pt` for each layer.
    let is_layer = name.starts_with("layer_") && name.ends_with("-model_states.pt");
    is_layer || name.ends_with("_model_states.pt")
}

/// Whether a name is that of a file in which DeepSpeed saves an optimizer.
pub fn is_optim_states(name: &str) -> bool {
    name.ends_with("_optim_states.pt")
}

/// Whether a name is that of a file in which DeepSpeed saves a rank's part of the 32-bit weights.
pub fn is_zero_optimizer(name: &str) -> bool {
    is_optim_states(name) && name.contains("zero_pp_rank_")
}

/// Whether a name is that of a file that DeepSpeed writes for a rank, a layer or an expert.
fn is_deepspeed(name: &str) -> bool {
    let is_states = is_model_states(name) || is_optim_states(name);
    let is_part = ["mp_rank_", "zero_pp_rank_"].iter().any(|word| name.contains(word));
    let is_layer = ["layer_", "expert_"].iter().any(|prefix| name.starts_with(prefix));
    is_states && (is_part || is_layer)
}

/// The per-rank files of a folder, in sets of names that differ only in the rank.
fn rank_file_sets(names: &[String], has_pieces: &dyn Fn(&str) -> bool) -> Vec<TrainingFolder> {
    let mut sets: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for name in names.iter().filter(|name| has_checkpoint_extension(name)) {
        if let Some((stem, _)) = split_rank(name) {
            sets.entry(stem).or_default().push(name);
        }
    }
    // A rank also saves its random state, its optimizer and more.
    let is_model = |stem: &str| {
        !stem.contains("rng") && !stem.starts_with("optim") && !stem.starts_with("extra_state")
    };
    let sets = sets.into_iter().filter(|(stem, files)| {
        is_model(stem)
            && (stem.contains("_world_size_")
                || stem.contains("_fsdp_")
                || files.len() > 1 && files.iter().any(|name| has_pieces(name)))
    });
    let sets: Vec<(&str, Vec<&String>)> = sets
        .map(|(stem, files)| {
            let stem = stem.trim_end_matches(['_', '-']);
            (stem.strip_suffix("rank").unwrap_or(stem).trim_end_matches(['_', '-']), files)
        })
        .collect();
    let model = |stem: &str| stem.split("_world_size_").next().unwrap_or(stem).to_owned();
    let models: Vec<String> = sets.iter().map(|(stem, _)| model(stem)).collect();
    let to_folder = |(stem, files): (&str, Vec<&String>)| {
        let model = model(stem);
        // Saves of runs of other sizes are other checkpoints.
        let is_only = models.iter().filter(|other| **other == model).count() == 1;
        let name = if is_only { &*model } else { stem };
        let virtual_name = format!("{}.safetensors", if name.is_empty() { "model" } else { name });
        let names = files.into_iter().cloned().collect();
        let empty = TrainingFolder::empty(TrainingFormat::RankFiles);
        TrainingFolder { names, virtual_name, ..empty }
    };
    sets.into_iter().map(to_folder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(names: &[&str]) -> Option<TrainingFormat> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        find_folder(&names).map(|folder| folder.format)
    }

    #[test]
    fn training_folders_are_detected_by_names() {
        for (names, format) in [
            (&[".metadata", "__0_0.distcp"][..], TrainingFormat::Dcp),
            (&["__0_0.distcp"], TrainingFormat::Dcp),
            (&["__0.metadata", "__0_0.distcp"], TrainingFormat::Dcp),
            (&["shard-00001-model-00001-of-00001.safetensors"], TrainingFormat::DcpSafetensors),
            (
                &["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
                TrainingFormat::Zero,
            ),
            (&["zero_pp_rank_0_mp_rank_00_model_states.pt"], TrainingFormat::Zero),
        ] {
            assert_eq!(detect(names), Some(format), "{names:?}");
        }
    }

    #[test]
    fn per_rank_files_are_sets_by_their_names_or_their_contents() {
        let sets = |names: &[&str], has_pieces: bool| -> Vec<(String, usize)> {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let sets = rank_file_sets(&names, &|_| has_pieces).into_iter();
            sets.map(|set| (set.virtual_name, set.names.len())).collect()
        };
        let verl = [
            "model_world_size_2_rank_0.pt",
            "model_world_size_2_rank_1.pt",
            "optim_world_size_2_rank_0.pt",
        ];
        assert_eq!(sets(&verl, false), [("model.safetensors".to_owned(), 2)]);
        let two_runs = ["model_world_size_1_rank_0.pt", "model_world_size_2_rank_0.pt"];
        let names = ["model_world_size_1.safetensors", "model_world_size_2.safetensors"];
        assert_eq!(sets(&two_runs, false), names.map(|name| (name.to_owned(), 1)));
        let fsdp = ["pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_1_rank0.bin"];
        let names = ["pytorch_model_fsdp_0.safetensors", "pytorch_model_fsdp_1.safetensors"];
        assert_eq!(sets(&fsdp, false), names.map(|name| (name.to_owned(), 1)));
        let unsure = ["sharded_rank0.bin", "sharded_rank1.bin"];
        assert_eq!(sets(&unsure, true), [("sharded.safetensors".to_owned(), 2)]);
        assert_eq!(sets(&unsure, false), []);
        assert_eq!(sets(&["rank_0.pt", "rank_1.pt"], true), [("model.safetensors".to_owned(), 2)]);
        assert_eq!(
            sets(&["model_rank0.pt", "rng_state_rank0.pth", "rng_state_rank1.pth"], true),
            []
        );
    }

    #[test]
    fn other_folders_are_not_training_folders() {
        for names in [
            &["model.safetensors", "config.json"][..],
            &[".metadata"],
            &["rng_state_0.pth", "rng_state_1.pth"],
            &["model_rank0.pt"],
            &["rank_0.txt", "rank_1.txt"],
            &["shard-a-model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors"],
            &["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors"],
            &["best_model_states.pt"],
            &["mp_rank_00_model_states.pt"],
            // Beside a model, an optimizer's file is training state.
            &["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "pytorch_model.bin"],
        ] {
            assert_eq!(detect(names), None, "{names:?}");
        }
    }
}
