//! `ckptfs fetch`: fetches checkpoints of a store into the cache on disk.

use std::io::Write;

use serde::Serialize;

use crate::fetch::{FetchReport, fetch};

use crate::cli::args::FetchArgs;
use crate::cli::each_path::{for_each_path, write_json};
use crate::cli::error::{CommandError, ErrorFormat};
use crate::cli::progress::{ProgressMeter, StopSignal};
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

/// The result for one URL, as the JSON has it.
#[derive(Debug, Serialize)]
struct UrlReport {
    url: String,
    #[serde(flatten)]
    report: FetchReport,
}

pub fn run(args: &FetchArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let options = args.view_args.to_options()?;
    let stop = StopSignal::register()?;
    let mut reports = Vec::new();
    let format = ErrorFormat::new(args.json);
    let done = for_each_path(&args.urls, format, out, |url, out| {
        let meter = ProgressMeter::new(0, &stop);
        let fetched = fetch(url, options.clone(), &meter);
        meter.finish();
        let report = fetched?;
        let url = url.display().to_string();
        if args.json {
            reports.push(UrlReport { url, report });
            return Ok(());
        }
        let FetchReport { files, bytes, cached_bytes } = report;
        let files = format_count(usize::try_from(files).unwrap_or(usize::MAX), "file");
        let (bytes, cached) = (format_bytes(bytes), format_bytes(cached_bytes));
        Ok(writeln!(
            out,
            "{}: {files}, {bytes}, of which {cached} were cached before",
            one_line(&url)
        )?)
    });
    if args.json {
        write_json(&args.urls, &reports, out)?;
    }
    done
}
