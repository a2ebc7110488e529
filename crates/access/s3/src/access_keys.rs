//! The keys that clients sign with: a file of lines, read again when it changes. Knows no signature.

use s3s::auth::{S3Auth, SecretKey};
use s3s::{S3Result, s3_error};
use spurline_trust::WatchedFiles;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The largest file of keys, in bytes.
const KEY_FILE_MAX: u64 = 1 << 20;
/// The shortest secret: 96 bits in base64.
const SECRET_LENGTH_MIN: usize = 16;
const HOW_TO_MAKE_KEYS: &str =
    "write a line ACCESS_KEY:SECRET for each client: (umask 077; echo \"client1:$(openssl rand -hex 20)\" > FILE)";

/// The access keys of an endpoint, with the secrets.
pub struct AccessKeys(WatchedFiles<HashMap<String, SecretKey>>);

impl AccessKeys {
    /// Reads the file; each change is read too.
    ///
    /// # Errors
    /// `NotFound` or `PermissionDenied` for a file that can't be read, `Invalid` for a file that other users can read, or a line
    /// that is no key.
    pub fn read_file(file: &Path) -> Result<Self> {
        let shown = file.to_owned();
        Ok(AccessKeys(WatchedFiles::new(vec![file.to_owned()], Box::new(move || read_keys(&shown)))?))
    }
}

#[async_trait::async_trait]
impl S3Auth for AccessKeys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let keys = self.0.get();
        keys.get(access_key)
            .cloned()
            .ok_or_else(|| s3_error!(InvalidAccessKeyId, "the endpoint has no such access key"))
    }
}

fn read_keys(file: &Path) -> Result<HashMap<String, SecretKey>> {
    let shown = format!("--s3-keys {}", file.display());
    let failed = |error: &std::io::Error| Error::io(format_args!("{shown}; {HOW_TO_MAKE_KEYS}"), error);
    let mut opened = std::fs::File::open(file).map_err(|error| failed(&error))?;
    let mode = opened.metadata().map_err(|error| failed(&error))?.permissions().mode();
    if mode & 0o077 != 0 {
        let why = format!(
            "{shown}: other users of this host may read or change the secrets (mode {:o}); chmod 600 {}",
            mode & 0o777,
            file.display()
        );
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let mut text = String::new();
    let read = (&mut opened).take(KEY_FILE_MAX).read_to_string(&mut text);
    read.map_err(|error| failed(&error))?;
    parse_keys(&text).map_err(|why| Error::new(ErrorKind::Invalid, format!("{shown}: {why}")))
}

/// The keys of a text; empty lines, and lines that begin with a number sign, have none.
fn parse_keys(text: &str) -> std::result::Result<HashMap<String, SecretKey>, String> {
    let mut keys = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let Some((access_key, secret)) = line.split_once(':') else {
            return Err(format!("line {number} has no colon; {HOW_TO_MAKE_KEYS}"));
        };
        if access_key.is_empty() || access_key.contains(|c: char| c.is_whitespace() || matches!(c, '/' | ',' | '=')) {
            return Err(format!("the access key of line {number} is empty, or has a blank, a slash, a comma or '='"));
        }
        if secret.len() < SECRET_LENGTH_MIN || secret.contains(char::is_whitespace) {
            return Err(format!(
                "the secret of line {number} has {} characters; {SECRET_LENGTH_MIN} without blanks are the least; {HOW_TO_MAKE_KEYS}",
                secret.len()
            ));
        }
        if keys.insert(access_key.to_owned(), SecretKey::from(secret)).is_some() {
            return Err(format!("line {number} has the access key of an earlier line"));
        }
    }
    if keys.is_empty() {
        return Err(format!("the file has no key; {HOW_TO_MAKE_KEYS}"));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_keys_or_named() {
        let keys = parse_keys("# clients\n\na:0123456789abcdef\nb:fedcba9876543210:/+\n").unwrap();
        assert_eq!(keys.len(), 2);
        assert_eq!(keys["b"].expose(), "fedcba9876543210:/+");
        for (text, why) in [
            ("", "no key"),
            ("a", "line 1 has no colon"),
            ("\n:0123456789abcdef", "line 2"),
            ("a:short", "5 characters"),
            ("a:0123456789abcdef\na:0123456789abcdef", "earlier line"),
        ] {
            let error = parse_keys(text).err().unwrap();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        std::fs::write(&file, "a:0123456789abcdef").unwrap();
        for (mode, accepted) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_keys(&file).is_ok(), accepted, "{mode:o}");
        }
        let error = AccessKeys::read_file(&dir.path().join("missing")).err().unwrap();
        assert!(error.message().contains("openssl rand"), "{error}");
    }
}
