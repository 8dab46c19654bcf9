//! `ckptfs cache`: lists, shrinks or checks the cache of object stores.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::source::{CacheReport, DiskCache, HIDDEN_QUERY, RemoteOptions, SourceUrl};

use crate::cli::args::{CacheAction, CacheArgs};
use crate::cli::error::{CommandError, EXIT_FAILED, EXIT_USAGE};
use crate::cli::progress::StopSignal;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

/// An object, as the JSON has it.
#[derive(Debug, Serialize)]
struct ObjectReport<'a> {
    url: &'a str,
    etag: Option<&'a str>,
    bytes: u64,
    cached_bytes: u64,
    disk_bytes: u64,
    /// Seconds since 1970.
    used: i64,
}

impl ObjectReport<'_> {
    fn new(report: &CacheReport) -> ObjectReport<'_> {
        let CacheReport { version, cached_bytes, disk_bytes, used } = report;
        ObjectReport {
            url: &version.url,
            etag: version.etag.as_deref(),
            bytes: version.size,
            cached_bytes: *cached_bytes,
            disk_bytes: *disk_bytes,
            used: *used,
        }
    }
}

/// The result of `prune` and `verify`, as the JSON has it.
#[derive(Debug, Default, Serialize)]
struct ChangeReport {
    blocks: usize,
    bytes: u64,
    removed_blocks: usize,
    removed_bytes: u64,
}

pub fn run(args: &CacheArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    if args.to.is_some() && args.action != CacheAction::Prune {
        return Err(CommandError::new(EXIT_USAGE, "--to is an option of prune", "leave it out"));
    }
    let urls = args.urls.iter().map(|url| parse_url(url)).collect::<Result<Vec<String>, _>>()?;
    let cache = open()?;
    let is_chosen =
        |url: &str| urls.is_empty() || urls.iter().any(|chosen| is_beneath(url, chosen));
    match args.action {
        CacheAction::Ls => {
            let mut reports = cache.report();
            reports.retain(|report| is_chosen(&report.version.url));
            list(&reports, args.json, out)
        }
        CacheAction::Prune => {
            let removed = cache.prune(args.to.unwrap_or(0), |version| is_chosen(&version.url));
            let failure = removed.failure.as_ref().map(|(path, error)| {
                CommandError::new(
                    EXIT_FAILED,
                    format!("{}: cannot be removed: {error}", path.display()),
                    "check that you may write to the folder of the cache, and that its disk is writable",
                )
            });
            write_report(args, &removed.into(), out)?;
            failure.map_or(Ok(()), Err)
        }
        CacheAction::Verify => verify(&cache, args, &is_chosen, out),
    }
}

fn open() -> Result<DiskCache, CommandError> {
    let failed = |message: String, remedy: &str| CommandError::new(EXIT_FAILED, message, remedy);
    let options = RemoteOptions::current()
        .map_err(|error| CommandError::new(EXIT_USAGE, &error, error.remedy()))?;
    let folder = options.cache.folder.as_ref().ok_or_else(|| {
        failed(
            "there is no cache".to_owned(),
            "leave out --no-cache, or give its folder: --cache-dir DIR",
        )
    })?;
    DiskCache::open(&options.cache, folder).map_err(|error| {
        let message = format!("{}: the cache cannot be opened: {error}", folder.display());
        failed(
            message,
            "give a folder of your own that no other user can write to: --cache-dir DIR",
        )
    })
}

/// The one form of a URL that the user chose, without a query string.
fn parse_url(path: &Path) -> Result<String, CommandError> {
    let text = path.to_str().unwrap_or_default();
    let url = SourceUrl::parse(Path::new(text.strip_suffix(HIDDEN_QUERY).unwrap_or(text)));
    match url {
        Some(Ok(url)) => Ok(SourceUrl { query: None, ..url }.to_string()),
        Some(Err(error)) => Err(CommandError::new(EXIT_USAGE, error, error.remedy())),
        None => Err(CommandError::new(
            EXIT_USAGE,
            "an argument is no URL of a store",
            "give URLs as `ckptfs cache ls` prints them",
        )),
    }
}

