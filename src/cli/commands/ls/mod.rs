//! `ckptfs ls`: lists what a mount would show, without mounting.

mod report;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::source::FileKind;
use crate::view::{View, ViewEntry, ViewError};

use crate::cli::args::LsArgs;
use crate::cli::error::{CommandError, EXIT_FAILED};
use crate::cli::terminal_text::{format_bytes, format_count, one_line};
use report::{DirectoryReport, EntryReport};

pub fn run(args: &LsArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let view = View::new(&args.path, args.view_args.to_options()?)?;
    let mut directories = Vec::new();
    let mut unreadable = 0;
    let mut todo = vec![PathBuf::new()];
    while let Some(path) = todo.pop() {
        let is_top = path.as_os_str().is_empty();
        let (directory, subdirectories) = match list(&view, &path) {
            Ok(listed) => listed,
            Err(error) if is_top => return Err(error.into()),
            // An unreadable subdirectory does not stop the listing.
            Err(error) => (DirectoryReport::unreadable(&path, &error), Vec::new()),
        };
        unreadable += directory.unreadable.len() + usize::from(directory.error.is_some());
        if args.recursive {
            todo.extend(subdirectories.into_iter().rev());
        }
        if args.json {
            directories.push(directory);
            continue;
        }
        if args.recursive {
            let gap = if is_top { "" } else { "\n" };
            let path = args.path.join(&path);
            writeln!(out, "{gap}{}:", one_line(&path.display().to_string()))?;
        }
        print_directory(&directory, out)?;
    }
    if args.json {
        let json = serde_json::to_string_pretty(&directories).map_err(io::Error::from)?;
        writeln!(out, "{json}")?;
    }
    if unreadable > 0 {
        let message = format!("{} could not be read", format_count(unreadable, "name"));
        return Err(CommandError::new(EXIT_FAILED, message, "see the reasons in the listing"));
    }
    Ok(())
}

/// The report on a directory of the view, and its subdirectories.
fn list(view: &View, path: &Path) -> Result<(DirectoryReport, Vec<PathBuf>), ViewError> {
    let listing = view.list(path)?;
    let headers = view.safetensors_headers(path, &listing);
    let unreachable = unreachable_mounts(view, path);
    let is_reachable = |name: &OsStr| unreachable.iter().all(|(other, _)| other != name);
    let is_directory =
        |entry: &ViewEntry| matches!(entry, ViewEntry::Source(a) if a.kind == FileKind::Directory);
    let directories = listing.entries.iter().filter(|named| is_directory(&named.entry));
    let subdirectories = directories.filter(|named| is_reachable(&named.name));
    let subdirectories = subdirectories.map(|named| path.join(&named.name)).collect();
    Ok((DirectoryReport::new(path, listing, headers, unreachable), subdirectories))
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
        for note in entry.virtual_file.iter().flat_map(|virtual_file| &virtual_file.notes) {
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
        "file" | "virtual_file" | "index" => format_bytes(entry.size),
        _ => String::new(),
    }
}

/// Describes an entry behind its name: its kind, and its source files.
fn description(entry: &EntryReport) -> String {
    if let Some(virtual_file) = &entry.virtual_file {
        let from = match virtual_file.from.as_slice() {
            [one] => one_line(one),
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
        ("index", _) => {
            "  made for loaders that follow an index: names only the virtual file".to_owned()
        }
        (_, Some(tensors)) => format!("  ({})", format_count(tensors, "tensor")),
        _ => String::new(),
    }
}
