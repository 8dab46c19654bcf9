//! The text of a recipe: TOML in a file, or the same in JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use serde::{Deserialize, Serialize};

use super::beside::BesideRule;
use super::error::RecipeError;
use super::relative_path::RelativePath;
use super::shape::{FileShape, MAX_RECIPE_BYTES, RecipeShape, check_length, check_toml_shape};
use super::transform::Transform;
use super::version_source::{DeltasForm, VersionSource};

/// How a recipe is opened. Opening a FIFO must not wait for its writer.
pub const RECIPE_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// What a view shows beside the files of its source.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The files, in the order of the text.
    #[serde(rename = "file")]
    pub files: Vec<RecipeFile>,
}

/// Maximum number of checkpoints that one file joins: each is opened for it.
const MAX_JOINED_COUNT: usize = 1024;

/// Fields that are set in a shown `config.json`.
pub type ConfigFields = serde_json::Map<String, serde_json::Value>;

/// One file that a view shows, and what it is made of.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "RecipeFileForm", into = "RecipeFileForm")]
pub struct RecipeFile {
    /// Where it is shown.
    pub path: RelativePath,
    /// The checkpoints that it is made of: files, sets or directories. Empty if it is made of versions.
    pub from: Vec<RelativePath>,
    /// The versions of which it is the newest.
    pub versions: Option<VersionSource>,
    /// The steps with their tensors.
    pub transform: Transform,
    /// Names of files of the first checkpoint's directory that are shown beside it.
    pub beside: Vec<BesideRule>,
    /// Fields of its `config.json`.
    pub config: ConfigFields,
}

/// A file as written in a recipe.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with `path` and `from`")]
struct RecipeFileForm {
    path: RelativePath,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<Vec<RelativePath>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<RelativePath>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deltas: Option<DeltasForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    only: Vec<super::GlobRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    drop: Vec<super::GlobRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rename: Vec<super::RenameRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    slice: Vec<super::SliceRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    split: Vec<super::SplitRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    stack: Vec<super::StackRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cast: Vec<super::CastRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    beside: Vec<BesideRule>,
    #[serde(default, skip_serializing_if = "ConfigFields::is_empty")]
    config: ConfigFields,
}

impl Recipe {
    /// Reads a recipe from a file.
    pub fn read(path: &Path) -> Result<Recipe, RecipeError> {
        Recipe::parse(&Recipe::read_text(path)?, path)
    }

    /// Reads the text of a recipe, and not more than a recipe can have.
    pub fn read_text(path: &Path) -> Result<Vec<u8>, RecipeError> {
        let io_error = |error| RecipeError::Io { path: path.to_path_buf(), error };
        let file = openat(CWD, path, RECIPE_FLAGS, Mode::empty());
        Recipe::read_text_of(file.map_err(|error| io_error(error.into()))?.into(), path)
    }

    /// The same of an open file; `path` is for messages.
    pub fn read_text_of(file: File, path: &Path) -> Result<Vec<u8>, RecipeError> {
        let io_error = |error| RecipeError::Io { path: path.to_path_buf(), error };
        if !file.metadata().map_err(io_error)?.is_file() {
            return Err(io_error(std::io::Error::other("it is not a file")));
        }
        let mut text = Vec::new();
        file.take(MAX_RECIPE_BYTES + 1).read_to_end(&mut text).map_err(io_error)?;
        check_length(&text, path)?;
        Ok(text)
    }

    /// Parses the TOML of a recipe; `path` is for messages.
    pub fn parse(toml: &[u8], path: &Path) -> Result<Recipe, RecipeError> {
        check_length(toml, path)?;
        let syntax = |message: String| RecipeError::Syntax { path: path.to_path_buf(), message };
        let text = std::str::from_utf8(toml).map_err(|_| syntax("is not UTF-8 text".to_owned()))?;
        let at_line = |error: toml::de::Error| {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            syntax(format!("{place}{}", error.message().replace('\n', " ")))
        };
        let table = toml::de::DeTable::parse(text).map_err(at_line)?;
        check_toml_shape(table.get_ref()).map_err(syntax)?;
        let recipe = Recipe::deserialize(toml::Deserializer::from(table)).map_err(at_line)?;
        recipe.check(path)
    }

    /// Parses a recipe in JSON, which has the same keys.
    pub fn parse_json(json: &[u8], path: &Path) -> Result<Recipe, RecipeError> {
        check_length(json, path)?;
        let syntax = |message: String| RecipeError::Syntax { path: path.to_path_buf(), message };
        let shape: RecipeShape =
            serde_json::from_slice(json).map_err(|error| syntax(error.to_string()))?;
        shape.check().map_err(syntax)?;
        let recipe: Recipe =
            serde_json::from_slice(json).map_err(|error| syntax(error.to_string()))?;
        recipe.check(path)
    }

