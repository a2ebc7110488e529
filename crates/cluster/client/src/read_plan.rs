//! Owns the plan of a call to nodes of a group: the bytes, the order of the nodes, and the deadline. Sends nothing
//! itself. The steps of a remote read, in order:
//!
//! 1. `GroupVolume::read` cuts the read at block borders; bytes fetched ahead are copied from memory.
//! 2. `plan_read` makes a [`ReadPlan`]: nearest node first, one deadline for all attempts.
//! 3. `read_pipelined`: a large piece of a sequential reader takes the answer that was requested ahead, once the next
//!    pieces are requested.
//! 4. `read_split`: a large read is split over several idle rails. Each unread range continues with a
//!    [`ReadPlan::part`].
//! 5. `rank_holders` ranks the nodes; a late one moves to the end, except for a trial ([`LateNodes`]).
//! 6. `call_ranked` calls one node after the other, over the rail nearest to the landing address, or TCP. A node
//!    without an answer or without its origin is followed by the next at once; after a round there is a pause.
//! 7. `call_hedged`: a late answer competes with that of a second node, and the first good one lands.
//! 8. A redirect repeats the read once, owner first ([`ReadPlan::redirected`]).
//! 9. The read ends with all its bytes, a final error, or at its deadline.

use crate::peer::{GroupPeer, RequestPatience, landing_address};
use crate::placement::WantedBlock;
use spurline_proto::{ReadFlags, ReadRequest, VolumeId};
use spurline_types::ObjectRef;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The order in which the holders of a block are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderOrder {
    /// Nearest first. A node before the owner may redirect the reader.
    NearFirst,
    /// Owner first; no node may redirect the reader.
    OwnerFirst,
}

/// Whether a call may be the trial of a late node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LateNodes {
    /// Now and then a late node is called in its normal order. Only for reads, because only reads are timed.
    Try,
    /// Late nodes come last.
    Skip,
}

/// How ranked nodes are called.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallPlan {
    /// Address where the payload lands, for the choice of a rail near its memory; `None` without a payload.
    pub lands: Option<usize>,
    pub late_nodes: LateNodes,
    pub patience: RequestPatience,
    /// End of all attempts.
    pub deadline: Instant,
}

impl CallPlan {
    /// A call that starts now and whose answer has no payload.
    pub fn without_payload(patience: RequestPatience) -> CallPlan {
        CallPlan { lands: None, late_nodes: LateNodes::Skip, patience, deadline: Instant::now() + patience.answer }
    }
}

/// A read of bytes inside one block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadPlan<'a> {
    pub object: &'a ObjectRef,
    pub offset: u64,
    pub len: usize,
    /// The block, and its number of holders.
    pub block: WantedBlock,
    pub order: HolderOrder,
    pub call: CallPlan,
}

impl<'a> ReadPlan<'a> {
    /// The request to one node; `may_redirect` as in [`HolderChoice`].
    pub fn request(&self, volume: VolumeId, may_redirect: bool) -> ReadRequest<'a> {
        let path = &*self.object.path;
        let version = self.object.version.as_str();
        let size = self.object.size;
        let flags = if may_redirect { ReadFlags::MAY_REDIRECT } else { ReadFlags::NONE };
        ReadRequest { volume, path, version, size, offset: self.offset, len: self.len as u32, flags }
    }

    /// The plan of a part, which lands at `dst`.
    pub fn part(&self, range: Range<usize>, dst: &[u8]) -> ReadPlan<'a> {
        let call = CallPlan { lands: Some(landing_address(dst)), ..self.call };
        ReadPlan { offset: self.offset + range.start as u64, len: range.len(), call, ..*self }
    }

    /// The plan after a redirect.
    pub fn redirected(self) -> ReadPlan<'a> {
        ReadPlan { order: HolderOrder::OwnerFirst, ..self }
    }

    /// The plan with another deadline.
    pub fn until(self, deadline: Instant) -> ReadPlan<'a> {
        ReadPlan { call: CallPlan { deadline, ..self.call }, ..self }
    }
}

/// The node chosen for an attempt.
pub(crate) struct HolderChoice<P> {
    pub peer: P,
    /// It comes before the block's owner and may redirect the reader there.
    pub may_redirect: bool,
}

/// A choice that outlives the list of nodes.
pub(crate) type OwnedChoice = HolderChoice<Arc<GroupPeer>>;
