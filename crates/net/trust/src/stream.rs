//! The proof of the token, and TLS, on an asynchronous stream before any other traffic, such as gRPC. Does not know the traffic
//! that follows.

use crate::proof::CONTROL;
use crate::tls::explain_failure;
use crate::{ProofConnection, RefusalReason, TokenVerifier, Trust};
use spurline_proto::{
    AnswerBody, ChallengeAnswer, FrameFlags, FrameHeader, FrameOp, HEADER_LEN, MAX_GREETING_BODY, NodeRequest,
    decode_error, encode_error_message, frame_padding,
};
use spurline_types::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream, rustls};

const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
/// The channel binding of a TLS 1.3 connection (RFC 9266).
const CHANNEL_BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

/// A stream after the required proof of the peer.
pub enum GuardedStream<S> {
    /// Without encryption.
    Plain(S),
    /// Encrypted.
    Tls(Box<TlsStream<S>>),
}

impl<S> GuardedStream<S> {
    /// The underlying stream.
    pub fn get_ref(&self) -> &S {
        match self {
            GuardedStream::Plain(stream) => stream,
            GuardedStream::Tls(stream) => stream.get_ref().0,
        }
    }

    fn channel_binding(&self) -> Result<Vec<u8>> {
        let GuardedStream::Tls(stream) = self else { return Ok(Vec::new()) };
        let exported = match &**stream {
            TlsStream::Client(stream) => {
                stream.get_ref().1.export_keying_material([0; 32], CHANNEL_BINDING_LABEL, Some(b""))
            }
            TlsStream::Server(stream) => {
                stream.get_ref().1.export_keying_material([0; 32], CHANNEL_BINDING_LABEL, Some(b""))
            }
        };
        exported.map(Vec::from).map_err(|e| Error::new(ErrorKind::Protocol, format!("TLS: {e}")))
    }
}

/// The side that connected to `host` (with or without a port). A drop of the future cancels the work.
///
/// # Errors
/// `PermissionDenied` when either side does not hold the other's token or certificate, `Timeout` after ten seconds, `Unavailable`
/// when the other side closed the stream.
pub async fn connect_stream<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    trust: &Trust,
    host: &str,
) -> Result<GuardedStream<S>> {
    in_time(host, async {
        let mut stream = match trust.tls() {
            None => GuardedStream::Plain(stream),
            Some(tls) => {
                let (config, _, cert) = tls.configs();
                let connector = TlsConnector::from(config.clone());
                let agreed = connector.connect(tls.server_name(host)?, stream).await;
                GuardedStream::Tls(Box::new(agreed.map_err(|e| tls_error(&e, host, cert))?.into()))
            }
        };
        let binding = stream.channel_binding()?;
        if let Some(mut prover) = trust.prover(ProofConnection { kind: CONTROL, binding: &binding })? {
            let challenged: ChallengeAnswer =
                send_request(&mut stream, 1, &NodeRequest::Challenge(prover.challenge())).await?;
            let proof = prover.answer_challenge(challenged);
            prover.check_answer(&send_request(&mut stream, 2, &NodeRequest::Prove(proof)).await?)?;
        }
        Ok(stream)
    })
    .await
}

/// The side that accepted a connection of `peer`.
///
/// # Errors
/// As [`connect_stream`], with a counter for each.
pub async fn accept_stream<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    trust: &Trust,
    peer: &str,
) -> std::result::Result<GuardedStream<S>, (RefusalReason, Error)> {
    let encrypted = async {
        Ok(match trust.tls() {
            None => GuardedStream::Plain(stream),
            Some(tls) => {
                let (_, config, cert) = tls.configs();
                let agreed = TlsAcceptor::from(config.clone()).accept(stream).await;
                GuardedStream::Tls(Box::new(agreed.map_err(|e| tls_error(&e, peer, cert))?.into()))
            }
        })
    };
    let counted = |error: Error, reason| match error.kind() {
        ErrorKind::Timeout => (RefusalReason::Silent, error),
        ErrorKind::Protocol => (RefusalReason::Frames, error),
        _ => (reason, error),
    };
    let stream = in_time(peer, encrypted).await.map_err(|error| counted(error, RefusalReason::Tls))?;
    in_time(peer, require_proof(stream, trust)).await.map_err(|error| counted(error, RefusalReason::Proof))
}

/// Requires the peer's proof of the token, if there is a token.
async fn require_proof<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: GuardedStream<S>,
    trust: &Trust,
) -> Result<GuardedStream<S>> {
    let Some(tokens) = trust.tokens() else { return Ok(stream) };
    let binding = stream.channel_binding()?;
    let connection = ProofConnection { kind: CONTROL, binding: &binding };
    let (header, body) = receive_request(&mut stream, trust).await?;
    let Ok(NodeRequest::Challenge(challenge)) = NodeRequest::decode(header.op, &body) else {
        return Err(send_refusal(&mut stream, &header, trust.unproved_error()).await);
    };
    let (asked, challenged) = TokenVerifier::new(tokens, trust.name(), connection, &challenge)?;
    send_answer(&mut stream, &header, &challenged).await?;
    let (header, body) = receive_request(&mut stream, trust).await?;
    let Ok(NodeRequest::Prove(proof)) = NodeRequest::decode(header.op, &body) else {
        return Err(send_refusal(&mut stream, &header, trust.unproved_error()).await);
    };
    match asked.check_proof(&proof) {
        Ok(proof) => send_answer(&mut stream, &header, &proof).await?,
        Err(error) => return Err(send_refusal(&mut stream, &header, error).await),
    }
    Ok(stream)
}

