//! The proof of the group token: each side proves possession of the token, for this single connection, without sending the token.
//! Knows no message format.
//!
//! Both sides draw a nonce. The connecting peer proves first, with the first token; the node tries all tokens and answers with
//! the matching token, so that files with old and new tokens are compatible. A proof is HMAC-SHA-256 under the token over the
//! following fields, each preceded by its length: the name of this scheme, the role of the prover, the kind of connection, its
//! channel binding, both nonces, both names, and in the node's proof the peer's proof. Roles prevent reflection of a proof;
//! nonces prevent replay; the kind and the binding prevent use on another connection where that one is encrypted.

use crate::{GroupTokens, ProofConnection};
use aws_lc_rs::{hmac, rand};
use spurline_proto::{Challenge, ChallengeAnswer, MAX_PEER_NAME, NONCE_LEN, PROOF_LEN, PROOF_SCHEME, TokenProof};
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;

const PROOF_LABEL: &[u8] = b"spurline group proof 1";
const PEER_ROLE: &[u8] = b"peer";
const NODE_ROLE: &[u8] = b"node";
/// The kind of connections to a coordinator, beside `tcp` and `rdma` to a node.
pub(crate) const CONTROL: &str = "control";

/// The fields that both proofs of a connection cover.
#[derive(Clone)]
struct ProofTranscript {
    kind: String,
    binding: Vec<u8>,
    peer_nonce: [u8; NONCE_LEN],
    node_nonce: [u8; NONCE_LEN],
    peer: String,
    node: String,
}

impl ProofTranscript {
    /// The server of this connection, for messages.
    fn server_noun(&self) -> &'static str {
        if self.kind == CONTROL { "coordinator" } else { "node" }
    }

    fn signed_bytes(&self, role: &[u8], before: &[u8]) -> Vec<u8> {
        let parts: [&[u8]; 9] = [
            PROOF_LABEL,
            role,
            self.kind.as_bytes(),
            &self.binding,
            &self.peer_nonce,
            &self.node_nonce,
            self.peer.as_bytes(),
            self.node.as_bytes(),
            before,
        ];
        let mut out = Vec::with_capacity(parts.iter().map(|part| 4 + part.len()).sum());
        for part in parts {
            // Names and bindings are far shorter than u32.
            out.extend_from_slice(&(part.len() as u32).to_le_bytes());
            out.extend_from_slice(part);
        }
        out
    }

    fn sign_role(&self, key: &hmac::Key, role: &[u8], before: &[u8]) -> TokenProof {
        let tag = hmac::sign(key, &self.signed_bytes(role, before));
        let mut proof = [0; PROOF_LEN];
        proof.copy_from_slice(tag.as_ref());
        TokenProof(proof)
    }

    fn verify_role(&self, key: &hmac::Key, role: &[u8], before: &[u8], proof: &TokenProof) -> bool {
        // In constant time.
        hmac::verify(key, &self.signed_bytes(role, before), &proof.0).is_ok()
    }
}

fn draw_nonce() -> Result<[u8; NONCE_LEN]> {
    let mut nonce = [0; NONCE_LEN];
    rand::fill(&mut nonce)
        .map_err(|_| Error::new(ErrorKind::Io(EIO), "the operating system returns no random numbers"))?;
    Ok(nonce)
}

/// A name cut to the limit of a message.
fn cut_name(name: &str) -> String {
    name[..name.floor_char_boundary(MAX_PEER_NAME)].to_owned()
}

/// The side that connected.
pub struct TokenProver {
    tokens: Arc<GroupTokens>,
    transcript: ProofTranscript,
    shown: Option<TokenProof>,
}

impl TokenProver {
    pub(crate) fn new(tokens: Arc<GroupTokens>, name: &str, connection: ProofConnection<'_>) -> Result<TokenProver> {
        let transcript = ProofTranscript {
            kind: connection.kind.to_owned(),
            binding: connection.binding.to_vec(),
            peer_nonce: draw_nonce()?,
            node_nonce: [0; NONCE_LEN],
            peer: cut_name(name),
            node: String::new(),
        };
        Ok(TokenProver { tokens, transcript, shown: None })
    }

    /// The first message.
    pub fn challenge(&self) -> Challenge<'_> {
        Challenge { scheme: PROOF_SCHEME, nonce: self.transcript.peer_nonce, peer: &self.transcript.peer }
    }

    /// The second message, after the node's answer to the first.
    pub fn answer_challenge(&mut self, challenged: ChallengeAnswer) -> TokenProof {
        self.transcript.node_nonce = challenged.nonce;
        self.transcript.node = challenged.node;
        let proof = self.transcript.sign_role(&self.tokens.keys[0], PEER_ROLE, &[]);
        self.shown = Some(proof);
        proof
    }

    /// Checks the node's answer to the second message.
    ///
    /// # Errors
    /// `PermissionDenied` when the node does not hold the token.
    pub fn check_answer(&self, answer: &TokenProof) -> Result<()> {
        if self
            .shown
            .as_ref()
            .is_some_and(|shown| self.transcript.verify_role(&self.tokens.keys[0], NODE_ROLE, &shown.0, answer))
        {
            return Ok(());
        }
        let why = format!(
            "{} '{}' does not hold the group token, or its messages were changed in transit: no request is sent to it",
            self.transcript.server_noun(),
            self.transcript.node.escape_debug()
        );
        Err(Error::new(ErrorKind::PermissionDenied, why))
    }
}

