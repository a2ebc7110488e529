//! The handshake gate of a coordinator: new connections must prove the group token or certificate, and begin like
//! gRPC, before the server gets them. Holds the client's side of the handshake too. Knows nothing of the requests
//! that follow.

use crate::ANSWER_TIMEOUT;
use spurline_trust::{GuardedStream, RefusalLog, RefusalReason, Trust, accept_stream, connect_stream, decline_proof};
use spurline_types::HostPort;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// Connections still in the handshake. Another closes the oldest, so that silent strangers keep no peer out.
const MAX_HANDSHAKES: usize = 256;
/// Connections in all; each watcher and each node has a connection.
const MAX_COORDINATOR_CONNECTIONS: usize = 60_000;
/// Time for proof and the first bytes of gRPC.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example when no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// First bytes of an HTTP/2 client (RFC 9113, 3.4).
const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection that passed the handshake.
pub(crate) struct AdmittedStream {
    stream: GuardedStream<TcpStream>,
    /// How much of the preface, already read for the check, the server has read.
    given: usize,
    _place: ConnectionPermit,
}

/// Counts a connection until the drop.
struct ConnectionPermit(Arc<AtomicUsize>);

impl ConnectionPermit {
    fn try_acquire(taken: &Arc<AtomicUsize>) -> Option<ConnectionPermit> {
        let place = ConnectionPermit(Arc::clone(taken));
        (taken.fetch_add(1, Ordering::Relaxed) < MAX_COORDINATOR_CONNECTIONS).then_some(place)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Passes on connections that prove what `trust` requires; refuses, counts and logs the rest.
pub(crate) fn admit_connections(
    listener: TcpListener,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
) -> ReceiverStream<io::Result<AdmittedStream>> {
    // Small: the server takes admitted connections at once.
    let (out, admitted) = mpsc::channel(64);
    tokio::spawn(async move {
        let refusals = Arc::new(RefusalLog::new(Arc::clone(&stats)));
        let taken = Arc::new(AtomicUsize::new(0));
        let mut waiting: VecDeque<(SocketAddr, AbortHandle)> = VecDeque::new();
        loop {
            let (stream, peer) = tokio::select! {
                () = out.closed() => return,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        refusals.log_closed("any peer", &format!("can't accept a connection: {error}"));
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let Some(place) = ConnectionPermit::try_acquire(&taken) else {
                let why = format!(
                    "all {MAX_COORDINATOR_CONNECTIONS} connections are in use; use etcd as the registry of so large a cluster"
                );
                refusals.record_refusal(&peer.to_string(), RefusalReason::Limit, &why);
                continue;
            };
            if waiting.len() >= MAX_HANDSHAKES {
                waiting.retain(|(_, task)| !task.is_finished());
            }
            if waiting.len() >= MAX_HANDSHAKES
                && let Some((oldest, task)) = waiting.pop_front()
            {
                task.abort();
                let why =
                    format!("more than {MAX_HANDSHAKES} connections are in the handshake, and this is the oldest");
                refusals.record_refusal(&oldest.to_string(), RefusalReason::Limit, &why);
            }
            let out = out.clone();
            let trust = Arc::clone(&trust);
            let stats = Arc::clone(&stats);
            let refusals = Arc::clone(&refusals);
            let task = tokio::spawn(async move {
                match check_handshake(stream, &trust, peer).await {
                    Ok(stream) => {
                        if trust.checks_peers() {
                            stats.trust.proved.add(1);
                        }
                        // A closed receiver means that the server has ended.
                        let _ = out.send(Ok(AdmittedStream { stream, given: 0, _place: place })).await;
                    }
                    // A connection that closes without a byte is most often a port check: not logged.
                    Err((_, error)) if error.kind() == ErrorKind::Unavailable => {}
                    Err((reason, error)) => refusals.record_refusal(&peer.to_string(), reason, &error),
                }
            });
            waiting.push_back((peer, task.abort_handle()));
        }
    });
    ReceiverStream::new(admitted)
}

async fn check_handshake(
    mut stream: TcpStream,
    trust: &Trust,
    peer: SocketAddr,
) -> std::result::Result<GuardedStream<TcpStream>, (RefusalReason, Error)> {
    // Without this option answers wait for other answers; a connection that refuses the option works too.
    let _ = stream.set_nodelay(true);
    let mut first = [0];
    let began = within_deadline(async { stream.peek(&mut first).await.map_err(connection_ended) }).await?;
    if trust.checks_peers() && began > 0 && first[0] == HTTP2_PREFACE[0] {
        // The client speaks plain gRPC, and understands a plain answer.
        let error = proof_required(trust);
        let _ =
            within_deadline(async { send_goaway(&mut stream, error.message()).await.map_err(connection_ended) }).await;
        return Err((RefusalReason::Proof, error));
    }
    let mut stream = accept_stream(stream, trust, &peer.to_string()).await?;
    let mut begin = [0; HTTP2_PREFACE.len()];
    within_deadline(async { stream.read_exact(&mut begin).await.map_err(connection_ended) }).await?;
    if !trust.checks_peers() && begin.starts_with(b"SPUR") {
        return Err((RefusalReason::Proof, decline_proof(&mut stream, &begin).await));
    }
    if begin != *HTTP2_PREFACE {
        let why = "its first bytes are not gRPC: a coordinator serves nodes, mounts and coordinators of Spurline only";
        return Err((RefusalReason::Frames, Error::new(ErrorKind::Protocol, why)));
    }
    Ok(stream)
}

fn connection_ended(e: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the connection ended: {e}"))
}

/// The error for a client that offers no proof.
fn proof_required(trust: &Trust) -> Error {
    match trust.tls() {
        None => trust.unproved_error(),
        Some(_) => {
            let why = "the coordinator speaks TLS only: start this side with --tls and --group-token-file, or with \
                       --tls-cert, --tls-key and --tls-ca, as the coordinator was";
            Error::new(ErrorKind::PermissionDenied, why)
        }
    }
}

async fn within_deadline<T>(work: impl Future<Output = Result<T>>) -> std::result::Result<T, (RefusalReason, Error)> {
    tokio::time::timeout(HANDSHAKE_TIMEOUT, work)
        .await
        .map_err(|_| Error::new(ErrorKind::Timeout, format!("no complete handshake within {HANDSHAKE_TIMEOUT:?}")))
        .flatten()
        .map_err(|error| (RefusalReason::Silent, error))
}

/// Ends an HTTP/2 connection before the first request; the reason is the debug data of the GOAWAY.
async fn send_goaway(stream: &mut TcpStream, why: &str) -> io::Result<()> {
    const SETTINGS_FRAME: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    // INADEQUATE_SECURITY, and no request was processed.
    const GOAWAY_FRAME: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0xc];
    let len = (GOAWAY_FRAME.len() + why.len()) as u32;
    let head = [&len.to_be_bytes()[1..], &[7, 0, 0, 0, 0, 0]].concat();
    stream.write_all(&[&SETTINGS_FRAME[..], &head, &GOAWAY_FRAME, why.as_bytes()].concat()).await?;
    stream.shutdown().await?;
    // Closing with unread bytes would reset the connection and discard the reason.
    let mut rest = [0; 1024];
    for _ in 0..64 {
        if stream.read(&mut rest).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// Connects to a coordinator and gives the required proof.
pub(crate) async fn connect_coordinator(address: HostPort, trust: Arc<Trust>) -> Result<GuardedStream<TcpStream>> {
    let shown = address.to_string();
    let opened = tokio::time::timeout(ANSWER_TIMEOUT, TcpStream::connect((address.host.as_str(), address.port))).await;
    let stream = opened
        .map_err(|_| Error::new(ErrorKind::Unavailable, format!("no connection within {ANSWER_TIMEOUT:?}")))?
        .map_err(|e| Error::new(ErrorKind::Unavailable, format!("can't connect: {e}")))?;
    let _ = stream.set_nodelay(true);
    connect_stream(stream, &trust, &shown).await.map_err(|error| match error.kind() {
        // The coordinator answers, but without the proof.
        ErrorKind::Protocol if trust.checks_peers() => Error::new(
            ErrorKind::PermissionDenied,
            "its answer is not that of a coordinator with a group token: start it with the same --group-token-file as \
             this side, and both with --tls or neither",
        ),
        _ => error,
    })
}

impl Connected for AdmittedStream {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for AdmittedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let rest = &HTTP2_PREFACE[this.given..];
        if rest.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let now = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..now]);
        this.given += now;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AdmittedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