    /// Fails if two files of the view are in each other's way.
    fn check(self, path: &Path) -> Result<Recipe, RecipeError> {
        let syntax = |message: String| RecipeError::Syntax { path: path.to_path_buf(), message };
        let mut shown = BTreeMap::new();
        for file in &self.files {
            if shown.insert(file.path.as_path().to_path_buf(), None).is_some() {
                let shown = file.path.as_str().to_owned();
                return Err(RecipeError::SamePath { path: path.to_path_buf(), shown });
            }
        }
        for file in self.files.iter().filter(|file| !file.config.is_empty()) {
            let config = file.path.directory().join("config.json");
            if let Some(Some(other)) = shown.insert(config, Some(&file.config))
                && *other != file.config
            {
                let directory = file.path.directory();
                let message = format!(
                    "files in `{}` set different fields of its config.json",
                    directory.display()
                );
                return Err(syntax(message));
            }
        }
        for file in &self.files {
            let mut above = file.path.as_path().ancestors().skip(1);
            if let Some(parent) = above.find(|parent| shown.contains_key(*parent)) {
                let message = format!(
                    "`{}` lies beneath `{}`, which is a file",
                    file.path.as_str(),
                    parent.display()
                );
                return Err(syntax(message));
            }
        }
        Ok(self)
    }
}

impl RecipeFile {
    /// The paths of its checkpoints, or of its base.
    pub fn source_paths(&self) -> impl Iterator<Item = &RelativePath> {
        self.from.iter().chain(self.versions.as_ref().map(|versions| &versions.base))
    }

    /// The file as JSON, for a loader that makes it again.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, numbers and lists always have a JSON form.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The file in such JSON; `None` if it is invalid.
    pub fn from_json(json: &[u8]) -> Option<RecipeFile> {
        check_length(json, Path::new("")).ok()?;
        serde_json::from_slice::<FileShape>(json).ok()?.check().ok()?;
        serde_json::from_slice(json).ok()
    }
}

impl TryFrom<RecipeFileForm> for RecipeFile {
    type Error = String;

    fn try_from(form: RecipeFileForm) -> Result<RecipeFile, String> {
        let RecipeFileForm {
            path,
            from,
            base,
            deltas,
            only,
            drop,
            rename,
            slice,
            split,
            stack,
            cast,
            beside,
            config,
        } = form;
        let transform = Transform { only, drop, rename, slice, split, stack, cast };
        let versions = match (base, deltas) {
            (Some(base), Some(deltas)) => Some(VersionSource::parse(base, deltas)?),
            (Some(_), None) => {
                return Err("`base` needs `deltas`: write deltas = \"auto\"".to_owned());
            }
            (None, Some(_)) => return Err("`deltas` needs a `base`".to_owned()),
            (None, None) => None,
        };
        let from = match (from, &versions) {
            (Some(from), None) => from,
            (None, Some(_)) => Vec::new(),
            (Some(_), Some(_)) => {
                return Err("write either `from`, or `base` and `deltas`".to_owned());
            }
            (None, None) => return Err("`from` is missing".to_owned()),
        };
        if from.is_empty() && versions.is_none() {
            return Err("`from` names no checkpoint".to_owned());
        }
        if from.len() > MAX_JOINED_COUNT {
            return Err(format!("`from` names more than {MAX_JOINED_COUNT} checkpoints"));
        }
        let mut named = BTreeSet::new();
        if let Some(twice) = from.iter().find(|from| !named.insert(from.as_str())) {
            return Err(format!("`from` names `{}` twice", twice.as_str()));
        }
        if !path.name().ends_with(".safetensors") || path.name() == ".safetensors" {
            return Err(format!("`{}`: its name must end with .safetensors", path.as_str()));
        }
        Ok(RecipeFile { path, from, versions, transform, beside, config })
    }
}

