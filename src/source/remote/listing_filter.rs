//! Removes from a store's listing the entries whose name or size no file can have, so that the others are shown.
//!
//! The client of stores refuses a whole page for one key with `//`, a segment `.` or `..`, a control character, or an
//! invalid XML reference, such as `&#0;`. It also refuses a page for one size that it cannot parse.

use std::borrow::Cow;

use object_store::path::Path as ObjectPath;
use percent_encoding::percent_decode_str;
use quick_xml::Reader;
use quick_xml::events::Event;
use reqwest::Url;

/// The elements that have one name each: of S3 and Google Cloud Storage, of Azure, and of WebDAV.
const ENTRY_ELEMENTS: [&[u8]; 5] =
    [b"Contents", b"CommonPrefixes", b"Blob", b"BlobPrefix", b"response"];

/// The elements directly in those that state the name.
const NAME_ELEMENTS: [&[u8]; 4] = [b"Key", b"Prefix", b"Name", b"href"];

/// The elements, at any depth of an entry, that state the size of an object.
const SIZE_ELEMENTS: [&[u8]; 3] = [b"Size", b"Content-Length", b"getcontentlength"];

/// Maximum names in a message, and maximum characters of each.
const MAX_SHOWN_NAMES: usize = 3;
const MAX_SHOWN_CHARS: usize = 200;

/// A page of a listing without the entries that cannot be shown.
pub struct FilteredListing {
    pub kept: Vec<u8>,
    pub removed_count: usize,
    /// The first names that were removed.
    pub removed_names: Vec<String>,
}

/// An entry of a listing.
struct Entry {
    start: usize,
    depth: usize,
    name: String,
    is_unusable: bool,
}

/// A page of a listing without the entries that cannot be shown; `None` if there are none. Other documents are left as
/// they are.
pub fn remove_unusable_names(xml: &[u8]) -> Option<FilteredListing> {
    let mut reader = Reader::from_reader(xml);
    let (mut kept, mut removed_names) = (Vec::new(), Vec::new());
    let (mut kept_to, mut removed_count, mut depth) = (0, 0, 0usize);
    let mut entry: Option<Entry> = None;
    loop {
        let start = usize::try_from(reader.buffer_position()).ok()?;
        match reader.read_event().ok()? {
            Event::Start(element) => {
                depth += 1;
                let name = element.local_name();
                let name: &[u8] = name.as_ref();
                let Some(entry) = &mut entry else {
                    if ENTRY_ELEMENTS.contains(&name) {
                        entry =
                            Some(Entry { start, depth, name: String::new(), is_unusable: false });
                    }
                    continue;
                };
                let is_name = depth == entry.depth + 1 && NAME_ELEMENTS.contains(&name);
                if !is_name && !SIZE_ELEMENTS.contains(&name) {
                    continue;
                }
                let raw = reader.read_text(element.to_end().name()).ok()?;
                depth -= 1;
                let text = raw.decode().ok();
                let text = text.as_deref().and_then(decode_text);
                if is_name {
                    let shown = text
                        .as_deref()
                        .map_or_else(|| String::from_utf8_lossy(&raw), Cow::Borrowed);
                    entry.name = shown.chars().take(MAX_SHOWN_CHARS).collect();
                }
                entry.is_unusable |= !text.is_some_and(|text| match name {
                    b"href" => is_usable_href(&text),
                    _ if is_name => is_usable_key(&text),
                    _ => is_usable_size(&text),
                });
            }
            Event::End(_) => {
                if let Some(ended) = entry.take_if(|entry| entry.depth == depth)
                    && ended.is_unusable
                {
                    kept.extend_from_slice(&xml[kept_to..ended.start]);
                    kept_to = usize::try_from(reader.buffer_position()).ok()?;
                    removed_count += 1;
                    if removed_names.len() < MAX_SHOWN_NAMES {
                        removed_names.push(ended.name);
                    }
                }
                depth = depth.checked_sub(1)?;
            }
            Event::Eof => break,
            _ => {}
        }
    }
    kept.extend_from_slice(&xml[kept_to..]);
    (removed_count > 0).then_some(FilteredListing { kept, removed_count, removed_names })
}

/// The text of an element without child elements: one CDATA section, or text with references. `None` if it is invalid.
fn decode_text(raw: &str) -> Option<Cow<'_, str>> {
    let literal = raw.trim().strip_prefix("<![CDATA[").and_then(|raw| raw.strip_suffix("]]>"));
    match literal {
        Some(literal) => (!literal.contains("]]>")).then_some(Cow::Borrowed(literal)),
        None => quick_xml::escape::unescape(raw).ok(),
    }
}

