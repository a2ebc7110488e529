//! The paths that the keys of objects lead to, and the prefixes that keys have in common. Knows no request and no volume.

use spurline_fs::{NAME_MAX, UNPUBLISHED_PREFIX};
use std::time::{Duration, SystemTime};

/// An upload whose file has not changed for this long has ended.
const UPLOAD_SILENCE: Duration = Duration::from_secs(24 * 3600);

/// The place of an object in a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyPath<'a> {
    File(&'a str),
    /// A folder: the key ends with a slash.
    Folder(&'a str),
    /// A key that no path of the source has: with an empty name, `.`, `..`, a name of an unfinished upload.
    Nowhere,
}

impl<'a> KeyPath<'a> {
    /// The path of the file or folder; empty for a key without one.
    pub fn path(self) -> &'a str {
        match self {
            KeyPath::File(path) | KeyPath::Folder(path) => path,
            KeyPath::Nowhere => "",
        }
    }

    /// The place of the object `key`.
    pub fn of_key(key: &'a str) -> Self {
        let folder = key.strip_suffix('/');
        let path = folder.unwrap_or(key);
        if path.is_empty() || path.contains('\0') || !path.split('/').all(is_name) {
            return KeyPath::Nowhere;
        }
        match folder {
            Some(path) => KeyPath::Folder(path),
            None => KeyPath::File(path),
        }
    }
}

fn is_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= NAME_MAX && !name.starts_with(UNPUBLISHED_PREFIX)
}

/// Whether a file is that of an upload whose endpoint has ended: uploads under way write theirs.
pub(crate) fn is_left_behind(name: &str, modified: SystemTime) -> bool {
    name.starts_with(UNPUBLISHED_PREFIX) && modified.elapsed().is_ok_and(|age| age > UPLOAD_SILENCE)
}

/// Whether a listing shows this name.
pub(crate) fn is_listed(name: &[u8]) -> bool {
    !name.starts_with(UNPUBLISHED_PREFIX.as_bytes())
}

/// The part of a key up to the first delimiter behind the prefix. A folder has it only if the delimiter is in the folder's key.
pub(crate) fn common_prefix(key: &str, prefix: &str, delimiter: &str) -> Option<String> {
    if delimiter.is_empty() {
        return None;
    }
    let rest = key.strip_prefix(prefix)?;
    let at = rest.find(delimiter)?;
    Some(key[..prefix.len() + at + delimiter.len()].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lead_to_paths_or_nowhere() {
        assert_eq!(KeyPath::of_key("a/b"), KeyPath::File("a/b"));
        assert_eq!(KeyPath::of_key("a/b/"), KeyPath::Folder("a/b"));
        let long = "n".repeat(NAME_MAX + 1);
        let nowhere =
            ["", "/", "/a", "a//b", "a//", "a/./b", "..", "../a", "a/..", "a\0b", ".spurline-upload-1", &long];
        for key in nowhere {
            assert_eq!(KeyPath::of_key(key), KeyPath::Nowhere, "{key:?}");
        }
    }
}
