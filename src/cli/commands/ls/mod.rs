//! `ckptfs ls`: lists what a mount would show, without mounting.

mod report;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::view::{self, View, ViewError, ViewOptions};

use crate::cli::args::LsArgs;
use crate::cli::each_path::for_each_path;
use crate::cli::error::{CommandError, EXIT_FAILED, ErrorFormat};
use crate::cli::output::is_quiet;
use crate::cli::stuck_path_check::check_path;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};
use report::{DirectoryReport, EntryReport, NameReason};

pub fn run(args: &LsArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let options = args.view_args.to_options()?;
    let mut listing = PathListing { args, options, directories: Vec::new(), printed: 0 };
    let format = ErrorFormat::new(args.json);
    let done = for_each_path(&args.paths, format, out, |path, out| listing.add(path, out));
    // The error is all that there is to report of a single path.
    if args.json && !listing.directories.is_empty() {
        let json = serde_json::to_string_pretty(&listing.directories).map_err(io::Error::from)?;
        writeln!(out, "{json}")?;
    }
    done
}

/// The listing of all paths: printed at once, or collected for the JSON.
struct PathListing<'a> {
    args: &'a LsArgs,
    options: ViewOptions,
    directories: Vec<DirectoryReport>,
    /// The number of directories that were printed.
    printed: usize,
}

impl PathListing<'_> {
    /// Lists a path, and with `--recursive` all beneath it.
    fn add(&mut self, root: &Path, out: &mut dyn Write) -> Result<(), CommandError> {
        let (view, top) = match self.open(root) {
            Ok(opened) => opened,
            Err(error) => {
                if self.args.json && self.args.paths.len() > 1 {
                    let why = format!("{}; what to do: {}", error.whole_message(), error.remedy);
                    self.directories.push(DirectoryReport::unreadable(root, Path::new(""), why));
                }
                return Err(error);
            }
        };
        let mut unreadable = 0;
        let mut top = Some(top);
        view::walk(|path| {
            let (directory, subdirectories) = match top.take() {
                Some(listed) => listed,
                // An unreadable subdirectory does not stop the listing.
                None => list(&view, root, path).unwrap_or_else(|error| {
                    let why = report::error_text(&error, &error.remedy());
                    (DirectoryReport::unreadable(root, path, why), Vec::new())
                }),
            };
            unreadable += directory.unreadable.len() + usize::from(directory.error.is_some());
            if self.args.json {
                self.directories.push(directory);
            } else {
                let is_top = path.as_os_str().is_empty();
                let path = if is_top { root.to_owned() } else { root.join(path) };
                self.print(&path, &directory, out)?;
            }
            Ok::<_, io::Error>(if self.args.recursive { subdirectories } else { Vec::new() })
        })?;
        if unreadable > 0 {
            let names = format_count(unreadable, "name");
            let message = format!("{}: {names} could not be read", root.display());
            let remedy = "see the reasons in the listing";
            return Err(CommandError::new(EXIT_FAILED, message, remedy));
        }
        Ok(())
    }

    fn open(&self, root: &Path) -> Result<(View, ListedDirectory), CommandError> {
        check_path(root)?;
        let view = View::new(root, self.options.clone())?;
        let top = list(&view, root, Path::new(""))?;
        let has_reason = |name: &NameReason| name.remedy.is_some();
        if view.is_single() && top.0.left.iter().any(has_reason) {
            // A checkpoint that was named and is refused is an error, as in every command.
            view::open(root, &self.options.parse)?;
        }
        Ok((view, top))
    }

    fn print(
        &mut self,
        path: &Path,
        directory: &DirectoryReport,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        if self.args.recursive || self.args.paths.len() > 1 {
            let gap = if self.printed == 0 { "" } else { "\n" };
            writeln!(out, "{gap}{}:", one_line(&path.display().to_string()))?;
        }
        self.printed += 1;
        print_directory(directory, out)
    }
}

/// The report on a directory, and its subdirectories.
type ListedDirectory = (DirectoryReport, Vec<PathBuf>);

