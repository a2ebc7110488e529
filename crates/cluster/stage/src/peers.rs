//! The other nodes of the group and its registry, as staged objects need them.

use crate::message::{Answer, Reply, SentFailure, StageCall, StageReply};
use serde::{Deserialize, Serialize};
use spurline_object_store::{RequestFailure, RetryHint};
use spurline_types::{Error, ErrorKind, Result, RetryAdvice};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Longer calls go as bytes, before their own.
const SHORT_CALL_MAX: usize = 60 << 10;
/// In the place of a call that goes as bytes.
const LONG_CALL: &[u8] = b"{}";

/// A call as it came, with its bytes.
///
/// # Errors
/// `Protocol` for a call that this release does not know.
pub fn decode_call<'a>(call: &[u8], bytes: &'a [u8]) -> Result<(StageCall, &'a [u8])> {
    if call != LONG_CALL {
        return Ok((serde_json::from_slice(call).map_err(|error| json_error(&error))?, bytes));
    }
    // The call, and the bytes behind.
    let mut calls = serde_json::Deserializer::from_slice(bytes).into_iter::<StageCall>();
    let call = calls.next().unwrap_or_else(|| Err(serde::de::Error::custom("nothing")));
    let call = call.map_err(|error| json_error(&error))?;
    Ok((call, &bytes[calls.byte_offset()..]))
}

/// A call as it goes, with its bytes.
fn encode_call<'a>(call: &StageCall, bytes: &'a [u8]) -> Result<(Vec<u8>, Cow<'a, [u8]>)> {
    let encoded = serde_json::to_vec(call).map_err(|error| json_error(&error))?;
    if encoded.len() <= SHORT_CALL_MAX {
        return Ok((encoded, bytes.into()));
    }
    Ok((LONG_CALL.to_vec(), [&encoded[..], bytes].concat().into()))
}

/// Why a node gave no answer.
#[derive(Debug, Clone)]
pub enum PeerFailure {
    /// The node did not get the call.
    NotSent(Error),
    /// The node may have executed the call.
    Lost(Error),
    /// The node's own error.
    Answered(Error),
}

impl PeerFailure {
    /// The error.
    pub fn into_error(self) -> Error {
        match self {
            PeerFailure::NotSent(error) | PeerFailure::Lost(error) | PeerFailure::Answered(error) => error,
        }
    }
}

impl From<PeerFailure> for RequestFailure {
    fn from(failure: PeerFailure) -> RequestFailure {
        failure_of(failure.into_error())
    }
}

/// The failure of a request to the group for this error.
pub fn failure_of(error: Error) -> RequestFailure {
    let is_final = error.kind().retry_advice() == RetryAdvice::Never;
    RequestFailure { advice: if is_final { RetryHint::Never } else { RetryHint::AfterPause }, error }
}

/// The nodes of the group.
pub trait StagePeers: Send + Sync {
    /// The names of all present nodes, this node included.
    fn names(&self) -> Vec<String>;

    /// Most bytes of a call to any node.
    fn frame_len(&self) -> usize {
        4 << 20
    }

    /// Sends a call to another node, once.
    ///
    /// # Errors
    /// Why there is no answer.
    fn call(
        &self,
        node: &str,
        call: &[u8],
        bytes: &[u8],
        room: usize,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Vec<u8>), PeerFailure>;
}

/// Sends a call to another node.
///
/// # Errors
/// Why there is no answer. A failure of the call itself is an answer.
pub fn call_node(
    peers: &dyn StagePeers,
    node: &str,
    call: &StageCall,
    bytes: &[u8],
    room: usize,
    deadline: Instant,
) -> Result<Reply, PeerFailure> {
    let (call, bytes) = encode_call(call, bytes).map_err(PeerFailure::NotSent)?;
    let (body, bytes) = peers.call(node, &call, &bytes, room, deadline)?;
    let reply: StageReply = serde_json::from_slice(&body).map_err(|error| PeerFailure::Lost(json_error(&error)))?;
    Ok(Reply { reply, bytes })
}

fn json_error(error: &serde_json::Error) -> Error {
    Error::new(ErrorKind::Protocol, format!("a call about staged files: {error}"))
}

