//! Folders of training that hold one checkpoint in the files of many ranks, told apart by names and not read.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use crate::checkpoint::conversions::{
    dcp_remedy, dcp_safetensors_remedy, deepspeed_command, rank_files_remedy,
};
use crate::shell_word::shell_word;

use super::candidate::Candidate;
use super::shard_name::{CHECKPOINT_EXTENSIONS, has_checkpoint_extension};

/// What a folder is, by the names in it. A format that gets a reader leaves this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderFormat {
    /// torch.distributed.checkpoint: `.metadata` and `*.distcp`.
    Dcp {
        /// Whether the table that is written last is there.
        is_complete: bool,
    },
    /// torch.distributed.checkpoint with safetensors files by rank.
    DcpSafetensors,
    /// DeepSpeed, with or without ZeRO.
    DeepSpeed {
        /// Whether parameters are divided among the ranks, and no file has them whole.
        is_stage_3: bool,
    },
    /// Files by rank of FSDP, or of tensor parallelism.
    RankFiles,
    /// Models of llama.cpp.
    Gguf,
}

/// A folder format, and the names in the folder that belong to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatFolder {
    /// What its names say that it is.
    pub format: FolderFormat,
    /// Its files, sorted.
    pub names: Vec<String>,
}

impl FormatFolder {
    /// Detects the format of a folder that has files of these names.
    pub fn detect(names: &[String]) -> Option<FormatFolder> {
        let matching = |is_part: &dyn Fn(&str) -> bool| {
            let parts: BTreeSet<String> =
                names.iter().filter(|name| is_part(name)).cloned().collect();
            parts.into_iter().collect::<Vec<String>>()
        };
        let found = |format, names: Vec<String>| Some(FormatFolder { format, names });
        let data = matching(&|name| name.ends_with(".distcp"));
        if !data.is_empty() {
            let parts = matching(&|name| name.ends_with(".distcp") || name.ends_with(".metadata"));
            return found(FolderFormat::Dcp { is_complete: parts.len() > data.len() }, parts);
        }
        let parts = matching(&is_dcp_safetensors);
        if !parts.is_empty() {
            return found(FolderFormat::DcpSafetensors, parts);
        }
        let parts = matching(&is_deepspeed);
        if !parts.is_empty() {
            let is_piece = |name: &String| {
                name.contains("zero_pp_rank_") && name.ends_with("_model_states.pt")
            };
            return found(
                FolderFormat::DeepSpeed { is_stage_3: parts.iter().any(is_piece) },
                parts,
            );
        }
        let parts = rank_files(names);
        if !parts.is_empty() {
            return found(FolderFormat::RankFiles, parts);
        }
        let parts = matching(&|name| name.ends_with(".gguf"));
        if parts.is_empty() { None } else { found(FolderFormat::Gguf, parts) }
    }

    /// Whether all of these candidates are made of files of this folder.
    pub fn has_all(&self, candidates: &[Candidate]) -> bool {
        let mut originals = candidates.iter().flat_map(Candidate::original_names);
        originals.all(|name| self.names.binary_search(&name).is_ok())
    }

    /// What the user can do about the folder at a path.
    pub fn remedy(&self, path: &Path) -> String {
        match self.format {
            FolderFormat::Dcp { is_complete: true } => dcp_remedy(path),
            FolderFormat::Dcp { is_complete: false } => {
                "give the folder of another step: this one was not saved to its end".to_owned()
            }
            FolderFormat::DcpSafetensors => dcp_safetensors_remedy(path),
            FolderFormat::DeepSpeed { .. } => {
                let join = format!("join the ranks in 32 bits: {}", deepspeed_command(path));
                match self.whole_model() {
                    Some(name) => format!(
                        "see the weights that training used: ckptfs inspect {}; or {join}",
                        shell_word(&path.join(name))
                    ),
                    None => join,
                }
            }
            FolderFormat::RankFiles => {
                let first = self.names.first().map_or("", String::as_str);
                rank_files_remedy(&path.join(first))
            }
            FolderFormat::Gguf => {
                "load it with llama.cpp, or fetch the model as .safetensors instead".to_owned()
            }
        }
    }

    /// The file of a DeepSpeed folder that has all parameters.
    fn whole_model(&self) -> Option<&String> {
        let is_model = |name: &&String| name.ends_with("_model_states.pt");
        let mut models = self.names.iter().filter(is_model);
        let first = models.next().filter(|name| name.starts_with("mp_rank_"))?;
        models.next().is_none().then_some(first)
    }
}

