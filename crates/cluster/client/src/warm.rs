//! Loads parts of objects into the nodes that hold them, or drops them from all caches, for load and free jobs. Does
//! not know a job's files.

use crate::members::MembersSnapshot;
use crate::peer::{RequestPatience, call_ranked};
use crate::placement::{FIRST_HOLDERS, WantedBlock};
use crate::read_plan::CallPlan;
use crate::remote::{GroupClient, GroupVolume};
use serde::de::DeserializeOwned;
use spurline_proto::{NodeRequest, ObjectRange, RangeDone, RangeList, RangesDone, VolumeId};
use spurline_transport::{CallError, ChannelLease};
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, ObjectRef, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Maximum blocks per request: the node answers when all are cached.
const BLOCKS_AT_ONCE: u64 = 32;
/// Number of further nodes in rank tried for a part that a node refused. Unreachable nodes do not count.
const OTHERS: usize = 3;

/// Maximum nodes called in parallel, to bound the threads in a group of ten thousand.
const SIDE_BY_SIDE: usize = 16;

/// A byte range of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectExtent {
    /// The object at one version.
    pub object: ObjectRef,
    /// The range; bytes past the object's end are ignored.
    pub bytes: Range<u64>,
}

/// A part of an extent: one request to one node.
#[derive(Clone)]
struct WarmPiece {
    /// Index of its extent.
    extent: usize,
    bytes: Range<u64>,
    /// Index of its block; all copies of one block share it.
    block: usize,
    /// Ranks of the node that should hold it, and of the node to call now.
    copy: usize,
    rank: usize,
    tries: usize,
    /// Error of the nodes tried so far.
    failed: Option<Error>,
}

/// State of the copies of a block.
struct WarmBlock {
    extent: usize,
    /// Wanted number of copies.
    copies: u32,
    /// Rank of the next node not tried for any copy.
    next: usize,
    /// Whether a node accepted one.
    taken: bool,
    /// Why one was refused; a node's answer takes precedence over unreachable nodes.
    failed: Option<Error>,
}