impl From<RecipeFile> for RecipeFileForm {
    fn from(file: RecipeFile) -> RecipeFileForm {
        let RecipeFile { path, from, versions, transform, beside, config } = file;
        let Transform { only, drop, rename, slice, split, stack, cast } = transform;
        let from = versions.is_none().then_some(from);
        let (base, deltas) = versions.map(VersionSource::into_form).unzip();
        RecipeFileForm {
            path,
            from,
            base,
            deltas,
            only,
            drop,
            rename,
            slice,
            split,
            stack,
            cast,
            beside,
            config,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::shape::MAX_RULE_COUNT;

    fn parse(toml: &str) -> Result<Recipe, String> {
        Recipe::parse(toml.as_bytes(), Path::new("r.toml")).map_err(|error| error.to_string())
    }

    const WHOLE: &str = r#"
[[file]]
path = "llama-bf16/model.safetensors"
from = ["llama"]
cast = [{ tensors = "*", to = "bfloat16" }, { tensors = "*.norm.weight", to = "float32" }]
rename = [{ match = '^model\.(.*)$', to = '$1' }]
only = ["*"]
drop = ["*.inv_freq", { tensors = "*.bias", optional = true }]
slice = [{ tensors = "*.q_proj.weight", dim = 0, part = "1/4" }, { tensors = "a", dim = -1, range = [0, 1024] }]
stack = [{ tensors = 'layers\.(\d+)\.w', to = "layers.w" }]
split = [{ tensors = "experts.w", dim = 0, to = "experts.{}.w" }]
beside = ["config.json", "tokenizer*", { names = "special_tokens*", optional = true }]
config = { dtype = "bfloat16" }
"#;

    #[test]
    fn every_key_is_read_and_json_says_the_same() {
        let recipe = parse(WHOLE).unwrap();
        assert_eq!(recipe.files[0].transform.rule_count(), 10);
        assert_eq!(recipe.files[0].config["dtype"], "bfloat16");
        let json = serde_json::to_vec(&recipe).unwrap();
        let again = Recipe::parse_json(&json, Path::new("r.json")).unwrap();
        assert_eq!(serde_json::to_vec(&again).unwrap(), json);
        let chains = "[[file]]\npath = \"a.safetensors\"\nbase = \"m\"\ndeltas = \"auto\"\n[[file]]\npath = \"b.safetensors\"\n\
            base = \"r/weight_v000007\"\ndeltas = [\"r/weight_v000008\", \"r/weight_v000009\"]\n";
        for file in parse(chains).unwrap().files {
            let again = RecipeFile::from_json(&file.to_json()).unwrap();
            assert!(
                again.versions == file.versions
                    && again.versions.is_some()
                    && again.from.is_empty()
            );
        }
        let file = RecipeFile::from_json(&recipe.files[0].to_json()).unwrap();
        assert_eq!(file.transform.canonical_text(), recipe.files[0].transform.canonical_text());
    }

    #[test]
    fn faults_name_their_line() {
        let file =
            |more: &str| format!("[[file]]\npath = \"a.safetensors\"\nfrom = [\"x\"]\n{more}\n");
        let chain = |base: &str, deltas: &str| {
            format!("[[file]]\npath = \"a.safetensors\"\nbase = \"{base}\"\ndeltas = {deltas}\n")
        };
        for (text, expected) in [
            ("[[file]]\npath = 3\n".to_owned(), "line 2"),
            ("file = [3]\n".to_owned(), "expected a table with `path`"),
            (file("casts = []"), "line 4"),
            (file("cast = [{ tensors = \"*\", to = \"float99\" }]"), "`float99` is no type"),
            (file("rename = [{ match = '(', to = '' }]"), "line 4"),
            (file("rename = [{ match = 'a', to = '$1' }]"), "has no group `1`"),
            (file("slice = [{ tensors = \"*\", dim = 0, part = \"0/4\" }]"), "no part"),
            (file("slice = [{ tensors = \"*\", dim = 0 }]"), "either part"),
            (file("slice = [{ tensors = \"*\", dim = 0, range = [2, 1] }]"), "ends before"),
            (file("stack = [{ tensors = 'a', to = 'b' }]"), "no group for the number"),
            (file("split = [{ tensors = 'a', dim = 0, to = 'b' }]"), "no place for the number"),
            (
                "[[file]]\npath = \"../a.safetensors\"\nfrom = [\"x\"]\n".to_owned(),
                "without . or ..",
            ),
            ("[[file]]\npath = \"/a.safetensors\"\nfrom = [\"x\"]\n".to_owned(), "is absolute"),
            (
                "[[file]]\npath = \"a.safetensors\"\nfrom = [\"x\", \"x\"]\n".to_owned(),
                "names `x` twice",
            ),
            (file("slice = [{ tensors = \"*\", dim = 0, part = \"+1/ 2\" }]"), "no part"),
            (
                "[[file]]\npath = \"a.safetensors\"\nfrom = [\"../x\"]\n".to_owned(),
                "without . or ..",
            ),
            ("[[file]]\npath = \"a.bin\"\nfrom = [\"x\"]\n".to_owned(), "safetensors"),
            ("[[file]]\npath = \"a.safetensors\"\nfrom = []\n".to_owned(), "no checkpoint"),
            ("[[file]]\npath = \"a.safetensors\"\n".to_owned(), "`from` is missing"),
            (file("base = \"b\""), "needs `deltas`"),
            (file("deltas = \"auto\""), "needs a `base`"),
            (file("base = \"b\"\ndeltas = \"auto\""), "either `from`, or `base`"),
            (chain(".", "\"auto\""), "beneath the mounted directory"),
            (chain("b", "\"all\""), "write \"auto\""),
            (chain("b", "3"), "a list of folders"),
            (chain("b", "[]"), "names no version"),
            (chain("b", "[\"../weight_v000001\"]"), ". or .."),
            (chain("b", "[\"weight_v000002\"]"), "is not version 1"),
            (chain("weight_v000001", "[\"weight_v000003\"]"), "is not version 2"),
            (chain("r/weight_v000001", "[\"s/weight_v000002\"]"), "beside its base"),
            (
                chain("b", "[\"r/weight_v000001\", \"s/weight_v000002\"]"),
                "beside `r/weight_v000001`",
            ),
            (format!("{0}{0}", file("")), "two files"),
            (file("config = { day = 1979-05-27 }"), "a date"),
            (file("config = { limits = [1.5, inf] }"), "inf or nan"),
            (
                file("") + "[[file]]\npath = \"a.safetensors/b.safetensors\"\nfrom = [\"x\"]\n",
                "lies beneath `a.safetensors`",
            ),
            (
                file("config = { n = 1 }")
                    + "[[file]]\npath = \"b.safetensors\"\nfrom = [\"x\"]\nconfig = { n = 2 }\n",
                "different fields",
            ),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn recipes_are_bounded() {
        assert!(parse(&"#".repeat(2 << 20)).unwrap_err().contains("longer than"));
        let rules = "{ match = 'a', to = 'b' },".repeat(MAX_RULE_COUNT + 1);
        let many =
            format!("[[file]]\npath = \"a.safetensors\"\nfrom = [\"x\"]\nrename = [{rules}]\n");
        assert!(parse(&many).unwrap_err().contains("more than 1024 rules"));
        // Counted over all files, before any pattern is compiled.
        let rules = r"{ match = '\w{8}\w{1..3}q', to = 'x' },".repeat(600);
        let file = |name| {
            format!("[[file]]\npath = \"{name}.safetensors\"\nfrom = [\"x\"]\nrename = [{rules}]\n")
        };
        assert!(parse(&(file("a") + &file("b"))).unwrap_err().contains("more than 1024 rules"));
    }

    #[test]
    fn rules_in_json_are_counted_before_a_pattern_is_compiled() {
        let rules = vec![r#"{"match": "(", "to": ""}"#; MAX_RULE_COUNT + 1].join(",");
        // A value of the wrong kind does not hide the count.
        for steps in [
            format!(r#"{{"rename": [{rules}]}}"#),
            format!(r#"{{"rename": [{rules}], "cast": 3}}"#),
            format!(r#"{{"cast": "x", "rename": [{rules}]}}"#),
        ] {
            let refused = Transform::parse_json(&steps, Path::new("r.json")).unwrap_err();
            assert!(refused.to_string().contains("more than 1024 rules"), "{refused}");
            let file = steps.replacen('{', r#"{"path": "a.safetensors", "from": ["x"], "#, 1);
            let recipe = format!(r#"{{"file": [{file}]}}"#);
            let refused = Recipe::parse_json(recipe.as_bytes(), Path::new("r.json")).unwrap_err();
            assert!(refused.to_string().contains("more than 1024 rules"), "{refused}");
            assert!(RecipeFile::from_json(file.as_bytes()).is_none());
        }
        let long = format!(r#"{{"only": ["{}"]}}"#, "a".repeat(2 << 20));
        let refused = Transform::parse_json(&long, Path::new("r.json")).unwrap_err();
        assert!(refused.to_string().contains("longer than"), "{refused}");
    }

    #[test]
    fn deeply_nested_recipes_are_refused() {
        for (open, close) in [("[", "]"), ("{ a = ", " }")] {
            let nested = open.repeat(50_000) + "1" + &close.repeat(50_000);
            let text = format!(
                "[[file]]\npath = \"a.safetensors\"\nfrom = [\"x\"]\nconfig = {{ a = {nested} }}\n"
            );
            assert!(parse(&text).unwrap_err().contains("recursion"));
        }
        let dotted = format!("[[file]]\nconfig.{} = 1\n", "a.".repeat(50_000) + "a");
        assert!(parse(&dotted).is_err());
    }

    #[test]
    fn a_fifo_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.toml");
        let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).unwrap();
        assert!(Recipe::read(&path).unwrap_err().to_string().contains("not a file"));
    }
}
