//! The report in JSON, written to a path (`/dev/fd/N` for an open file).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use crate::codes::Code;
use crate::contexts::Contexts;
use crate::memory::Memory;
use crate::streams::{Stream, StreamKind, Streams};

/// The state that a report tells of.
pub struct Report<'a> {
    pub calls: &'a BTreeMap<&'static str, u64>,
    pub faults: &'a [String],
    pub sticky: Option<Code>,
    pub pageable: u64,
    pub contexts: &'a Contexts,
    pub memory: &'a Memory,
    pub streams: &'a Streams,
    /// The number of modules.
    pub modules: usize,
}

impl Report<'_> {
    pub fn write_to(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.to_json())
    }

    fn to_json(&self) -> String {
        let calls = map(self.calls.iter().map(|(name, times)| (*name, times.to_string())));
        let streams = self.streams.streams.values();
        let created = streams.clone().filter(|stream| stream.kind == StreamKind::Created);
        let queued: usize = streams.map(Stream::queued).sum();
        let primary = self.contexts.primary.iter();
        let contexts = primary.clone().filter(|primary| primary.retained > 0).count();
        let retained: u32 = primary.map(|primary| primary.retained).sum();
        let Memory { device, host } = self.memory;
        let allocated = map([
            ("device", ranges(device.live.values().map(|one| one.len()))),
            ("pinned", ranges(host.pinned.values().chain(host.registered.values()).copied())),
            ("streams", created.count().to_string()),
            ("modules", self.modules.to_string()),
            ("events", self.streams.events.len().to_string()),
            ("contexts", contexts.to_string()),
            ("retained", retained.to_string()),
        ]);
        let peak = map([("device", device.peak.to_string()), ("pinned", host.peak.to_string())]);
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
