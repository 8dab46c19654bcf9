//! `ckptfs inspect`: tells what a checkpoint holds.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::checkpoint::Layout;
use crate::image::Image;
use crate::view;

use super::args::Inspect;
use super::report::{Report, Tensor};
use super::terminal_text::{bytes, count, one_line};
use super::{Failure, REFUSED};

pub fn run(args: &Inspect, out: &mut dyn Write) -> Result<(), Failure> {
    let (report, outcome) = match view::open(&args.source.path, &args.source.reading.options()) {
        Ok(checkpoint) => {
            let mut report = Report::of(&checkpoint);
            let outcome = match Image::new(checkpoint) {
                Ok(image) => {
                    report.set_image(&image);
                    Ok(())
                }
                Err(error) => {
                    let failure = Failure::from(error);
                    // Refused entries are in the report; what else there is must be said too.
                    if report.refused.is_empty() {
                        let whole = Report::refusal(None, failure.message.clone(), &failure.remedy);
                        report.refused = whole.refused;
                    }
                    Err(failure)
                }
            };
            (report, outcome)
        }
        Err(error) if args.json && error.is_refusal() => {
            let path = Some(error.path().display().to_string());
            (Report::refusal(path, error.to_string(), error.remedy()), Err(Failure::from(error)))
        }
        Err(error) => return Err(error.into()),
    };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report).map_err(io::Error::from)?;
        writeln!(out)?;
        return outcome;
    }
    write_text(&report, args, out)?;
    // What is refused stands in the text.
    outcome
        .map_err(|failure| if failure.code == REFUSED { Failure::told(REFUSED) } else { failure })
}

fn write_text(report: &Report, args: &Inspect, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", one_line(&args.source.path.display().to_string()))?;
    let mut line = |label: &str, text: String| writeln!(out, "  {label:<9} {text}");
    let format = report.format.map_or("unknown", |format| format.name());
    let total: u64 = report.files.iter().map(|file| file.size).sum();
    line("format", format!("{format}, {} in {}", bytes(total), count(report.files.len(), "file")))?;
    line("tensors", tensors_in_words(&report.tensors))?;
    for (layout, word) in LAYOUTS {
        let n = report.tensors.iter().filter(|tensor| tensor.layout == layout).count();
        if n > 0 {
            line(word, format!("{} {}", count(n, "tensor"), explained(layout)))?;
        }
    }
    let shared = report.tensors.iter().filter(|tensor| !tensor.shares_with.is_empty()).count();
    if shared > 0 {
        line(
            "shared",
            format!(
                "{} whose bytes overlap those of others; every name is kept",
                count(shared, "tensor")
            ),
        )?;
    }
    for (key, value) in &report.metadata {
        line("metadata", format!("{} = {}", one_line(key), shortened(&one_line(value))))?;
    }
    match &report.image {
        Some(image) => {
            line(
                "image",
                format!("{}, {} of it header", bytes(image.size), bytes(image.header_size)),
            )?;
            line("layout", image.layout.clone())?;
            line("identity", image.identity.clone())?;
        }
        None => line("image", "none: refused".to_owned())?,
    }
    for note in &report.notes {
        line("note", one_line(note))?;
    }
    for entry in &report.refused {
        let name =
            entry.tensor.as_ref().map(|name| format!("`{}` ", one_line(name))).unwrap_or_default();
        line(
            "refused",
            format!("{name}{}; what to do: {}", one_line(&entry.reason), entry.remedy),
        )?;
    }
    if args.tensors {
        write_tensors(&report.tensors, out)?;
    }
    Ok(())
}

const LAYOUTS: [(Layout, &str); 4] = [
    (Layout::Strided, "strided"),
    (Layout::Expanded, "expanded"),
    (Layout::Swapped, "swapped"),
    (Layout::Memory, "memory"),
];

fn explained(layout: Layout) -> &'static str {
    match layout {
        Layout::Run => "read as they lie",
        Layout::Strided => "gathered as read: not stored in order",
        Layout::Expanded => "repeated as read: stored once",
        Layout::Swapped => "turned round as read: stored big-endian",
        Layout::Memory => "held unpacked in memory: stored compressed",
    }
}

fn tensors_in_words(tensors: &[Tensor]) -> String {
    let mut by_dtype: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in tensors {
        let (n, size) = by_dtype.entry(tensor.dtype).or_default();
        *n += 1;
        *size = size.saturating_add(tensor.nbytes);
    }
    let parts: Vec<String> = by_dtype
        .iter()
        .map(|(dtype, (n, size))| format!("{n} {dtype} ({})", bytes(*size)))
        .collect();
    match parts.len() {
        0 => "none".to_owned(),
        1 => parts.concat(),
        _ => format!("{}: {}", tensors.len(), parts.join(", ")),
    }
}

/// Metadata can be a page long; the JSON has all of it.
const SHOWN_VALUE: usize = 100;

fn shortened(value: &str) -> String {
    match value.char_indices().nth(SHOWN_VALUE) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

fn write_tensors(tensors: &[Tensor], out: &mut dyn Write) -> io::Result<()> {
    let names: Vec<String> = tensors.iter().map(|tensor| one_line(&tensor.name)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    for (tensor, name) in tensors.iter().zip(names) {
        let layout = serde_json::to_value(tensor.layout)?;
        let layout = layout.as_str().filter(|_| tensor.layout != Layout::Run).unwrap_or_default();
        let shape = format!("{:?}", tensor.shape);
        let line = format!(
            "  {name:<width$}  {:<8} {shape:<20} {:>12}  {layout}",
            tensor.dtype,
            bytes(tensor.nbytes)
        );
        let shares: Vec<String> = tensor.shares_with.iter().map(|name| one_line(name)).collect();
        let shares = if shares.is_empty() {
            String::new()
        } else {
            format!("  overlaps with {}", shares.join(", "))
        };
        writeln!(out, "{}{shares}", line.trim_end())?;
    }
    Ok(())
}
