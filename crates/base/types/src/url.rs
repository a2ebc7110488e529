//! How sources, and files below them, are named by URLs: one way for each, so that two who mean the same write the same.
//! What lies in an object store is named as it is called there; names of directories and their files may have any bytes,
//! and those that a URL can't have, or not everywhere, are escaped. It knows no scheme's other rules.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use std::borrow::Cow;

/// What is escaped besides all that is not ASCII.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'?').add(b'#');

/// Whether the URLs below a source, or a part of its URL, are those of directories.
fn is_directory(source: &str) -> bool {
    source.starts_with("file:")
}

/// The URL of a directory by its absolute path.
pub fn of_directory(path: &[u8]) -> String {
    format!("file://{}", percent_encode(path, ESCAPED))
}

/// The bytes of a path that is part of a directory's URL, escaped or not.
pub fn unescaped(path: &str) -> Cow<'_, [u8]> {
    percent_decode_str(path).into()
}

/// The path that is meant by the part of a URL below `source`.
pub fn path_in<'a>(source: &str, below: &'a str) -> Cow<'a, [u8]> {
    if is_directory(source) { unescaped(below) } else { below.as_bytes().into() }
}

/// The URL of a path below `source`, of the source itself for an empty one. ASCII if the source is a directory.
pub fn join(source: &str, path: &[u8]) -> Vec<u8> {
    let mut url = source.trim_end_matches('/').as_bytes().to_vec();
    if path.is_empty() && !url.ends_with(b":") {
        return url;
    }
    // Of the root of all files no slash is left.
    let slashes: &[u8] = if url.ends_with(b":") { b"///" } else { b"/" };
    url.extend_from_slice(slashes);
    if is_directory(source) {
        url.extend(percent_encode(path, ESCAPED).flat_map(str::bytes));
    } else {
        url.extend_from_slice(path);
    }
    url
}

/// The path from a folder's URL to another, empty for its own; `None` when that is not below it.
pub fn below<'a>(url: &'a str, folder: &str) -> Option<Cow<'a, [u8]>> {
    let folder = folder.trim_end_matches('/');
    let rest = url.strip_prefix(folder)?;
    (rest.is_empty() || rest.starts_with('/')).then(|| path_in(folder, rest.trim_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_escaped_and_those_of_objects_are_not() {
        assert_eq!(of_directory(b"/a b/100%/\xc3\xa9\xff#?"), "file:///a%20b/100%25/%C3%A9%FF%23%3F");
        assert_eq!(join("file:///a%20b/", b"c d"), b"file:///a%20b/c%20d");
        assert_eq!(join("s3://b/", b"c d%"), b"s3://b/c d%");
        assert_eq!((join("s3://b", b""), join("file:///", b"")), (b"s3://b".to_vec(), b"file:///".to_vec()));
        assert_eq!(join("file:///", b"x"), b"file:///x");
    }

    #[test]
    fn what_is_below_is_told_by_whole_names() {
        let below = |url, folder| below(url, folder).map(|path| path.into_owned());
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
            let source = of_directory(folder.as_bytes());
            let named = unescaped(&source["file://".len()..]);
            proptest::prop_assert_eq!(named.as_ref(), folder.as_bytes());
            let url = String::from_utf8(join(&source, path)).unwrap();
            proptest::prop_assert!(url.is_ascii());
            let found = below(&url, &source).unwrap();
            proptest::prop_assert_eq!(found.as_ref(), path);
        }
    }
}
