//! The report in JSON, written to a path (`/dev/fd/N` for an open file).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use crate::driver::Driver;
use crate::streams::{Kind, Stream};

impl Driver {
    /// Writes the report that the settings ask for.
    pub fn write_report(&self) {
        if let Some(path) = &self.settings.report
            && let Err(error) = self.report_to(path)
        {
            eprintln!("stub CUDA: {}: {error}", path.display());
        }
    }

    pub fn report_to(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.report())
    }

    fn report(&self) -> String {
        let calls = map(self.calls.iter().map(|(name, times)| (*name, times.to_string())));
        let created = self.streams.streams.values().filter(|stream| stream.kind == Kind::Created);
        let queued: usize = self.streams.streams.values().map(Stream::queued).sum();
        let contexts = self.contexts.primary.iter().filter(|primary| primary.retained > 0).count();
        let retained: u32 = self.contexts.primary.iter().map(|primary| primary.retained).sum();
        let allocated = map([
            ("device", ranges(self.device.live.values().map(|one| one.len()))),
            ("pinned", ranges(self.host.pinned.values().copied())),
            ("registered", ranges(self.host.registered.values().copied())),
            ("streams", created.count().to_string()),
            ("events", self.streams.events.len().to_string()),
            ("contexts", contexts.to_string()),
            ("retained", retained.to_string()),
        ]);
        let peak =
            map([("device", self.device.peak.to_string()), ("pinned", self.host.peak.to_string())]);
        let faults: Vec<String> = self.faults.iter().map(|words| text(words)).collect();
        let mut report = map([
            ("calls", calls),
            ("allocated", allocated),
            ("queued", queued.to_string()),
            ("peak", peak),
            ("faults", format!("[{}]", faults.join(","))),
            ("sticky", self.sticky.map_or("null".to_owned(), |code| code.to_string())),
            ("pageable_copies", self.pageable.to_string()),
        ]);
        report.push('\n');
        report
    }
}

/// The count and the bytes of allocations.
fn ranges(sizes: impl Iterator<Item = usize>) -> String {
    let (count, bytes) = sizes.fold((0, 0), |(count, bytes), size| (count + 1, bytes + size));
    map([("count", count.to_string()), ("bytes", bytes.to_string())])
}

fn map<'a>(entries: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let entries: BTreeMap<&str, String> = entries.into_iter().collect();
    let entries: Vec<String> =
        entries.iter().map(|(name, value)| format!("{}:{value}", text(name))).collect();
    format!("{{{}}}", entries.join(","))
}

/// A string in JSON.
fn text(words: &str) -> String {
    let mut text = String::from("\"");
    for letter in words.chars() {
        match letter {
            '"' | '\\' => text.extend(['\\', letter]),
            letter if letter < ' ' => {
                let _ = write!(text, "\\u{:04x}", letter as u32);
            }
            letter => text.push(letter),
        }
    }
    text.push('"');
    text
}
