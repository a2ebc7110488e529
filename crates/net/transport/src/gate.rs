//! What a peer has to prove before its greeting is looked at, and how it does so on a channel. It knows neither the
//! secret nor a connection's bytes.

use crate::Channel;
use crate::channel::call_for;
use parking_lot::Mutex;
use spurline_proto::{Challenge, Challenged, Proof, Request};
use spurline_trust::{Asked, Connection, Trust};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The most challenges of one connection. One is enough for who holds the token.
const CHALLENGES: u32 = 2;

/// The node's side of one connection.
pub(crate) struct Gate {
    trust: Arc<Trust>,
    kind: String,
    binding: OnceLock<Vec<u8>>,
    asked: Mutex<Option<Asked>>,
    /// Challenges there were.
    challenges: AtomicU32,
    passed: AtomicBool,
    stats: Arc<Stats>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.passed() { "open" } else { "shut" })
    }
}

impl Gate {
    pub fn new(trust: &Arc<Trust>, kind: &str, stats: &Arc<Stats>) -> Gate {
        let passed = AtomicBool::new(trust.tokens().is_none());
        Gate {
            trust: Arc::clone(trust),
            kind: kind.to_owned(),
            binding: OnceLock::new(),
            asked: Mutex::new(None),
            challenges: AtomicU32::new(0),
            passed,
            stats: Arc::clone(stats),
        }
    }

    /// The channel binding, once the connection is encrypted.
    pub fn bind(&self, binding: &[u8]) {
        self.binding.get_or_init(|| binding.to_vec());
    }

    pub fn passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }

    pub fn unproved(&self) -> Error {
        self.trust.unproved()
    }

    /// Answers a challenge. Each number is good for one proof, so a peer may begin anew, but not for ever: each answer takes
    /// time, and room on the way to the peer. The connection ends with its first wrong proof.
    pub fn challenged(&self, challenge: &Challenge<'_>) -> Result<Challenged> {
        let Some(tokens) = self.trust.tokens() else {
            return Err(no_token());
        };
        if self.challenges.fetch_add(1, Ordering::Relaxed) >= CHALLENGES {
            let why = format!("more than {CHALLENGES} challenges on one connection");
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        let connection = Connection { kind: &self.kind, binding: self.binding.get().map_or(b"", Vec::as_slice) };
        let (asked, challenged) = Asked::new(tokens, self.trust.name(), connection, challenge)?;
        *self.asked.lock() = Some(asked);
        Ok(challenged)
    }

    pub fn proved(&self, proof: &Proof) -> Result<Proof> {
        let Some(asked) = self.asked.lock().take() else {
            return Err(Error::new(ErrorKind::Protocol, "a proof came before a challenge"));
        };
        let answer = asked.check(proof)?;
        self.stats.trust.proved.add(1);
        self.passed.store(true, Ordering::Release);
        Ok(answer)
    }
}

/// What a node without a token says to a peer that has one, which will then not talk to it.
pub(crate) fn no_token() -> Error {
    let why = "this node asks nobody for a group token: start it with --group-token-file too, or this peer without";
    Error::new(ErrorKind::PermissionDenied, why)
}

/// Proves the group token on a channel that was just opened, and has the node prove it; nothing happens where `trust`
/// has no token. `binding` is the connection's channel binding, empty where nothing is encrypted.
///
/// # Errors
/// Those of [`Channel::call`]; `PermissionDenied` when one side does not hold the other's token.
pub fn prove(channel: &mut dyn Channel, trust: &Trust, binding: &[u8], deadline: Instant) -> Result<()> {
    let kind = channel.endpoints().kind.to_string();
    let Some(mut prover) = trust.prover(Connection { kind: &kind, binding })? else { return Ok(()) };
    let mut body = Vec::new();
    let challenged: Challenged =
        call_for(channel, &Request::Challenge(prover.challenge()), &mut body, deadline).map_err(Error::from)?;
    let proof = prover.prove(challenged);
    let answer: Proof = call_for(channel, &Request::Prove(proof), &mut body, deadline).map_err(Error::from)?;
    prover.check(&answer).map_err(|e| e.context(channel.endpoints()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_trust::Tokens;

    #[test]
    fn a_peer_may_begin_anew_and_not_for_ever() {
        let trust = Trust::with_tokens("node", Tokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap());
        let gate = Gate::new(&trust, "tcp", &Arc::default());
        let prover = trust.prover(Connection { kind: "tcp", binding: b"" }).unwrap().unwrap();
        for _ in 0..CHALLENGES {
            gate.challenged(&prover.challenge()).unwrap();
        }
        let error = gate.challenged(&prover.challenge()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(!gate.passed());
    }
}
