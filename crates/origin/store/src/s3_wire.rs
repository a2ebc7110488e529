//! The wire form of S3: listing and error documents, times, percent-encoding.
//! It deliberately knows no connection and no request.

use crate::backend::{RawObject, RawPage};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, utf8_percent_encode};
use quick_xml::events::Event;
use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, SystemTime};

/// All but RFC 3986's unreserved characters.
const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// The same with `/` left as it is.
const STRICT_PATH: &AsciiSet = &STRICT.remove(b'/');

/// A query value, percent-encoded.
pub fn encode_query(text: &str) -> impl std::fmt::Display {
    utf8_percent_encode(text, STRICT)
}

/// A key as a path of a URL, percent-encoded.
pub(crate) fn encode_path(key: &str) -> impl std::fmt::Display {
    utf8_percent_encode(key, STRICT_PATH)
}

/// A name under `encoding-type=url`: percent-encoding with `+` for a space. `None` when it is not UTF-8.
fn decode_name(text: &str) -> Option<String> {
    let spaced: Cow<'_, str> = if text.contains('+') { text.replace('+', " ").into() } else { text.into() };
    Some(percent_decode(spaced.as_bytes()).decode_utf8().ok()?.into_owned())
}

/// An etag without quotes and weak prefix, as versions have it.
pub fn bare_etag(etag: &str) -> &str {
    etag.trim().trim_start_matches("W/").trim_matches('"')
}

/// The region in a host name of AWS (`bucket.s3.eu-west-1.amazonaws.com`, `s3-eu-west-1.amazonaws.com`).
pub(crate) fn region_of(host: &str) -> Option<&str> {
    let (before, _) = host.split_once(".amazonaws.com")?;
    let (rest, last) = before.rsplit_once('.').unwrap_or(("", before));
    let region = match last.strip_prefix("s3-") {
        Some(region) => region,
        None => last,
    };
    let in_place = last.starts_with("s3-") || rest.split('.').any(|part| part == "s3");
    (in_place && region.contains('-') && region.ends_with(|c: char| c.is_ascii_digit())).then_some(region)
}

/// The range and the total length of a `Content-Range` header, as far as it states them.
pub(crate) fn parse_content_range(text: &str) -> (Option<Range<u64>>, Option<u64>) {
    let Some((range, total)) = text.strip_prefix("bytes ").and_then(|rest| rest.split_once('/')) else {
        return (None, None);
    };
    let range = range.split_once('-').and_then(|(first, last)| {
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then(|| first..last.saturating_add(1))
    });
    (range, total.parse().ok())
}