/// Whether a URL is the chosen one or lies beneath it.
fn is_beneath(url: &str, chosen: &str) -> bool {
    let rest = url.strip_suffix(HIDDEN_QUERY).unwrap_or(url).strip_prefix(chosen);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn list(reports: &[CacheReport], is_json: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    let objects: Vec<ObjectReport<'_>> = reports.iter().map(ObjectReport::new).collect();
    if is_json {
        let json = serde_json::to_string_pretty(&objects).map_err(io::Error::from)?;
        return Ok(writeln!(out, "{json}")?);
    }
    for object in &objects {
        let share = match object.cached_bytes >= object.bytes {
            true => format_bytes(object.bytes),
            false => {
                format!("{} of {}", format_bytes(object.cached_bytes), format_bytes(object.bytes))
            }
        };
        writeln!(out, "{share:>24}  {:>10}  {}", age(object.used), one_line(object.url))?;
    }
    let total = format_bytes(objects.iter().map(|object| object.disk_bytes).sum());
    Ok(writeln!(out, "{}, {total} on disk", format_count(objects.len(), "object"))?)
}

/// The time since a use, in one unit.
fn age(used: i64) -> String {
    let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used.max(0).unsigned_abs());
    let seconds = SystemTime::now().duration_since(used).unwrap_or_default().as_secs();
    match seconds {
        0..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

fn verify(
    cache: &DiskCache,
    args: &CacheArgs,
    is_chosen: &dyn Fn(&str) -> bool,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let stop = StopSignal::register()?;
    let mut report = ChangeReport::default();
    let verified = cache.verify(&|version| is_chosen(&version.url), &mut |bytes, is_whole| {
        report.blocks += 1;
        report.bytes += bytes;
        if !is_whole {
            report.removed_blocks += 1;
            report.removed_bytes += bytes;
        }
        !stop.is_set()
    });
    verified.map_err(|error| {
        let message = format!("the cache cannot be read: {error}");
        CommandError::new(EXIT_FAILED, message, "check its disk (dmesg), or remove its folder")
    })?;
    write_report(args, &report, out)?;
    if report.removed_blocks > 0 {
        return Err(CommandError::already_reported(EXIT_FAILED));
    }
    Ok(())
}

fn write_report(
    args: &CacheArgs,
    report: &ChangeReport,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    if args.json {
        let json = serde_json::to_string_pretty(report).map_err(io::Error::from)?;
        return Ok(writeln!(out, "{json}")?);
    }
    let ChangeReport { blocks, bytes, removed_blocks, removed_bytes } = *report;
    let (removed, kept) = (format_count(removed_blocks, "block"), format_count(blocks, "block"));
    let (removed_bytes, bytes) = (format_bytes(removed_bytes), format_bytes(bytes));
    let line = match args.action {
        CacheAction::Verify => {
            format!("{kept}, {bytes} compared; {removed} removed, {removed_bytes}")
        }
        CacheAction::Prune | CacheAction::Ls => format!("{removed} removed, {removed_bytes}"),
    };
    Ok(writeln!(out, "{line}")?)
}

impl From<crate::source::RemovedBlocks> for ChangeReport {
    fn from(removed: crate::source::RemovedBlocks) -> ChangeReport {
        ChangeReport {
            removed_blocks: removed.count,
            removed_bytes: removed.bytes,
            ..ChangeReport::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_chooses_itself_and_what_lies_beneath() {
        for form in ["s3://b/m", "s3://b/m/", "S3://b/m", "s3:/b/m"] {
            let chosen = |url: &str| is_beneath(url, &parse_url(Path::new(form)).unwrap());
            assert!(chosen("s3://b/m") && chosen("s3://b/m/x"));
            assert!(!chosen("s3://b/model") && !chosen("s3://b"));
        }
        for form in ["https://h/a%20b?@q", "https://h/a b", "https://h/a b?…"] {
            let chosen = |url: &str| is_beneath(url, &parse_url(Path::new(form)).unwrap());
            assert!(chosen("https://h/a%20b?…") && chosen("https://h/a%20b"));
        }
    }

    #[test]
    fn what_is_no_url_is_refused_and_not_shown() {
        for text in ["models", "https://me:hunter2@h/a", "https://h/a?hunter2", "ftp://hunter2@h"] {
            let error = parse_url(Path::new(text)).unwrap_err();
            assert!(!error.whole_message().contains("hunter2"), "{text}");
        }
    }
}
