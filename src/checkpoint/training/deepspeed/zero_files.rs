//! The files of a DeepSpeed folder, by their names.

use crate::checkpoint::training_error::TrainingError;

/// The files of a folder, each kind in the order of ranks.
#[derive(Debug, Default)]
pub struct ZeroFiles {
    pub models: Vec<String>,
    pub optims: Vec<String>,
    /// Files behind a gap in the numbers: of ranks that the run did not have, or behind a missing one.
    pub detached: Vec<DetachedFile>,
}

/// A file whose rank is not the next one.
#[derive(Debug)]
pub struct DetachedFile {
    rank: u64,
    name: String,
    /// The first file that is not there.
    pub missing: String,
}

impl DetachedFile {
    /// The error of the folder, given the number of ranks that the run had.
    pub fn into_error(self, ranks: u64) -> TrainingError {
        match self.rank >= ranks {
            true => TrainingError::ExcessFile { name: self.name, ranks },
            false => TrainingError::MissingFile { name: self.missing },
        }
    }
}

impl ZeroFiles {
    /// The files of these names.
    pub fn from_names(names: &[String]) -> Result<ZeroFiles, TrainingError> {
        let unsupported = |what: String| TrainingError::Unsupported { what };
        let mut ranked: Vec<(bool, u64, &String)> = Vec::new();
        for name in names {
            if name.starts_with("layer_") || name.starts_with("expert_") {
                return Err(unsupported(format!("pipeline or expert parallelism ({name})")));
            }
            if number_after(name, "mp_rank_").is_some_and(|rank| rank > 0) {
                return Err(unsupported(format!("tensor parallelism ({name})")));
            }
            let rank = number_after(name, "zero_pp_rank_");
            if name.ends_with("_model_states.pt") {
                ranked.push((false, rank.unwrap_or(0), name));
            } else if let (true, Some(rank)) = (name.ends_with("_optim_states.pt"), rank) {
                ranked.push((true, rank, name));
            }
        }
        ranked.sort();
        if let Some(pair) =
            ranked.windows(2).find(|two| (two[0].0, two[0].1) == (two[1].0, two[1].1))
        {
            let (first, second) = (pair[0].2.clone(), pair[1].2.clone());
            return Err(TrainingError::MixedSaves { first, second });
        }
        let mut detached = Vec::new();
        let mut of_kind = |is_optim| {
            let files = ranked.iter().filter(|file| file.0 == is_optim);
            let files: Vec<(u64, &String)> = files.map(|file| (file.1, file.2)).collect();
            let count = (0..).zip(&files).take_while(|(n, (rank, _))| n == rank).count();
            if let Some((rank, name)) = files.get(count) {
                let missing = name
                    .replace(&format!("zero_pp_rank_{rank}_"), &format!("zero_pp_rank_{count}_"));
                if count == 0 {
                    return Err(TrainingError::MissingFile { name: missing });
                }
                detached.push(DetachedFile { rank: *rank, name: (*name).clone(), missing });
            }
            Ok(files[..count].iter().map(|(_, name)| (*name).clone()).collect::<Vec<String>>())
        };
        let (models, optims) = (of_kind(false)?, of_kind(true)?);
        Ok(ZeroFiles { models, optims, detached })
    }

    /// Fails if there is no file of one of the kinds.
    pub fn require_both(self) -> Result<ZeroFiles, TrainingError> {
        let name = "zero_pp_rank_0_mp_rank_00_optim_states.pt";
        match (self.models.is_empty(), self.optims.is_empty()) {
            (true, _) => Err(TrainingError::no_model_states()),
            (_, true) => Err(TrainingError::MissingFile { name: name.to_owned() }),
            _ => Ok(self),
        }
    }
}

/// The number that follows a word in a name.
fn number_after(name: &str, word: &str) -> Option<u64> {
    let (_, rest) = name.split_once(word)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