/// Lists a directory of the view.
fn list(view: &View, root: &Path, path: &Path) -> Result<ListedDirectory, ViewError> {
    let listing = view.list(path)?;
    let headers = view.safetensors_headers(path, &listing);
    let unreachable = unreachable_mounts(view, path);
    let is_reachable = |name: &OsStr| unreachable.iter().all(|(other, _)| other != name);
    let subdirectories = listing.subdirectories().filter(|name| is_reachable(name));
    let subdirectories = subdirectories.map(|name| path.join(name)).collect();
    Ok((DirectoryReport::new(root, path, listing, headers, unreachable), subdirectories))
}

/// The dead and stuck mounts in a directory, each with its error. A listing has their names, but cannot enter them.
fn unreachable_mounts(view: &View, path: &Path) -> Vec<(OsString, String)> {
    #[cfg(feature = "mount")]
    {
        let directory = view.root().real_path().join(view.source_path(path));
        let mounts = crate::mount::lifecycle::stuck_paths::unreachable_mounts_in(&directory);
        mounts.into_iter().map(|(name, e)| (name, report::error_text(&e, &e.remedy()))).collect()
    }
    #[cfg(not(feature = "mount"))]
    {
        let _ = (view, path);
        Vec::new()
    }
}

fn print_directory(directory: &DirectoryReport, out: &mut dyn Write) -> io::Result<()> {
    for entry in &directory.entries {
        writeln!(
            out,
            "{:>10}  {}{}",
            size_text(entry),
            one_line(&entry.name.text),
            description(entry)
        )?;
        let notes = entry.virtual_file.iter().flat_map(|virtual_file| &virtual_file.notes);
        for note in notes.filter(|_| !is_quiet()) {
            writeln!(out, "{:>10}    note: {}", "", one_line(note))?;
        }
    }
    let reasons = [
        ("hidden", &directory.hidden),
        ("as is", &directory.left),
        ("unreadable", &directory.unreadable),
    ];
    for (word, names) in reasons {
        for name in names {
            let (text, reason) = (one_line(&name.name.text), one_line(&name.reason));
            writeln!(out, "{word:>10}  {text}: {reason}")?;
            if let Some(remedy) = &name.remedy {
                writeln!(out, "{:>10}    what to do: {}", "", one_line(remedy))?;
            }
        }
    }
    for refused in &directory.refused {
        writeln!(out, "   refused  {}", one_line(&refused.reason))?;
        writeln!(out, "{:>10}    what to do: {}", "", one_line(&refused.remedy))?;
    }
    if let Some(error) = &directory.error {
        writeln!(out, "{:>10}  {}", "unreadable", one_line(error))?;
    }
    Ok(())
}

fn size_text(entry: &EntryReport) -> String {
    match entry.kind {
        "file" | "virtual_file" | "index" | "config" => format_bytes(entry.size),
        _ => String::new(),
    }
}

/// Describes an entry behind its name: its kind, and its source files.
fn description(entry: &EntryReport) -> String {
    if let Some(virtual_file) = &entry.virtual_file {
        let from = match virtual_file.from.as_slice() {
            [one] => one_line(one).into_owned(),
            [first, ..] => format!("{} and others", one_line(first)),
            [] => String::new(),
        };
        let files = format_count(virtual_file.from.len(), "file");
        let tensors = format_count(virtual_file.tensors, "tensor");
        return format!(
            "  virtual file of {from} ({files}, {}, {tensors})",
            virtual_file.format.name()
        );
    }
    if let Some(target) = &entry.target {
        return format!(" -> {}", one_line(&target.text));
    }
    if let Some(reason) = entry.refused {
        return format!(" -> refused: {reason}");
    }
    match (entry.kind, entry.tensors) {
        ("directory", _) => "/".to_owned(),
        ("config", _) => "  with the fields that the recipe sets".to_owned(),
        ("index", _) => {
            "  made for loaders that follow an index: names only the virtual file".to_owned()
        }
        (_, Some(tensors)) => format!("  ({})", format_count(tensors, "tensor")),
        _ => String::new(),
    }
}
