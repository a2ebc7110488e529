//! The proof that a peer must give before the handshake, and how a reader gives the proof on a channel. Knows neither the secret
//! nor the bytes of a connection.

use crate::Channel;
use crate::channel::call_decoded;
use parking_lot::Mutex;
use spurline_proto::{Challenge, ChallengeAnswer, NodeRequest, TokenProof};
use spurline_trust::{ProofConnection, TokenVerifier, Trust};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Limit of challenges per connection. A holder of the token needs a single challenge.
const MAX_CHALLENGES: u32 = 2;

/// The node's side of the proof, for a connection.
pub(crate) struct ProofGate {
    trust: Arc<Trust>,
    kind: String,
    binding: OnceLock<Vec<u8>>,
    verifier: Mutex<Option<TokenVerifier>>,
    /// Challenges received so far.
    challenges: AtomicU32,
    passed: AtomicBool,
    stats: Arc<Stats>,
}

impl fmt::Debug for ProofGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.passed() { "open" } else { "shut" })
    }
}

impl ProofGate {
    pub fn new(trust: &Arc<Trust>, kind: &str, stats: &Arc<Stats>) -> ProofGate {
        let passed = AtomicBool::new(trust.tokens().is_none());
        ProofGate {
            trust: Arc::clone(trust),
            kind: kind.to_owned(),
            binding: OnceLock::new(),
            verifier: Mutex::new(None),
            challenges: AtomicU32::new(0),
            passed,
            stats: Arc::clone(stats),
        }
    }

    /// Sets the channel binding, once the connection is encrypted.
    pub fn set_binding(&self, binding: &[u8]) {
        self.binding.get_or_init(|| binding.to_vec());
    }

    pub fn passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }

    pub fn unproved_error(&self) -> Error {
        self.trust.unproved_error()
    }

    /// Answers a challenge. Each nonce is valid for a single proof, so a peer may start again, but not without limit: each answer
    /// costs time and send buffer. The first wrong proof ends the connection.
    pub fn answer_challenge(&self, challenge: &Challenge<'_>) -> Result<ChallengeAnswer> {
        let Some(tokens) = self.trust.tokens() else {
            return Err(no_token());
        };
        if self.challenges.fetch_add(1, Ordering::Relaxed) >= MAX_CHALLENGES {
            let why = format!("more than {MAX_CHALLENGES} challenges on one connection");
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        let connection = ProofConnection { kind: &self.kind, binding: self.binding.get().map_or(b"", Vec::as_slice) };
        let (asked, challenged) = TokenVerifier::new(tokens, self.trust.name(), connection, challenge)?;
        *self.verifier.lock() = Some(asked);
        Ok(challenged)
    }

    pub fn check_proof(&self, proof: &TokenProof) -> Result<TokenProof> {
        let Some(asked) = self.verifier.lock().take() else {
            return Err(Error::new(ErrorKind::Protocol, "a proof came before a challenge"));
        };
        let answer = asked.check_proof(proof)?;
        self.stats.trust.proved.add(1);
        self.passed.store(true, Ordering::Release);
        Ok(answer)
    }
}

/// The error a node without a token sends to a peer with a token; the peer then ends the connection.
pub(crate) fn no_token() -> Error {
    let why = "this node requires no group token: start it with --group-token-file too, or this peer without";
    Error::new(ErrorKind::PermissionDenied, why)
}

/// Proves the group token on a channel that was just opened, and verifies the node's proof. Does nothing where
/// `trust` has no token. `binding` is the connection's channel binding, empty where the connection is not encrypted.
///
/// # Errors
/// As [`Channel::call`]; `PermissionDenied` when either side does not hold the other's token.
pub fn prove_token(channel: &mut dyn Channel, trust: &Trust, binding: &[u8], deadline: Instant) -> Result<()> {
    let kind = channel.endpoints().kind.to_string();
    let Some(mut prover) = trust.prover(ProofConnection { kind: &kind, binding })? else { return Ok(()) };
    let mut body = Vec::new();
    let challenged: ChallengeAnswer =
        call_decoded(channel, &NodeRequest::Challenge(prover.challenge()), &mut body, deadline).map_err(Error::from)?;
    let proof = prover.answer_challenge(challenged);
    let answer: TokenProof =
        call_decoded(channel, &NodeRequest::Prove(proof), &mut body, deadline).map_err(Error::from)?;
    prover.check_answer(&answer).map_err(|e| e.context(channel.endpoints()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_trust::GroupTokens;

    #[test]
    fn a_peer_may_begin_anew_and_not_for_ever() {
        let trust = Trust::with_tokens("node", GroupTokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap());
        let gate = ProofGate::new(&trust, "tcp", &Arc::default());
        let prover = trust.prover(ProofConnection { kind: "tcp", binding: b"" }).unwrap().unwrap();
        for _ in 0..MAX_CHALLENGES {
            gate.answer_challenge(&prover.challenge()).unwrap();
        }
        let error = gate.answer_challenge(&prover.challenge()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(!gate.passed());
    }
}
