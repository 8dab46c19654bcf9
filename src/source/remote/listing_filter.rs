//! Removes from a store's listing the names that no file can have, so that the others are shown.
//!
//! The client of stores refuses a whole page for one key with `//`, a segment `.` or `..`, or a control character.

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

/// A page of a listing without the names that cannot be shown, and how many these are; `None` if there are none. What
/// is no listing is left as it is.
pub fn remove_unusable_names(xml: &[u8]) -> Option<(Vec<u8>, usize)> {
    let mut reader = Reader::from_reader(xml);
    let mut kept = Vec::new();
    let (mut kept_to, mut count, mut depth) = (0, 0, 0usize);
    // The start of the entry and its depth.
    let mut entry: Option<(usize, usize)> = None;
    let mut is_unusable = false;
    loop {
        let start = usize::try_from(reader.buffer_position()).ok()?;
        match reader.read_event().ok()? {
            Event::Start(element) => {
                depth += 1;
                let name = element.local_name();
                let name: &[u8] = name.as_ref();
                match entry {
                    None if ENTRY_ELEMENTS.contains(&name) => entry = Some((start, depth)),
                    Some((_, entry_depth))
                        if depth == entry_depth + 1 && NAME_ELEMENTS.contains(&name) =>
                    {
                        let text = reader.read_text(element.to_end().name()).ok()?;
                        depth -= 1;
                        let text = text.decode().ok()?;
                        let text = quick_xml::escape::unescape(&text).ok()?;
                        is_unusable = match name {
                            b"href" => !is_usable_href(&text),
                            _ => ObjectPath::parse(&*text).is_err(),
                        };
                    }
                    _ => {}
                }
            }
            Event::End(_) => {
                if let Some((entry_start, entry_depth)) = entry
                    && entry_depth == depth
                {
                    if std::mem::take(&mut is_unusable) {
                        kept.extend_from_slice(&xml[kept_to..entry_start]);
                        kept_to = usize::try_from(reader.buffer_position()).ok()?;
                        count += 1;
                    }
                    entry = None;
                }
                depth = depth.checked_sub(1)?;
            }
            Event::Eof => break,
            _ => {}
        }
    }
    kept.extend_from_slice(&xml[kept_to..]);
    (count > 0).then_some((kept, count))
}

/// Whether an address leads to a name without slashes in it.
fn is_usable_href(href: &str) -> bool {
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
        let (kept, count) = remove_unusable_names(xml.as_bytes()).unwrap();
        (String::from_utf8(kept).unwrap(), count)
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
        let bad = ["/a%2Fb", "/a/%ff", "/a%0ab", "/a//b"].map(response);
        assert_eq!(filter(&page(&[&bad[..2], &kept[..], &bad[2..]].concat())), (page(&kept), 4));
    }

    #[test]
    fn what_is_no_listing_is_left_as_it_is() {
        for text in [
            "",
            "<",
            "<a><b></a>",
            "{}",
            "<Contents><Key>//",
            "</a></b>",
            "<Contents><Key>&x;</Key></Contents>",
        ] {
            assert!(remove_unusable_names(text.as_bytes()).is_none(), "{text}");
        }
    }
}