/// Whether a key can be a path. The client of stores would remove a slash at its start, and read another key.
fn is_usable_key(key: &str) -> bool {
    !key.starts_with('/') && ObjectPath::parse(key).is_ok()
}

/// Whether a file can have a size. Some servers state an empty one for directories.
fn is_usable_size(size: &str) -> bool {
    let size = size.trim();
    size.is_empty() || size.parse::<u64>().is_ok_and(|size| i64::try_from(size).is_ok())
}

/// Whether an address leads to a name without slashes in it.
fn is_usable_href(href: &str) -> bool {
    // A URL that begins so names a host.
    if href.starts_with("//") {
        return false;
    }
    let any = Url::options();
    let base = Url::parse("http://host/").ok();
    let Ok(url) = any.base_url(base.as_ref()).parse(href) else { return false };
    let path = url.path();
    let decoded = percent_decode_str(path).decode_utf8();
    decoded.is_ok_and(|decoded| {
        decoded.matches('/').count() == path.matches('/').count()
            && ObjectPath::parse(&*decoded).is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(xml: &str) -> (String, usize) {
        let filtered = remove_unusable_names(xml.as_bytes()).unwrap();
        (String::from_utf8(filtered.kept).unwrap(), filtered.removed_count)
    }

    #[test]
    fn entries_with_names_of_no_file_are_removed() {
        let contents = |key: &str| {
            format!("<Contents><Key>{key}</Key><Owner><Key>//</Key></Owner></Contents>")
        };
        let prefixes =
            |key: &str| format!("<CommonPrefixes>\n<Prefix>{key}</Prefix></CommonPrefixes>");
        let page = |inside: &[String]| {
            format!(
                "<?xml version=\"1.0\"?>\n<List><Prefix>a//</Prefix>{}<Next/></List>",
                inside.concat()
            )
        };
        let kept = [contents("a/b"), contents("a &amp; b"), prefixes("a/c/")];
        let [first, second, third] = kept.clone();
        let (bad, worse, worst) = (contents("a/../b"), prefixes("a//"), contents("a/&#10;"));
        let filtered = filter(&page(&[first, bad, second, worse, worst, third]));
        assert_eq!(filtered, (page(&kept), 3));
        assert!(remove_unusable_names(page(&kept).as_bytes()).is_none());
    }

    #[test]
    fn keys_that_xml_cannot_carry_and_impossible_sizes_are_removed_and_named() {
        let entry = |key: &str, size: &str| {
            format!("<Contents><Key>{key}</Key><Size>{size}</Size></Contents>")
        };
        let kept =
            [entry("a", "5"), entry("b", "9223372036854775807"), entry("<![CDATA[a&b]]>", "7")];
        let kept = kept.concat();
        let bad = [
            entry("&#0;", "1"),
            entry("&x;", "1"),
            entry("/c", "1"),
            entry("d", "9223372036854775808"),
            entry("e", "-1"),
            entry("/", "0"),
            entry("<![CDATA[/f]]>", "1"),
        ];
        let filtered = remove_unusable_names([&kept, &*bad.concat()].concat().as_bytes()).unwrap();
        assert_eq!((filtered.kept, filtered.removed_count), (kept.into_bytes(), bad.len()));
        assert_eq!(filtered.removed_names, ["&#0;", "&x;", "/c"]);
        let not_text = b"<Blob><Name>\xff</Name><Properties><Content-Length>7</Content-Length></Properties></Blob>";
        assert_eq!(remove_unusable_names(not_text).unwrap().removed_names, ["\u{fffd}"]);
        let nested = "<Blob><Name>f</Name><Properties><Content-Length>18446744073709551616</Content-Length></Properties></Blob>";
        assert_eq!(filter(nested), (String::new(), 1));
    }

    #[test]
    fn addresses_with_encoded_slashes_or_dots_are_removed() {
        let response = |href: &str| {
            format!(
                "<D:response><D:href>{href}</D:href><D:propstat><D:prop/></D:propstat></D:response>"
            )
        };
        let page = |inside: &[String]| {
            format!("<D:multistatus xmlns:D=\"DAV:\">{}</D:multistatus>", inside.concat())
        };
        let kept = ["/a%20b/", "http://other/50%2525.pt", "/a/%C3%A4%23%3F"].map(response);
        let bad = ["/a%2Fb", "/a/%ff", "/a%0ab", "/a//b", "//a/b"].map(response);
        assert_eq!(filter(&page(&[&bad[..2], &kept[..], &bad[2..]].concat())), (page(&kept), 5));
    }

    #[test]
    fn what_is_no_listing_is_left_as_it_is() {
        for text in ["", "<", "<a><b></a>", "{}", "<Contents><Key>//", "</a></b>"] {
            assert!(remove_unusable_names(text.as_bytes()).is_none(), "{text}");
        }
    }
}
