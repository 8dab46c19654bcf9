//! Tries whether objects can be listed and read, and how fast.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;

use crate::source::url::{SourceUrl, StoreKind};

use super::super::error::RemoteError;
use super::super::failure::StoreFailure;
use super::super::listing::{StoreEntry, StoreListing};
use super::super::store::RemoteStore;
use super::super::version::ObjectVersion;
use super::address::ServerAddress;
use super::{AccessStep, Steps};

/// The bytes of the part that is timed: as much as one request of a load.
const PART_BYTES: u64 = 8 << 20;

/// The least part that tells a bandwidth: smaller ones arrive before the server's window opens.
const MIN_TIMED_BYTES: u64 = 1 << 20;

/// Sends a request until it succeeds or the server is given up.
macro_rules! attempt {
    ($store:expr, $request:expr) => {
        async {
            let mut budget = $store.retry_budget(None)?;
            loop {
                match $request.await {
                    Ok(answer) => return Ok(answer),
                    Err(failure) => budget.wait_after(failure).await?,
                }
            }
        }
        .await
    };
}

/// An object to try reads on.
struct SampleObject {
    key: String,
    /// As the listing or the first request states it.
    version: ObjectVersion,
}

pub async fn check_objects(
    store: &Arc<RemoteStore>,
    url: &SourceUrl,
    address: &ServerAddress,
    steps: &mut Steps,
) -> Result<(), AccessStep> {
    let named = find_named_object(store, &url.key).await?;
    let directory = match &named {
        Some(_) => url.key.rsplit_once('/').map_or("", |(parent, _)| parent),
        None => &url.key,
    };
    let listed = attempt!(store, store.list_page(directory, None)).and_then(|page| {
        let mut names = StoreListing::new();
        names.add_page(directory, page.result).map(|()| names)
    });
    if let (StoreKind::S3, Some(region)) = (url.kind, &address.region)
        && listed.is_ok()
    {
        steps.push(AccessStep::works("region", format!("{region} is right")));
    }
    let (step, found) = match (listed, named) {
        (Ok(names), named) => judge_listing(directory, names, named)?,
        // The URL leads to an object: no name is needed beside it.
        (Err(failure), Some(named)) => {
            let says = AccessStep::failure("listing", failure).says;
            let remedy =
                "only single files can be read; for directories, ask for the right to list them";
            (AccessStep::limited("listing", says, remedy), Some(named))
        }
        (Err(failure), None) => return Err(AccessStep::failure("listing", failure)),
    };
    steps.push(step);
    let Some(sample) = found else {
        let says = "not tried: no file lies directly in this directory";
        steps.push(AccessStep::works("object", says));
        return Ok(());
    };
    check_object(store, sample, steps).await
}

/// The object that the URL itself names; `None` if it is a directory, or may not be looked at.
async fn find_named_object(
    store: &RemoteStore,
    key: &str,
) -> Result<Option<SampleObject>, AccessStep> {
    if key.is_empty() {
        return Ok(None);
    }
    match attempt!(store, store.head(key)) {
        Ok(head) if head.meta.size > 0 => {
            let version = ObjectVersion::new(&head.meta);
            let version = version.map_err(|e| AccessStep::error("version", &e))?;
            Ok(Some(SampleObject { key: key.to_owned(), version }))
        }
        Ok(_) | Err(StoreFailure::Missing) => Ok(None),
        // Credentials may list a directory and be denied to look for an object of its name.
        Err(StoreFailure::Permanent(RemoteError::Denied { .. })) => Ok(None),
        Err(failure) => Err(AccessStep::failure("object", failure)),
    }
}

/// The step of a listing, and the object to read: the named one, else the largest.
fn judge_listing(
    directory: &str,
    names: StoreListing,
    named: Option<SampleObject>,
) -> Result<(AccessStep, Option<SampleObject>), AccessStep> {
    let version = |(name, entry): (String, StoreEntry)| match entry {
        StoreEntry::Object(version) => Some((name, version)),
        StoreEntry::Directory => None,
    };
    let name_count = names.entries.len();
    let objects: Vec<_> = names.entries.into_iter().filter_map(version).collect();
    let (object_count, directory_count) = (objects.len(), name_count - objects.len());
    if object_count + directory_count == 0 && named.is_none() {
        return Err(AccessStep::failure("listing", StoreFailure::Missing));
    }
    let says = format!(
        "allowed: {object_count} object{} and {directory_count} director{}",
        if object_count == 1 { "" } else { "s" },
        if directory_count == 1 { "y" } else { "ies" },
    );
    let largest = objects.into_iter().filter(|(_, version)| version.size > 0);
    let largest = largest.max_by_key(|(_, version)| version.size).map(|(name, version)| {
        let slash = if directory.is_empty() { "" } else { "/" };
        SampleObject { key: format!("{directory}{slash}{name}"), version }
    });
    Ok((AccessStep::works("listing", says), named.or(largest)))
}

