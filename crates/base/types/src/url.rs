//! The URLs of sources and of the files below, in a canonical form. Keys of an object store are used unmodified. Names of
//! directories and files may have any bytes; bytes that a URL can't have, or not everywhere, are escaped. Knows no other rules of
//! any scheme.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use std::borrow::Cow;

/// Escaped in addition to everything that is not ASCII.
const ESCAPED_IN_URLS: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'?').add(b'#');

/// Whether a source is a directory, by the URL or a part.
pub fn is_directory(source: &str) -> bool {
    source.starts_with("file:")
}

/// The URL of a directory by the absolute path.
pub fn directory_url(path: &[u8]) -> String {
    format!("file://{}", percent_encode(path, ESCAPED_IN_URLS))
}

/// The bytes of a path that is part of a directory's URL, escaped or not.
pub fn percent_decoded(path: &str) -> Cow<'_, [u8]> {
    percent_decode_str(path).into()
}

/// The path that the part of a URL below `source` names.
pub fn path_in<'a>(source: &str, below: &'a str) -> Cow<'a, [u8]> {
    if is_directory(source) { percent_decoded(below) } else { below.as_bytes().into() }
}

/// The URL of a path below `source`; of the source for an empty path. ASCII if the source is a directory.
pub fn join_url(source: &str, path: &[u8]) -> Vec<u8> {
    let mut url = source.trim_end_matches('/').as_bytes().to_vec();
    if path.is_empty() && !url.ends_with(b":") {
        return url;
    }
    // The URL of the root of all files has lost its slashes.
    let slashes: &[u8] = if url.ends_with(b":") { b"///" } else { b"/" };
    url.extend_from_slice(slashes);
    if is_directory(source) {
        url.extend(percent_encode(path, ESCAPED_IN_URLS).flat_map(str::bytes));
    } else {
        url.extend_from_slice(path);
    }
    url
}

/// The path from a folder's URL to another, empty for the folder; `None` when the other does not lie below.
pub fn path_below<'a>(url: &'a str, folder: &str) -> Option<Cow<'a, [u8]>> {
    let folder = folder.trim_end_matches('/');
    let rest = url.strip_prefix(folder)?;
    (rest.is_empty() || rest.starts_with('/')).then(|| path_in(folder, rest.trim_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_escaped_and_those_of_objects_are_not() {
        assert_eq!(directory_url(b"/a b/100%/\xc3\xa9\xff#?"), "file:///a%20b/100%25/%C3%A9%FF%23%3F");
        assert_eq!(join_url("file:///a%20b/", b"c d"), b"file:///a%20b/c%20d");
        assert_eq!(join_url("s3://b/", b"c d%"), b"s3://b/c d%");
        assert_eq!((join_url("s3://b", b""), join_url("file:///", b"")), (b"s3://b".to_vec(), b"file:///".to_vec()));
        assert_eq!(join_url("file:///", b"x"), b"file:///x");
    }

    #[test]
    fn what_is_below_is_told_by_whole_names() {
        let below = |url, folder| path_below(url, folder).map(|path| path.into_owned());
        assert_eq!(below("file:///a%20b/c%25", "file:///a%20b").unwrap(), b"c%");
        assert_eq!(below("file:///x/y", "file:///").unwrap(), b"x/y");
        assert_eq!(below("s3://b/c%20d/", "s3://b/").unwrap(), b"c%20d");
        assert_eq!(below("s3://b", "s3://b").unwrap(), b"");
        assert!(below("s3://bb", "s3://b").is_none() && below("s3://b", "s3://b/c").is_none());
    }

    proptest::proptest! {
        #[test]
        fn any_name_comes_back(folder in "/[^/\0]{1,12}", path in proptest::collection::vec(1u8..=255, 1..20)) {
            let path = path.strip_prefix(b"/").unwrap_or(&path);
            let path = path.strip_suffix(b"/").unwrap_or(path);
            proptest::prop_assume!(!path.is_empty() && !path.starts_with(b"/") && !path.ends_with(b"/"));
            let source = directory_url(folder.as_bytes());
            let named = percent_decoded(&source["file://".len()..]);
            proptest::prop_assert_eq!(named.as_ref(), folder.as_bytes());
            let url = String::from_utf8(join_url(&source, path)).unwrap();
            proptest::prop_assert!(url.is_ascii());
            let found = path_below(&url, &source).unwrap();
            proptest::prop_assert_eq!(found.as_ref(), path);
        }
    }
}
