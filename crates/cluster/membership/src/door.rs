//! Who gets to speak with a coordinator: connections as they come, proved, encrypted and seen to begin like gRPC before
//! the server hears of them, and the same from the other side. It knows nothing of what is said then.

use crate::ANSWER;
use spurline_trust::{Guarded, Reason, Refusals, Trust, accept, connect, decline};
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

/// Connections that have not said who they are; with a further one the oldest is closed, so that strangers who say
/// nothing keep nobody out.
const MAX_WAITING: usize = 256;
/// Connections in all: a watcher and a node have one each, those of large clusters together.
const MAX_CONNECTIONS: usize = 60_000;
/// A connection that has not begun to speak gRPC by then is closed.
const PATIENCE: Duration = Duration::from_secs(10);
/// A pause after the operating system gave no connection, when it has no files left say.
const PAUSE: Duration = Duration::from_millis(100);
/// What a client of HTTP/2 begins with (RFC 9113, 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection that has been let in.
pub(crate) struct Admitted {
    stream: Guarded<TcpStream>,
    /// How much of the preface, which was read to see it, was given on.
    given: usize,
    _place: Place,
}

/// A place among all connections, as long as it is kept.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(taken: &Arc<AtomicUsize>) -> Option<Place> {
        let place = Place(Arc::clone(taken));
        (taken.fetch_add(1, Ordering::Relaxed) < MAX_CONNECTIONS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets in who proves what `trust` asks for; the rest is refused, counted and said.
pub(crate) fn admit(
    listener: TcpListener,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
) -> ReceiverStream<io::Result<Admitted>> {
    // The server takes what was let in at once.
    let (out, admitted) = mpsc::channel(64);
    tokio::spawn(async move {
        let refusals = Arc::new(Refusals::new(Arc::clone(&stats)));
        let taken = Arc::new(AtomicUsize::new(0));
        let mut waiting: VecDeque<(SocketAddr, AbortHandle)> = VecDeque::new();
        loop {
            let (stream, peer) = tokio::select! {
                () = out.closed() => return,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        refusals.say("anybody", &format!("no connection can be taken: {error}"));
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                },
            };
            let Some(place) = Place::take(&taken) else {
                let why =
                    format!("all {MAX_CONNECTIONS} connections are in use; run another coordinator beside this one");
                refusals.refused(&peer.to_string(), Reason::Limit, &why);
                continue;
            };
            if waiting.len() >= MAX_WAITING {
                waiting.retain(|(_, task)| !task.is_finished());
            }
            if waiting.len() >= MAX_WAITING
                && let Some((oldest, task)) = waiting.pop_front()
            {
                task.abort();
                let why =
                    format!("more than {MAX_WAITING} connections have not said who they are, and it is the oldest");
                refusals.refused(&oldest.to_string(), Reason::Limit, &why);
            }
            let (out, trust, stats, refusals) =
                (out.clone(), Arc::clone(&trust), Arc::clone(&stats), Arc::clone(&refusals));
            let task = tokio::spawn(async move {
                match look_at(stream, &trust, peer).await {
                    Ok(stream) => {
                        if trust.asks() {
                            stats.trust.proved.add(1);
                        }
                        // Without a server there is nobody to speak with.
                        let _ = out.send(Ok(Admitted { stream, given: 0, _place: place })).await;
                    }
                    // Who goes away without a word is no stranger of note: so do probes of whether a port is open.
                    Err((_, error)) if error.kind() == ErrorKind::Unavailable => {}
                    Err((reason, error)) => refusals.refused(&peer.to_string(), reason, &error),
                }
            });
            waiting.push_back((peer, task.abort_handle()));
        }
    });
    ReceiverStream::new(admitted)
}