/// The node's side after a challenge; valid for a single answer.
pub struct TokenVerifier {
    tokens: Arc<GroupTokens>,
    transcript: ProofTranscript,
}

impl TokenVerifier {
    /// Answers a challenge with a nonce of this side.
    ///
    /// # Errors
    /// `Unsupported` for a scheme of a newer release, or when there is no randomness.
    pub fn new(
        tokens: Arc<GroupTokens>,
        name: &str,
        connection: ProofConnection<'_>,
        challenge: &Challenge<'_>,
    ) -> Result<(TokenVerifier, ChallengeAnswer)> {
        let transcript = ProofTranscript {
            kind: connection.kind.to_owned(),
            binding: connection.binding.to_vec(),
            peer_nonce: challenge.nonce,
            node_nonce: draw_nonce()?,
            peer: challenge.peer.to_owned(),
            node: cut_name(name),
        };
        if challenge.scheme != PROOF_SCHEME {
            let why = format!(
                "this {} uses proof scheme {PROOF_SCHEME}, the peer {}: run the same release on both sides",
                transcript.server_noun(),
                challenge.scheme
            );
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let challenged = ChallengeAnswer { nonce: transcript.node_nonce, node: transcript.node.clone() };
        Ok((TokenVerifier { tokens, transcript }, challenged))
    }

    /// The node's own proof, if the peer's is valid.
    ///
    /// # Errors
    /// `PermissionDenied` when the peer holds none of the tokens.
    pub fn check_proof(self, proof: &TokenProof) -> Result<TokenProof> {
        let holder = |transcript: &ProofTranscript| {
            self.tokens.keys.iter().find(|key| transcript.verify_role(key, PEER_ROLE, &[], proof))
        };
        if let Some(key) = holder(&self.transcript) {
            return Ok(self.transcript.sign_role(key, NODE_ROLE, &proof.0));
        }
        // The token may be right and the port wrong: a node's port instead of a coordinator's, or the reverse.
        let own = self.transcript.server_noun();
        for (kind, meant) in [(CONTROL, "coordinator"), ("tcp", "node")] {
            let other = ProofTranscript { kind: kind.to_owned(), ..self.transcript.clone() };
            if meant != own && holder(&other).is_some() {
                let peer = self.transcript.peer.escape_debug();
                let why = format!(
                    "'{peer}' expected a {meant} on the port of {own} '{}': give it the {meant}'s port",
                    self.transcript.node
                );
                return Err(Error::new(ErrorKind::PermissionDenied, why));
            }
        }
        let why = format!(
            "'{}' proved another group token than {own} '{}' has: give both the same --group-token-file",
            self.transcript.peer.escape_debug(),
            self.transcript.node
        );
        Err(Error::new(ErrorKind::PermissionDenied, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "old-q5Ykm0WJ7b2uR1xTzv9sLd3f";
    const NEW: &str = "new-q5Ykm0WJ7b2uR1xTzv9sLd3f";

    fn tokens(lines: &[&str]) -> Arc<GroupTokens> {
        Arc::new(GroupTokens::parse(lines.join("\n").as_bytes()).unwrap())
    }

    fn connection(kind: &'static str, binding: &'static [u8]) -> ProofConnection<'static> {
        ProofConnection { kind, binding }
    }

    /// Whether peer and node accept each other.
    fn agree(peer: (&[&str], ProofConnection<'_>), node: (&[&str], ProofConnection<'_>)) -> Result<()> {
        let mut prover = TokenProver::new(tokens(peer.0), "peer", peer.1)?;
        let (asked, challenged) = TokenVerifier::new(tokens(node.0), "node", node.1, &prover.challenge())?;
        let answer = asked.check_proof(&prover.answer_challenge(challenged))?;
        prover.check_answer(&answer)
    }

    #[test]
    fn the_same_token_on_the_same_connection_and_nothing_else() {
        let (tcp, rdma) = (connection("tcp", b""), connection("rdma", b""));
        agree((&[OLD], tcp), (&[OLD], tcp)).unwrap();
        agree((&[OLD], tcp), (&[NEW], tcp)).unwrap_err();
        agree((&[OLD], tcp), (&[OLD], rdma)).unwrap_err();
        agree((&[OLD], connection("tcp", b"one")), (&[OLD], connection("tcp", b"one"))).unwrap();
        agree((&[OLD], connection("tcp", b"one")), (&[OLD], connection("tcp", b"two"))).unwrap_err();
        agree((&[OLD], connection("tcp", b"one")), (&[OLD], tcp)).unwrap_err();
    }

    #[test]
    fn the_right_token_on_the_wrong_port_is_told_so() {
        let (tcp, control) = (connection("tcp", b"b"), connection(CONTROL, b"b"));
        for (peer, node, says) in [(tcp, control, "the node's port"), (control, tcp, "the coordinator's port")] {
            let error = agree((&[OLD], peer), (&[OLD], node)).unwrap_err();
            assert!(error.message().contains(says), "{error}");
            let error = agree((&[OLD], peer), (&[NEW], node)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        }
    }

    #[test]
    fn another_token_names_the_kind_of_server() {
        for (kind, server) in [("tcp", "node 'node'"), ("rdma", "node 'node'"), (CONTROL, "coordinator 'node'")] {
            let connection = connection(kind, b"");
            let error = agree((&[OLD], connection), (&[NEW], connection)).unwrap_err();
            assert!(error.message().contains(&format!("than {server} has")), "{error}");
            let mut prover = TokenProver::new(tokens(&[OLD]), "peer", connection).unwrap();
            let challenge = prover.challenge();
            let (_, challenged) = TokenVerifier::new(tokens(&[NEW]), "node", connection, &challenge).unwrap();
            let proof = prover.answer_challenge(challenged);
            let error = prover.check_answer(&proof).unwrap_err();
            assert!(error.message().starts_with(&format!("{server} does not hold the group token")), "{error}");
        }
    }

    #[test]
    fn a_token_is_changed_one_member_after_the_other() {
        let tcp = connection("tcp", b"");
        let steps: [&[&str]; 4] = [&[OLD], &[OLD, NEW], &[NEW, OLD], &[NEW]];
        for pair in steps.windows(2) {
            agree((pair[0], tcp), (pair[1], tcp)).unwrap();
            agree((pair[1], tcp), (pair[0], tcp)).unwrap();
        }
        agree((steps[0], tcp), (steps[3], tcp)).unwrap_err();
    }

    #[test]
    fn a_proof_is_good_once_and_in_one_direction() {
        let tcp = connection("tcp", b"");
        let mut prover = TokenProver::new(tokens(&[OLD]), "peer", tcp).unwrap();
        let challenge = prover.challenge();
        let (asked, challenged) = TokenVerifier::new(tokens(&[OLD]), "node", tcp, &challenge).unwrap();
        // The same challenge again gets another nonce.
        let (again, _) = TokenVerifier::new(tokens(&[OLD]), "node", tcp, &challenge).unwrap();
        let proof = prover.answer_challenge(challenged);
        again.check_proof(&proof).map(|_| ()).unwrap_err();
        let answer = asked.check_proof(&proof).unwrap();
        assert_ne!(answer, proof);
        prover.check_answer(&answer).unwrap();
        // A node without the token can only send back what it was sent.
        assert_eq!(prover.check_answer(&proof).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(prover.check_answer(&TokenProof([0; PROOF_LEN])).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn parts_of_a_transcript_cannot_change_places() {
        let with = |peer: &str, node: &str| ProofTranscript {
            kind: "tcp".into(),
            binding: Vec::new(),
            peer_nonce: [1; NONCE_LEN],
            node_nonce: [2; NONCE_LEN],
            peer: peer.into(),
            node: node.into(),
        };
        assert_ne!(with("ab", "c").signed_bytes(PEER_ROLE, b""), with("a", "bc").signed_bytes(PEER_ROLE, b""));
        assert_ne!(with("a", "c").signed_bytes(PEER_ROLE, b""), with("a", "c").signed_bytes(NODE_ROLE, b""));
    }

    proptest::proptest! {
        #[test]
        fn no_other_bytes_are_a_proof(flip in 0usize..PROOF_LEN * 8, name in ".{0,40}", kind in ".{0,8}", binding: Vec<u8>) {
            let connection = ProofConnection { kind: &kind, binding: &binding };
            let mut prover = TokenProver::new(tokens(&[OLD]), &name, connection).unwrap();
            let (asked, challenged) = TokenVerifier::new(tokens(&[NEW, OLD]), &name, connection, &prover.challenge()).unwrap();
            let proof = prover.answer_challenge(challenged);
            let mut answer = asked.check_proof(&proof).unwrap();
            prover.check_answer(&answer).unwrap();
            answer.0[flip / 8] ^= 1 << (flip % 8);
            proptest::prop_assert!(prover.check_answer(&answer).is_err());
        }
    }
}