impl GroupVolume {
    /// Makes the holders of these extents fetch their missing blocks, on `copies` nodes each or the configured
    /// number. With `verify` they also read back and check their blocks. Returns the sums over all pieces of each
    /// extent, and the first error. A copy without a reachable node is left out if another copy exists.
    ///
    /// Blocks until done. Nodes are called in parallel, the requests of one node in sequence.
    pub fn warm(&self, extents: &[ObjectExtent], copies: Option<u32>, verify: bool) -> Vec<RangeDone> {
        let inner = self.inner();
        let mut sums = vec![RangeDone::default(); extents.len()];
        let mut pieces: Vec<WarmPiece> = Vec::new();
        let mut blocks: Vec<WarmBlock> = Vec::new();
        for (number, extent) in extents.iter().enumerate() {
            let copies = copies.unwrap_or_else(|| inner.copies_of(&extent.object.path));
            for bytes in inner.split_blocks(&extent.object, &extent.bytes) {
                let next = (copies as usize).clamp(1, FIRST_HOLDERS);
                let block = blocks.len();
                pieces.extend((0..next).map(|copy| WarmPiece {
                    block,
                    copy,
                    rank: copy,
                    ..WarmPiece::whole_extent(number, bytes.clone())
                }));
                blocks.push(WarmBlock { extent: number, copies, next, taken: false, failed: None });
            }
        }
        // Further copies come from the first one, not from the origin again.
        let (first, others): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|piece| piece.copy == 0);
        for pieces in [first, others] {
            inner.warm_pieces(extents, pieces, PartAction::Warm { verify }, &mut blocks, &mut sums);
        }
        for block in blocks {
            match block.failed {
                Some(error) if block.taken && error.kind() == ErrorKind::Unavailable => {}
                Some(error) => note_error(&mut sums[block.extent], &error),
                None if block.taken => {}
                None => note_error(&mut sums[block.extent], &no_node_error()),
            }
        }
        sums
    }

    /// Number of nodes with weight above 0 that are not known to be down.
    pub fn holders_up(&self) -> usize {
        let view = self.inner().members().snapshot();
        let holders = view.members().iter().enumerate().filter(|(_, member)| member.weight > 0);
        holders.filter(|(index, _)| view.existing_peer(*index as u32).is_none_or(|peer| !peer.is_down())).count()
    }

    /// Makes every node drop its blocks of these extents, pinned blocks only if `with_pinned`. Sums over all nodes, and the first error: an unreachable
    /// node may still hold them.
    pub fn drop_cached(&self, extents: &[ObjectExtent], with_pinned: bool) -> Vec<RangeDone> {
        self.call_all_nodes(extents, PartAction::Drop { with_pinned })
    }

    /// Makes every node drop all blocks of this source, of any file and version, or of `every_source`. Returns the sum
    /// over the nodes, and the first error.
    pub fn drop_all(&self, every_source: bool, with_pinned: bool) -> RangeDone {
        let inner = self.inner();
        let mut sum = RangeDone::default();
        for some in inner.members().snapshot().members().chunks(SIDE_BY_SIDE) {
            std::thread::scope(|scope| {
                let asked: Vec<_> = some
                    .iter()
                    .map(|member| scope.spawn(|| inner.drop_all_of_node(&member.name, every_source, with_pinned)))
                    .collect();
                for thread in asked {
                    let panicked = Error::new(ErrorKind::Io(EIO), "a thread that called a node panicked; see the log");
                    let done = thread.join();
                    add_done(&mut sum, &done.unwrap_or(RangeDone { error: Some(panicked), ..RangeDone::default() }));
                }
            });
        }
        sum
    }

    /// Makes every node apply the folder rules to its blocks of these extents. Results as for
    /// [`GroupVolume::drop_cached`].
    pub fn classify(&self, extents: &[ObjectExtent]) -> Vec<RangeDone> {
        self.call_all_nodes(extents, PartAction::Classify)
    }

    /// Number of holders for the file at `path`, limited by the group's size.
    pub fn copies_of(&self, path: &[u8]) -> u32 {
        self.inner().copies_of(path)
    }

    /// The folder rules and free space of a node.
    fn rules_of<T: DeserializeOwned>(&self, name: &str, time: Duration) -> Result<T> {
        let patience = RequestPatience { answer: time, absence: Duration::ZERO };
        let text: Vec<u8> = self.inner().call_named(name, patience, |lease, body, deadline| {
            lease.call(&NodeRequest::Rules { text: "" }, body, &mut [], &mut |_| {}, deadline)?;
            Ok(std::mem::take(body))
        })?;
        serde_json::from_slice(&text).map_err(|error| {
            Error::new(ErrorKind::Protocol, format!("the rules of node {name} are not valid JSON: {error}"))
        })
    }

    /// The folder rules and free space of the first `most` nodes, as JSON. Nodes are called in parallel, each with
    /// the timeout `time`.
    ///
    /// # Errors
    /// The error of the first node that does not answer.
    pub fn node_rules<T: DeserializeOwned + Send>(&self, most: usize, time: Duration) -> Result<Vec<T>> {
        let view = self.inner().members().snapshot();
        let mut told = Vec::new();
        for some in view.members().chunks(SIDE_BY_SIDE).take(most.div_ceil(SIDE_BY_SIDE)) {
            std::thread::scope(|scope| {
                let asked: Vec<_> =
                    some.iter().take(most).map(|member| scope.spawn(|| self.rules_of(&member.name, time))).collect();
                asked.into_iter().try_for_each(|thread| {
                    told.push(thread.join().unwrap_or_else(|_| {
                        Err(Error::new(ErrorKind::Io(EIO), "a thread that called a node panicked; see the log"))
                    })?);
                    Ok::<_, Error>(())
                })
            })?;
        }
        Ok(told)
    }

    fn call_all_nodes(&self, extents: &[ObjectExtent], what: PartAction) -> Vec<RangeDone> {
        let inner = self.inner();
        let mut sums = vec![RangeDone::default(); extents.len()];
        let mut by_node: BTreeMap<String, Vec<WarmPiece>> = BTreeMap::new();
        for member in inner.members().snapshot().members() {
            let mut pieces = Vec::new();
            for (number, extent) in extents.iter().enumerate() {
                let end = extent.bytes.end.min(extent.object.size);
                let step = inner.block_size() << 15;
                let mut at = extent.bytes.start;
                while at < end {
                    let next = (at / step + 1).saturating_mul(step).min(end);
                    pieces.push(WarmPiece::whole_extent(number, at..next));
                    at = next;
                }
            }
            by_node.insert(member.name.clone(), pieces);
        }
        for (piece, outcome) in inner.call_nodes(extents, by_node, what) {
            match outcome {
                Ok(done) => add_done(&mut sums[piece.extent], &done),
                Err(error) => note_error(&mut sums[piece.extent], &error),
            }
        }
        sums
    }
}

