//! The messages by which two peers prove to each other that they hold the same secret, before the greeting. It knows
//! neither the secret nor how a proof is made: bytes of fixed length.

use crate::codec::{Put, Take};
use crate::{Body, FrameError};

/// Length of a challenge's random number in bytes.
pub const NONCE_LEN: usize = 32;
/// Length of a proof in bytes.
pub const PROOF_LEN: usize = 32;
/// The one way of proving there is so far: HMAC-SHA-256 over both sides' numbers, names and the connection.
pub const PROOF_SCHEME: u16 = 1;
/// The longest name in a challenge in bytes.
pub const MAX_PEER_NAME: usize = 1024;

/// Begins a proof: the first request on a connection to a node that asks for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Challenge<'a> {
    /// How the proof is made; [`PROOF_SCHEME`].
    pub scheme: u16,
    /// Drawn for this connection.
    pub nonce: [u8; NONCE_LEN],
    /// The peer's name for logs; part of what is proved.
    pub peer: &'a str,
}

/// Answers [`Challenge`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenged {
    /// Drawn for this connection.
    pub nonce: [u8; NONCE_LEN],
    /// The node's name; part of what is proved.
    pub node: String,
}

/// What only a holder of the secret can compute: in the request the peer's, in its answer the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof(pub [u8; PROOF_LEN]);

impl<'a> Challenge<'a> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(self.scheme);
        out.extend_from_slice(&self.nonce);
        out.put_bytes(self.peer.as_bytes());
    }
    pub(crate) fn take(take: &mut Take<'a>) -> Result<Self, FrameError> {
        let scheme = take.u16("a scheme of proof")?;
        let nonce = take.array("a challenge")?;
        Ok(Challenge { scheme, nonce, peer: name(take)? })
    }
}

fn name<'a>(take: &mut Take<'a>) -> Result<&'a str, FrameError> {
    let name = take.text("a peer's name")?;
    if name.len() > MAX_PEER_NAME {
        let (len, max) = (name.len() as u64, MAX_PEER_NAME as u64);
        return Err(FrameError::TooLong { what: "a peer's name", len, max });
    }
    Ok(name)
}

impl Body for Challenged {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.nonce);
        out.put_bytes(self.node.as_bytes());
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = Take(bytes);
        let challenged = Challenged { nonce: take.array("a challenge")?, node: name(&mut take)?.to_owned() };
        take.end()?;
        Ok(challenged)
    }
}

impl Body for Proof {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = Take(bytes);
        let proof = Proof(take.array("a proof")?);
        take.end()?;
        Ok(proof)
    }
}
