//! Proves that the nodes of a group write to one source: a folder that one node makes is seen by the others. Knows
//! no request of a program.

use super::{CallDeadline, CallTarget, HomeProcess, RequestContext, WriteCalls, attr_of, settle_answer};
use crate::peer::GroupPeer;
use parking_lot::{Mutex, RwLock};
use spurline_proto::{MIN_STORE_VERSION, MIN_WRITE_VERSION, NumberList, WelcomeAnswer, WriteCall};
use spurline_sys::random;
use spurline_types::errno::ENOENT;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, Change, FileIdentity, NamePath, NodePath};
use std::time::Instant;

/// Changes that may come again, at most: one for each thread of the mount, and of the processes before while they ended within a
/// minute each.
const REPEATABLE_MAX: usize = 2048;
const ROOT: NodePath<'static> = NodePath { path: b"", expected: None };

/// The processes that were seen to have the same directory.
#[derive(Default)]
pub(crate) struct ProvenProcesses {
    proven: RwLock<Vec<HomeProcess>>,
    /// The directory itself, as the first of them has it.
    root: Mutex<Option<FileIdentity>>,
    /// Held during a proof.
    proving: Mutex<()>,
}

impl ProvenProcesses {
    /// Whether a process with this random number is among them.
    pub fn contains(&self, instance: u64) -> bool {
        self.proven.read().iter().any(|known| known.instance == instance)
    }

    fn add(&self, process: HomeProcess) {
        let mut proven = self.proven.write();
        // The earlier process of this node is gone.
        proven.retain(|known| known.node != process.node);
        proven.push(process);
    }
}

impl WriteCalls {
    /// Checks that a node understands the calls of this release.
    ///
    /// # Errors
    /// `Unsupported` when it is older.
    pub(crate) fn check_version(&self, welcome: &WelcomeAnswer) -> Result<()> {
        let needed = if self.about_paths { MIN_STORE_VERSION } else { MIN_WRITE_VERSION };
        if welcome.version >= needed {
            return Ok(());
        }
        let why = format!(
            "node {} speaks protocol version {}, and writes of this mount need {needed}: the node's release is older; \
             upgrade spurline on its host, or mount without --rw",
            welcome.node, welcome.version
        );
        Err(Error::new(ErrorKind::Unsupported, why))
    }

    /// Whether requests may go to this process.
    pub(crate) fn is_trusted(&self, instance: u64) -> bool {
        self.about_paths || self.proofs.contains(instance) || !self.needs_proofs()
    }

    /// A lone node needs no proof, unless it has to know first which changes may come again.
    fn needs_proofs(&self) -> bool {
        self.goes_on || self.client.members().snapshot().members().len() > 1
    }

    /// Checks the release of all nodes that can be reached, and proves their directories.
    ///
    /// # Errors
    /// When a node has another directory, or is too old for changes.
    pub(crate) fn prove_all(&self) -> Result<()> {
        let view = self.client.members().snapshot();
        let lone = view.members().len() < 2;
        for index in 0..view.members().len() {
            let peer = view.peer(index as u32);
            let until = Instant::now() + self.client.patience().absence;
            let reached = peer.tcp_pool().checkout(until);
            let instance = reached.map(|lease| self.check_version(lease.welcome()).map(|()| lease.welcome().instance));
            match instance {
                // It is proved when it is back.
                Err(error) if !lone => {
                    tracing::warn!(peer = peer.name(), %error, "a node is away, and proves its directory later")
                }
                // The first request reports it.
                Err(_) => {}
                Ok(instance) => {
                    let instance = instance?;
                    if self.needs_proofs() {
                        self.prove_process(peer, instance, self.begin())?;
                    }
                    if self.goes_on {
                        // An earlier process may have made changes there.
                        self.note_touched(&HomeProcess { node: peer.name().into(), instance });
                    }
                }
            }
        }
        Ok(())
    }

