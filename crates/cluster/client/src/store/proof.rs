//! The processes that may get the requests of a mount: each has shown that its store is that of the others, or takes no changes. Knows no
//! request of a writer.

use super::{AttemptFailure, StoreAttempt, StoreLink, unexpected};
use crate::peer::GroupPeer;
use bytes::Bytes;
use spurline_proto::{StoreAnswer, StoreAttributes, StoreCall};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time of a request that compares the stores of two nodes.
const PROOF_TIME: Duration = Duration::from_secs(10);
/// The key of the upload by which stores are compared, below the source; never an object.
const PROOF_KEY: &str = ".spurline-node";

/// A process to which requests can be sent.
#[derive(Clone, Copy)]
struct StoreProcess<'a> {
    peer: &'a GroupPeer,
    instance: u64,
}

/// A process of a node.
#[derive(Clone)]
pub(super) struct KnownProcess {
    node: Arc<str>,
    instance: u64,
}

impl StoreLink {
    /// Whether a process may get requests.
    pub(super) fn is_known(&self, instance: u64) -> bool {
        self.proven.read().iter().chain(self.readers.read().iter()).any(|known| known.instance == instance)
    }

    /// Whether a node took no changes when this mount reached it first.
    pub(super) fn is_reader(&self, node: &str) -> bool {
        self.readers.read().iter().any(|known| *known.node == *node)
    }

    /// Compares the store of a process with that of the others. If none of the others can be reached, this process is the first again.
    /// One that takes no changes is noted as such.
    ///
    /// # Errors
    /// `PermissionDenied` for another store; why the process does not answer.
    pub(super) fn prove(self: &Arc<Self>, peer: &GroupPeer, instance: u64) -> Result<()> {
        let _proving = self.proving.lock();
        if self.is_known(instance) {
            return Ok(());
        }
        let process = KnownProcess { node: peer.name().into(), instance };
        let described = self.ask(StoreProcess { peer, instance }, &StoreCall::Describe);
        let mut readers = self.readers.write();
        readers.retain(|reader| reader.node != process.node);
        if described.is_err_and(|error| error.kind() == ErrorKind::ReadOnly) {
            readers.push(process);
            return Ok(());
        }
        drop(readers);
        let known = self.proven.read().clone();
        let view = self.client.members().snapshot();
        let mut compared_with = None;
        for process in &known {
            let Some(index) = view.members().iter().position(|member| *member.name == *process.node) else { continue };
            let other = view.peer(index as u32);
            if let Some(is_same) = self.compare_stores(
                StoreProcess { peer: other, instance: process.instance },
                StoreProcess { peer, instance },
            )? {
                compared_with = Some((other.name(), is_same));
                break;
            }
        }
        if let Some((other, false)) = compared_with {
            let why = format!(
                "node {} has another store than node {other} for {}: start both with the same --endpoint-url and credentials",
                peer.name(),
                self.client.source()
            );
            return Err(Error::new(ErrorKind::PermissionDenied, why));
        }
        let mut proven = self.proven.write();
        // The earlier process of this node is gone.
        proven.retain(|known| compared_with.is_some() && known.node != process.node);
        proven.push(process);
        Ok(())
    }

    /// Whether `new` has the store of `known`; `None` when the latter can't be reached.
    ///
    /// # Errors
    /// The failure of `new`.
    fn compare_stores(self: &Arc<Self>, known: StoreProcess<'_>, new: StoreProcess<'_>) -> Result<Option<bool>> {
        let key = format!("{}{PROOF_KEY}", self.root);
        let begin = StoreCall::BeginUpload { key: &key, attributes: StoreAttributes::default() };
        let Ok(StoreAnswer::Text(upload)) = self.ask(known, &begin) else { return Ok(None) };
        let abort = StoreCall::Abort { key: &key, upload: &upload };
        let ended = self.ask(new, &abort);
        if !matches!(ended, Ok(StoreAnswer::Done)) {
            // Without parts, an upload that stays costs nothing.
            let _ = self.ask(known, &abort);
        }
        match ended? {
            StoreAnswer::Done => Ok(Some(true)),
            StoreAnswer::Failed(error, _) if error.kind() == ErrorKind::NotFound => Ok(Some(false)),
            StoreAnswer::Failed(error, _) => Err(error),
            other => Err(unexpected(&other).error),
        }
    }

    /// Sends a request to a process that is not proven.
    fn ask(self: &Arc<Self>, process: StoreProcess<'_>, call: &StoreCall<'_>) -> Result<StoreAnswer> {
        let attempt = StoreAttempt::new(self, self.home_of(""), call, Bytes::new());
        let attempt = StoreAttempt { needs_proof: false, time: PROOF_TIME, ..attempt };
        let deadline = Instant::now() + PROOF_TIME;
        match attempt.exchange(process.peer, Some(process.instance), call, &[], &mut [], deadline) {
            Ok(answered) => Ok(answered.answer),
            Err(AttemptFailure::NotSent(error) | AttemptFailure::Lost(error)) => Err(error),
            Err(AttemptFailure::Unproven(_)) => Err(Error::new(ErrorKind::Protocol, "a proof needs no proof")),
        }
    }
}
