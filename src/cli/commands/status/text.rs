//! The text of `ckptfs status`: a paragraph for each mount, of lines that fit the width.

use crate::mount::MountStats;
use crate::mount::stats::{LogStats, RecentError};
use crate::shell_word::shell_text;

use super::{MountReport, MountState};
use crate::cli::commands::mount::log::{IDENTIFIER, MOUNTPOINT_FIELD};
use crate::cli::python_environment::{self, PythonEnvironment};
use crate::cli::terminal_text::{format_bytes, format_count, one_line, wrap};

/// Errors of a mount that are listed. The JSON has all that the mount keeps.
const MAX_LISTED_ERRORS: usize = 5;

/// Characters of the column of labels.
const LABEL_CHARACTERS: usize = 15;

/// All mounts, and the Python environment if there is one, as lines of at most `width` characters. `now` is in seconds
/// since 1970.
pub fn mount_lines(mounts: &[MountReport], now: u64, width: usize) -> Vec<String> {
    let mut lines = paragraphs(mounts, now, width);
    if let Some(environment) = python_environment::get() {
        lines.push(String::new());
        lines.append(&mut environment_lines(environment, width));
    }
    lines
}

/// The state of the Python environment that runs this command.
fn environment_lines(environment: &PythonEnvironment, width: usize) -> Vec<String> {
    let PythonEnvironment { state, remedy } = environment;
    let mut paragraph = Paragraph { width, lines: Vec::new() };
    paragraph.add("python ", 2, state);
    if !remedy.is_empty() {
        paragraph.add("  what to do: ", 2, remedy);
    }
    paragraph.lines
}

fn paragraphs(mounts: &[MountReport], now: u64, width: usize) -> Vec<String> {
    if mounts.is_empty() {
        return vec!["no mounts".to_owned()];
    }
    let paragraphs = mounts.iter().map(|mount| {
        let mut paragraph = Paragraph { width, lines: Vec::new() };
        paragraph.add_mount(mount, now);
        paragraph.lines
    });
    paragraphs.collect::<Vec<_>>().join(&String::new())
}

/// The lines of one mount.
struct Paragraph {
    width: usize,
    lines: Vec<String>,
}

impl Paragraph {
    /// Adds a text whose first line begins with `start`. The others are indented by `indent` spaces.
    fn add(&mut self, start: &str, indent: usize, text: &str) {
        let room = self.width.saturating_sub(indent.max(start.chars().count()));
        for (n, line) in wrap(&one_line(text), room).into_iter().enumerate() {
            match n {
                0 => self.lines.push(format!("{start}{line}")),
                _ => self.lines.push(format!("{:indent$}{line}", "")),
            }
        }
    }

    fn add_field(&mut self, label: &str, text: &str) {
        self.add(&format!("  {label:<LABEL_CHARACTERS$}"), LABEL_CHARACTERS + 2, text);
    }

    fn add_mount(&mut self, mount: &MountReport, now: u64) {
        self.add("", 0, &mount.mountpoint);
        self.add_field("source", &mount.source);
        match &mount.stats {
            Some(stats) => self.add_stats(mount, stats, now),
            None => self.add_field("state", &state_text(mount)),
        }
    }

    fn add_stats(&mut self, mount: &MountReport, stats: &MountStats, now: u64) {
        if stats.source_removed {
            let path = shell_text(&mount.mountpoint);
            let text = format!(
                "REMOVED: the mount stays empty; unmount it, and mount again: ckptfs unmount {path}"
            );
            self.add_field("state", &text);
        }
        let MountStats { pid, reads, .. } = stats;
        self.add_field("up", &format!("{}, process {pid}", format_duration(stats.uptime_s)));
        let served = format_bytes(stats.bytes_served);
        let reads = format_count(usize::try_from(*reads).unwrap_or(usize::MAX), "read");
        self.add_field("served", &format!("{served} in {reads}"));
        self.add_field("virtual files", &virtual_files_text(mount, stats));
        for refused in &stats.refused_views {
            self.add_field("view refused", refused);
        }
        let (held, budget) = (stats.cache.held_bytes, stats.cache.budget_bytes);
        self.add_field("cache", &format!("{} of {}", format_bytes(held), format_bytes(budget)));
        if stats.prefetch.fetched > 0 {
            self.add_field("read ahead", &prefetch_text(stats));
        }
        if stats.store.requests > 0 || stats.store.cached_bytes > 0 {
            self.add_field("store", &store_text(stats));
        }
        if let Some(log) = log_text(mount, &stats.log, *pid) {
            self.add_field("log", &log);
        }
        self.add_field("errors", &stats.errors.to_string());
        for error in stats.last_errors.iter().take(MAX_LISTED_ERRORS) {
            self.add_error(error, now);
        }
        if stats.last_errors.len() > MAX_LISTED_ERRORS {
            self.add("    ", 4, "the errors before these: ckptfs status --json");
        }
    }