async fn look_at(
    mut stream: TcpStream,
    trust: &Trust,
    peer: SocketAddr,
) -> std::result::Result<Guarded<TcpStream>, (Reason, Error)> {
    let gone = |e: io::Error| Error::new(ErrorKind::Unavailable, format!("the connection ended: {e}"));
    // Without it answers wait for others; a connection that can't have it does without.
    let _ = stream.set_nodelay(true);
    let mut first = [0];
    let began = in_time(async { stream.peek(&mut first).await.map_err(gone) }).await?;
    if trust.asks() && began > 0 && first[0] == PREFACE[0] {
        // gRPC in plain words, so it understands an answer in them.
        let error = wanted(trust);
        let _ = in_time(async { say_goodbye(&mut stream, error.message()).await.map_err(gone) }).await;
        return Err((Reason::Proof, error));
    }
    let mut stream = accept(stream, trust, &peer.to_string()).await?;
    let mut begin = [0; PREFACE.len()];
    in_time(async { stream.read_exact(&mut begin).await.map_err(gone) }).await?;
    if !trust.asks() && begin.starts_with(b"SPUR") {
        return Err((Reason::Proof, decline(&mut stream, &begin).await));
    }
    if begin != *PREFACE {
        let why = "what it says is no gRPC: only nodes, mounts and coordinators of Spurline are answered here";
        return Err((Reason::Frames, Error::new(ErrorKind::Protocol, why)));
    }
    Ok(stream)
}

/// What is asked of somebody who shows nothing.
fn wanted(trust: &Trust) -> Error {
    match trust.tls() {
        None => trust.unproved(),
        Some(_) => {
            let why = "the coordinator speaks TLS only: start this side with --tls and --group-token-file, or with \
                       --tls-cert, --tls-key and --tls-ca, as the coordinator was";
            Error::new(ErrorKind::PermissionDenied, why)
        }
    }
}

async fn in_time<T>(work: impl Future<Output = Result<T>>) -> std::result::Result<T, (Reason, Error)> {
    let late = |_| Error::new(ErrorKind::Timeout, format!("it said nothing within {PATIENCE:?}"));
    tokio::time::timeout(PATIENCE, work).await.map_err(late).flatten().map_err(|error| (Reason::Silent, error))
}

/// Ends a conversation of HTTP/2 that has not begun, with the reason as the words of its GOAWAY.
async fn say_goodbye(stream: &mut TcpStream, why: &str) -> io::Result<()> {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    // INADEQUATE_SECURITY, and no request was looked at.
    const REASON: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0xc];
    let len = (REASON.len() + why.len()) as u32;
    let head = [&len.to_be_bytes()[1..], &[7, 0, 0, 0, 0, 0]].concat();
    stream.write_all(&[&SETTINGS[..], &head, &REASON, why.as_bytes()].concat()).await?;
    stream.shutdown().await?;
    // Closing with words unread would take these back.
    let mut rest = [0; 1024];
    for _ in 0..64 {
        if stream.read(&mut rest).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// Connects to a coordinator and proves what it asks for.
pub(crate) async fn knock(address: HostPort, trust: Arc<Trust>) -> Result<Guarded<TcpStream>> {
    let shown = address.to_string();
    let cant = |e: io::Error| Error::new(ErrorKind::Unavailable, format!("can't be connected to: {e}"));
    let opened = tokio::time::timeout(ANSWER, TcpStream::connect((address.host.as_str(), address.port))).await;
    let late = || Error::new(ErrorKind::Unavailable, format!("no connection within {ANSWER:?}"));
    let stream = opened.map_err(|_| late())?.map_err(cant)?;
    let _ = stream.set_nodelay(true);
    connect(stream, &trust, &shown).await.map_err(|error| match error.kind() {
        // It answers, but not as somebody who asks for a proof.
        ErrorKind::Protocol if trust.asks() => Error::new(
            ErrorKind::PermissionDenied,
            "it does not speak as a coordinator that asks for the group token: start it with the same --group-token-file as \
             this side, and both with --tls or neither",
        ),
        _ => error,
    })
}

impl Connected for Admitted {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Admitted {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let rest = &PREFACE[this.given..];
        if rest.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let now = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..now]);
        this.given += now;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Admitted {
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