async fn check_object(
    store: &RemoteStore,
    sample: SampleObject,
    steps: &mut Steps,
) -> Result<(), AccessStep> {
    let SampleObject { key, version: listed } = sample;
    let head = attempt!(store, store.head(&key)).map_err(|e| AccessStep::failure("object", e))?;
    let meta = head.meta;
    let version = ObjectVersion::new(&meta).map_err(|e| AccessStep::error("version", &e))?;
    steps.push(AccessStep::works("object", format!("{key}: {} bytes", meta.size)));
    let is_conditional = version.if_match().is_some();
    steps.push(match (is_conditional, &meta.e_tag) {
        (true, _) => AccessStep::works("version", "an ETag, for conditional reads"),
        (false, tag) => {
            let states = if tag.is_some() { "a weak ETag" } else { "Last-Modified alone" };
            let says = format!("{states}: each answer is compared with it");
            let remedy = "nothing needs to be done unless objects are replaced while they are read";
            AccessStep::limited("version", says, remedy)
        }
    });
    if !listed.matches(&version) {
        let says = "the listing states another version than the object itself";
        let remedy = "wait until the program that writes it is done; else read it by its own URL";
        steps.push(AccessStep::limited("version", says, remedy));
    }
    let middle = meta.size / 2;
    let began = Instant::now();
    attempt!(store, read_range(store, &key, &version, middle..middle + 1))
        .map_err(|failure| AccessStep::failure("range", failure))?;
    let latency = began.elapsed();
    steps.push(AccessStep::works("range", format!("1 byte after {} ms", latency.as_millis())));
    if is_conditional {
        let compares = attempt!(store, store.compares_versions(&key));
        steps.push(
            match compares.map_err(|failure| AccessStep::failure("condition", failure))? {
                true => AccessStep::works("condition", "If-Match is honoured"),
                false => AccessStep::limited(
                    "condition",
                    "the server ignores If-Match: each answer's ETag is compared instead",
                    "nothing needs to be done",
                ),
            },
        );
    }
    let part = 0..meta.size.min(PART_BYTES);
    let began = Instant::now();
    let bytes = part.end;
    attempt!(store, read_range(store, &key, &version, part.clone()))
        .map_err(|failure| AccessStep::failure("speed", failure))?;
    steps.push(AccessStep::works("speed", describe_speed(bytes, began.elapsed(), latency)));
    Ok(())
}

/// Reads a range, and drops its bytes.
async fn read_range(
    store: &RemoteStore,
    key: &str,
    version: &ObjectVersion,
    range: Range<u64>,
) -> Result<(), StoreFailure> {
    let expected = range.end - range.start;
    let mut body = store.get(key, version, range).await?;
    let mut read = 0;
    while read < expected {
        let next = tokio::time::timeout(store.options.stall_timeout, body.next()).await;
        let next = next.map_err(|_| StoreFailure::transient("the answer stalled"))?;
        let Some(bytes) = next.transpose()? else {
            return Err(StoreFailure::transient("the answer ended early"));
        };
        read += bytes.len() as u64;
    }
    Ok(())
}

fn describe_speed(bytes: u64, took: Duration, latency: Duration) -> String {
    let millis = took.as_millis();
    if bytes < MIN_TIMED_BYTES {
        return format!("{bytes} bytes in {millis} ms: too few to tell a bandwidth");
    }
    // The time until the first byte is no bandwidth.
    let transfer = took.saturating_sub(latency).max(Duration::from_millis(1));
    let rate = bytes as f64 / transfer.as_secs_f64() / 1e6;
    let megabytes = bytes as f64 / 1e6;
    format!("{megabytes:.1} MB in {millis} ms: {rate:.0} MB/s by one connection")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_leaves_the_latency_out() {
        let millis = Duration::from_millis;
        let text = describe_speed(8_000_000, millis(230), millis(30));
        assert_eq!(text, "8.0 MB in 230 ms: 40 MB/s by one connection");
        assert!(describe_speed(9, millis(5), millis(30)).ends_with("too few to tell a bandwidth"));
    }
}