    fn add_error(&mut self, error: &RecentError, now: u64) {
        let RecentError { time, count, path, errno, message, remedy } = error;
        let times = if *count > 1 { format!(", {count} times") } else { String::new() };
        let ago = format_duration(now.saturating_sub(*time));
        self.add("    ", 6, &format!("{ago} ago, {errno}{times}: {path}"));
        self.add("      ", 6, message);
        self.add("      ", 6, &format!("what to do: {remedy}"));
    }
}

fn state_text(mount: &MountReport) -> String {
    let path = shell_text(&mount.mountpoint);
    match mount.state {
        MountState::Alive => "answers, but without statistics".to_owned(),
        MountState::Dead => {
            format!("DEAD: its daemon was killed; remove it: ckptfs unmount {path}")
        }
        MountState::NotAnswering => {
            format!("NOT ANSWERING: its daemon is stuck; remove it: ckptfs unmount --lazy {path}")
        }
        MountState::NotPermitted => match &mount.reason {
            Some(reason) => format!("not permitted to look: {reason}"),
            None => "another user's: not permitted to look".to_owned(),
        },
        MountState::Hidden => "hidden: another mount lies over it".to_owned(),
        MountState::Failed => format!("FAILED: {}", mount.reason.as_deref().unwrap_or("unknown")),
    }
}

fn virtual_files_text(mount: &MountReport, stats: &MountStats) -> String {
    let known = stats.virtual_files.known;
    match stats.virtual_files.refused {
        0 => format!("{known} listed or opened so far"),
        refused => {
            let views = if stats.refused_views.is_empty() { "" } else { "--views RECIPE " };
            let command = format!("ckptfs ls -r {views}{}", shell_text(&mount.source));
            format!("{known} listed or opened so far, {refused} refused: {command} says why")
        }
    }
}

fn prefetch_text(stats: &MountStats) -> String {
    let share = |part: u64| 100.0 * part as f64 / stats.prefetch.fetched as f64;
    let (used, wasted) = (share(stats.prefetch.used), share(stats.prefetch.wasted));
    let replayed = match share(stats.prefetch.replayed) {
        0.0 => String::new(),
        replayed => format!(", {replayed:.0}% remembered"),
    };
    format!("{used:.0}% used, {wasted:.0}% wasted{replayed}")
}

/// Bytes and requests of a store, its hit ratio and its rate now.
fn store_text(stats: &MountStats) -> String {
    let store = &stats.store;
    let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let requests = format_count(count(store.requests), "request");
    let mut text = format!("{} in {requests}", format_bytes(store.bytes));
    if store.retries > 0 {
        text += &format!(", {} sent again", store.retries);
    }
    if let Some(ratio) = store.hit_ratio().filter(|_| store.cached_bytes > 0) {
        let cached = format_bytes(store.cached_bytes);
        text += &format!("; {cached} from the cache on disk ({:.0}%)", 100.0 * ratio);
    }
    if store.in_flight > 0 || store.bytes_per_second > 0 {
        let rate = format_bytes(store.bytes_per_second);
        text += &format!("; now {rate}/s, {} in flight", store.in_flight);
    }
    text
}

/// Where a daemon logs, and how to read that; `None` if its program does not say.
fn log_text(mount: &MountReport, log: &LogStats, pid: u32) -> Option<String> {
    match (&*log.target, &log.path) {
        ("", _) => None,
        ("file", Some(path)) => Some(path.display().to_string()),
        ("journal", _) => {
            let field = shell_text(&format!("{MOUNTPOINT_FIELD}={}", one_line(&mount.mountpoint)));
            Some(format!("journalctl {field}"))
        }
        ("syslog", _) => Some(format!("syslog, as {IDENTIFIER}[{pid}]")),
        ("stderr", _) => Some(format!("standard error of process {pid}")),
        ("none", _) => Some(
            "none: there is no journal, no syslog and no home directory; mount with --log-file FILE"
                .to_owned(),
        ),
        (other, _) => Some(other.to_owned()),
    }
}

