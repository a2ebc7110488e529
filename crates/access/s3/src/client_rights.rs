//! What a client may do: all, or reads only, or only with the objects below a prefix. Knows no secret and no volume.

use http::Extensions;
use s3s::{S3Result, s3_error};
use std::sync::Arc;

/// The rights of the client that has sent a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClientRights {
    /// Requests that change something are refused.
    pub reads_only: bool,
    /// The only bucket that the client has; `None` for all.
    pub bucket: Option<String>,
    /// All keys of the client begin so.
    pub prefix: String,
}

impl ClientRights {
    /// The rights that go with a request. A request without any is refused: no way leads to a bucket without a check of the client.
    ///
    /// # Errors
    /// `AccessDenied`.
    pub fn of_request(extensions: &Extensions) -> S3Result<&ClientRights> {
        let rights: Option<&Arc<ClientRights>> = extensions.get();
        rights.map(|rights| &**rights).ok_or_else(|| s3_error!(AccessDenied, "Signature is required"))
    }

    /// Whether the client may know of a bucket.
    pub fn has_bucket(&self, bucket: &str) -> bool {
        self.bucket.as_ref().is_none_or(|only| only == bucket)
    }

    /// # Errors
    /// `AccessDenied` for another bucket than that of the client.
    pub fn check_bucket(&self, bucket: &str) -> S3Result<()> {
        if self.has_bucket(bucket) {
            return Ok(());
        }
        Err(s3_error!(AccessDenied, "the key of the client is for another bucket"))
    }

    /// # Errors
    /// `AccessDenied` for a key, or a prefix of a listing, that does not begin with that of the client.
    pub fn check_key(&self, bucket: &str, key: &str) -> S3Result<()> {
        self.check_bucket(bucket)?;
        if key.starts_with(&self.prefix) {
            return Ok(());
        }
        Err(s3_error!(AccessDenied, "the key of the client is for objects below '{}'", self.prefix))
    }

    /// # Errors
    /// `AccessDenied` for a client that may only read.
    pub fn check_change(&self, bucket: &str, key: &str) -> S3Result<()> {
        self.check_key(bucket, key)?;
        self.check_writes()
    }

    /// # Errors
    /// `AccessDenied` for a client that may only read.
    pub fn check_writes(&self) -> S3Result<()> {
        if self.reads_only {
            return Err(s3_error!(AccessDenied, "the key of the client may only read"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_have_limits() {
        let all = ClientRights::default();
        all.check_change("any", "key").unwrap();
        all.check_key("any", "").unwrap();
        let train = ClientRights { reads_only: true, bucket: Some("data".into()), prefix: "train/".into() };
        train.check_key("data", "train/x").unwrap();
        train.check_key("data", "train/").unwrap();
        train.check_change("data", "train/x").unwrap_err();
        for (bucket, key) in
            [("data", ""), ("data", "train"), ("data", "test/x"), ("data", "a/train/x"), ("other", "train/x")]
        {
            train.check_key(bucket, key).unwrap_err();
        }
        ClientRights::of_request(&Extensions::new()).unwrap_err();
    }
}
