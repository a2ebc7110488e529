//! The keys that clients sign with, and their rights: a file of lines, read again when it changes. Knows no signature.

use crate::client_rights::ClientRights;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{Credentials, S3Auth, SecretKey};
use s3s::{S3Result, s3_error};
use spurline_trust::WatchedFiles;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

/// The largest file of keys, in bytes.
const KEY_FILE_MAX: u64 = 1 << 20;
/// The shortest secret: 96 bits in base64.
const SECRET_LENGTH_MIN: usize = 16;
const HOW_TO_MAKE_KEYS: &str = "write a line ACCESS_KEY:SECRET[:ro][:PREFIX] for each client: \
     (umask 077; echo \"client1:$(openssl rand -hex 20)\" > FILE)";
/// The word of a line whose key may only read.
const READS_ONLY: &str = "ro";

/// An access key of a client.
struct AccessKey {
    secret: SecretKey,
    rights: Arc<ClientRights>,
}

/// The access keys of an endpoint, with the secrets and rights; clones share them.
#[derive(Clone)]
pub struct AccessKeys(Arc<WatchedFiles<HashMap<String, AccessKey>>>);

impl AccessKeys {
    /// Reads the file; each change is read too.
    ///
    /// # Errors
    /// `NotFound` or `PermissionDenied` for a file that can't be read, `Invalid` for a file that other users can read, or a line
    /// that is no key.
    pub fn read_file(file: &Path) -> Result<Self> {
        let shown = file.to_owned();
        let files = WatchedFiles::new(vec![file.to_owned()], Box::new(move || read_keys(&shown)))?;
        Ok(AccessKeys(Arc::new(files)))
    }

    /// The rights of a client whose signature was checked.
    ///
    /// # Errors
    /// `AccessDenied` for a request without a signature, or with a key that is no longer in the file.
    pub(crate) fn rights_of(&self, credentials: Option<&Credentials>) -> S3Result<Arc<ClientRights>> {
        let keys = self.0.get();
        let known = credentials.and_then(|credentials| keys.get(&credentials.access_key));
        known.map(|known| Arc::clone(&known.rights)).ok_or_else(|| s3_error!(AccessDenied, "Signature is required"))
    }
}

#[async_trait::async_trait]
impl S3Auth for AccessKeys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let keys = self.0.get();
        keys.get(access_key)
            .map(|known| known.secret.clone())
            .ok_or_else(|| s3_error!(InvalidAccessKeyId, "the endpoint has no such access key"))
    }
}

#[async_trait::async_trait]
impl S3Access for AccessKeys {
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        let rights = self.rights_of(context.credentials())?;
        context.extensions_mut().insert(rights);
        Ok(())
    }
}

fn read_keys(file: &Path) -> Result<HashMap<String, AccessKey>> {
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
fn parse_keys(text: &str) -> std::result::Result<HashMap<String, AccessKey>, String> {
    let mut keys = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let Some((access_key, rest)) = line.split_once(':') else {
            return Err(format!("line {number} has no colon; {HOW_TO_MAKE_KEYS}"));
        };
        let mut parts = rest.splitn(2, ':');
        let secret = parts.next().unwrap_or_default();
        let limits = parts.next();
        if access_key.is_empty() || access_key.contains(|c: char| c.is_whitespace() || matches!(c, '/' | ',' | '=')) {
            return Err(format!("the access key of line {number} is empty, or has a blank, a slash, a comma or '='"));
        }
        if secret.len() < SECRET_LENGTH_MIN || secret.contains(char::is_whitespace) {
            return Err(format!(
                "the secret of line {number} has {} characters; {SECRET_LENGTH_MIN} without blanks are the least; {HOW_TO_MAKE_KEYS}",
                secret.len()
            ));
        }
        let rights = parse_rights(limits).map_err(|why| format!("line {number}: {why}; {HOW_TO_MAKE_KEYS}"))?;
        let key = AccessKey { secret: SecretKey::from(secret), rights: Arc::new(rights) };
        if keys.insert(access_key.to_owned(), key).is_some() {
            return Err(format!("line {number} has the access key of an earlier line"));
        }
    }
    if keys.is_empty() {
        return Err(format!("the file has no key; {HOW_TO_MAKE_KEYS}"));
    }
    Ok(keys)
}

/// The rights behind a secret: `ro`, a prefix of keys, or both. A prefix of the form `s3://BUCKET/PREFIX` is for one bucket.
fn parse_rights(limits: Option<&str>) -> std::result::Result<ClientRights, String> {
    let Some(limits) = limits else { return Ok(ClientRights::default()) };
    let (reads_only, prefix) = match limits.split_once(':') {
        Some((READS_ONLY, prefix)) => (true, Some(prefix)),
        None if limits == READS_ONLY => (true, None),
        _ => (false, Some(limits)),
    };
    let mut rights = ClientRights { reads_only, ..ClientRights::default() };
    let Some(prefix) = prefix else { return Ok(rights) };
    let mut keys = prefix;
    if let Some(place) = prefix.strip_prefix("s3://") {
        let (bucket, below) = place.split_once('/').unwrap_or((place, ""));
        if bucket.is_empty() {
            return Err(format!("'{prefix}' names no bucket"));
        }
        rights.bucket = Some(bucket.to_owned());
        keys = below;
    } else if prefix.is_empty() {
        return Err("the prefix after the last colon is empty".to_owned());
    }
    if keys.starts_with('/') {
        return Err(format!("the prefix '{keys}' begins with a slash, and no key does"));
    }
    rights.prefix = keys.to_owned();
    Ok(rights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_keys_or_named() {
        let keys = parse_keys("# clients\n\na:0123456789abcdef\nb:fedcba9876543210/+\n").unwrap();
        assert_eq!(keys.len(), 2);
        assert_eq!(keys["b"].secret.expose(), "fedcba9876543210/+");
        for (text, why) in [
            ("", "no key"),
            ("a", "line 1 has no colon"),
            ("\n:0123456789abcdef", "line 2"),
            ("a:short", "5 characters"),
            ("a:0123456789abcdef\na:0123456789abcdef", "earlier line"),
            ("a:0123456789abcdef:/+", "begins with a slash"),
            ("a:0123456789abcdef:", "is empty"),
            ("a:0123456789abcdef:ro:", "is empty"),
            ("a:0123456789abcdef:s3:///x", "names no bucket"),
            ("a:0123456789abcdef:s3://data//x", "begins with a slash"),
        ] {
            let error = parse_keys(text).err().unwrap();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn keys_have_all_rights_or_limits() {
        for (limits, reads_only, bucket, prefix) in [
            ("", false, None, ""),
            (":ro", true, None, ""),
            (":train/", false, None, "train/"),
            (":ro:train/a:b", true, None, "train/a:b"),
            (":s3://data", false, Some("data"), ""),
            (":ro:s3://data/train/", true, Some("data"), "train/"),
        ] {
            let keys = parse_keys(&format!("a:0123456789abcdef{limits}")).unwrap();
            let bucket = bucket.map(str::to_owned);
            let expected = ClientRights { reads_only, bucket, prefix: prefix.to_owned() };
            assert_eq!(*keys["a"].rights, expected, "{limits}");
            assert_eq!(keys["a"].secret.expose(), "0123456789abcdef");
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