/// Informs a peer that started a proof, with the bytes `begun`, that this side has no token. Returns the error for
/// the log.
pub async fn decline_proof<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut GuardedStream<S>, begun: &[u8]) -> Error {
    let why = "this side requires no group token: start it with --group-token-file too, or the other without";
    let error = Error::new(ErrorKind::PermissionDenied, why);
    let mut head = [0; HEADER_LEN];
    let all = async {
        head.get_mut(..begun.len()).ok_or_else(|| Error::new(ErrorKind::Protocol, why))?.copy_from_slice(begun);
        stream.read_exact(&mut head[begun.len()..]).await.map_err(|e| connection_ended(&e))?;
        let header = FrameHeader::decode(&head)?;
        receive_body(stream, &header).await?;
        Ok(header)
    };
    match in_time("the other side", all).await {
        Ok(header) => send_refusal(stream, &header, error).await,
        Err(_) => error,
    }
}

async fn in_time<T>(peer: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PROOF_TIMEOUT, work)
        .await
        .map_err(|_| Error::new(ErrorKind::Timeout, format!("{peer} did not authenticate within {PROOF_TIMEOUT:?}")))?
}

fn tls_error(error: &std::io::Error, peer: &str, cert: Option<&std::path::Path>) -> Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(inner) => explain_failure(inner, peer, cert),
        None => {
            connection_ended(error).context(format_args!("{peer}: the TLS handshake failed; do both sides have --tls?"))
        }
    }
}

fn connection_ended(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the connection ended: {error}"))
}

/// Sends a request and receives the answer.
async fn send_request<S: AsyncRead + AsyncWrite + Unpin, T: AnswerBody>(
    stream: &mut GuardedStream<S>,
    id: u64,
    request: &NodeRequest<'_>,
) -> Result<T> {
    let mut out = Vec::new();
    request.encode(id, &mut out)?;
    stream.write_all(&out).await.map_err(|e| connection_ended(&e))?;
    stream.flush().await.map_err(|e| connection_ended(&e))?;
    let header = receive_header(stream).await?;
    header.check_answer(request.op(), id)?;
    let body = receive_body(stream, &header).await?;
    if header.status != 0 {
        return Err(decode_error(header.status, &body));
    }
    Ok(T::decode(&body)?)
}

/// Receives a request of the proof.
async fn receive_request<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut GuardedStream<S>,
    trust: &Trust,
) -> Result<(FrameHeader, Vec<u8>)> {
    // A peer that starts with anything else has no token, or is no member at all.
    let header = receive_header(stream).await.map_err(|e| match e.kind() {
        ErrorKind::Protocol => trust.unproved_error(),
        _ => e,
    })?;
    header.check_request()?;
    if !matches!(header.op, FrameOp::Challenge | FrameOp::Prove) || header.flags.contains(FrameFlags::ANSWER) {
        return Err(send_refusal(stream, &header, trust.unproved_error()).await);
    }
    let body = receive_body(stream, &header).await?;
    Ok((header, body))
}

async fn receive_header<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut GuardedStream<S>) -> Result<FrameHeader> {
    let mut head = [0; HEADER_LEN];
    let mut got = 0;
    while got < HEADER_LEN {
        match stream.read(&mut head[got..]).await.map_err(|e| connection_ended(&e))? {
            0 => return Err(Error::new(ErrorKind::Unavailable, "the other side closed the connection")),
            n => got += n,
        }
        FrameHeader::check_start(&head[..got])?;
    }
    Ok(FrameHeader::decode(&head)?)
}

async fn receive_body<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut GuardedStream<S>,
    header: &FrameHeader,
) -> Result<Vec<u8>> {
    let len = header.body_len as usize;
    if len > MAX_GREETING_BODY || header.payload_len != 0 {
        return Err(Error::new(ErrorKind::Protocol, "the message is too long for a proof"));
    }
    let mut body = vec![0; len + frame_padding(len).len()];
    stream.read_exact(&mut body).await.map_err(|e| connection_ended(&e))?;
    body.truncate(len);
    Ok(body)
}

async fn send_answer<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut GuardedStream<S>,
    request: &FrameHeader,
    value: &impl AnswerBody,
) -> Result<()> {
    let mut body = Vec::new();
    value.encode(&mut body);
    send_frame(stream, request, 0, &body).await
}

/// Sends the reason of a refusal, as far as the peer still reads.
async fn send_refusal<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut GuardedStream<S>,
    request: &FrameHeader,
    error: Error,
) -> Error {
    let mut body = Vec::new();
    encode_error_message(&error, &mut body);
    // The connection is refused in any case.
    let _ = send_frame(stream, request, error.kind().code(), &body).await;
    error
}

async fn send_frame<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut GuardedStream<S>,
    request: &FrameHeader,
    status: u16,
    body: &[u8],
) -> Result<()> {
    let header = request.new_answer(status, body.len(), 0)?;
    let frame = [&header.encode()[..], body, frame_padding(body.len())].concat();
    stream.write_all(&frame).await.map_err(|e| connection_ended(&e))?;
    stream.flush().await.map_err(|e| connection_ended(&e))
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for GuardedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            GuardedStream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            GuardedStream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for GuardedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            GuardedStream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            GuardedStream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            GuardedStream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            GuardedStream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            GuardedStream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            GuardedStream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
