//! `ckptfs ls`: the view of a directory, without mounting it.
//!
//! In: a path. Out: a [`Directory`] for each that is listed, as text or as JSON.

mod report;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::source::FileKind;
use crate::view::{self, View, ViewEntry};

use crate::cli::args::LsArgs;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};
use crate::cli::{CommandError, EXIT_FAILED};
use report::{DirectoryReport, EntryReport};

pub fn run(args: &LsArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let view = View::new(&args.path, args.view_args.options()?)?;
    let mut directories = Vec::new();
    let mut unreadable = 0;
    let mut todo = vec![PathBuf::new()];
    while let Some(place) = todo.pop() {
        let (directory, beneath) = match list(&view, &place) {
            Ok(listed) => listed,
            // What was asked for; anything beneath it keeps nothing else from being listed.
            Err(error) if place.as_os_str().is_empty() => return Err(error.into()),
            Err(error) => (DirectoryReport::unreadable(&place, &error), Vec::new()),
        };
        unreadable += directory.unreadable.len() + usize::from(directory.error.is_some());
        if args.recursive {
            todo.extend(beneath.into_iter().rev());
        }
        if args.json {
            directories.push(directory);
            continue;
        }
        if args.recursive {
            let gap = if place.as_os_str().is_empty() { "" } else { "\n" };
            let path = args.path.join(&place);
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
        return Err(CommandError::new(EXIT_FAILED, message, "see what the listing says of each"));
    }
    Ok(())
}

/// The directory at a place, and the places of those in it.
fn list(view: &View, place: &Path) -> Result<(DirectoryReport, Vec<PathBuf>), view::ViewError> {
    let listing = view.list(place)?;
    let headers = view.safetensors_headers(place, &listing);
    let unreachable = unreachable_mounts(view, place);
    let is_reachable = |name: &OsStr| unreachable.iter().all(|(other, _)| other != name);
    let folders = listing
        .entries
        .iter()
        .filter(
            |named| matches!(&named.entry, ViewEntry::Source(a) if a.kind == FileKind::Directory),
        )
        .filter(|named| is_reachable(&named.name))
        .map(|named| place.join(&named.name))
        .collect();
    Ok((DirectoryReport::new(place, listing, headers, unreachable), folders))
}

/// The mounts in a directory whose daemons are gone or stuck, and what is wrong with each: a listing
/// has their names, and does not go there.
fn unreachable_mounts(view: &View, place: &Path) -> Vec<(OsString, String)> {
    #[cfg(feature = "mount")]
    {
        let wrong = crate::mount::lifecycle::stuck_paths::unreachable_mounts_in(
            &view.root().real_path().join(view.source_path(place)),
        );
        let told = wrong.into_iter().map(|(name, e)| (name, report::error_text(&e, e.remedy())));
        told.collect()
    }
    #[cfg(not(feature = "mount"))]
    {
        let _ = (view, place);
        Vec::new()
    }
}

fn print_directory(directory: &DirectoryReport, out: &mut dyn Write) -> io::Result<()> {
    for named in &directory.entries {
        writeln!(
            out,
            "{:>10}  {}{}",
            size_text(named),
            one_line(&named.name.text),
            description(named)
        )?;
        for note in named.virtual_file.iter().flat_map(|virtual_file| &virtual_file.notes) {
            writeln!(out, "{:>10}    note: {}", "", one_line(note))?;
        }
    }
    let reasons = [
        ("hidden", &directory.hidden),
        ("as is", &directory.left),
        ("unreadable", &directory.unreadable),
    ];
    for (word, names) in reasons {
        for why in names {
            writeln!(out, "{word:>10}  {}: {}", one_line(&why.name.text), one_line(&why.reason))?;
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

fn size_text(named: &EntryReport) -> String {
    match named.kind {
        "file" | "virtual_file" | "index" => format_bytes(named.size),
        _ => String::new(),
    }
}

/// What follows a name: what it is, and what it is made of.
fn description(named: &EntryReport) -> String {
    if let Some(virtual_file) = &named.virtual_file {
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
    if let Some(target) = &named.target {
        return format!(" -> {}", one_line(&target.text));
    }
    if let Some(reason) = named.refused {
        return format!(" -> refused: {reason}");
    }
    match (named.kind, named.tensors) {
        ("directory", _) => "/".to_owned(),
        ("index", _) => {
            "  made for loaders that go by an index: names the virtual file alone".to_owned()
        }
        (_, Some(tensors)) => format!("  ({})", format_count(tensors, "tensor")),
        _ => String::new(),
    }
}
