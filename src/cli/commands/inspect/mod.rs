//! `ckptfs inspect`: describes a checkpoint.

mod report;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use crate::checkpoint::{Checkpoint, LayoutKind, ParseOptions};
use crate::view;
use crate::virtual_file::VirtualFile;

use crate::cli::args::InspectArgs;
use crate::cli::each_path::{for_each_path, write_json};
use crate::cli::error::{CommandError, EXIT_REFUSED, ErrorFormat};
use crate::cli::open_reader::open_checkpoint;
use crate::cli::output::is_quiet;
use crate::cli::stuck_path_check::check_path;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};
use report::{InspectReport, TensorReport};

pub fn run(args: &InspectArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let mut reports = Vec::new();
    let mut is_first = true;
    let format = ErrorFormat::new(args.json);
    let done = for_each_path(&args.paths, format, out, |path, out| {
        let (report, result) = inspect(path, &args.parse_args.to_options(), args.views.as_deref());
        if args.json {
            // Of a single path that is no checkpoint, the error is all that there is to report.
            if report.is_refusal() || result.is_ok() || args.paths.len() > 1 {
                reports.push(report);
            }
            return result;
        }
        if report.format.is_none() {
            return result;
        }
        if !is_first {
            writeln!(out)?;
        }
        is_first = false;
        write_text(path, &report, args.tensors, out)?;
        result.map_err(|error| match error.code {
            // The text has reported refusals.
            EXIT_REFUSED => CommandError::already_reported(EXIT_REFUSED),
            _ => error,
        })
    });
    if args.json {
        write_json(&args.paths, &reports, out)?;
    }
    done
}

/// The report on a path, and the error if it cannot be shown.
fn inspect(
    path: &Path,
    options: &ParseOptions,
    views: Option<&Path>,
) -> (InspectReport, Result<(), CommandError>) {
    let (mut report, result) = match check_path(path) {
        Err(error) => (InspectReport::default(), Err(error)),
        Ok(()) if views.is_some() => match open_checkpoint(path, options, views) {
            Ok(checkpoint) => report_on(checkpoint),
            Err(error) => (InspectReport::default(), Err(error)),
        },
        Ok(()) => match view::open(path, options) {
            Ok(checkpoint) => report_on(checkpoint),
            Err(error) if error.is_refusal() => {
                let refused = Some(error.path().display().to_string());
                let report =
                    InspectReport::from_refusal(refused, error.to_string(), &error.remedy());
                (report, Err(error.into()))
            }
            Err(error) => (InspectReport::default(), Err(error.into())),
        },
    };
    report.path = path.display().to_string();
    report.error = result.as_ref().err().cloned();
    (report, result)
}

/// The report on a checkpoint, and the error of its virtual file if it has none.
fn report_on(checkpoint: Checkpoint) -> (InspectReport, Result<(), CommandError>) {
    let mut report = InspectReport::from_checkpoint(&checkpoint);
    match VirtualFile::new(checkpoint) {
        Ok(virtual_file) => {
            report.set_virtual_file(&virtual_file);
            (report, Ok(()))
        }
        Err(error) => {
            let error = CommandError::from(error);
            // The report has refused entries already, but no other error.
            if report.refused.is_empty() {
                let (message, remedy) = (error.whole_message(), &error.remedy);
                report.refused = InspectReport::from_refusal(None, message, remedy).refused;
            }
            (report, Err(error))
        }
    }
}

