//! A folder that is served as S3 serves buckets: each folder in it is a bucket.
//!
//! It is for benchmarks. A server in a process of its own, or one that copies what it sends, takes the processor that the
//! client needs.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use hyper::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_MATCH, LAST_MODIFIED, RANGE,
};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};

/// Names in one page of a listing.
const PAGE_NAMES: usize = 1000;

pub struct Folder {
    pub path: PathBuf,
}

impl Folder {
    pub fn answer(&self, request: &Parts) -> Response<Bytes> {
        let path = decode(request.uri.path().trim_start_matches('/'));
        let query = query(request.uri.query().unwrap_or_default());
        let (bucket, key) = path.split_once('/').unwrap_or((&path, ""));
        let is_safe = |path: &str| {
            Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
        };
        let bucket_path = self.path.join(bucket);
        if bucket.is_empty() || !is_safe(bucket) || !is_safe(key) || !bucket_path.is_dir() {
            return error(StatusCode::NOT_FOUND, "NoSuchBucket");
        }
        match (&request.method, key) {
            (&Method::HEAD, "") => answer(StatusCode::OK, Bytes::new()),
            (&Method::GET, "") if query.iter().any(|(name, _)| name == "location") => {
                answer(StatusCode::OK, Bytes::from_static(b"<LocationConstraint/>"))
            }
            (&Method::GET, "") => list(&bucket_path, bucket, &query),
            (&Method::GET | &Method::HEAD, _) => get(&bucket_path.join(key), request),
            _ => error(StatusCode::NOT_IMPLEMENTED, "NotImplemented"),
        }
    }
}

fn answer(status: StatusCode, body: Bytes) -> Response<Bytes> {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
}

fn error(status: StatusCode, code: &str) -> Response<Bytes> {
    answer(status, format!("<Error><Code>{code}</Code></Error>").into())
}

/// The version of an object, as long as it keeps its size and time.
fn etag(metadata: &std::fs::Metadata) -> String {
    format!(
        "\"{:x}-{:x}\"",
        metadata.len(),
        metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec()
    )
}