impl WarmPiece {
    /// The only piece of its bytes.
    fn whole_extent(extent: usize, bytes: Range<u64>) -> Self {
        WarmPiece { extent, bytes, block: 0, copy: 0, rank: 0, tries: 0, failed: None }
    }
}

fn no_node_error() -> Error {
    Error::new(ErrorKind::Unavailable, "the cache group has no node that can hold it")
}

fn add_done(sum: &mut RangeDone, done: &RangeDone) {
    sum.moved_bytes = sum.moved_bytes.saturating_add(done.moved_bytes);
    sum.held_bytes = sum.held_bytes.saturating_add(done.held_bytes);
    if let Some(error) = &done.error {
        note_error(sum, error);
    }
}

fn note_error(sum: &mut RangeDone, error: &Error) {
    sum.error.get_or_insert_with(|| error.clone());
}

/// Action of a node on the parts of a request.
#[derive(Clone, Copy)]
enum PartAction {
    Warm { verify: bool },
    Drop { with_pinned: bool },
    Classify,
}

impl PartAction {
    fn build_request(self, volume: VolumeId, list: &RangeList) -> NodeRequest<'_> {
        let parts = list.as_ranges();
        match self {
            PartAction::Warm { verify } => NodeRequest::Warm { volume, verify, parts },
            PartAction::Drop { with_pinned } => NodeRequest::Drop { volume, with_pinned, parts },
            PartAction::Classify => NodeRequest::Classify { volume, parts },
        }
    }
}

type PieceOutcomes = Vec<(WarmPiece, Result<RangeDone>)>;

/// The more specific error: a node's answer before an unreachable node.
fn worse_error(known: Option<Error>, other: Option<Error>) -> Option<Error> {
    if known.as_ref().is_none_or(is_unavailable)
        && other.as_ref().is_some_and(|error| known.is_none() || !is_unavailable(error))
    {
        other
    } else {
        known
    }
}

/// The results of a thread. After a panic its pieces have an unknown state, reported as an error.
fn piece_outcomes(pieces: &[WarmPiece], asked: std::thread::Result<PieceOutcomes>) -> PieceOutcomes {
    asked.unwrap_or_else(|_| {
        let panicked = Error::new(ErrorKind::Io(EIO), "a thread that called a node panicked; see the log");
        pieces.iter().map(|piece| (piece.clone(), Err(panicked.clone()))).collect()
    })
}

