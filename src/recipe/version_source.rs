//! A base and the deltas that follow it, as the source of a file of a recipe.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::checkpoint::version_of_folder;

use super::relative_path::RelativePath;

/// The newest version of a chain: a base, and what deltas make of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSource {
    /// A version, or the model that training began with.
    pub base: RelativePath,
    /// The folders of the versions that follow it, in order; `None` for all beside the base.
    pub deltas: Option<Vec<RelativePath>>,
}

/// The deltas as written in a recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "deltas are \"auto\", or a list of folders of versions")]
pub enum DeltasForm {
    Text(String),
    List(Vec<String>),
}

impl VersionSource {
    /// Parses the keys `base` and `deltas`.
    pub fn parse(base: RelativePath, deltas: DeltasForm) -> Result<VersionSource, String> {
        if base.as_str().is_empty() {
            return Err("`base` must be beneath the mounted directory".to_owned());
        }
        let deltas = match deltas {
            DeltasForm::Text(text) if text == "auto" => None,
            DeltasForm::Text(text) => {
                return Err(format!(
                    "`deltas` is `{text}`: write \"auto\", or a list of folders of versions"
                ));
            }
            DeltasForm::List(list) => {
                let list: Vec<RelativePath> =
                    list.into_iter().map(RelativePath::try_from).collect::<Result<_, _>>()?;
                check_order(&base, &list)?;
                Some(list)
            }
        };
        Ok(VersionSource { base, deltas })
    }

    /// The keys as written in a recipe.
    pub fn into_form(self) -> (RelativePath, DeltasForm) {
        let deltas = match self.deltas {
            None => DeltasForm::Text("auto".to_owned()),
            Some(list) => DeltasForm::List(list.into_iter().map(String::from).collect()),
        };
        (self.base, deltas)
    }

    /// The paths of the deltas; `None` for all beside the base.
    pub fn delta_paths(&self) -> Option<Vec<PathBuf>> {
        let deltas = self.deltas.as_ref()?;
        Some(deltas.iter().map(|delta| delta.as_path().to_path_buf()).collect())
    }
}

/// Fails if the folders are not versions that follow a base, one after the other.
fn check_order(base: &RelativePath, deltas: &[RelativePath]) -> Result<(), String> {
    let Some(first) = deltas.first() else {
        return Err("`deltas` names no version: write \"auto\" for all beside the base".to_owned());
    };
    let base_version = version_of_folder(base.as_path());
    if base_version > 0 && base.directory() != first.directory() {
        return Err(format!(
            "`{}` does not lie beside its base `{}`",
            first.as_str(),
            base.as_str()
        ));
    }
    for (n, delta) in (1..).zip(deltas) {
        let expected = base_version.saturating_add(n);
        if delta.directory() != first.directory() {
            let (delta, first) = (delta.as_str(), first.as_str());
            return Err(format!("`{delta}` does not lie beside `{first}`, as versions do"));
        }
        if version_of_folder(delta.as_path()) != expected {
            let delta = delta.as_str();
            return Err(format!(
                "`{delta}` is not version {expected}: `deltas` are weight_v000001 and on, each after the one before"
            ));
        }
    }
    Ok(())
}
