//! What an object store is asked, before retries, deadlines and the meaning of names.
//! It deliberately knows no folder and no file: keys, prefixes, versions, bytes.

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use spurline_types::{Error, ErrorKind};
use std::time::{Duration, SystemTime};

/// One object as a listing or a head tells it.
#[derive(Debug, Clone)]
pub(crate) struct RawObject {
    pub key: String,
    pub size: u64,
    /// Whole seconds, since some answers have no finer ones and one object must look the same in all.
    pub mtime: SystemTime,
    /// As the store gave it; `None` when it gave none.
    pub etag: Option<String>,
}

/// A page of a listing.
#[derive(Debug, Default)]
pub(crate) struct RawPage {
    pub objects: Vec<RawObject>,
    /// Common prefixes, each with its delimiter at the end.
    pub prefixes: Vec<String>,
    pub next: Option<String>,
}

/// The start of an answer to a read.
pub(crate) struct RawBody {
    pub etag: Option<String>,
    pub mtime: Option<SystemTime>,
    /// Length of the whole object, where the answer says.
    pub total: Option<u64>,
    /// It is said to be the range asked for, and not just something.
    pub ranged: bool,
    pub stream: BoxStream<'static, Result<Bytes, Failure>>,
}

/// A failure of one attempt: the error to show, and whether another attempt may help.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub error: Error,
    pub again: Again,
}

/// What another attempt may do for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// Nothing.
    No,
    /// Help, after the usual pause.
    Yes,
    /// Help once the server is there again, which a restart of it takes seconds for: nobody listens.
    WhenBack,
    /// Help at once: nothing is wrong but the first words (another region).
    Now,
    /// Help, after the store has had time: it asked to slow down, for this long where it says.
    SlowDown(Option<Duration>),
}

impl Failure {
    pub(crate) fn fatal(kind: ErrorKind, message: String) -> Self {
        Failure { error: Error::new(kind, message), again: Again::No }
    }
    pub(crate) fn passing(kind: ErrorKind, message: String) -> Self {
        Failure { error: Error::new(kind, message), again: Again::Yes }
    }

    /// `place` answered a read with bytes of which nothing says what they are: a login page, a notice that a site is
    /// blocked.
    pub(crate) fn nameless(place: &str) -> Self {
        let message = format!(
            "{place} answered a read with something that does not say which version of the object it is (no ETag, or no              Last-Modified and length where there are no ETags): something between answered in its place; look at the              endpoint (AWS_ENDPOINT_URL) and at proxies and gateways before it"
        );
        Self::passing(ErrorKind::Unavailable, message)
    }
}

/// One object store and bucket, one attempt at a time. Dropping a future or a stream ends its request.
pub(crate) trait Backend: Send + Sync {
    /// Endpoint, region and style, for a person.
    fn describe(&self) -> String;

    /// The same with connections of its own, for a lane; `None` when it can't be had twice.
    fn twin(&self) -> Option<Box<dyn Backend>> {
        None
    }

    /// Tells the runtime that lives as long as the store, for what must not live on a lane.
    fn attach(&self, _shared: &tokio::runtime::Handle) {}

    /// Keys that start with `prefix`, those with a `/` after it folded into prefixes.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max: usize,
    ) -> BoxFuture<'a, Result<RawPage, Failure>>;

    /// One object's attributes.
    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<RawObject, Failure>>;

    /// The bytes `from..to` of the object if its etag is still `etag`; a failure of kind `Stale` otherwise.
    fn get<'a>(
        &'a self,
        key: &'a str,
        from: u64,
        to: u64,
        etag: Option<&'a str>,
    ) -> BoxFuture<'a, Result<RawBody, Failure>>;
}
