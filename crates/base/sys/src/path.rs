//! Paths inside a source: bytes, parts separated by `/`, empty for the root.

/// The path of `name` in `folder`.
pub fn join_path(folder: &[u8], name: &[u8]) -> Vec<u8> {
    if folder.is_empty() { name.to_vec() } else { [folder, name].join(&b'/') }
}

/// A path's folder and name.
pub fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (b"", path),
    }
}

/// A path for messages.
pub fn show_path(path: &[u8]) -> String {
    if path.is_empty() { "/".into() } else { String::from_utf8_lossy(path).into_owned() }
}

#[cfg(test)]
mod tests {
    use super::join_path;

    #[test]
    fn names_in_the_root_have_no_slash() {
        assert_eq!((join_path(b"", b"n"), join_path(b"a/b", b"n")), (b"n".to_vec(), b"a/b/n".to_vec()));
    }
}