/// A time of a header (RFC 1123) or a listing (ISO 8601), in whole seconds.
pub(crate) fn parse_time(text: &str) -> Option<SystemTime> {
    let time =
        chrono::DateTime::parse_from_rfc2822(text).or_else(|_| chrono::DateTime::parse_from_rfc3339(text)).ok()?;
    let seconds = u64::try_from(time.timestamp()).ok()?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// Calls `seen(path, Some(text))` for every element that holds text only, with the names of the elements it stands in,
/// and `seen(path, None)` at the end of every other. Returns `false` when the document is not well formed.
fn walk_elements(document: &[u8], mut seen: impl FnMut(&[String], Option<String>)) -> bool {
    let mut reader = quick_xml::Reader::from_reader(document);
    let mut path: Vec<String> = Vec::new();
    let mut text = String::new();
    let mut is_leaf = false;
    loop {
        match reader.read_event() {
            Ok(Event::Start(start)) => {
                path.push(String::from_utf8_lossy(start.local_name().as_ref()).into_owned());
                text.clear();
                is_leaf = true;
            }
            Ok(Event::Empty(empty)) => {
                path.push(String::from_utf8_lossy(empty.local_name().as_ref()).into_owned());
                seen(&path, Some(String::new()));
                path.pop();
                is_leaf = false;
            }
            Ok(Event::End(_)) => {
                seen(&path, is_leaf.then(|| std::mem::take(&mut text)));
                path.pop();
                is_leaf = false;
            }
            Ok(Event::Text(part)) => match part.decode() {
                Ok(part) => text.push_str(&part),
                Err(_) => return false,
            },
            Ok(Event::CData(part)) => match part.decode() {
                Ok(part) => text.push_str(&part),
                Err(_) => return false,
            },
            Ok(Event::GeneralRef(reference)) => {
                if let Ok(Some(c)) = reference.resolve_char_ref() {
                    text.push(c);
                } else if let Ok(name) = reference.decode() {
                    match quick_xml::escape::resolve_predefined_entity(&name) {
                        Some(c) => text.push_str(c),
                        None => return false,
                    }
                }
            }
            Ok(Event::Eof) => return path.is_empty(),
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

/// Why a document is not a page of a listing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PageError {
    /// It is another document.
    NotListing,
    /// It is truncated without a continuation token: an answer to the older ListObjects.
    NoContinuation,
}

/// Parses the answer to ListObjectsV2. Names that are not UTF-8 are counted in the second part.
pub(crate) fn parse_list(document: &[u8]) -> Result<(RawPage, u64), PageError> {
    let mut page = RawPage::default();
    let mut seen_root = false;
    let mut encoded = false;
    let mut truncated = None;
    let mut object = empty_object();
    let mut well = true;
    let mut objects: Vec<RawObject> = Vec::new();
    let mut prefixes: Vec<String> = Vec::new();
    let parsed = walk_elements(document, |path, text| {
        let mut names = path.iter().map(String::as_str);
        if names.next() != Some("ListBucketResult") {
            well = false;
            return;
        }
        seen_root = true;
        match (names.next(), names.next(), names.next(), text) {
            (Some("Contents"), Some("Key"), None, Some(text)) => object.key = text,
            (Some("Contents"), Some("Size"), None, Some(text)) => match text.trim().parse() {
                Ok(size) => object.size = size,
                Err(_) => well = false,
            },
            (Some("Contents"), Some("LastModified"), None, Some(text)) => {
                object.mtime = parse_time(&text).unwrap_or(SystemTime::UNIX_EPOCH);
            }
            (Some("Contents"), Some("ETag"), None, Some(text)) => {
                object.etag = Some(text).filter(|t| !bare_etag(t).is_empty());
            }
            (Some("Contents"), None, None, None) => objects.push(std::mem::replace(&mut object, empty_object())),
            (Some("CommonPrefixes"), Some("Prefix"), None, Some(text)) => prefixes.push(text),
            (Some("EncodingType"), None, None, Some(text)) => encoded = text.eq_ignore_ascii_case("url"),
            (Some("IsTruncated"), None, None, Some(text)) => truncated = Some(text.eq_ignore_ascii_case("true")),
            (Some("NextContinuationToken"), None, None, Some(text)) => page.next = Some(text).filter(|t| !t.is_empty()),
            _ => {}
        }
    });
    if !parsed || !well || !seen_root {
        return Err(PageError::NotListing);
    }
    match truncated {
        Some(true) if page.next.is_none() => return Err(PageError::NoContinuation),
        Some(false) => page.next = None,
        _ => {}
    }
    let mut skipped = 0;
    let mut keep = |text: String| {
        let text = if encoded { decode_name(&text) } else { Some(text) };
        if text.is_none() {
            skipped += 1;
        }
        text
    };
    page.prefixes = prefixes.into_iter().filter_map(&mut keep).collect();
    page.objects = objects.into_iter().filter_map(|o| keep(o.key.clone()).map(|key| RawObject { key, ..o })).collect();
    Ok((page, skipped))
}

/// The content of an error document.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct WireError {
    pub code: String,
    pub message: String,
    /// The bucket's region, where the server states it.
    pub region: Option<String>,
    /// The server's time, where clocks differ.
    pub server_time: Option<String>,
}

/// Parses an error document; `None` for any other document (a proxy's page, another kind of server).
pub(crate) fn parse_error(document: &[u8]) -> Option<WireError> {
    let mut error = WireError::default();
    let mut well = true;
    let parsed =
        walk_elements(document, |path, text| match (&path.iter().map(String::as_str).collect::<Vec<_>>()[..], text) {
            (["Error", "Code"] | ["ErrorResponse", "Error", "Code"], Some(text)) => error.code = text,
            (["Error", "Message"] | ["ErrorResponse", "Error", "Message"], Some(text)) => error.message = text,
            (["Error", "Region"], Some(text)) => error.region = Some(text),
            (["Error", "ServerTime"], Some(text)) => error.server_time = Some(text),
            (["Error" | "ErrorResponse", ..], _) => {}
            _ => well = false,
        });
    (parsed && well && !error.code.is_empty()).then_some(error)
}

/// The text of the first element `name` directly below the root `root`.
pub(crate) fn parse_field(document: &[u8], root: &str, name: &str) -> Option<String> {
    let mut found = None;
    let well_formed = walk_elements(document, |path, text| {
        if let ([first, second], Some(text)) = (path, text)
            && first == root
            && second == name
        {
            found.get_or_insert(text);
        }
    });
    found.filter(|_| well_formed)
}

/// The body of CompleteMultipartUpload.
pub(crate) fn complete_body<'a>(parts: impl Iterator<Item = (u32, &'a str)>) -> String {
    let mut body = String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for (number, etag) in parts {
        let etag = quick_xml::escape::escape(etag);
        body.push_str(&format!("<Part><PartNumber>{number}</PartNumber><ETag>&quot;{etag}&quot;</ETag></Part>"));
    }
    body.push_str("</CompleteMultipartUpload>");
    body
}

