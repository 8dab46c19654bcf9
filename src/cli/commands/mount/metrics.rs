//! Serves the statistics of a mount to Prometheus, as OpenMetrics text at `/metrics`.
//!
//! The length, the time and the number of concurrent requests are bounded.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::mount::{MountStats, StatsReporter};

/// Requests of Prometheus take a few hundred bytes.
const MAX_REQUEST_BYTES: usize = 8 * 1024;

/// Readers are on this machine: they send and receive within milliseconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Concurrent readers. A further one disconnects the oldest.
const MAX_READERS: usize = 16;

/// The time that a reader has at least, however many others there are. The kernel queues 128 connections, which then
/// wait for less than half a second.
const MIN_REQUEST_TIMEOUT: Duration = Duration::from_millis(50);

/// Serves readers, without an end.
pub async fn serve(listener: TcpListener, reporter: StatsReporter) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("metrics cannot be served: {error}"),
    };
    // Oldest first.
    let mut readers: VecDeque<(Instant, JoinHandle<()>)> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                readers.retain(|(_, reader)| !reader.is_finished());
                if readers.len() == MAX_READERS
                    && let Some((began, mut oldest)) = readers.pop_front()
                    && timeout_at(began + MIN_REQUEST_TIMEOUT, &mut oldest).await.is_err()
                {
                    oldest.abort();
                }
                let reporter = Arc::clone(&reporter);
                let reader = tokio::spawn(async move {
                    let answered =
                        tokio::time::timeout(REQUEST_TIMEOUT, answer_request(stream, &reporter))
                            .await;
                    if !matches!(answered, Ok(Ok(()))) {
                        tracing::debug!("a reader of the metrics was cut off: {answered:?}");
                    }
                });
                readers.push_back((Instant::now(), reader));
            }
            Err(error) => {
                // Most likely, descriptors have run out, and other readers may close some.
                tracing::warn!("metrics: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn answer_request(mut stream: TcpStream, reporter: &StatsReporter) -> io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() >= MAX_REQUEST_BYTES {
            return respond(&mut stream, "431 Request Header Fields Too Large", "").await;
        }
        let room = (MAX_REQUEST_BYTES - request.len()) as u64;
        if (&mut stream).take(room).read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let (status, page) = match request.split(|&byte| byte == b' ').take(2).collect::<Vec<_>>()[..] {
        [b"GET", b"/metrics"] => ("200 OK", render_page(&reporter())),
        [b"GET", _] => ("404 Not Found", String::new()),
        _ => ("405 Method Not Allowed", String::new()),
    };
    respond(&mut stream, status, &page).await
}

async fn respond(stream: &mut TcpStream, status: &str, page: &str) -> io::Result<()> {
    const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let length = page.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {KIND}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(page.as_bytes()).await?;
    stream.shutdown().await
}

/// The page. A value has a name without the prefix, a flag whether it is a counter, and a help text.
fn render_page(stats: &MountStats) -> String {
    let MountStats { virtual_files, memory, cache, prefetch, store, .. } = stats;
    let values = [
        ("uptime_seconds", false, "Seconds since the mount was made", stats.uptime_s),
        ("served_bytes", true, "Bytes that reads returned", stats.bytes_served),
        ("reads", true, "Reads answered", stats.reads),
        ("errors", true, "Reads answered with an error", stats.errors),
        (
            "source_removed",
            false,
            "1 if the source was removed, else 0",
            u64::from(stats.source_removed),
        ),
        ("virtual_files_known", false, "Checkpoints shown so far", virtual_files.known),
        ("virtual_files_open", false, "Checkpoints held open", virtual_files.open),
        ("virtual_files_refused", false, "Checkpoints not shown", virtual_files.refused),
        ("memory_budget_bytes", false, "Bytes that may be held in memory", memory.budget),
        ("memory_held_bytes", false, "Bytes held in memory", memory.held),
        ("cache_hits", true, "Reads answered from memory", cache.hits),
        ("cache_misses", true, "Reads that waited for a disk", cache.misses),
        ("cache_budget_bytes", false, "Bytes that the cache may hold", cache.budget_bytes),
        ("cache_held_bytes", false, "Bytes that the cache holds", cache.held_bytes),
        ("prefetch_fetched", true, "Blocks read ahead", prefetch.fetched),
        ("prefetch_used", true, "Blocks read ahead and given to readers", prefetch.used),
        ("prefetch_wasted", true, "Blocks read ahead and dropped unused", prefetch.wasted),
        (
            "prefetch_replayed",
            true,
            "Blocks read ahead because a trace named them",
            prefetch.replayed,
        ),
        ("store_requests", true, "Requests to the store", store.requests),
        ("store_requests_in_flight", false, "Requests to the store, not complete", store.in_flight),
        ("store_bytes", true, "Bytes that the store sent", store.bytes),
        (
            "store_bytes_per_second",
            false,
            "Bytes that the store sent, over the last 5 seconds",
            store.bytes_per_second,
        ),
        (
            "store_cached_bytes",
            true,
            "Bytes of the store that the cache on disk had",
            store.cached_bytes,
        ),
        ("store_retries", true, "Requests to the store that were sent again", store.retries),
    ];
    let labels = format!(
        "{{mountpoint=\"{}\",source=\"{}\"}}",
        escape_label(&stats.mountpoint.to_string_lossy()),
        escape_label(&stats.source.to_string_lossy())
    );
    let mut page = String::new();
    for (name, is_counter, help, value) in values {
        let (kind, suffix) = if is_counter { ("counter", "_total") } else { ("gauge", "") };
        // Writing to a string does not fail.
        let _ = writeln!(page, "# TYPE ckptfs_{name} {kind}");
        let _ = writeln!(page, "# HELP ckptfs_{name} {help}.");
        let _ = writeln!(page, "ckptfs_{name}{suffix}{labels} {value}");
    }
    // Absent before the first byte, as a ratio of nothing has no value.
    if let Some(ratio) = store.hit_ratio() {
        let _ = writeln!(page, "# TYPE ckptfs_store_hit_ratio gauge");
        let _ =
            writeln!(page, "# HELP ckptfs_store_hit_ratio Share of bytes from the cache on disk.");
        let _ = writeln!(page, "ckptfs_store_hit_ratio{labels} {ratio}");
    }
    page.push_str("# EOF\n");
    page
}

/// Escapes a label value for its quotes.
fn escape_label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_the_page() {
        let stats = MountStats { source: "/a\"b\\c\nd".into(), reads: 7, ..MountStats::default() };
        let page = render_page(&stats);
        assert!(
            page.contains("ckptfs_reads_total{mountpoint=\"\",source=\"/a\\\"b\\\\c\\nd\"} 7\n")
        );
        assert!(page.ends_with("# EOF\n"));
    }
}
