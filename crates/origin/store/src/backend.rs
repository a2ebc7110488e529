//! The interface to one object store and bucket: single attempts, before retries, deadlines and the meaning of names.
//! It deliberately knows no folder and no file: keys, prefixes, versions, bytes.

use crate::write_backend::ObjectWriteBackend;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use spurline_types::{Error, ErrorKind};
use std::ops::Range;
use std::time::{Duration, SystemTime};

/// One object, as a listing or a head describes it.
#[derive(Debug, Clone)]
pub struct RawObject {
    /// The key.
    pub key: String,
    /// Length in bytes.
    pub size: u64,
    /// Whole seconds: some answers have no finer ones, and an object must look the same in all of them.
    pub mtime: SystemTime,
    /// As the store returned it; `None` when the answer has none.
    pub etag: Option<String>,
}

/// A page of a listing.
#[derive(Debug, Default)]
pub struct RawPage {
    /// In the order of their keys.
    pub objects: Vec<RawObject>,
    /// Common prefixes, each with its trailing delimiter.
    pub prefixes: Vec<String>,
    /// The token of the next page.
    pub next: Option<String>,
}

/// The start of the answer to a read.
pub struct RawBody {
    /// As the store returned it.
    pub etag: Option<String>,
    /// Whole seconds.
    pub mtime: Option<SystemTime>,
    /// Length of the whole object, where the answer states it.
    pub total: Option<u64>,
    /// The bytes of the object in the answer, where it states them; all of them in an answer without ranges.
    pub range: Option<Range<u64>>,
    /// It is an answer to a request for a range.
    pub partial: bool,
    /// The bytes.
    pub stream: BoxStream<'static, Result<Bytes, RequestFailure>>,
}

/// The failure of one attempt: the error to report, and whether another attempt may help.
#[derive(Debug, Clone)]
pub struct RequestFailure {
    /// The error to report if no further attempt is made.
    pub error: Error,
    /// Whether another attempt may help.
    pub advice: RetryHint,
}

/// Whether, and when, another attempt may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryHint {
    /// Another attempt fails likewise.
    Never,
    /// After the usual pause.
    AfterPause,
    /// Once the server listens again; a restart takes seconds.
    AfterRestart,
    /// At once, with other parameters: the bucket's region has changed.
    AtOnce,
    /// After the store has had time: it returned SlowDown, with this pause where it stated one.
    SlowDown(Option<Duration>),
}

impl RawPage {
    /// Whether it has no name.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.prefixes.is_empty()
    }

    /// All keys and prefixes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.objects.iter().map(|object| object.key.as_str()).chain(self.prefixes.iter().map(String::as_str))
    }
}

impl RequestFailure {
    /// Another attempt fails likewise.
    pub fn fatal(kind: ErrorKind, message: String) -> Self {
        RequestFailure { error: Error::new(kind, message), advice: RetryHint::Never }
    }
    /// Another attempt may succeed.
    pub fn transient(kind: ErrorKind, message: String) -> Self {
        RequestFailure { error: Error::new(kind, message), advice: RetryHint::AfterPause }
    }

    /// The answer of `place` does not identify the object: a login page, or a notice that a site is blocked.
    pub fn unidentified_answer(place: &str) -> Self {
        let message = format!(
            "the answer of {place} to a read does not identify the object: it lacks the ETag (Last-Modified, where the \
             object has no ETag), the range or the total length; a proxy or gateway probably answered instead: check \
             the endpoint (AWS_ENDPOINT_URL) and the proxies before it"
        );
        Self::transient(ErrorKind::Unavailable, message)
    }

    /// The answer of `place` is of the right version, but is not the `stored` bytes.
    pub fn unpacked_answer(place: &str, stored: u64, sent: Option<u64>) -> Self {
        let sent = sent.map_or_else(|| "an unknown number of".to_owned(), |sent| sent.to_string());
        let message = format!(
            "{place} answered a read with {sent} bytes of the same version instead of the {stored} that are stored: the \
             store, or a proxy before it, unpacks objects with a Content-Encoding (gzip), although the request accepts \
             them packed; upload the object without Content-Encoding, or with Cache-Control: no-transform"
        );
        Self::fatal(ErrorKind::Unsupported, message)
    }
}

/// The failure of a listing of a bucket that was there before: its names are unavailable, and none is deleted.
pub fn bucket_unavailable(error: Error) -> Error {
    if error.kind() == ErrorKind::NotFound { Error::new(ErrorKind::Unavailable, error.message()) } else { error }
}

/// One object store and bucket, one attempt at a time. Dropping a future or a stream cancels its request.
pub trait ObjectBackend: Send + Sync {
    /// Endpoint, region and style, for messages.
    fn describe(&self) -> String;

    /// The same backend with connections of its own, for a transfer runtime; `None` when it can't be duplicated.
    fn try_clone(&self) -> Option<Box<dyn ObjectBackend>> {
        None
    }

    /// The changing side; `None` where there is none.
    fn writes(&self) -> Option<&dyn ObjectWriteBackend> {
        None
    }

    /// Whether requests wait for sockets. If not, all waits of the bucket's threads are those for locks and clocks.
    fn uses_sockets(&self) -> bool {
        true
    }

    /// Sets the runtime that lives as long as the store, for work that must not run on a transfer runtime.
    fn attach_runtime(&self, _shared: &tokio::runtime::Handle) {}

    /// Keys that start with `prefix`; those with a further `/` are folded into prefixes. `NotFound` when there is no such bucket.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max: usize,
    ) -> BoxFuture<'a, Result<RawPage, RequestFailure>>;

    /// One object's attributes.
    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<RawObject, RequestFailure>>;

    /// The bytes `from..to` of the object if its etag is still `etag`; a failure of kind `Stale` otherwise.
    fn get<'a>(
        &'a self,
        key: &'a str,
        from: u64,
        to: u64,
        etag: Option<&'a str>,
    ) -> BoxFuture<'a, Result<RawBody, RequestFailure>>;
}
