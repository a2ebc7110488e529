//! Parsing and normalising of source URLs. It deliberately accesses no origin, not even to check that it exists.

use spurline_types::{Error, ErrorKind, Result, url};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// The kind of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceScheme {
    /// `s3://bucket[/prefix]`
    S3,
    /// `gs://bucket[/prefix]`
    Gcs,
    /// `az://container[/prefix]`
    Azure,
    /// `file:///dir` or a path
    Directory,
}

impl SourceScheme {
    /// The start of a normalised URL.
    pub fn url_start(self) -> &'static str {
        match self {
            SourceScheme::S3 => "s3://",
            SourceScheme::Gcs => "gs://",
            SourceScheme::Azure => "az://",
            SourceScheme::Directory => "file://",
        }
    }
}

/// A source URL, parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceLocation {
    scheme: SourceScheme,
    url: String,
    bucket: String,
    prefix: String,
    from_directory: PathBuf,
}

/// The known schemes, for messages.
const KNOWN: &str = "s3://bucket[/prefix], gs://bucket[/prefix], az://container[/prefix], file:///dir or a path";

fn invalid_source(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl SourceLocation {
    /// Parses a source as people write it.
    ///
    /// # Errors
    /// `Invalid` for an unknown scheme, a missing bucket, or credentials in the URL.
    pub fn parse(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(invalid_source(format!("the source is empty; give {KNOWN}")));
        }
        let Some((scheme, rest)) = text.split_once("://").filter(|(s, _)| is_scheme(s)) else {
            return Self::directory(Path::new(text));
        };
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "s3" | "s3a" => SourceScheme::S3,
            "gs" | "gcs" => SourceScheme::Gcs,
            "az" | "abfs" | "azure" => SourceScheme::Azure,
            "file" => {
                let path = rest.strip_prefix("localhost").unwrap_or(rest);
                if !path.starts_with('/') {
                    return Err(invalid_source(format!(
                        "'{text}' has a host name after file://, and file:// reaches only this machine's files; \
                         write file:///dir"
                    )));
                }
                return Self::directory(Path::new(&OsString::from_vec(url::percent_decoded(path).into_owned())));
            }
            other => {
                // The rest of the URL is not repeated: it may contain a password.
                return Err(invalid_source(format!("unknown scheme '{other}://' in the source; known are {KNOWN}")));
            }
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains('@') || bucket.contains(':') {
            return Err(invalid_source(
                "the source URL holds a user, password or port; credentials and endpoints are given by \
                 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, never in the URL"
                    .into(),
            ));
        }
        if bucket.is_empty() {
            return Err(invalid_source(format!("'{text}' names no bucket; known are {KNOWN}")));
        }
        let prefix = prefix.trim_matches('/');
        if prefix.split('/').any(|part| matches!(part, "." | "..") || (part.is_empty() && !prefix.is_empty())) {
            return Err(invalid_source(format!("the prefix '{prefix}' has an empty, '.' or '..' part; remove it")));
        }
        let head = scheme.url_start();
        let slash = if prefix.is_empty() { "" } else { "/" };
        Ok(SourceLocation {
            scheme,
            url: format!("{head}{bucket}{slash}{prefix}"),
            bucket: bucket.into(),
            prefix: prefix.into(),
            from_directory: PathBuf::new(),
        })
    }

    /// A source of a directory; a relative path starts at the current directory.
    ///
    /// # Errors
    /// `Invalid` for a path with a `..` in it, since its target depends on symbolic links, and when the current
    /// directory is unknown.
    pub fn directory(path: &Path) -> Result<Self> {
        let absolute = std::path::absolute(path).map_err(|e| {
            invalid_source(format!("'{}' can't be made absolute: {e}; give an absolute path", path.display()))
        })?;
        if absolute.components().any(|part| part == Component::ParentDir) {
            return Err(invalid_source(format!("the directory '{}' has a '..' part; remove it", path.display())));
        }
        let mut bytes = absolute.as_os_str().as_bytes().to_vec();
        while bytes.len() > 1 && bytes.last() == Some(&b'/') {
            bytes.pop();
        }
        let url = url::directory_url(&bytes);
        let directory = PathBuf::from(OsString::from_vec(bytes));
        Ok(SourceLocation {
            scheme: SourceScheme::Directory,
            url,
            bucket: String::new(),
            prefix: String::new(),
            from_directory: directory,
        })
    }

    /// The kind of the source.
    pub fn scheme(&self) -> SourceScheme {
        self.scheme
    }
    /// The normalised URL.
    pub fn url(&self) -> &str {
        &self.url
    }
    /// The bucket or container; empty for a directory.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }
    /// The prefix without slashes at its ends; empty for none.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
    /// The directory; empty for an object store.
    pub fn path(&self) -> &Path {
        &self.from_directory
    }
}

/// The normalised form of a source URL. An invalid one is returned unchanged; opening it fails.
pub fn normal_url(url: &str) -> String {
    SourceLocation::parse(url).map_or_else(|_| url.to_owned(), |source| source.url)
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalises() {
        for (text, url) in [
            ("s3://b", "s3://b"),
            ("S3://b/", "s3://b"),
            ("s3a://b/p/q/", "s3://b/p/q"),
            ("gcs://b/p", "gs://b/p"),
            ("az://c", "az://c"),
            ("/data/x/", "file:///data/x"),
            ("file:///data/x%20y", "file:///data/x%20y"),
            ("file://localhost/d", "file:///d"),
            ("file:///data//x/%2e/./y", "file:///data/x/y"),
            ("/data/a b%", "file:///data/a%20b%25"),
            ("/", "file:///"),
        ] {
            let source = SourceLocation::parse(text).unwrap();
            assert_eq!(source.url(), url, "{text}");
            assert_eq!(SourceLocation::parse(url).unwrap(), source, "{text}");
        }
        assert_eq!(SourceLocation::parse("file:///data/x%20y").unwrap().path(), Path::new("/data/x y"));
    }

    #[test]
    fn refuses_with_the_reason() {
        for (text, part) in [
            ("", "empty"),
            ("foo://x", "unknown scheme 'foo://'"),
            ("s3://", "names no bucket"),
            ("s3:///p", "names no bucket"),
            ("s3://key:hush@b/p", "never in the URL"),
            ("s3://b/a//b", "empty, '.' or '..'"),
            ("s3://b/../c", "empty, '.' or '..'"),
            ("file://host/dir", "host name"),
            ("file:///srv/data/../../etc", "'..'"),
            ("file:///srv/data/%2e%2E/%2e./etc", "'..'"),
            ("file:///srv/data%2F..", "'..'"),
            ("/srv/..", "'..'"),
        ] {
            let error = SourceLocation::parse(text).unwrap_err();
            assert!(error.message().contains(part), "{text}: {error}");
            assert!(!error.message().contains("hush"), "{error}");
        }
        let known = SourceLocation::parse("foo://user:hush@x").unwrap_err();
        assert!(known.message().contains("s3://bucket") && !known.message().contains("hush"));
    }
}