fn empty_object() -> RawObject {
    RawObject { key: String::new(), size: 0, mtime: SystemTime::UNIX_EPOCH, etag: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing() {
        let document = br#"<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix></Prefix>
<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>t&amp;1</NextContinuationToken>
<Contents><Key>a+b%2Bc%0A%E2%82%AC</Key><LastModified>2024-01-02T03:04:05.678Z</LastModified><ETag>&quot;e1&quot;</ETag>
<Size>5000000000</Size><Owner><ID>x</ID></Owner></Contents>
<CommonPrefixes><Prefix>d%20/</Prefix></CommonPrefixes>
<Contents><Key>z</Key><LastModified>2024-01-02T03:04:05Z</LastModified><ETag>e2</ETag><Size>1</Size></Contents>
<Contents><Key>%FF</Key><LastModified>2024-01-02T03:04:05Z</LastModified><Size>1</Size></Contents>
</ListBucketResult>"#;
        let (page, skipped) = parse_list(document).unwrap();
        assert_eq!(skipped, 1);
        assert_eq!(page.next.as_deref(), Some("t&1"));
        assert_eq!(page.prefixes, ["d /"]);
        let keys: Vec<_> = page.objects.iter().map(|o| o.key.as_str()).collect();
        assert_eq!(keys, ["a b+c\n€", "z"]);
        assert_eq!(page.objects[0].size, 5_000_000_000);
        assert_eq!(bare_etag(page.objects[0].etag.as_deref().unwrap()), "e1");
        assert_eq!(page.objects[0].mtime, parse_time("Tue, 02 Jan 2024 03:04:05 GMT").unwrap());
    }

    #[test]
    fn plain_keys_keep_their_spaces_and_references() {
        let document =
            b"<ListBucketResult><IsTruncated>false</IsTruncated><NextContinuationToken>t</NextContinuationToken>\
            <Contents><Key> a&amp;b&#x1;+%41 </Key><Size>1</Size></Contents></ListBucketResult>";
        let (page, _) = parse_list(document).unwrap();
        assert_eq!(page.objects[0].key, " a&b\u{1}+%41 ");
        assert_eq!(page.next, None);
    }

    #[test]
    fn etags_and_times_as_gateways_write_them() {
        for etag in ["\"e1\"", "e1", "W/\"e1\"", " \"e1\" "] {
            assert_eq!(bare_etag(etag), "e1");
        }
        let document = b"<ListBucketResult>\
            <Contents><Key>a</Key><Size>1</Size><ETag/></Contents>\
            <Contents><Key>b</Key><Size>1</Size><ETag>&quot;&quot;</ETag></Contents>\
            <Contents><Key>c</Key><LastModified>1969-12-31T23:59:59.000Z</LastModified><Size>1</Size></Contents>\
            <Contents><Key>d</Key><LastModified>2999-01-02T03:04:05+02:00</LastModified><Size>1</Size></Contents>\
            </ListBucketResult>";
        let (page, _) = parse_list(document).unwrap();
        assert!(page.objects.iter().all(|object| object.etag.is_none()));
        let times: Vec<_> = page.objects.iter().map(|object| object.mtime).collect();
        let late = parse_time("Wed, 02 Jan 2999 01:04:05 GMT").unwrap();
        assert_eq!(times, [SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH, late]);
    }

    #[test]
    fn regions_in_hosts() {
        for (host, region) in [
            ("bucket.s3.eu-west-1.amazonaws.com", Some("eu-west-1")),
            ("s3.dualstack.us-gov-west-1.amazonaws.com", Some("us-gov-west-1")),
            ("b.s3-us-west-2.amazonaws.com", Some("us-west-2")),
            ("s3.cn-north-1.amazonaws.com.cn", Some("cn-north-1")),
            ("bucket.s3.amazonaws.com", None),
            ("s3-1.amazonaws.com", None),
            ("bucket.s3-accelerate.amazonaws.com", None),
            ("s3.eu-west-1.example.com", None),
        ] {
            assert_eq!(region_of(host), region, "{host}");
        }
    }

    #[test]
    fn content_ranges() {
        for (text, parts) in [
            ("bytes 0-9/1000", (Some(0..10), Some(1000))),
            ("bytes 5-5/6", (Some(5..6), Some(6))),
            ("bytes 0-9/*", (Some(0..10), None)),
            ("bytes */1000", (None, Some(1000))),
            ("bytes 9-0/1000", (None, Some(1000))),
            ("bytes a-9/-1", (None, None)),
            ("items 0-9/10", (None, None)),
            ("", (None, None)),
        ] {
            assert_eq!(parse_content_range(text), parts, "{text}");
        }
    }

    #[test]
    fn what_is_no_listing() {
        for document in
            [&b""[..], b"<html><body>hi</body></html>", b"<ListBucketResult><Contents>", b"{}", b"\xff\xfe<"]
        {
            assert!(matches!(parse_list(document), Err(PageError::NotListing)), "{document:?}");
        }
    }

    #[test]
    fn a_listing_that_is_cut_and_does_not_say_where() {
        let page = |rest: &str| format!("<ListBucketResult>{rest}<Contents><Key>a</Key></Contents></ListBucketResult>");
        let parse = |rest: &str| parse_list(page(rest).as_bytes()).map(|(page, _)| page.next);
        let v1 = "<IsTruncated>true</IsTruncated><Marker/><NextMarker>a</NextMarker>";
        assert_eq!(parse(v1), Err(PageError::NoContinuation));
        assert_eq!(parse("<IsTruncated>true</IsTruncated><NextContinuationToken/>"), Err(PageError::NoContinuation));
        assert_eq!(parse("<IsTruncated>false</IsTruncated><NextMarker>a</NextMarker>"), Ok(None));
        assert_eq!(parse(""), Ok(None));
    }

    #[test]
    fn errors() {
        let e =
            parse_error(b"<Error><Code>PermanentRedirect</Code><Message>m</Message><Region>eu-west-1</Region></Error>");
        let e = e.unwrap();
        assert_eq!((e.code.as_str(), e.region.as_deref()), ("PermanentRedirect", Some("eu-west-1")));
        assert!(parse_error(b"<html><title>503</title></html>").is_none());
    }

    proptest::proptest! {
        #[test]
        fn never_panics(document: Vec<u8>) {
            let _ = parse_list(&document);
            let _ = parse_error(&document);
        }
        #[test]
        fn never_panics_on_tags(parts in proptest::collection::vec("(<ListBucketResult>|<Contents>|<Key>|</Key>|</Contents>|<Size>|</Size>|&amp;|&#x0;|%|1|<!\\[CDATA\\[|\\]\\]>)", 0..20)) {
            let _ = parse_list(parts.concat().as_bytes());
        }
    }
}