impl GroupClient {
    /// Cuts an extent into blocks.
    fn split_blocks(&self, object: &ObjectRef, bytes: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let block = self.block_size();
        let mut at = bytes.start;
        let end = bytes.end.min(object.size);
        std::iter::from_fn(move || {
            let piece = at..(at / block + 1).saturating_mul(block).min(end);
            at = piece.end.max(at);
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// Name of the node to call for a piece: its holder, or a later one in rank. When all were tried, the holder
    /// again, which may be back.
    fn holder_name(&self, object: &ObjectRef, piece: &WarmPiece, copies: u32) -> Option<String> {
        let view = self.members().snapshot();
        let mut ranked = Vec::new();
        let index = (piece.bytes.start / self.block_size()) as u32;
        view.find_holders(WantedBlock::of_block(object.id, index, copies), FIRST_HOLDERS, &mut ranked);
        let again = if piece.tries < OTHERS { ranked.get(piece.copy) } else { None };
        let at = ranked.get(piece.rank).or(again)?;
        Some(view.members()[*at as usize].name.clone())
    }

    /// Makes the holders of these pieces do `what`, or their successors, each for one copy of a block. Adds the results
    /// to the sums of the extents and to the blocks.
    fn warm_pieces(
        &self,
        extents: &[ObjectExtent],
        mut left: Vec<WarmPiece>,
        what: PartAction,
        blocks: &mut [WarmBlock],
        sums: &mut [RangeDone],
    ) {
        while !left.is_empty() {
            let mut by_node: BTreeMap<String, Vec<WarmPiece>> = BTreeMap::new();
            for piece in left.drain(..) {
                // A group smaller than the number of copies holds as many as it can.
                match self.holder_name(&extents[piece.extent].object, &piece, blocks[piece.block].copies) {
                    Some(name) => by_node.entry(name).or_default().push(piece),
                    None => blocks[piece.block].failed = worse_error(blocks[piece.block].failed.take(), piece.failed),
                }
            }
            for (mut piece, outcome) in self.call_nodes(extents, by_node, what) {
                let block = &mut blocks[piece.block];
                let error = match outcome {
                    Ok(done) => {
                        block.taken = true;
                        add_done(&mut sums[piece.extent], &done);
                        continue;
                    }
                    Err(error) => error,
                };
                let away = error.kind() == ErrorKind::Unavailable;
                piece.failed = worse_error(piece.failed, Some(error));
                piece.tries += 1;
                if away || piece.tries < OTHERS {
                    piece.rank = block.next;
                    block.next += 1;
                    left.push(piece);
                } else {
                    block.failed = worse_error(block.failed.take(), piece.failed);
                }
            }
        }
    }

    /// Calls the nodes in parallel, each with its pieces in as few requests as possible.
    fn call_nodes(
        &self,
        extents: &[ObjectExtent],
        by_node: BTreeMap<String, Vec<WarmPiece>>,
        what: PartAction,
    ) -> PieceOutcomes {
        if by_node.len() == 1 {
            return by_node.iter().flat_map(|(name, pieces)| self.call_node(extents, name, pieces, what)).collect();
        }
        let mut out = Vec::new();
        let mut by_node = by_node.into_iter();
        loop {
            let some: Vec<_> = by_node.by_ref().take(SIDE_BY_SIDE).collect();
            if some.is_empty() {
                return out;
            }
            std::thread::scope(|scope| {
                let asked: Vec<_> = some
                    .iter()
                    .map(|(name, pieces)| (pieces, scope.spawn(move || self.call_node(extents, name, pieces, what))))
                    .collect();
                asked.into_iter().for_each(|(pieces, thread)| out.extend(piece_outcomes(pieces, thread.join())));
            });
        }
    }

    fn call_node(&self, extents: &[ObjectExtent], name: &str, pieces: &[WarmPiece], what: PartAction) -> PieceOutcomes {
        let mut out = Vec::with_capacity(pieces.len());
        let mut pieces = pieces.iter().cloned().peekable();
        let mut together: Vec<WarmPiece> = Vec::new();
        while pieces.peek().is_some() {
            let mut list = RangeList::default();
            let mut blocks = 0;
            together.clear();
            while let Some(piece) = pieces.peek() {
                let object = &extents[piece.extent].object;
                let part = ObjectRange {
                    path: &object.path,
                    version: object.version.as_str(),
                    size: object.size,
                    offset: piece.bytes.start,
                    len: piece.bytes.end - piece.bytes.start,
                };
                blocks += part.len.div_ceil(self.block_size());
                if !list.is_empty() && blocks > BLOCKS_AT_ONCE || !list.push(&part) {
                    break;
                }
                together.extend(pieces.next());
            }
            if together.is_empty() {
                // Even alone, the path is too long for a request.
                let why = "its name is too long for a request";
                out.extend(pieces.next().map(|piece| (piece, Err(Error::new(ErrorKind::Invalid, why)))));
                continue;
            }
            // Do not wait for a node that is away: no reader waits, and others take its share.
            let patience = RequestPatience { absence: Duration::ZERO, ..self.patience() };
            let answer = self.call_named(name, patience, |lease, body, deadline| {
                lease.call_for::<RangesDone>(&what.build_request(lease.welcome().volume, &list), body, deadline)
            });
            match answer {
                Ok(RangesDone(done)) if done.len() == together.len() => {
                    // The cause is often local to the node (space, disks), so name it.
                    out.extend(together.drain(..).zip(done.into_iter().map(|done| {
                        let error = done.error.map(|error| error.context(format_args!("node {name}")));
                        Ok(RangeDone { error, ..done })
                    })));
                }
                Ok(_) => {
                    let error = Error::new(ErrorKind::Protocol, format!("node {name} answered for other parts"));
                    out.extend(together.drain(..).map(|piece| (piece, Err(error.clone()))));
                }
                Err(error) => out.extend(together.drain(..).map(|piece| (piece, Err(error.clone())))),
            }
        }
        out
    }

    /// Makes a node drop all blocks, part by part: each request ends soon, however many blocks the node has.
    fn drop_all_of_node(&self, name: &str, every_source: bool, with_pinned: bool) -> RangeDone {
        let patience = RequestPatience { absence: Duration::ZERO, ..self.patience() };
        let mut sum = RangeDone::default();
        for part in 0.. {
            let answer = self.call_named(name, patience, |lease, body, deadline| {
                let volume = lease.welcome().volume;
                let request = NodeRequest::DropAll { volume, every_source, with_pinned, part };
                lease.call_for::<RangesDone>(&request, body, deadline)
            });
            match answer {
                Ok(RangesDone(done)) if done.is_empty() => break,
                Ok(RangesDone(done)) => done.iter().for_each(|done| add_done(&mut sum, done)),
                Err(error) => {
                    note_error(&mut sum, &error.context(format_args!("node {name}")));
                    break;
                }
            }
        }
        sum
    }

    /// Calls exactly this node.
    pub(crate) fn call_named<T>(
        &self,
        name: &str,
        patience: RequestPatience,
        mut call: impl FnMut(&mut ChannelLease<'_>, &mut Vec<u8>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        let only = |view: &MembersSnapshot, _, ranked: &mut Vec<u32>| {
            ranked.clear();
            ranked.extend(view.members().iter().position(|member| member.name == name).map(|at| at as u32));
        };
        let mut body = Vec::new();
        let plan = CallPlan::without_payload(patience);
        call_ranked(self.members(), &plan, only, &mut Vec::new(), self.retries(), |_, lease, deadline| {
            call(lease, &mut body, deadline)
        })
    }
}

fn is_unavailable(error: &Error) -> bool {
    error.kind() == ErrorKind::Unavailable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_thread_that_panicked_are_not_done() {
        let pieces = [WarmPiece::whole_extent(0, 0..10), WarmPiece::whole_extent(1, 0..20)];
        let asked = std::thread::spawn(|| -> PieceOutcomes { panic!("as a test wants it") }).join();
        let found = piece_outcomes(&pieces, asked);
        assert!(found.len() == 2 && found.iter().all(|(_, outcome)| outcome.is_err()));
    }
}