/// Formats a duration in its two largest units.
fn format_duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match () {
        () if days > 0 => format!("{days}d {}h", hours % 24),
        () if hours > 0 => format!("{hours}h {}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m {}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_000;

    fn mount(mountpoint: &str, state: MountState, stats: Option<MountStats>) -> MountReport {
        let (source, stats) = ("/models".to_owned(), stats.map(Box::new));
        MountReport { mountpoint: mountpoint.to_owned(), source, state, reason: None, stats }
    }

    fn busy_stats() -> MountStats {
        let mut stats =
            MountStats { uptime_s: 90, reads: 300, errors: 6, pid: 7, ..MountStats::default() };
        stats.bytes_served = 2_200_000_000;
        (stats.virtual_files.known, stats.virtual_files.refused) = (3, 1);
        (stats.store.requests, stats.store.bytes, stats.store.retries) = (9, 64_000_000, 2);
        (stats.store.in_flight, stats.store.bytes_per_second) = (3, 12_000_000);
        stats.store.cached_bytes = 16_000_000;
        (stats.prefetch.fetched, stats.prefetch.used, stats.prefetch.replayed) = (100, 90, 40);
        stats.log = LogStats { target: "file".to_owned(), path: Some("/var/log/x".into()) };
        stats.last_errors = vec![RecentError {
            time: NOW - 75,
            count: 6,
            path: "/a/m.safetensors".to_owned(),
            errno: "EIO".to_owned(),
            message: "/models/m.bin: changed on disk since it was read".to_owned(),
            remedy: "wait until the program that writes it is done, then open it again".to_owned(),
        }];
        stats
    }

    #[test]
    fn mounts_of_every_kind_have_their_lines() {
        let mounts = [
            mount("/a", MountState::Alive, Some(busy_stats())),
            mount("/dead\x1b\nmount", MountState::Dead, None),
        ];
        let expected = "\
/a
  source         /models
  up             1m 30s, process 7
  served         2.2 GB in 300 reads
  virtual files  3 listed or opened so far, 1 refused: ckptfs ls -r /models says
                 why
  cache          0 bytes of 0 bytes
  read ahead     90% used, 0% wasted, 40% remembered
  store          64.0 MB in 9 requests, 2 sent again; 16.0 MB from the cache on
                 disk (20%); now 12.0 MB/s, 3 in flight
  log            /var/log/x
  errors         6
    1m 15s ago, EIO, 6 times: /a/m.safetensors
      /models/m.bin: changed on disk since it was read
      what to do: wait until the program that writes it is done, then open it
      again

/dead\\u{1b}\\nmount
  source         /models
  state          DEAD: its daemon was killed; remove it: ckptfs unmount
                 $'/dead\\033\\nmount'";
        assert_eq!(mount_lines(&mounts, NOW, 80).join("\n"), expected);
        assert_eq!(mount_lines(&[], NOW, 80), ["no mounts"]);
    }

    /// Whatever the paths, no line is longer, and no character of a path is lost.
    #[test]
    fn lines_fit_the_width_with_long_paths_too() {
        let long = format!("/{}", "long folder/".repeat(60));
        let mut stats = busy_stats();
        stats.source_removed = true;
        stats.log.path = Some(long.clone().into());
        stats.last_errors[0].path = long.clone();
        stats.last_errors = vec![stats.last_errors[0].clone(); 9];
        let mut mounts = vec![mount(&long, MountState::Alive, Some(stats))];
        mounts[0].source = long.replace(' ', "_");
        for state in [MountState::Dead, MountState::NotAnswering, MountState::NotPermitted] {
            mounts.push(mount(&long, state, None));
        }
        for width in [40, 80, 120] {
            let lines = mount_lines(&mounts, NOW, width);
            let widest = lines.iter().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= width, "{width}: {lines:#?}");
            let text: String = lines.concat().split_whitespace().collect();
            assert!(text.contains(&mounts[0].source), "{lines:#?}");
        }
    }

    #[test]
    fn each_log_has_the_way_to_read_it() {
        let at = mount("/mnt/a b", MountState::Alive, None);
        let text = |target: &str| {
            let path = (target == "file").then(|| "/x.log".into());
            log_text(&at, &LogStats { target: target.to_owned(), path }, 7).unwrap_or_default()
        };
        assert_eq!(text("journal"), "journalctl 'CKPTFS_MOUNTPOINT=/mnt/a b'");
        assert_eq!(text("syslog"), "syslog, as ckptfs[7]");
        assert_eq!((text("file").as_str(), text("").as_str()), ("/x.log", ""));
        assert_eq!(text("stderr"), "standard error of process 7");
        assert!(text("none").ends_with("--log-file FILE"));
    }

    #[test]
    fn times_in_words() {
        assert_eq!(format_duration(59), "59s");
        assert_eq!(format_duration(3600), "1h 0m");
        assert_eq!(format_duration(90_000), "1d 1h");
    }
}
