//! The text of a recipe: TOML in a file, or the same in JSON.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::RecipeError;
use super::name_glob::NameGlob;
use super::shape::{RecipeShape, find_value_outside_json};
use super::transform::{MAX_RULE_COUNT, Transform};

/// Maximum bytes of a recipe: a hundred times one that names each layer of a large model.
pub const MAX_RECIPE_BYTES: u64 = 1 << 20;

/// The longest path that Linux opens.
const MAX_PATH_BYTES: usize = 4095;

/// What a view shows beside the files of its source.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The files, in the order of the text.
    #[serde(rename = "file")]
    pub files: Vec<RecipeFile>,
}

/// Fields that are set in a shown `config.json`.
pub type ConfigFields = serde_json::Map<String, serde_json::Value>;

/// One file that a view shows, and what it is made of.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "RecipeFileForm", into = "RecipeFileForm")]
pub struct RecipeFile {
    /// Where it is shown.
    pub path: RelativePath,
    /// The checkpoints that it is made of: files, sets or directories.
    pub from: Vec<RelativePath>,
    /// The steps with their tensors.
    pub transform: Transform,
    /// Names of files of the first checkpoint's directory that are shown beside it.
    pub beside: Vec<NameGlob>,
    /// Fields of its `config.json`.
    pub config: ConfigFields,
}

/// A path from the root of a view that does not lead out of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelativePath(String);

/// A file as written in a recipe.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFileForm {
    path: RelativePath,
    from: Vec<RelativePath>,
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
    beside: Vec<NameGlob>,
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
        // Opening a FIFO must not wait for its writer.
        let mut options = OpenOptions::new();
        let file =
            options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io_error)?;
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
        // A fault of its syntax is reported below, with its line.
        if let Ok(shape) = toml::from_str::<RecipeShape>(text) {
            shape.check().map_err(syntax)?;
        }
        let table: Option<toml::Table> = toml::from_str(text).ok();
        if let Some(value) = table.as_ref().and_then(find_value_outside_json) {
            return Err(syntax(format!("`config` has {value}, which JSON has not")));
        }
        let recipe: Recipe = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            syntax(format!("{place}{}", error.message().replace('\n', " ")))
        })?;
        recipe.check(path)
    }

    /// Parses a recipe in JSON, which has the same keys.
    pub fn parse_json(json: &[u8], path: &Path) -> Result<Recipe, RecipeError> {
        check_length(json, path)?;
        let syntax = |message: String| RecipeError::Syntax { path: path.to_path_buf(), message };
        if let Ok(shape) = serde_json::from_slice::<RecipeShape>(json) {
            shape.check().map_err(syntax)?;
        }
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
                let shown = file.path.0.clone();
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
                    file.path.0,
                    parent.display()
                );
                return Err(syntax(message));
            }
        }
        Ok(self)
    }
}

fn check_length(text: &[u8], path: &Path) -> Result<(), RecipeError> {
    if text.len() as u64 > MAX_RECIPE_BYTES {
        let path = path.to_path_buf();
        return Err(RecipeError::TooLong { path, limit: MAX_RECIPE_BYTES });
    }
    Ok(())
}

impl RecipeFile {
    /// The file as JSON, for a loader that makes it again.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, numbers and lists always have a JSON form.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The file in such JSON; `None` if it is invalid.
    pub fn from_json(json: &[u8]) -> Option<RecipeFile> {
        check_length(json, Path::new("")).ok()?;
        serde_json::from_slice(json).ok()
    }
}

impl TryFrom<RecipeFileForm> for RecipeFile {
    type Error = String;

    fn try_from(form: RecipeFileForm) -> Result<RecipeFile, String> {
        let RecipeFileForm {
            path,
            from,
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
        if transform.rule_count() > MAX_RULE_COUNT {
            return Err(format!("more than {MAX_RULE_COUNT} rules"));
        }
        if from.is_empty() {
            return Err("`from` names no checkpoint".to_owned());
        }
        if !path.0.ends_with(".safetensors") || path.name() == ".safetensors" {
            return Err(format!("`{}`: its name must end with .safetensors", path.0));
        }
        Ok(RecipeFile { path, from, transform, beside, config })
    }
}

impl From<RecipeFile> for RecipeFileForm {
    fn from(RecipeFile { path, from, transform, beside, config }: RecipeFile) -> RecipeFileForm {
        let Transform { only, drop, rename, slice, split, stack, cast } = transform;
        RecipeFileForm { path, from, only, drop, rename, slice, split, stack, cast, beside, config }
    }
}

impl RelativePath {
    /// The path, empty for the root of the view.
    pub fn as_path(&self) -> &Path {
        Path::new(&self.0)
    }

    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name at its end.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// The directory that it lies in.
    pub fn directory(&self) -> PathBuf {
        self.as_path().parent().map(Path::to_path_buf).unwrap_or_default()
    }
}

impl TryFrom<String> for RelativePath {
    type Error = String;

    fn try_from(text: String) -> Result<RelativePath, String> {
        /// The longest name that filesystems take.
        const MAX_NAME_BYTES: usize = 255;
        if text == "." {
            return Ok(RelativePath(String::new()));
        }
        let is_name = |part: &str| {
            !matches!(part, "" | "." | "..") && part.len() <= MAX_NAME_BYTES && !part.contains('\0')
        };
        match text.len() <= MAX_PATH_BYTES && text.split('/').all(is_name) {
            true => Ok(RelativePath(text)),
            false => {
                Err(format!("`{text}`: write a path from the mounted directory, without . or .."))
            }
        }
    }
}

impl From<RelativePath> for String {
    fn from(path: RelativePath) -> String {
        if path.0.is_empty() { ".".to_owned() } else { path.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
beside = ["config.json", "tokenizer*"]
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
        let file = RecipeFile::from_json(&recipe.files[0].to_json()).unwrap();
        assert_eq!(file.transform.canonical_text(), recipe.files[0].transform.canonical_text());
    }

    #[test]
    fn faults_name_their_line() {
        let file =
            |more: &str| format!("[[file]]\npath = \"a.safetensors\"\nfrom = [\"x\"]\n{more}\n");
        for (text, expected) in [
            ("[[file]]\npath = 3\n".to_owned(), "line 2"),
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
            ("[[file]]\npath = \"/a.safetensors\"\nfrom = [\"x\"]\n".to_owned(), "without . or .."),
            (
                "[[file]]\npath = \"a.safetensors\"\nfrom = [\"../x\"]\n".to_owned(),
                "without . or ..",
            ),
            ("[[file]]\npath = \"a.bin\"\nfrom = [\"x\"]\n".to_owned(), "safetensors"),
            ("[[file]]\npath = \"a.safetensors\"\nfrom = []\n".to_owned(), "no checkpoint"),
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
    fn a_fifo_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.toml");
        let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).unwrap();
        assert!(Recipe::read(&path).unwrap_err().to_string().contains("not a file"));
    }
}
