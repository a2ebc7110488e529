//! Paths inside a source: bytes, parts separated by `/`, empty for the root.

/// The path of `name` in `folder`.
pub fn join_path(folder: &[u8], name: &[u8]) -> Vec<u8> {
    if folder.is_empty() { name.to_vec() } else { [folder, name].join(&b'/') }
}

#[cfg(test)]
mod tests {
    use super::join_path;

    #[test]
    fn names_in_the_root_have_no_slash() {
        assert_eq!((join_path(b"", b"n"), join_path(b"a/b", b"n")), (b"n".to_vec(), b"a/b/n".to_vec()));
    }
}
