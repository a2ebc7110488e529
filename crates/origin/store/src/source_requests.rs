//! Single requests to the bucket of a source, for the service of a node: keys below the source, an attempt each, a time limit.
//! Repeats nothing, and knows neither files nor folders.

use crate::backend::{ObjectBackend, RequestFailure, RetryHint};
use crate::config::OriginOptions;
use crate::open_bucket::open_bucket;
use crate::own_objects::HIDDEN_NAME;
use crate::shared_buckets::SharedBucket;
use crate::source::{SourceLocation, SourceScheme};
use crate::write_backend::{AnswerProgress, ObjectWriteBackend};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Both sides of a bucket, for a request.
#[derive(Clone, Copy)]
pub struct BucketSides<'a> {
    /// The reading side.
    pub reads: &'a dyn ObjectBackend,
    /// The changing side.
    pub writes: &'a dyn ObjectWriteBackend,
}

/// The requests below a source.
pub struct SourceRequests {
    bucket: Arc<SharedBucket>,
    url: String,
    /// The source's prefix with a trailing slash, or empty.
    root: String,
}

impl SourceRequests {
    /// The requests below `url`, over the connections that all origins with these options share.
    ///
    /// # Errors
    /// `Unsupported` for a directory, `ReadOnly` for a store that this program can't change, `Invalid` for an impossible
    /// configuration.
    pub fn open(url: &str, config: &OriginOptions, stats: Arc<Stats>) -> Result<SourceRequests> {
        let source = SourceLocation::parse(url)?;
        if source.scheme() == SourceScheme::Directory {
            let why = format!("{} is a directory, and no store takes requests for it", source.url());
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let bucket = open_bucket(&source, config, stats)?;
        if bucket.backend.writes().is_none() {
            let why = format!("{} can't be changed: only buckets of S3 can; mount it without --rw", source.url());
            return Err(Error::new(ErrorKind::ReadOnly, why));
        }
        let url = source.url().to_owned();
        let root = if source.prefix().is_empty() { String::new() } else { format!("{}/", source.prefix()) };
        Ok(SourceRequests { bucket, url, root })
    }

    /// The server and the bucket, for messages.
    pub fn describe(&self) -> String {
        self.bucket.backend.describe()
    }

    /// The path of an object that programs read; `None` for hidden objects and markers of folders.
    pub fn readable_path<'a>(&self, key: &'a str) -> Option<&'a str> {
        let path = key.strip_prefix(&self.root)?;
        (!path.starts_with(HIDDEN_NAME) && !path.is_empty() && !path.ends_with('/')).then_some(path)
    }

    /// Refuses a key, or the start of keys, that is not below the source.
    ///
    /// # Errors
    /// `PermissionDenied`.
    pub fn check_key(&self, key: &str) -> Result<()> {
        // A URL with these parts would lead to another key.
        let leads_elsewhere = key.split('/').any(|part| matches!(part, "." | ".."));
        if key.starts_with(&self.root) && !leads_elsewhere {
            return Ok(());
        }
        let why =
            format!("the key '{key}' is not below {}, which is all that this node changes for the mount", self.url);
        Err(Error::new(ErrorKind::PermissionDenied, why))
    }

    /// Sends a request, on this thread, and waits this long for the answer; longer as long as the answer makes `progress`.
    ///
    /// # Errors
    /// That of the store; a transient one without an answer.
    pub fn send<T>(
        &self,
        time: Duration,
        progress: &AnswerProgress,
        request: impl AsyncFnOnce(BucketSides<'_>) -> Result<T, RequestFailure>,
    ) -> Result<T, RequestFailure> {
        let deadline = Instant::now() + time;
        let patience = self.bucket.config.timeout;
        let answer = self.bucket.run_transfer(
            async |reads: &dyn ObjectBackend| {
                let Some(writes) = reads.writes() else { return Err(self.no_answer(ErrorKind::Unavailable)) };
                let answer = progress.await_answer(deadline, patience, request(BucketSides { reads, writes })).await;
                answer.unwrap_or_else(|| Err(self.no_answer(ErrorKind::Timeout)))
            },
            is_answered,
        );
        let answer = answer.unwrap_or_else(|| Err(self.no_answer(ErrorKind::Unavailable)));
        if let Err(failure) = &answer
            && failure.advice == RetryHint::Never
        {
            self.bucket.note_failure(&self.root, &failure.error);
        }
        answer
    }

    fn no_answer(&self, kind: ErrorKind) -> RequestFailure {
        RequestFailure::transient(kind, format!("{} gave no answer in time", self.describe()))
    }
}

/// Whether the store has answered, so that the connection can be used again.
fn is_answered<T>(answer: &Result<T, RequestFailure>) -> bool {
    answer.as_ref().err().is_none_or(|failure| failure.advice == RetryHint::Never)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AwsCredentials;

    fn open(url: &str) -> Result<SourceRequests> {
        let credentials = AwsCredentials {
            access_key_id: "key".to_owned(),
            secret_access_key: "secret".to_owned(),
            session_token: None,
        };
        let config = OriginOptions { credentials: Some(credentials), ..OriginOptions::default() };
        SourceRequests::open(url, &config, Arc::default())
    }

    #[test]
    fn only_keys_below_the_source_are_accepted() {
        let folder = open("s3://bucket/a/b").unwrap();
        for key in ["a/b/", "a/b/c", "a/b/c/d", "a/b/.spurline-record"] {
            folder.check_key(key).unwrap();
        }
        for key in ["", "a/b", "a/bc", "a/c", "b", "a/b/../c", "a/b/./c", ".."] {
            let refused = folder.check_key(key).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
        }
        for key in ["a/b/", "a/b/c/", "a/b/.spurline-record"] {
            assert_eq!(folder.readable_path(key), None);
        }
        assert_eq!(folder.readable_path("a/b/c/d"), Some("c/d"));
        let bucket = open("s3://bucket").unwrap();
        assert!(bucket.check_key("").is_ok() && bucket.check_key("any/key").is_ok());
        assert!(bucket.check_key("any/../key").is_err());
        assert_eq!(open("/a/directory").err().unwrap().kind(), ErrorKind::Unsupported);
    }
}
