//! `ckptfs export`: writes a checkpoint as a real file, or to standard output.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::export;
use crate::shell_word::shell_word;

use crate::cli::args::ExportArgs;
use crate::cli::error::{CommandError, EXIT_FAILED, EXIT_USAGE};
use crate::cli::open_reader::{CheckpointReader, open_reader};
use crate::cli::output::print_note;
use crate::cli::progress::{ProgressMeter, StopSignal};
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

/// What was written, as the JSON has it.
#[derive(Debug, Serialize)]
struct ExportReport {
    path: String,
    out: String,
    tensors: usize,
    bytes: u64,
    notes: Vec<String>,
}

pub fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let to_stdout = args.out == Path::new("-");
    if to_stdout {
        require_usable_stdout(args)?;
    } else {
        export::check_output_path(&args.out, args.any_suffix || args.out.is_dir())?;
    }
    let CheckpointReader { reader, name, notes } = open_reader(
        &args.path,
        &args.parse_args.to_options(),
        args.views.as_deref(),
        &args.transform_args.to_transform(),
    )?;
    let path = if to_stdout { PathBuf::new() } else { output_path(&args.out, &name)? };
    let virtual_file = reader.virtual_file();
    let meter = ProgressMeter::new(virtual_file.size(), &StopSignal::register()?);
    let written = if to_stdout {
        // Not through the buffer and the filter of other commands. The bytes go there in large pieces, and a reader
        // that closes the pipe has not got them.
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        export::export_to(&reader, &mut File::from(stdout), &meter)
    } else {
        export::export(&reader, &path, args.force, &meter)
    };
    meter.finish();
    written?;
    if !args.json {
        notes.iter().for_each(|text| print_note(text));
    }
    if to_stdout {
        return Ok(());
    }
    let (tensors, bytes) = (virtual_file.tensors().len(), virtual_file.size());
    let shown = path.display().to_string();
    if args.json {
        let path = args.path.display().to_string();
        let report = ExportReport { path, out: shown, tensors, bytes, notes };
        let json = serde_json::to_string_pretty(&report).map_err(io::Error::from)?;
        return Ok(writeln!(out, "{json}")?);
    }
    let (tensors, size) = (format_count(tensors, "tensor"), format_bytes(bytes));
    Ok(writeln!(out, "{}: {tensors}, {size}", one_line(&shown))?)
}

/// Refuses standard output where the bytes of a file are of no use.
fn require_usable_stdout(args: &ExportArgs) -> Result<(), CommandError> {
    if io::stdout().is_terminal() {
        let message = "-: standard output is a terminal, and a checkpoint is no text";
        let path = shell_word(&args.path);
        let remedy =
            format!("send it to a file or a program: ckptfs export {path} - > x.safetensors");
        return Err(CommandError::new(EXIT_USAGE, message, remedy));
    }
    if args.json {
        let message = "--json: standard output is taken by the checkpoint itself";
        return Err(CommandError::new(EXIT_USAGE, message, "name a file instead of -"));
    }
    Ok(())
}

/// The file to write: the one that was named, or that of the checkpoint's name in the directory that was named.
fn output_path(out: &Path, name: &str) -> Result<PathBuf, CommandError> {
    if out.is_dir() {
        return Ok(out.join(name));
    }
    if out.as_os_str().as_encoded_bytes().ends_with(b"/") && !out.exists() {
        let message = format!("{}: no such directory", out.display());
        let remedy = format!("create it first: mkdir -p {}", shell_word(out));
        return Err(CommandError::new(EXIT_FAILED, message, remedy));
    }
    Ok(out.to_path_buf())
}
