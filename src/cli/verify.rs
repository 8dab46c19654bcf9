//! `ckptfs verify`: reads every byte, or compares two checkpoints.

use std::io::Write;
use std::path::Path;

use crate::checkpoint::Options;
use crate::image::Reader;
use crate::verify;

use super::args::Verify;
use super::progress::Meter;
use super::terminal_text::{bytes, count, one_line};
use super::{FAILED, Failure, open_args};

pub fn run(args: &Verify, out: &mut dyn Write) -> Result<(), Failure> {
    let reader = open_args::reader(&args.source.path, &args.source.reading.options())?;
    match &args.against {
        None => read_all(&reader, &args.source.path, out),
        Some(other) => {
            // The dictionary that was asked for is one of the first; the other is shown by the rule.
            let options = Options { root_key: None, ..args.source.reading.options() };
            compare(&reader, &open_args::reader(other, &options)?, out)
        }
    }
}

fn stopped() -> Failure {
    Failure::new(FAILED, "stopped before everything was read", "run it again to start over")
}

fn read_all(reader: &Reader, path: &Path, out: &mut dyn Write) -> Result<(), Failure> {
    let image = reader.image();
    let meter = Meter::new(image.size())?;
    let done = verify::read_all(reader, &meter);
    meter.finish();
    if !done? {
        return Err(stopped());
    }
    let (n, size) = (image.tensors().len(), image.size());
    let name = one_line(&path.display().to_string());
    writeln!(out, "{name}: {}, all {} could be read", count(n, "tensor"), bytes(size))?;
    Ok(())
}

fn compare(first: &Reader, second: &Reader, out: &mut dyn Write) -> Result<(), Failure> {
    let meter = Meter::new(first.image().size() - first.image().header_size())?;
    let differences = verify::compare(first, second, &meter);
    meter.finish();
    let differences = differences?.ok_or_else(stopped)?;
    if differences.is_empty() {
        let n = first.image().tensors().len();
        writeln!(out, "equal: {} of the same names, types, shapes and values", count(n, "tensor"))?;
        return Ok(());
    }
    for difference in &differences {
        writeln!(out, "{}", one_line(&difference.to_string()))?;
    }
    writeln!(out, "{}", count(differences.len(), "difference"))?;
    Err(Failure::told(FAILED))
}
