//! The name of an under-store: parsing and normalising of source URLs.
//! It deliberately asks nothing of the place it names, not even whether it is there.

use spurline_types::{Error, ErrorKind, Result, url};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// What kind of place a source is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// `s3://bucket[/prefix]`
    S3,
    /// `gs://bucket[/prefix]`
    Gcs,
    /// `az://container[/prefix]`
    Azure,
    /// `file:///dir` or a path
    Directory,
}

/// A source URL, parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    scheme: Scheme,
    url: String,
    bucket: String,
    prefix: String,
    directory: PathBuf,
}

/// The schemes there are, for messages.
const KNOWN: &str = "s3://bucket[/prefix], gs://bucket[/prefix], az://container[/prefix], file:///dir or a path";

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl Source {
    /// Parses a source as people write it.
    ///
    /// # Errors
    /// `Invalid` for an unknown scheme, a missing bucket, or credentials in the URL.
    pub fn parse(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(invalid(format!("the source is empty; give {KNOWN}")));
        }
        let Some((scheme, rest)) = text.split_once("://").filter(|(s, _)| is_scheme(s)) else {
            return Self::directory(Path::new(text));
        };
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "s3" | "s3a" => Scheme::S3,
            "gs" | "gcs" => Scheme::Gcs,
            "az" | "abfs" | "azure" => Scheme::Azure,
            "file" => {
                let path = rest.strip_prefix("localhost").unwrap_or(rest);
                if !path.starts_with('/') {
                    return Err(invalid(format!(
                        "'{text}' has a host name after file://, and only this machine's files can be reached that \
                         way; write file:///dir"
                    )));
                }
                return Self::directory(Path::new(&OsString::from_vec(url::unescaped(path).into_owned())));
            }
            other => {
                // What follows the scheme is not repeated: it may hold a password.
                return Err(invalid(format!("unknown scheme '{other}://' in the source; known are {KNOWN}")));
            }
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains('@') || bucket.contains(':') {
            return Err(invalid(
                "the source URL holds a user, password or port; credentials and endpoints are given by \
                 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, never in the URL"
                    .into(),
            ));
        }
        if bucket.is_empty() {
            return Err(invalid(format!("'{text}' names no bucket; known are {KNOWN}")));
        }
        let prefix = prefix.trim_matches('/');
        if prefix.split('/').any(|part| matches!(part, "." | "..") || (part.is_empty() && !prefix.is_empty())) {
            return Err(invalid(format!("the prefix '{prefix}' has an empty, '.' or '..' part; leave it out")));
        }
        let head = match scheme {
            Scheme::S3 => "s3",
            Scheme::Gcs => "gs",
            Scheme::Azure | Scheme::Directory => "az",
        };
        let slash = if prefix.is_empty() { "" } else { "/" };
        Ok(Source {
            scheme,
            url: format!("{head}://{bucket}{slash}{prefix}"),
            bucket: bucket.into(),
            prefix: prefix.into(),
            directory: PathBuf::new(),
        })
    }

    /// Names a directory; a relative path is taken from the current directory.
    ///
    /// # Errors
    /// `Invalid` for a path with a `..` in it, whose place its words don't tell where links are on the way, and when the
    /// current directory can't be told.
    pub fn directory(path: &Path) -> Result<Self> {
        let absolute = std::path::absolute(path)
            .map_err(|e| invalid(format!("'{}' can't be made absolute: {e}; give an absolute path", path.display())))?;
        if absolute.components().any(|part| part == Component::ParentDir) {
            return Err(invalid(format!("the directory '{}' has a '..' part; write it without", path.display())));
        }
        let mut bytes = absolute.as_os_str().as_bytes().to_vec();
        while bytes.len() > 1 && bytes.last() == Some(&b'/') {
            bytes.pop();
        }
        let url = url::of_directory(&bytes);
        let directory = PathBuf::from(OsString::from_vec(bytes));
        Ok(Source { scheme: Scheme::Directory, url, bucket: String::new(), prefix: String::new(), directory })
    }

    /// What kind of place it is.
    pub fn scheme(&self) -> Scheme {
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
        &self.directory
    }
}

/// The normalised form of a source URL; what is none is given as it is, and can't be opened either.
pub fn normal(url: &str) -> String {
    Source::parse(url).map_or_else(|_| url.to_owned(), |source| source.url)
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
            let source = Source::parse(text).unwrap();
            assert_eq!(source.url(), url, "{text}");
            assert_eq!(Source::parse(url).unwrap(), source, "{text}");
        }
        assert_eq!(Source::parse("file:///data/x%20y").unwrap().path(), Path::new("/data/x y"));
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
            let error = Source::parse(text).unwrap_err();
            assert!(error.message().contains(part), "{text}: {error}");
            assert!(!error.message().contains("hush"), "{error}");
        }
        let known = Source::parse("foo://user:hush@x").unwrap_err();
        assert!(known.message().contains("s3://bucket") && !known.message().contains("hush"));
    }
}
