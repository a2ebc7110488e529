//! The proof of the token, and TLS, on a stream of a runtime, before anything else is said on it: what gRPC runs over.
//! It knows nothing of what follows.

use crate::proof::CONTROL;
use crate::tls::explain;
use crate::{Asked, Connection, Reason, Trust};
use spurline_proto::{
    Body, Challenged, Flags, HEADER_LEN, Header, MAX_GREETING_BODY, Op, Request, decode_error, encode_error_message,
    padding,
};
use spurline_types::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream, rustls};

/// Whoever takes longer than this to prove who it is, is not waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a TLS 1.3 connection is known by to both its ends (RFC 9266).
const EXPORTER: &[u8] = b"EXPORTER-Channel-Binding";

/// A stream whose other end has proved what it had to.
pub enum Guarded<S> {
    /// As it is.
    Plain(S),
    /// Encrypted.
    Tls(Box<TlsStream<S>>),
}

impl<S> Guarded<S> {
    /// The stream below.
    pub fn get_ref(&self) -> &S {
        match self {
            Guarded::Plain(stream) => stream,
            Guarded::Tls(stream) => stream.get_ref().0,
        }
    }

    fn binding(&self) -> Result<Vec<u8>> {
        let Guarded::Tls(stream) = self else { return Ok(Vec::new()) };
        let exported = match &**stream {
            TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; 32], EXPORTER, Some(b"")),
            TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; 32], EXPORTER, Some(b"")),
        };
        exported.map(Vec::from).map_err(|e| Error::new(ErrorKind::Protocol, format!("TLS: {e}")))
    }
}

/// The side that connected to `host` (with or without a port). Dropping the future gives up.
///
/// # Errors
/// `PermissionDenied` when one side does not hold the other's token or certificate, `Timeout` after ten seconds,
/// `Unavailable` when the other side closed the stream.
pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(stream: S, trust: &Trust, host: &str) -> Result<Guarded<S>> {
    in_time(host, async {
        let mut stream = match trust.tls() {
            None => Guarded::Plain(stream),
            Some(tls) => {
                let (config, _, cert) = tls.parts();
                let connector = TlsConnector::from(config.clone());
                let agreed = connector.connect(tls.server_name(host)?, stream).await;
                Guarded::Tls(Box::new(agreed.map_err(|e| tls_error(&e, host, cert))?.into()))
            }
        };
        let binding = stream.binding()?;
        if let Some(mut prover) = trust.prover(Connection { kind: CONTROL, binding: &binding })? {
            let challenged: Challenged = ask(&mut stream, 1, &Request::Challenge(prover.challenge())).await?;
            let proof = prover.prove(challenged);
            prover.check(&ask(&mut stream, 2, &Request::Prove(proof)).await?)?;
        }
        Ok(stream)
    })
    .await
}

/// The side that was connected to, by `peer`.
///
/// # Errors
/// Those of [`connect`], with what they are counted as.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    trust: &Trust,
    peer: &str,
) -> std::result::Result<Guarded<S>, (Reason, Error)> {
    let encrypted = async {
        Ok(match trust.tls() {
            None => Guarded::Plain(stream),
            Some(tls) => {
                let (_, config, cert) = tls.parts();
                let agreed = TlsAcceptor::from(config.clone()).accept(stream).await;
                Guarded::Tls(Box::new(agreed.map_err(|e| tls_error(&e, peer, cert))?.into()))
            }
        })
    };
    let counted = |error: Error, reason| match error.kind() {
        ErrorKind::Timeout => (Reason::Silent, error),
        ErrorKind::Protocol => (Reason::Frames, error),
        _ => (reason, error),
    };
    let stream = in_time(peer, encrypted).await.map_err(|error| counted(error, Reason::Tls))?;
    in_time(peer, proved(stream, trust)).await.map_err(|error| counted(error, Reason::Proof))
}

/// Has the other end of the stream prove the token, where one is asked for.
async fn proved<S: AsyncRead + AsyncWrite + Unpin>(mut stream: Guarded<S>, trust: &Trust) -> Result<Guarded<S>> {
    let Some(tokens) = trust.tokens() else { return Ok(stream) };
    let binding = stream.binding()?;
    let connection = Connection { kind: CONTROL, binding: &binding };
    let (header, body) = request(&mut stream, trust).await?;
    let Ok(Request::Challenge(challenge)) = Request::decode(header.op, &body) else {
        return Err(refuse(&mut stream, &header, trust.unproved()).await);
    };
    let (asked, challenged) = Asked::new(tokens, trust.name(), connection, &challenge)?;
    answer(&mut stream, &header, &challenged).await?;
    let (header, body) = request(&mut stream, trust).await?;
    let Ok(Request::Prove(proof)) = Request::decode(header.op, &body) else {
        return Err(refuse(&mut stream, &header, trust.unproved()).await);
    };
    match asked.check(&proof) {
        Ok(proof) => answer(&mut stream, &header, &proof).await?,
        Err(error) => return Err(refuse(&mut stream, &header, error).await),
    }
    Ok(stream)
}