fn write_text(
    path: &Path,
    report: &InspectReport,
    with_tensors: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    writeln!(out, "{}", one_line(&path.display().to_string()))?;
    let mut line = |label: &str, text: String| writeln!(out, "  {label:<12} {text}");
    let format = report.format.map_or("unknown", |format| format.name());
    let total: u64 = report.files.iter().map(|file| file.size).sum();
    let files = format_count(report.files.len(), "file");
    line("format", format!("{format}, {} in {files}", format_bytes(total)))?;
    line("tensors", tensor_summary(&report.tensors))?;
    for (layout, word) in LAYOUT_LABELS {
        let n = report.tensors.iter().filter(|tensor| tensor.layout == layout).count();
        if n > 0 {
            line(word, format!("{} {}", format_count(n, "tensor"), layout_text(layout)))?;
        }
    }
    let shared = report.tensors.iter().filter(|tensor| !tensor.shares_with.is_empty()).count();
    if shared > 0 {
        let tensors = format_count(shared, "tensor");
        line(
            "shared",
            format!("{tensors} whose bytes overlap those of others; every name is kept"),
        )?;
    }
    for (key, value) in &report.metadata {
        line("metadata", format!("{} = {}", one_line(key), truncate(&one_line(value))))?;
    }
    match &report.virtual_file {
        Some(virtual_file) => {
            let header = format_bytes(virtual_file.header_size);
            let size = format_bytes(virtual_file.size);
            line("virtual file", format!("{size}, {header} of it header"))?;
            line("layout", virtual_file.layout.clone())?;
            line("identity", virtual_file.identity.clone())?;
        }
        None => line("virtual file", "none: refused".to_owned())?,
    }
    for note in report.notes.iter().filter(|_| !is_quiet()) {
        line("note", one_line(note).into_owned())?;
    }
    for entry in &report.refused {
        let name =
            entry.tensor.as_ref().map(|name| format!("`{}` ", one_line(name))).unwrap_or_default();
        let reason = one_line(&entry.reason);
        line("refused", format!("{name}{reason}; what to do: {}", entry.remedy))?;
    }
    if with_tensors {
        write_tensors(&report.tensors, out)?;
    }
    Ok(())
}

const LAYOUT_LABELS: [(LayoutKind, &str); 7] = [
    (LayoutKind::Boxes, "in pieces"),
    (LayoutKind::Strided, "strided"),
    (LayoutKind::Expanded, "expanded"),
    (LayoutKind::Swapped, "swapped"),
    (LayoutKind::Cast, "cast"),
    (LayoutKind::Memory, "memory"),
    (LayoutKind::Patched, "patched"),
];

fn layout_text(layout: LayoutKind) -> &'static str {
    match layout {
        LayoutKind::Run => "contiguous",
        LayoutKind::Strided => "gathered on read: not stored in order",
        LayoutKind::Expanded => "repeated on read: stored once",
        LayoutKind::Swapped => "byte-swapped on read: stored big-endian",
        LayoutKind::Cast => "cast on read: stored as another type",
        LayoutKind::Boxes => "in pieces, joined as they are read",
        LayoutKind::Memory => "unpacked in memory: stored compressed",
        LayoutKind::Patched => "patched on read: stored as a base and deltas",
    }
}

fn tensor_summary(tensors: &[TensorReport]) -> String {
    let mut by_dtype: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in tensors {
        let (n, size) = by_dtype.entry(tensor.dtype).or_default();
        *n += 1;
        *size = size.saturating_add(tensor.nbytes);
    }
    let parts: Vec<String> = by_dtype
        .iter()
        .map(|(dtype, (n, size))| format!("{n} {dtype} ({})", format_bytes(*size)))
        .collect();
    match parts.len() {
        0 => "none".to_owned(),
        1 => parts.concat(),
        _ => format!("{}: {}", tensors.len(), parts.join(", ")),
    }
}

/// Longer metadata values are cut; the JSON has all of them.
const MAX_VALUE_CHARS: usize = 100;

fn truncate(value: &str) -> String {
    match value.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

/// Columns that shapes take at most. A longer one moves the rest of its own line only.
const MAX_SHAPE_COLUMNS: usize = 32;

fn write_tensors(tensors: &[TensorReport], out: &mut dyn Write) -> io::Result<()> {
    let names: Vec<_> = tensors.iter().map(|tensor| one_line(&tensor.name)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let dtype_width = tensors.iter().map(|tensor| tensor.dtype.len()).max().unwrap_or(0);
    let shapes: Vec<String> = tensors.iter().map(|tensor| format!("{:?}", tensor.shape)).collect();
    let shape_width = shapes.iter().map(String::len).max().unwrap_or(0).min(MAX_SHAPE_COLUMNS);
    for ((tensor, name), shape) in tensors.iter().zip(names).zip(shapes) {
        let layout = serde_json::to_value(tensor.layout)?;
        let layout =
            layout.as_str().filter(|_| tensor.layout != LayoutKind::Run).unwrap_or_default();
        let line = format!(
            "  {name:<width$}  {:<dtype_width$}  {shape:<shape_width$}  {:>12}  {layout}",
            tensor.dtype,
            format_bytes(tensor.nbytes)
        );
        let shares: Vec<_> = tensor.shares_with.iter().map(|name| one_line(name)).collect();
        let shares = if shares.is_empty() {
            String::new()
        } else {
            format!("  overlaps with {}", shares.join(", "))
        };
        writeln!(out, "{}{shares}", line.trim_end())?;
    }
    Ok(())
}
