//! The messages by which two peers prove to each other that they hold the same secret, before the handshake. The module knows
//! neither the secret nor how a proof is computed: bytes of fixed length.

use crate::codec::{ByteCursor, PutValue};
use crate::{AnswerBody, FrameError};

/// Length of a nonce in bytes.
pub const NONCE_LEN: usize = 32;
/// Length of a proof in bytes.
pub const PROOF_LEN: usize = 32;
/// The only proof scheme so far: HMAC-SHA-256 over both nonces, both names and the connection.
pub const PROOF_SCHEME: u16 = 1;
/// The longest name in a challenge in bytes.
pub const MAX_PEER_NAME: usize = 1024;

/// Starts a proof: the first request on a connection to a node that requires one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Challenge<'a> {
    /// The proof scheme; [`PROOF_SCHEME`].
    pub scheme: u16,
    /// Drawn for this connection.
    pub nonce: [u8; NONCE_LEN],
    /// The peer's name, for logs; covered by the proof.
    pub peer: &'a str,
}

/// Answers [`Challenge`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChallengeAnswer {
    /// Drawn for this connection.
    pub nonce: [u8; NONCE_LEN],
    /// The node's name; covered by the proof.
    pub node: String,
}

/// A value only a holder of the secret can compute: the peer's in the request, the node's in its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenProof(pub [u8; PROOF_LEN]);

impl<'a> Challenge<'a> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(self.scheme);
        out.extend_from_slice(&self.nonce);
        out.put_bytes(self.peer.as_bytes());
    }
    pub(crate) fn take_challenge(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        let scheme = take.take_u16("a scheme of proof")?;
        let nonce = take.take_array("a challenge")?;
        Ok(Challenge { scheme, nonce, peer: take_peer_name(take)? })
    }
}

fn take_peer_name<'a>(take: &mut ByteCursor<'a>) -> Result<&'a str, FrameError> {
    let name = take.take_text("a peer's name")?;
    if name.len() > MAX_PEER_NAME {
        let len = name.len() as u64;
        let max = MAX_PEER_NAME as u64;
        return Err(FrameError::TooLong { what: "a peer's name", len, max });
    }
    Ok(name)
}

impl AnswerBody for ChallengeAnswer {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.nonce);
        out.put_bytes(self.node.as_bytes());
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let challenged =
            ChallengeAnswer { nonce: take.take_array("a challenge")?, node: take_peer_name(&mut take)?.to_owned() };
        take.expect_end()?;
        Ok(challenged)
    }
}

impl AnswerBody for TokenProof {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let proof = TokenProof(take.take_array("a proof")?);
        take.expect_end()?;
        Ok(proof)
    }
}