fn get(path: &Path, request: &Parts) -> Response<Bytes> {
    let header = |name| request.headers.get(name).and_then(|value| value.to_str().ok());
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let Some((metadata, file)) = opened.ok().filter(|(metadata, _)| metadata.is_file()) else {
        return error(StatusCode::NOT_FOUND, "NoSuchKey");
    };
    let (size, etag) = (metadata.len(), etag(&metadata));
    if header(IF_MATCH).is_some_and(|wanted| wanted != etag && wanted != "*") {
        return error(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
    }
    let part = match header(RANGE).map(|text| range(text, size)) {
        Some(None) => return error(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange"),
        Some(part) => part,
        None => None,
    };
    let (start, end) = part.unwrap_or((0, size));
    let is_head = request.method == Method::HEAD;
    let body = match is_head || start == end {
        true => Bytes::new(),
        // SAFETY: nothing writes to the files while they are served.
        false => match unsafe { memmap2::Mmap::map(&file) } {
            Ok(map) => Bytes::from_owner(map).slice(start as usize..end as usize),
            Err(_) => return error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
        },
    };
    let status = if part.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let mut answer = answer(status, body);
    let modified = httpdate::fmt_http_date(metadata.modified().unwrap_or(std::time::UNIX_EPOCH));
    let fields = [
        (ETAG, etag),
        (LAST_MODIFIED, modified),
        (ACCEPT_RANGES, "bytes".to_owned()),
        (CONTENT_LENGTH, (end - start).to_string()),
    ];
    let range =
        part.map(|(start, end)| (CONTENT_RANGE, format!("bytes {start}-{}/{size}", end - 1)));
    for (name, value) in fields.into_iter().chain(range) {
        answer.headers_mut().insert(name, value.parse().expect("digits and letters"));
    }
    answer
}

/// The start and the end of a range; `None` if there is no such range.
fn range(text: &str, size: u64) -> Option<(u64, u64)> {
    let (start, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (start, end) = match (start.parse::<u64>().ok(), last.parse::<u64>().ok()) {
        (Some(start), Some(last)) => (start, last.saturating_add(1).min(size)),
        (Some(start), None) => (start, size),
        (None, Some(last)) => (size.saturating_sub(last), size),
        (None, None) => return None,
    };
    (start < end).then_some((start, end))
}

/// A page of a listing, of either version of the protocol.
fn list(bucket_path: &Path, bucket: &str, query: &[(String, String)]) -> Response<Bytes> {
    let value = |name: &str| {
        let found = query.iter().find(|(key, _)| key == name);
        found.map_or("", |(_, value)| value.as_str())
    };
    let (prefix, delimiter) = (value("prefix"), value("delimiter"));
    let after = ["continuation-token", "marker", "start-after"].map(value);
    let after = after.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
    let max = value("max-keys").parse().unwrap_or(PAGE_NAMES).min(PAGE_NAMES);
    let mut names = Vec::new();
    collect(bucket_path, "", &mut names);
    names.sort_by(|(a, _), (b, _)| a.cmp(b));
    let (mut objects, mut prefixes, mut next) = (String::new(), Vec::<String>::new(), None);
    let mut count = 0;
    for (name, metadata) in &names {
        let Some(rest) = name.strip_prefix(prefix) else { continue };
        let common = (!delimiter.is_empty()).then(|| rest.split_once(delimiter)).flatten();
        let common = common.map(|(first, _)| format!("{prefix}{first}{delimiter}"));
        let shown = common.as_deref().unwrap_or(name);
        if shown <= after || common.as_ref().is_some_and(|common| prefixes.last() == Some(common)) {
            continue;
        }
        if count == max {
            break;
        }
        count += 1;
        next = Some(shown.to_owned());
        match common {
            Some(common) => prefixes.push(common),
            None => {
                let modified = metadata.modified().unwrap_or(std::time::UNIX_EPOCH);
                let seconds =
                    modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
                objects += &format!(
                    "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size>\
                     <StorageClass>STANDARD</StorageClass></Contents>",
                    escape(name),
                    iso_time(seconds),
                    escape(&etag(metadata)),
                    metadata.len(),
                );
            }
        }
    }
    let is_truncated =
        count == max && names.last().is_some_and(|(last, _)| Some(last) > next.as_ref());
    let token = next.filter(|_| is_truncated).map_or(String::new(), |next| {
        let next = escape(&next);
        format!(
            "<NextContinuationToken>{next}</NextContinuationToken><NextMarker>{next}</NextMarker>"
        )
    });
    let prefixes: String = prefixes
        .iter()
        .map(|prefix| {
            format!("<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>", escape(prefix))
        })
        .collect();
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
         <Name>{bucket}</Name><Prefix>{}</Prefix><MaxKeys>{max}</MaxKeys><KeyCount>{count}</KeyCount>\
         <IsTruncated>{is_truncated}</IsTruncated>{token}{objects}{prefixes}</ListBucketResult>",
        escape(prefix),
    );
    let mut answer = answer(StatusCode::OK, text.into());
    answer.headers_mut().insert("content-type", "application/xml".parse().expect("letters"));
    answer
}

fn collect(folder: &Path, prefix: &str, names: &mut Vec<(String, std::fs::Metadata)>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match metadata.is_dir() {
            true => collect(&entry.path(), &format!("{name}/"), names),
            false => names.push((name, metadata)),
        }
    }
}

fn iso_time(seconds: u64) -> String {
    let (days, rest) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Days since 0000-03-01: leap days come last in a year then.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = (if month < 10 { month + 3 } else { month - 9 }, year_of_era + era * 400);
    let year = year + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.000Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn query(text: &str) -> Vec<(String, String)> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    let split = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name), decode(&value.replace('+', " ")))
    };
    pairs.map(split).collect()
}