/// Tells somebody who began to prove a token, with `begun`, that nobody is asked for one here; the error is for the log.
pub async fn decline<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut Guarded<S>, begun: &[u8]) -> Error {
    let why =
        "nobody is asked for a group token here: start this side with --group-token-file too, or the other without";
    let error = Error::new(ErrorKind::PermissionDenied, why);
    let mut head = [0; HEADER_LEN];
    let all = async {
        head.get_mut(..begun.len()).ok_or_else(|| Error::new(ErrorKind::Protocol, why))?.copy_from_slice(begun);
        stream.read_exact(&mut head[begun.len()..]).await.map_err(|e| gone(&e))?;
        let header = Header::decode(&head)?;
        body(stream, &header).await?;
        Ok(header)
    };
    match in_time("the other side", all).await {
        Ok(header) => refuse(stream, &header, error).await,
        Err(_) => error,
    }
}

async fn in_time<T>(peer: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(ErrorKind::Timeout, format!("{peer} did not say who it is within {PATIENCE:?}"));
    tokio::time::timeout(PATIENCE, work).await.map_err(late)?
}

fn tls_error(error: &std::io::Error, peer: &str, cert: Option<&std::path::Path>) -> Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(inner) => explain(inner, peer, cert),
        None => gone(error).context(format_args!("{peer}: TLS was not agreed on; do both sides have --tls?")),
    }
}

fn gone(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the connection ended: {error}"))
}

/// Sends a request and reads its answer.
async fn ask<S: AsyncRead + AsyncWrite + Unpin, T: Body>(
    stream: &mut Guarded<S>,
    id: u64,
    request: &Request<'_>,
) -> Result<T> {
    let mut out = Vec::new();
    request.encode(id, &mut out)?;
    stream.write_all(&out).await.map_err(|e| gone(&e))?;
    stream.flush().await.map_err(|e| gone(&e))?;
    let header = head(stream).await?;
    header.check_answer(request.op(), id)?;
    let body = body(stream, &header).await?;
    if header.status != 0 {
        return Err(decode_error(header.status, &body));
    }
    Ok(T::decode(&body)?)
}

/// Reads what is to be a request of the proof.
async fn request<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut Guarded<S>,
    trust: &Trust,
) -> Result<(Header, Vec<u8>)> {
    // Who begins with anything else has no token, or is no member at all.
    let header = head(stream).await.map_err(|e| match e.kind() {
        ErrorKind::Protocol => trust.unproved(),
        _ => e,
    })?;
    header.check_request()?;
    if !matches!(header.op, Op::Challenge | Op::Prove) || header.flags.contains(Flags::ANSWER) {
        return Err(refuse(stream, &header, trust.unproved()).await);
    }
    let body = body(stream, &header).await?;
    Ok((header, body))
}

async fn head<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut Guarded<S>) -> Result<Header> {
    let mut head = [0; HEADER_LEN];
    let mut got = 0;
    while got < HEADER_LEN {
        match stream.read(&mut head[got..]).await.map_err(|e| gone(&e))? {
            0 => return Err(Error::new(ErrorKind::Unavailable, "the other side closed the connection")),
            n => got += n,
        }
        Header::check_start(&head[..got])?;
    }
    Ok(Header::decode(&head)?)
}

async fn body<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut Guarded<S>, header: &Header) -> Result<Vec<u8>> {
    let len = header.body_len as usize;
    if len > MAX_GREETING_BODY || header.payload_len != 0 {
        return Err(Error::new(ErrorKind::Protocol, "what was to be a proof is too long for one"));
    }
    let mut body = vec![0; len + padding(len).len()];
    stream.read_exact(&mut body).await.map_err(|e| gone(&e))?;
    body.truncate(len);
    Ok(body)
}

async fn answer<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut Guarded<S>,
    request: &Header,
    value: &impl Body,
) -> Result<()> {
    let mut body = Vec::new();
    value.encode(&mut body);
    send(stream, request, 0, &body).await
}

/// Tells the other side why it is refused, if it listens.
async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut Guarded<S>, request: &Header, error: Error) -> Error {
    let mut body = Vec::new();
    encode_error_message(&error, &mut body);
    // It is refused in any case.
    let _ = send(stream, request, error.kind().code(), &body).await;
    error
}

async fn send<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut Guarded<S>,
    request: &Header,
    status: u16,
    body: &[u8],
) -> Result<()> {
    let header = request.answer(status, body.len(), 0)?;
    let frame = [&header.encode()[..], body, padding(body.len())].concat();
    stream.write_all(&frame).await.map_err(|e| gone(&e))?;
    stream.flush().await.map_err(|e| gone(&e))
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Guarded::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Guarded::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Guarded::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Guarded::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Guarded::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Guarded::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Guarded::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Guarded::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
