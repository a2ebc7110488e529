//! The connections of an endpoint: which of them wait for a request, so that a new client gets the place of the connection with the
//! longest wait. Knows no socket and no request.

use http::header::CONNECTION;
use http::{HeaderValue, Response};
use hyper::body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How long the end of an idle connection may take.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two log lines about a full endpoint.
const FULL_LOG_PAUSE: Duration = Duration::from_secs(60);

/// A connection.
#[derive(Debug)]
pub(crate) struct ClientConnection {
    number: u64,
    /// The begin of the wait for a request; `None` while a request is answered.
    idle_since: Mutex<Option<Instant>>,
    ending: Notify,
}

impl ClientConnection {
    /// Waits until the connection should end.
    pub async fn ordered_to_end(&self) {
        self.ending.notified().await;
    }

    pub fn begin_request(self: &Arc<Self>) -> RequestUnderWay {
        *self.idle_since.lock() = None;
        RequestUnderWay { connection: Arc::clone(self) }
    }
}

/// A request of a connection, until the answer is sent.
#[derive(Debug)]
pub(crate) struct RequestUnderWay {
    connection: Arc<ClientConnection>,
}

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        *self.connection.idle_since.lock() = Some(Instant::now());
    }
}

/// All connections, and the limit.
pub(crate) struct ClientConnections {
    places: Arc<Semaphore>,
    limit: usize,
    open: Mutex<HashMap<u64, Arc<ClientConnection>>>,
    last_number: AtomicU64,
    full_logged: Mutex<Option<Instant>>,
}

/// The place of a connection; a drop frees the place.
pub(crate) struct ConnectionPlace {
    pub connection: Arc<ClientConnection>,
    connections: Arc<ClientConnections>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.connections.open.lock().remove(&self.connection.number);
    }
}

impl ClientConnections {
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(ClientConnections {
            places: Arc::new(Semaphore::new(limit)),
            limit,
            open: Mutex::default(),
            last_number: AtomicU64::new(0),
            full_logged: Mutex::default(),
        })
    }

    /// The most connections at the same time.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// A place for a new connection. Without a free place, the connection with the longest wait for a request ends; `None` when
    /// requests of all connections are under way.
    pub async fn take_place(self: &Arc<Self>) -> Option<ConnectionPlace> {
        let permit = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                self.end_longest_idle()?;
                let place = Arc::clone(&self.places).acquire_owned();
                tokio::time::timeout(END_TIMEOUT, place).await.ok()?.ok()?
            }
        };
        let number = self.last_number.fetch_add(1, Ordering::Relaxed);
        let idle_since = Mutex::new(Some(Instant::now()));
        let connection = Arc::new(ClientConnection { number, idle_since, ending: Notify::new() });
        self.open.lock().insert(number, Arc::clone(&connection));
        Some(ConnectionPlace { connection, connections: Arc::clone(self), _permit: permit })
    }

    fn end_longest_idle(&self) -> Option<()> {
        let open = self.open.lock();
        let idle =
            open.values().filter_map(|connection| Some((*connection.idle_since.lock())?).map(|at| (at, connection)));
        let (_, longest) = idle.min_by_key(|(at, _)| *at)?;
        // The next client chooses another connection.
        *longest.idle_since.lock() = None;
        longest.ending.notify_one();
        Some(())
    }

    /// Waits until all connections have ended.
    pub async fn all_ended(&self) {
        let all = u32::try_from(self.limit).unwrap_or(u32::MAX);
        let _ = self.places.acquire_many(all).await;
    }

    /// Logs once a minute that clients are refused.
    pub fn log_full(&self) {
        let mut logged = self.full_logged.lock();
        if logged.is_none_or(|at| at.elapsed() > FULL_LOG_PAUSE) {
            *logged = Some(Instant::now());
            tracing::warn!(
                "requests of all {} connections of the S3 endpoint are under way: new clients get 503 SlowDown; a larger \
                 --buffer-size allows more",
                self.limit
            );
        }
    }
}

/// What learns that the end of a body was read.
pub(crate) trait BodyEnd {
    fn note_end(&self);
}

/// Whether the end of the body of a request was read.
pub(crate) type ReadToEnd = Arc<AtomicBool>;

impl BodyEnd for ReadToEnd {
    fn note_end(&self) {
        self.store(true, Ordering::Release);
    }
}

impl BodyEnd for RequestUnderWay {
    /// The drop of the body of the answer ends the request, however far the body was sent.
    fn note_end(&self) {}
}

/// A body, and its end.
pub(crate) struct WatchedBody<B, E> {
    pub body: B,
    pub end: E,
}

impl<B: Body> WatchedBody<B, ReadToEnd> {
    /// The body of a request, and whether the end was read.
    pub fn of_request(body: B) -> (Self, ReadToEnd) {
        let end = Arc::new(AtomicBool::new(body.is_end_stream()));
        (WatchedBody { body, end: Arc::clone(&end) }, end)
    }
}

impl<B: Body + Unpin, E: BodyEnd + Unpin> Body for WatchedBody<B, E> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.end.note_end();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Ends the connection after an answer to a request whose body was not read: the next bytes may be the body or the next request, and a
/// body must not be executed as a request.
pub(crate) fn end_after_unread_body<B>(answer: &mut Response<B>, is_read: &ReadToEnd) {
    if !is_read.load(Ordering::Acquire) {
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_client_gets_the_place_of_the_longest_idle_connection() {
        let connections = ClientConnections::new(2);
        let first = connections.take_place().await.unwrap();
        let second = connections.take_place().await.unwrap();
        let of_first = Arc::clone(&first.connection);
        let request = second.connection.begin_request();
        let ended = tokio::spawn(async move {
            of_first.ordered_to_end().await;
            drop(first);
        });
        let third = connections.take_place().await.expect("the place of the first");
        ended.await.unwrap();
        let busy = third.connection.begin_request();
        assert!(connections.take_place().await.is_none(), "requests of both are under way");
        drop((request, busy));
        assert!(connections.take_place().await.is_none(), "the idle connection does not end here");
        drop((second, third));
        assert!(connections.take_place().await.is_some());
        connections.all_ended().await;
    }
}