    /// Proves that this process has the directory of the others.
    ///
    /// # Errors
    /// `PermissionDenied` when it has another one; why that can't be known.
    pub(crate) fn prove_process(&self, peer: &GroupPeer, instance: u64, deadline: CallDeadline) -> Result<()> {
        let _one = self.proofs.proving.lock();
        if self.proofs.contains(instance) {
            return Ok(());
        }
        let process = HomeProcess { node: peer.name().into(), instance };
        self.keep_answers(&process, deadline)?;
        let root = self.find_identity(&process, &WriteCall::Stat(ROOT), deadline)?;
        let witnesses = self.proofs.proven.read().clone();
        let mut why = None;
        for witness in witnesses.iter().rev() {
            match self.probe(witness, &process, deadline) {
                Ok(true) => {
                    self.proofs.add(process);
                    return Ok(());
                }
                Ok(false) => return Err(self.refuse(peer, witness)),
                Err(error) => why = Some(error),
            }
        }
        // No witness is left: all nodes were started again. The directory is the same if its identity is.
        let mut known = self.proofs.root.lock();
        match (*known, why) {
            (Some(known), Some(why)) if known != root => {
                Err(why
                    .context(format_args!("whether node {} has the directory of the others is unknown", peer.name())))
            }
            _ => {
                *known = Some(root);
                self.proofs.add(process);
                Ok(())
            }
        }
    }

    /// Before the first change of this process confirms the answers to the changes of those before.
    fn keep_answers(&self, process: &HomeProcess, deadline: CallDeadline) -> Result<()> {
        if self.repeatable.is_empty() {
            return Ok(());
        }
        let mut scratch = Vec::new();
        let newest = self.repeatable.len().saturating_sub(REPEATABLE_MAX);
        let changes = NumberList::new(&self.repeatable[newest..], &mut scratch);
        let call = WriteCall::KeepAnswers { changes };
        let sent = self.query(CallTarget::Unproven(process), &call, &Caller::default(), deadline)?;
        settle_answer(sent.answer).map(drop)
    }

    fn refuse(&self, peer: &GroupPeer, witness: &HomeProcess) -> Error {
        Error::new(
            ErrorKind::PermissionDenied,
            format!(
                "node {} does not see a folder that node {} made in {}: they have different directories at this path; \
                 mount the same file system there on all nodes, or take the node out of the group",
                peer.name(),
                witness.node,
                self.client.source()
            ),
        )
    }

    fn find_identity(
        &self,
        process: &HomeProcess,
        call: &WriteCall<'_>,
        deadline: CallDeadline,
    ) -> Result<FileIdentity> {
        let sent = self.query(CallTarget::Unproven(process), call, &Caller::default(), deadline)?;
        settle_answer(sent.answer).and_then(attr_of).map(|attr| attr.identity)
    }

    /// Whether `other` sees a folder that `witness` makes.
    fn probe(&self, witness: &HomeProcess, other: &HomeProcess, deadline: CallDeadline) -> Result<bool> {
        let name = format!(".spurline-probe-{:016x}", random());
        let at = NamePath { directory: ROOT, name: name.as_bytes() };
        let root = Caller::default();
        let target = CallTarget::Unproven(witness);
        let call = WriteCall::Change(Change::Mkdir { at, mode: 0o700, implied: false });
        let made = settle_answer(self.change(target, &call, RequestContext::of(&root), deadline)?.answer)?;
        let made = attr_of(made)?;
        let seen = self.find_identity(other, &WriteCall::Lookup(at), deadline);
        let remove = WriteCall::Change(Change::Rmdir { at });
        // A probe that stays is an empty folder.
        let removed = self.change(target, &remove, RequestContext::of(&root), deadline).map_err(Error::from);
        if let Err(error) = removed.and_then(|removed| settle_answer(removed.answer)) {
            tracing::warn!(node = %witness.node, %error, "a probe folder was not removed: {name}");
        }
        match seen {
            Ok(seen) => Ok(seen == made.identity),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Io(ENOENT)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