impl fmt::Display for FormatFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.names.len();
        match self.format {
            FolderFormat::Dcp { is_complete: true } => f.write_str(
                "a folder of torch.distributed.checkpoint (DCP), which is not read yet",
            ),
            FolderFormat::Dcp { is_complete: false } => f.write_str(
                "an unfinished folder of torch.distributed.checkpoint (DCP): its .metadata is missing",
            ),
            FolderFormat::DcpSafetensors => f.write_str(
                "a folder of torch.distributed.checkpoint (DCP) with a safetensors file for each rank, which is not read yet: \
                 its tensors are pieces under full names",
            ),
            FolderFormat::DeepSpeed { is_stage_3: true } => f.write_str(
                "a DeepSpeed checkpoint (ZeRO stage 3), which is not read yet: its parameters are divided among the ranks",
            ),
            FolderFormat::DeepSpeed { is_stage_3: false } => {
                f.write_str("a DeepSpeed checkpoint, which is not read as a folder yet")
            }
            FolderFormat::RankFiles => write!(
                f,
                "a sharded checkpoint (FSDP or tensor parallel) in {n} files by rank, which are not joined yet"
            ),
            FolderFormat::Gguf => {
                f.write_str("a folder of GGUF, not of checkpoints of torch or safetensors")
            }
        }
    }
}

/// Whether a name is `shard-00001-model-00001-of-00002.safetensors`: a rank, and a part of its model.
pub fn is_dcp_safetensors(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    name.ends_with(".safetensors")
        && name
            .strip_prefix("shard-")
            .and_then(|rest| rest.split_once('-'))
            .is_some_and(|(rank, rest)| is_number(rank) && rest.starts_with("model-"))
}

/// Whether a name is that of a file that DeepSpeed writes for a rank.
fn is_deepspeed(name: &str) -> bool {
    let is_states = name.ends_with("_model_states.pt") || name.ends_with("_optim_states.pt");
    is_states && (name.contains("mp_rank_") || name.contains("zero_pp_rank_"))
}

/// The files by rank, if there are several, or one whose name says that there are others.
fn rank_files(names: &[String]) -> Vec<String> {
    let ranked = names.iter().filter(|name| has_checkpoint_extension(name));
    let ranked: Vec<(&String, &str, u32)> =
        ranked.filter_map(|name| split_rank(name).map(|(stem, rank)| (name, stem, rank))).collect();
    let is_one_of_several = |&(_, stem, rank): &(&String, &str, u32)| {
        stem.contains("_world_size_")
            || stem.contains("_fsdp_")
            || ranked.iter().any(|&(_, other, number)| other == stem && number != rank)
    };
    let mut parts: Vec<String> = Vec::new();
    // Names of random states and optimizers alone do not make a checkpoint.
    let is_model = |stem: &str| !stem.contains("rng") && !stem.starts_with("optim");
    if ranked.iter().any(|file| is_model(file.1) && is_one_of_several(file)) {
        parts = ranked.iter().filter(|file| is_one_of_several(file)).map(|f| f.0.clone()).collect();
    }
    parts.sort();
    parts
}

/// Splits `X_rank_3.pt` or `X_rank3.bin` into `X` and 3.
fn split_rank(name: &str) -> Option<(&str, u32)> {
    let (stem, extension) = name.rsplit_once('.')?;
    if !CHECKPOINT_EXTENSIONS.contains(&extension) {
        return None;
    }
    let digits = stem.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (stem, number) = stem.split_at(stem.len() - digits);
    let stem = stem.trim_end_matches(['_', '-']).strip_suffix("rank")?;
    Some((stem, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(names: &[&str]) -> Option<FolderFormat> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        FormatFolder::detect(&names).map(|folder| folder.format)
    }

    #[test]
    fn folders_of_training_are_told_by_their_names() {
        for (names, format) in [
            (&[".metadata", "__0_0.distcp"][..], FolderFormat::Dcp { is_complete: true }),
            (&["__0_0.distcp"], FolderFormat::Dcp { is_complete: false }),
            (&["__0.metadata", "__0_0.distcp"], FolderFormat::Dcp { is_complete: true }),
            (&["shard-00001-model-00001-of-00001.safetensors"], FolderFormat::DcpSafetensors),
            (
                &["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
                FolderFormat::DeepSpeed { is_stage_3: false },
            ),
            (
                &["zero_pp_rank_0_mp_rank_00_model_states.pt"],
                FolderFormat::DeepSpeed { is_stage_3: true },
            ),
            (&["model_world_size_2_rank_0.pt"], FolderFormat::RankFiles),
            (&["pytorch_model_fsdp_0_rank0.bin"], FolderFormat::RankFiles),
            (&["sharded_rank0.bin", "sharded_rank1.bin"], FolderFormat::RankFiles),
            (&["model.Q4_K_M.gguf"], FolderFormat::Gguf),
        ] {
            assert_eq!(detect(names), Some(format), "{names:?}");
        }
    }

    #[test]
    fn other_folders_are_none_of_them() {
        for names in [
            &["model.safetensors", "config.json"][..],
            &[".metadata"],
            &["rng_state_0.pth", "rng_state_1.pth"],
            &["model_rank0.pt"],
            &["rank_0.txt", "rank_1.txt"],
            &["shard-a-model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors"],
            &["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors"],
            &["best_model_states.pt"],
        ] {
            assert_eq!(detect(names), None, "{names:?}");
        }
    }
}
