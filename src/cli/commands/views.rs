//! `ckptfs views`: checks a recipe against its sources.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::recipe::{Recipe, RecipeFile, RelativePath};
use crate::view::{RecipeSource, View, ViewOptions};
use crate::virtual_file::VirtualFile;

use crate::cli::args::ViewsArgs;
use crate::cli::error::{CommandError, EXIT_REFUSED};
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

/// What one file would hold, as the JSON has it.
#[derive(Debug, Serialize)]
struct CheckedView {
    path: String,
    from: Vec<String>,
    /// The number of tensors of each type.
    dtypes: BTreeMap<&'static str, usize>,
    tensors: usize,
    bytes: u64,
    notes: Vec<String>,
    /// Why it cannot be shown, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<(String, String)>,
}

pub fn run(args: &ViewsArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let recipe = Arc::new(Recipe::read(&args.file)?);
    let parent = args.file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let source = args.source.as_deref().or(parent).unwrap_or(Path::new("."));
    let options = ViewOptions {
        parse: args.parse_args.to_options(),
        recipe: Some(RecipeSource::Fixed(Arc::clone(&recipe))),
        ..ViewOptions::default()
    };
    let view = View::new(source, options)?;
    let checked: Vec<CheckedView> = recipe.files.iter().map(|file| check(&view, file)).collect();
    if args.json {
        let json = serde_json::to_string_pretty(&checked).map_err(io::Error::from)?;
        writeln!(out, "{json}")?;
    } else {
        checked.iter().try_for_each(|file| write_text(file, out))?;
    }
    match checked.iter().filter(|file| file.refused.is_some()).count() {
        0 => Ok(()),
        _ => Err(CommandError::already_reported(EXIT_REFUSED)),
    }
}

fn check(view: &View, file: &RecipeFile) -> CheckedView {
    let mut checked = CheckedView {
        path: file.path.as_str().to_owned(),
        from: file.source_paths().map(RelativePath::as_str).map(str::to_owned).collect(),
        dtypes: BTreeMap::new(),
        tensors: 0,
        bytes: 0,
        notes: Vec::new(),
        refused: None,
    };
    match open(view, file, &mut checked.notes) {
        Ok(virtual_file) => {
            for tensor in virtual_file.tensors() {
                *checked.dtypes.entry(tensor.dtype.name()).or_default() += 1;
            }
            checked.tensors = virtual_file.tensors().len();
            checked.bytes = virtual_file.size();
        }
        Err(refused) => checked.refused = Some(refused),
    }
    checked
}

/// The virtual file of a recipe's file, or why there is none, and what to do.
fn open(
    view: &View,
    file: &RecipeFile,
    notes: &mut Vec<String>,
) -> Result<Arc<VirtualFile>, (String, String)> {
    let found = view.find_recipe_file(file);
    let shown = found.map_err(|refusal| (refusal.reason.clone(), refusal.remedy.clone()))?;
    notes.extend(shown.notes().iter().cloned());
    view.virtual_file(&shown).map_err(|error| (error.to_string(), error.remedy().into_owned()))
}

fn write_text(file: &CheckedView, out: &mut dyn Write) -> io::Result<()> {
    let path = one_line(&file.path);
    if let Some((reason, remedy)) = &file.refused {
        writeln!(out, "{path}: refused: {}", one_line(reason))?;
        return writeln!(out, "  what to do: {}", one_line(remedy));
    }
    let dtypes: Vec<String> = file.dtypes.iter().map(|(name, n)| format!("{n} {name}")).collect();
    let (tensors, bytes) = (format_count(file.tensors, "tensor"), format_bytes(file.bytes));
    let from = file.from.join(", ");
    writeln!(out, "{path}: {tensors} ({}), {bytes}, from {}", dtypes.join(", "), one_line(&from))?;
    file.notes.iter().try_for_each(|note| writeln!(out, "  note: {}", one_line(note)))
}