/// The answer without failures.
///
/// # Errors
/// The failure of the call.
pub fn succeeded(reply: Reply) -> Answer<Reply> {
    match reply.reply {
        StageReply::Failed(failure) => Err(failure.into()),
        StageReply::OldTerm(term) => {
            let why = format!("another node keeps the order of staged files now, in term {term}");
            Err(RequestFailure::transient(ErrorKind::Unavailable, why))
        }
        StageReply::NotLeader(_) => Err(no_leader()),
        _ => Ok(reply),
    }
}

/// The bytes of the first of these nodes that sends as many.
///
/// # Errors
/// The last node's failure.
pub fn first_bytes<'a>(
    holders: impl Iterator<Item = &'a String>,
    len: u64,
    ask: impl Fn(&str) -> Answer<Reply>,
) -> Answer<Vec<u8>> {
    let mut last = None;
    for node in holders {
        match ask(node) {
            Ok(Reply { bytes, .. }) if bytes.len() as u64 == len => return Ok(bytes),
            Ok(Reply { bytes, .. }) => {
                let why = format!("node {node} sent {} bytes instead of {len}", bytes.len());
                last = Some(RequestFailure::transient(ErrorKind::Corrupt, why));
            }
            Err(failure) => last = Some(failure),
        }
    }
    Err(last.unwrap_or_else(no_holder))
}

/// The failure of a read that no node answers.
pub fn no_holder() -> RequestFailure {
    RequestFailure::transient(ErrorKind::Unavailable, "no node has the bytes".to_owned())
}

/// The failure while no node leads.
pub fn no_leader() -> RequestFailure {
    let why = "no node of the group keeps the order of staged files now; another takes over within seconds";
    RequestFailure::transient(ErrorKind::Unavailable, why.to_owned())
}

/// An answer for a result.
pub fn reply_of(result: Answer<Reply>) -> Reply {
    result.unwrap_or_else(|failure| StageReply::Failed(SentFailure::from(failure)).into())
}

/// The registry's record of the order of staged objects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TermFacts {
    /// The term.
    pub term: u64,
    /// The leader's name.
    pub leader: String,
    /// Identifies the leader's process.
    pub instance: u64,
    /// The nodes that may keep objects, with their failure domains.
    pub nodes: BTreeMap<String, String>,
    /// The nodes that the newest leader has compared with others, with the identities of their disks. What another node keeps may be older: nothing is taken from that
    /// one as long as all these answer, but for a failure domain.
    #[serde(default)]
    pub current: BTreeMap<String, u64>,
    /// Those of the nodes that may lack objects that were staged there: nodes that the leader has not heard, and those with lost objects.
    #[serde(default)]
    pub lacking: BTreeSet<String>,
}

/// The record of the registry.
pub trait TermRecord: Send + Sync {
    /// The facts, and the version of the record.
    ///
    /// # Errors
    /// The registry's.
    fn read(&self) -> Result<(u64, TermFacts)>;
    /// Replaces a record of this version; false if the version is another.
    ///
    /// # Errors
    /// The registry's; the record may have been replaced.
    fn replace(&self, version: u64, facts: &TermFacts) -> Result<bool>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest_samples::sample;

    #[test]
    fn calls_of_each_length_keep_their_bytes() {
        for marks in [0, 1, 5000] {
            let begun = (0..marks).map(|number| format!("{number:032x}")).collect();
            let manifest = crate::manifest::Manifest { begun, ..sample("a", "mark", 1) };
            let call = StageCall::Hold { term: 1, manifest: Box::new(manifest.clone()) };
            for bytes in [&b""[..], b"{}", b"bytes"] {
                let (sent, payload) = encode_call(&call, bytes).unwrap();
                assert_eq!(sent == LONG_CALL, marks > 1);
                let (found, rest) = decode_call(&sent, &payload).unwrap();
                assert!(matches!(found, StageCall::Hold { manifest: found, .. } if *found == manifest));
                assert_eq!(rest, bytes);
            }
        }
        assert!(decode_call(LONG_CALL, b"").is_err());
    }
}
