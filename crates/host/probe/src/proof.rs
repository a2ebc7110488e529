//! The proof of the group token on a control connection, in frames. The scheme is that of the trust crate.

use crate::frame::{self, Frame, MAX_BODY, REFUSED};
use crate::message::{self, ProofChallenge, ProofNonce, ProofTag, kind};
use spurline_proto::{Challenge, ChallengeAnswer, TokenProof};
use spurline_trust::{ProofConnection, TokenVerifier, Trust};
use spurline_types::{Error, ErrorKind, Result};
use std::net::TcpStream;
use std::time::Instant;

/// A proof is valid for connections of this kind only.
const PROBE_CONNECTION: ProofConnection<'static> = ProofConnection { kind: "probe", binding: b"" };

/// Proves the client's token, if any, and checks the server's proof.
///
/// # Errors
/// The server's refusal; `PermissionDenied` when the server does not hold the token.
pub(crate) fn prove(socket: &TcpStream, trust: &Trust, deadline: Instant) -> Result<()> {
    let Some(mut prover) = trust.prover(PROBE_CONNECTION)? else { return Ok(()) };
    let Challenge { scheme, nonce, peer } = prover.challenge();
    let challenge = ProofChallenge { scheme, nonce: nonce.to_vec(), peer: peer.to_owned() };
    let body = message::encode_message(&challenge);
    let ProofNonce { nonce, node } = exchange(socket, kind::CHALLENGE, &body, kind::CHALLENGED, deadline)?;
    let proof = prover.answer_challenge(ChallengeAnswer { nonce: fixed(&nonce)?, node });
    let body = message::encode_message(&ProofTag { proof: proof.0.to_vec() });
    let ProofTag { proof } = exchange(socket, kind::PROVE, &body, kind::PROVED, deadline)?;
    prover.check_answer(&TokenProof(fixed(&proof)?))
}

/// Checks the proof of a client whose first frame is `first`; returns the next frame.
///
/// # Errors
/// `PermissionDenied` for a client without the token; to be sent there as the refusal.
pub(crate) fn check(socket: &TcpStream, trust: &Trust, first: Frame, deadline: Instant) -> Result<Option<Frame>> {
    let Some(tokens) = trust.tokens() else {
        if first.head.kind != kind::CHALLENGE {
            return Ok(Some(first));
        }
        let why = "this server has no group token: start it with --group-token-file, or measure without one";
        return Err(Error::new(ErrorKind::PermissionDenied, why));
    };
    // A data connection is identified by the token of the measurement, which only proven clients get.
    if first.head.kind == kind::ATTACH {
        return Ok(Some(first));
    }
    if first.head.kind != kind::CHALLENGE {
        let why = "this server requires a proof of the group token: use --group-token-file with the server's token";
        return Err(Error::new(ErrorKind::PermissionDenied, why));
    }
    let challenge: ProofChallenge = message::decode_message(&first.body)?;
    let nonce = fixed(&challenge.nonce)?;
    let challenge = Challenge { scheme: challenge.scheme, nonce, peer: &challenge.peer };
    let (verifier, answer) = TokenVerifier::new(tokens, trust.name(), PROBE_CONNECTION, &challenge)?;
    let nonce = ProofNonce { nonce: answer.nonce.to_vec(), node: answer.node };
    frame::send_frame(socket, kind::CHALLENGED, &message::encode_message(&nonce), deadline)?;
    let shown: ProofTag = match frame::receive_frame(socket, MAX_BODY, deadline)? {
        Some(frame) if frame.head.kind == kind::PROVE => message::decode_message(&frame.body)?,
        _ => return Err(Error::new(ErrorKind::Protocol, "the client sent no proof")),
    };
    let proof = verifier.check_proof(&TokenProof(fixed(&shown.proof)?))?;
    let body = message::encode_message(&ProofTag { proof: proof.0.to_vec() });
    frame::send_frame(socket, kind::PROVED, &body, deadline)?;
    frame::receive_frame(socket, MAX_BODY, deadline)
}

fn exchange<T: serde::de::DeserializeOwned>(
    socket: &TcpStream,
    kind: u16,
    body: &[u8],
    answer: u16,
    deadline: Instant,
) -> Result<T> {
    frame::send_frame(socket, kind, body, deadline)?;
    match frame::receive_frame(socket, MAX_BODY, deadline)? {
        Some(frame) if frame.head.kind == answer => message::decode_message(&frame.body),
        Some(frame) if frame.head.kind == REFUSED => {
            let why: String =
                String::from_utf8_lossy(&frame.body).chars().filter(|c| !c.is_control()).take(500).collect();
            Err(Error::new(ErrorKind::PermissionDenied, why))
        }
        Some(_) => Err(Error::new(ErrorKind::Protocol, "an unexpected answer to the proof of the group token")),
        None => Err(Error::new(ErrorKind::Unavailable, "the server closed the connection during the proof")),
    }
}

fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N]> {
    bytes.try_into().map_err(|_| Error::new(ErrorKind::Protocol, "a message of the proof has the wrong length"))
}
