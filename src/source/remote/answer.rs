//! Answers of servers: their headers, and bodies that are read whole, within limits.

use std::time::Duration;

use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, RETRY_AFTER};
use http::{HeaderMap, Method, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::failure::TransportError;
use super::listing_filter::remove_unusable_names;

/// The longest wait that one answer of a server can ask for.
const MAX_RETRY_AFTER_INTERVAL: Duration = Duration::from_secs(60);

/// The longest answer that is no part of an object: a thousand names take less than a MiB.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The longest answer with a reason for an error: stores send some hundred bytes.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// Stall timeouts that a whole answer may take: a page of names has less than a MiB.
const WHOLE_ANSWER_STALLS: u32 = 3;

/// Encodings that change no byte of an object. Some stores keep `aws-chunked` from an upload in chunks.
const HARMLESS_ENCODINGS: [&str; 3] = ["identity", "aws-chunked", ""];

/// The longest encoding that a message shows.
const MAX_ENCODING_CHARS: usize = 32;

/// Fails if the status says that the server is overloaded, or failed.
pub fn check_status(status: StatusCode, headers: &HeaderMap) -> Result<(), TransportError> {
    let is_final =
        matches!(status, StatusCode::NOT_IMPLEMENTED | StatusCode::HTTP_VERSION_NOT_SUPPORTED);
    let is_busy = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    match is_busy || status.is_server_error() && !is_final {
        true => Err(TransportError::Busy { status, retry_after: retry_after(headers) }),
        false => Ok(()),
    }
}

/// Fails if a successful answer cannot have the bytes of an object as they are stored.
pub fn check_headers(method: &Method, headers: &HeaderMap) -> Result<(), TransportError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let is_size =
        |text: &str| text.trim().parse::<u64>().is_ok_and(|size| i64::try_from(size).is_ok());
    if *method == Method::HEAD {
        return match text(CONTENT_LENGTH).is_none_or(is_size) {
            true => Ok(()),
            false => Err(TransportError::ImpossibleSize),
        };
    }
    // The client of stores adds 1 to the last byte, which must not overflow.
    let range = text(CONTENT_RANGE).and_then(|range| range.trim().strip_prefix("bytes "));
    if range.is_some_and(|range| range.split(['-', '/']).any(|number| !is_size(number))) {
        return Err(TransportError::ImpossibleSize);
    }
    let encodings: Vec<_> = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .map(|value| String::from_utf8_lossy(value.as_bytes()))
        .collect();
    let changes =
        |part: &&str| !HARMLESS_ENCODINGS.iter().any(|one| part.eq_ignore_ascii_case(one));
    match encodings.iter().flat_map(|value| value.split(',')).map(str::trim).find(changes) {
        Some(part) => {
            let shown = part.chars().filter(char::is_ascii_graphic).take(MAX_ENCODING_CHARS);
            Err(TransportError::Encoded(shown.collect()))
        }
        None => Ok(()),
    }
}

/// The time that a server asks to wait, in seconds or as a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let date = chrono::DateTime::parse_from_rfc2822(text).ok()?;
            (date.to_utc() - chrono::Utc::now()).to_std().unwrap_or_default()
        }
    };
    Some(wait.min(MAX_RETRY_AFTER_INTERVAL))
}

/// Reads the start of an answer whose status is an error. The rest, and bytes that come too late, are left
/// out: the status decides.
pub async fn read_error_answer(mut body: reqwest::Body, limit: Duration) -> bytes::Bytes {
    let mut start = Vec::new();
    let read = async {
        while let Some(Ok(frame)) = body.frame().await
            && start.len() < MAX_ERROR_BYTES
        {
            let bytes = frame.into_data().unwrap_or_default();
            start.extend_from_slice(&bytes[..bytes.len().min(MAX_ERROR_BYTES - start.len())]);
        }
    };
    // What came before the limit counts.
    let _ = tokio::time::timeout(limit, read).await;
    start.into()
}

/// Reads a whole answer that is no part of an object. A listing loses the names that cannot be shown.
pub async fn read_whole_answer(
    body: reqwest::Body,
    stall_timeout: Duration,
) -> Result<bytes::Bytes, TransportError> {
    let whole = Limited::new(body, MAX_ANSWER_BYTES).collect();
    let slow = |_| TransportError::Connection("the answer is too slow".to_owned());
    let body = tokio::time::timeout(stall_timeout * WHOLE_ANSWER_STALLS, whole).await;
    let body = body.map_err(slow)?.map_err(|error| match error.is::<LengthLimitError>() {
        true => TransportError::TooLong(MAX_ANSWER_BYTES),
        false => TransportError::Connection("the answer broke".to_owned()),
    });
    let body = body?.to_bytes();
    let Some(filtered) = remove_unusable_names(&body) else { return Ok(body) };
    tracing::warn!(
        count = filtered.removed_count,
        names = ?filtered.removed_names,
        "names in a store are not shown: each has an empty segment, `.`, `..`, a control character, no UTF-8, or an impossible size"
    );
    Ok(filtered.kept.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_with_changed_bytes_are_refused() {
        let check = |method, name: http::HeaderName, value: &str| {
            check_headers(&method, &HeaderMap::from_iter([(name, value.parse().unwrap())]))
        };
        for encoding in ["", "identity", "AWS-chunked", "identity, aws-chunked"] {
            assert!(check(Method::GET, CONTENT_ENCODING, encoding).is_ok(), "{encoding}");
        }
        for encoding in ["gzip", "identity,gzip", "aws-chunked, br"] {
            let refused = check(Method::GET, CONTENT_ENCODING, encoding);
            assert!(matches!(refused, Err(TransportError::Encoded(_))), "{encoding}");
        }
        let mut both = HeaderMap::new();
        for encoding in [&b"identity"[..], b"gz\xff"] {
            both.append(CONTENT_ENCODING, http::HeaderValue::from_bytes(encoding).unwrap());
        }
        let refused = check_headers(&Method::GET, &both);
        assert!(matches!(refused, Err(TransportError::Encoded(shown)) if shown == "gz"));
        let largest = i64::MAX.unsigned_abs();
        assert!(check(Method::HEAD, CONTENT_LENGTH, &largest.to_string()).is_ok());
        let range = format!("bytes 0-{}/{largest}", largest - 1);
        assert!(check(Method::GET, CONTENT_RANGE, &range).is_ok());
        assert!(check(Method::GET, CONTENT_RANGE, "bytes 0-5/*").is_err());
        for size in [format!("{}", largest + 1), format!("{}0", u64::MAX), "-1".to_owned()] {
            assert!(check(Method::HEAD, CONTENT_LENGTH, &size).is_err(), "{size}");
            assert!(check(Method::GET, CONTENT_RANGE, &format!("bytes 0-{size}/5")).is_err());
        }
    }

    #[test]
    fn a_server_may_ask_to_wait_for_a_minute_and_no_longer() {
        let after = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(after("3"), Some(Duration::from_secs(3)));
        assert_eq!(after("99999"), Some(MAX_RETRY_AFTER_INTERVAL));
        assert_eq!(after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert_eq!(after("soon"), None);
    }
}
