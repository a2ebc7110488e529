//! What a command asks the nodes of a group about staged objects. Knows no registry: the caller has the list of the nodes.

use crate::holder::READ_MAX;
use crate::manifest::{BucketKey, Manifest};
use crate::message::{KnownName, Reply, StageCall, StageReply, UnsavedList, unexpected};
use crate::peers::{PeerFailure, StagePeers, call_node, first_bytes, no_leader, succeeded};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time until a node that leads has answered.
const ASK_LEADER_TIME: Duration = Duration::from_secs(15);
const ASK_PAUSE: Duration = Duration::from_millis(250);
/// Longest time of a call.
const ASK_TIME: Duration = Duration::from_secs(5);
/// Longest time of a change, which waits for other changes of the name.
const ASKED_CHANGE_TIME: Duration = Duration::from_secs(25);
/// Behind all records, so that a node lists none.
const LAST_RECORD: &str = "~";

/// Why the nodes of a group do not answer a question about staged objects.
#[derive(Debug, Clone)]
pub enum StageRefusal {
    /// All nodes have answered, and no node keeps staged objects.
    NothingStaged,
    /// No node that leads has answered in time.
    NoLeader(Error),
    /// The answer is a failure.
    Failed(Error),
}

/// What a group knows of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StagedName {
    /// The object is staged.
    Object(Box<Manifest>),
    /// The object is removed, and the store's object of the name is not removed yet.
    Removing,
    /// The store decides.
    AtStore,
}

/// Questions of a command.
pub struct StageClient {
    peers: Arc<dyn StagePeers>,
}

impl StageClient {
    /// Questions to these nodes.
    pub fn new(peers: Arc<dyn StagePeers>) -> StageClient {
        StageClient { peers }
    }

    /// The objects that the store does not have.
    ///
    /// # Errors
    /// See [`StageRefusal`].
    pub fn list_unsaved(&self) -> std::result::Result<UnsavedList, StageRefusal> {
        match self.ask_leader(&StageCall::ListUnsaved, ASK_TIME)? {
            StageReply::Unsaved(unsaved) => Ok(unsaved),
            other => Err(StageRefusal::Failed(unexpected(&other).error)),
        }
    }

    /// The staged object of a name.
    ///
    /// # Errors
    /// See [`StageRefusal`].
    pub fn find(&self, at: &BucketKey) -> std::result::Result<StagedName, StageRefusal> {
        match self.ask_leader(&StageCall::Find(at.clone()), ASK_TIME)? {
            StageReply::Known(KnownName::Object(manifest)) => Ok(StagedName::Object(manifest)),
            StageReply::Known(KnownName::Removing) => Ok(StagedName::Removing),
            StageReply::Known(_) => Ok(StagedName::AtStore),
            other => Err(StageRefusal::Failed(unexpected(&other).error)),
        }
    }

    /// Gives up the upload or the removal of a name, for good.
    ///
    /// # Errors
    /// See [`StageRefusal`].
    pub fn give_up(&self, at: &BucketKey) -> std::result::Result<(), StageRefusal> {
        match self.ask_leader(&StageCall::Drop(at.clone()), ASKED_CHANGE_TIME)? {
            StageReply::Done => Ok(()),
            other => Err(StageRefusal::Failed(unexpected(&other).error)),
        }
    }

    /// Gives `sink` all bytes of an object, in order, from the nodes that have these.
    ///
    /// # Errors
    /// When no node has the bytes; those of `sink`.
    pub fn read(&self, manifest: &Manifest, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if manifest.pieces.is_empty() {
            if manifest.size > 0 {
                let call = StageCall::ReadInline { record: manifest.record.clone() };
                sink(&self.first_bytes(&manifest.holders, &call, manifest.size)?)?;
            }
            return Ok(());
        }
        for slice in manifest.pieces.iter().flat_map(|piece| &piece.slices) {
            let mut done = 0;
            while done < slice.len {
                let len = (slice.len - done).min(READ_MAX);
                let call = StageCall::ReadPart { part: slice.part.clone(), from: slice.from + done, len };
                sink(&self.first_bytes(&slice.holders, &call, len)?)?;
                done += len;
            }
        }
        Ok(())
    }

    fn first_bytes(&self, holders: &[String], call: &StageCall, len: u64) -> Result<Vec<u8>> {
        let ask = |node: &str| succeeded(self.call(node, call, READ_MAX as usize, 4 * ASK_TIME)?);
        first_bytes(holders.iter(), len, ask).map_err(|failure| failure.error)
    }

    fn call(
        &self,
        node: &str,
        call: &StageCall,
        room: usize,
        time: Duration,
    ) -> std::result::Result<Reply, PeerFailure> {
        call_node(&*self.peers, node, call, &[], room, Instant::now() + time)
    }

    /// Asks all nodes in turn, until the node that leads has answered. Each such call may be sent twice.
    fn ask_leader(&self, call: &StageCall, time: Duration) -> std::result::Result<StageReply, StageRefusal> {
        let deadline = Instant::now() + ASK_LEADER_TIME;
        loop {
            let asked = self.ask_each(call, time);
            if !matches!(asked, Err(StageRefusal::NoLeader(_))) || Instant::now() >= deadline {
                return asked;
            }
            std::thread::sleep(ASK_PAUSE);
        }
    }

    fn ask_each(&self, call: &StageCall, time: Duration) -> std::result::Result<StageReply, StageRefusal> {
        let names = self.peers.names();
        let mut silent = None;
        let mut followers = Vec::new();
        for node in &names {
            match self.call(node, call, 0, time) {
                Ok(Reply { reply: StageReply::NotLeader(_) | StageReply::OldTerm(_), .. }) => followers.push(node),
                Ok(Reply { reply: failed @ StageReply::Failed(_), .. }) => {
                    return Err(StageRefusal::Failed(refusal_of(failed)));
                }
                Ok(Reply { reply, .. }) => return Ok(reply),
                Err(failure) => match failure.into_error() {
                    error if error.kind() == ErrorKind::Unsupported => {}
                    error if error.kind() == ErrorKind::PermissionDenied => return Err(StageRefusal::Failed(error)),
                    error => silent = Some(error),
                },
            }
        }
        if followers.iter().any(|node| self.keeps_objects(node)) {
            return Err(StageRefusal::NoLeader(no_leader().error));
        }
        Err(silent.map_or(StageRefusal::NothingStaged, StageRefusal::NoLeader))
    }

    fn keeps_objects(&self, node: &str) -> bool {
        let probe = StageCall::ListKept { after: LAST_RECORD.to_owned() };
        matches!(self.call(node, &probe, 0, ASK_TIME), Ok(Reply { reply: StageReply::Kept(..), .. }))
    }
}

/// The error in an answer that is a failure.
fn refusal_of(reply: StageReply) -> Error {
    match reply {
        StageReply::Failed(failure) => spurline_object_store::RequestFailure::from(failure).error,
        other => unexpected(&other).error,
    }
}
