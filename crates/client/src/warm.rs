//! Parts of objects brought into the caches of the nodes that hold them, or taken out of all caches, for jobs that fill
//! and free a group. It does not know which files a job is about.

use crate::peer::{NOWHERE, Patience, Peer, ask};
use crate::placement::{FIRST, RUN_BLOCKS, Wanted};
use crate::remote::{Inner, Remote};
use crate::roster::View;
use spurline_proto::{Part, PartDone, PartList, PartsDone, Request, VolumeId};
use spurline_transport::{CallError, Lease, PoolState};
use spurline_types::{Error, ErrorKind, ObjectRef, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most blocks that one request asks a node to fetch: it answers when all are there.
const BLOCKS_AT_ONCE: u64 = 32;
/// A part that a node did not take is asked of the next ones in rank, so many times.
const OTHERS: usize = 3;

/// Nodes asked side by side: not a thread for each of ten thousand.
const SIDE_BY_SIDE: usize = 16;

/// A range of bytes of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The object at one version.
    pub object: ObjectRef,
    /// The range; what is past the object's end is not meant.
    pub bytes: Range<u64>,
}

/// A piece of an extent: what one node is asked for.
#[derive(Clone)]
struct Piece {
    /// Of the list that was given.
    extent: usize,
    bytes: Range<u64>,
    /// Which copy it is: 0 the first; and of how many.
    copy: usize,
    copies: u32,
}

impl Remote {
    /// Has the nodes that hold these extents, `copies` nodes each or as many as is configured for the path, fetch what
    /// they do not have; with `verify` they also
    /// read back and check what they have. Sums over all pieces of each extent, and the first error.
    ///
    /// Blocks until all is done; asks each node that is concerned one request after another, the nodes side by side.
    pub fn warm(&self, extents: &[Extent], copies: Option<u32>, verify: bool) -> Vec<PartDone> {
        let inner = self.inner();
        let mut sums = vec![PartDone::default(); extents.len()];
        let mut pieces: Vec<Piece> = Vec::new();
        for (number, extent) in extents.iter().enumerate() {
            let copies = copies.unwrap_or_else(|| inner.copies_of(&extent.object.path));
            for bytes in inner.runs(&extent.object, &extent.bytes) {
                let piece = |copy| Piece { extent: number, bytes: bytes.clone(), copy, copies };
                pieces.extend((0..(copies as usize).clamp(1, FIRST)).map(piece));
            }
        }
        // The other copies come from the first, once that is there, and not from the under-store again.
        let (first, others): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|piece| piece.copy == 0);
        for pieces in [first, others] {
            inner.warm_pieces(extents, pieces, What::Warm { verify }, &mut sums);
        }
        sums
    }

    /// How many nodes have a share of the blocks and are not known to be down.
    pub fn holders_up(&self) -> usize {
        let view = self.inner().roster().view();
        let down = |index: usize| {
            let down = |peer: &Arc<Peer>| matches!(peer.state().0, PoolState::Down { .. }) && !peer.is_up();
            view.made(index as u32).is_some_and(down)
        };
        view.members().iter().enumerate().filter(|(index, member)| member.weight > 0 && !down(*index)).count()
    }

    /// Has every node drop what it holds of these extents. Sums over all nodes, and the first error: a node that does
    /// not answer may still hold them.
    pub fn drop_cached(&self, extents: &[Extent]) -> Vec<PartDone> {
        self.everywhere(extents, What::Drop)
    }

    /// Has every node bring what it holds of these extents under the rules for their folders. Sums as those of
    /// [`Remote::drop_cached`].
    pub fn classify(&self, extents: &[Extent]) -> Vec<PartDone> {
        self.everywhere(extents, What::Classify)
    }

    /// Nodes that hold each block of the file at `path`, as far as there are so many.
    pub fn copies_of(&self, path: &[u8]) -> u32 {
        self.inner().copies_of(path)
    }

    /// What the first `most` nodes say of the rules for folders and of their room, as JSON; asked side by side, each for
    /// no longer than `time`.
    ///
    /// # Errors
    /// The first node's that does not answer.
    pub fn rules_told(&self, most: usize, time: Duration) -> Result<Vec<serde_json::Value>> {
        let (inner, patience) = (self.inner(), Patience { answer: time, absence: Duration::ZERO });
        let view = inner.roster().view();
        let one = |name: &str| {
            let text: Vec<u8> = inner.ask_named(name, patience, |lease, body, deadline| {
                lease.call(&Request::Rules { text: "" }, body, &mut [], &mut |_| {}, deadline)?;
                Ok(std::mem::take(body))
            })?;
            serde_json::from_slice(&text).map_err(|error| {
                Error::new(ErrorKind::Protocol, format!("what node {name} says makes no sense: {error}"))
            })
        };
        let mut told = Vec::new();
        for some in view.members().chunks(SIDE_BY_SIDE).take(most.div_ceil(SIDE_BY_SIDE)) {
            std::thread::scope(|scope| {
                let asked: Vec<_> = some.iter().take(most).map(|member| scope.spawn(|| one(&member.name))).collect();
                asked.into_iter().try_for_each(|thread| {
                    let gone = |_| Err(Error::new(ErrorKind::Io(5), "a thread panicked"));
                    told.push(thread.join().unwrap_or_else(gone)?);
                    Ok::<_, Error>(())
                })
            })?;
        }
        Ok(told)
    }

    fn everywhere(&self, extents: &[Extent], what: What) -> Vec<PartDone> {
        let inner = self.inner();
        let mut sums = vec![PartDone::default(); extents.len()];
        let mut by_node: BTreeMap<String, Vec<Piece>> = BTreeMap::new();
        for member in inner.roster().view().members() {
            let mut pieces = Vec::new();
            for (number, extent) in extents.iter().enumerate() {
                let end = extent.bytes.end.min(extent.object.size);
                let step = inner.block_size() << 15;
                let mut at = extent.bytes.start;
                while at < end {
                    let next = (at / step + 1).saturating_mul(step).min(end);
                    pieces.push(Piece { extent: number, bytes: at..next, copy: 0, copies: 1 });
                    at = next;
                }
            }
            by_node.insert(member.name.clone(), pieces);
        }
        for (piece, outcome) in inner.ask_each(extents, by_node, what) {
            match outcome {
                Ok(done) => add(&mut sums[piece.extent], &done),
                Err(error) => note(&mut sums[piece.extent], &error),
            }
        }
        sums
    }
}

fn no_node() -> Error {
    Error::new(ErrorKind::Unavailable, "the cache group has no node to hold it")
}

fn add(sum: &mut PartDone, done: &PartDone) {
    sum.moved_bytes += done.moved_bytes;
    sum.held_bytes += done.held_bytes;
    if let Some(error) = &done.error {
        note(sum, error);
    }
}

fn note(sum: &mut PartDone, error: &Error) {
    sum.error.get_or_insert_with(|| error.clone());
}

/// What a node is asked to do with the parts it is sent.
#[derive(Clone, Copy)]
enum What {
    Warm { verify: bool },
    Drop,
    Classify,
}

impl What {
    fn request(self, volume: VolumeId, list: &PartList) -> Request<'_> {
        let parts = list.parts();
        match self {
            What::Warm { verify } => Request::Warm { volume, verify, parts },
            What::Drop => Request::Drop { volume, parts },
            What::Classify => Request::Classify { volume, parts },
        }
    }
}

/// What became of each piece.
type Outcomes = Vec<(Piece, Result<PartDone>)>;

impl Inner {
    /// An extent cut where another node may hold what follows, and into pieces of a size to be asked for at once.
    fn runs(&self, object: &ObjectRef, bytes: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let run = self.block_size() * u64::from(RUN_BLOCKS);
        let (mut at, end) = (bytes.start, bytes.end.min(object.size));
        std::iter::from_fn(move || {
            let piece = at..(at / run + 1).saturating_mul(run).min(end);
            at = piece.end.max(at);
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The name of the node to ask for a piece: the one whose copy it is, or another one further down.
    fn holder(&self, object: &ObjectRef, piece: &Piece, attempt: usize) -> Option<String> {
        let view = self.roster().view();
        let mut ranked = Vec::new();
        let index = (piece.bytes.start / self.block_size()) as u32;
        view.holders(Wanted::block(object.id, index, piece.copies), FIRST, &mut ranked);
        let at = ranked.get(piece.copy + attempt).or_else(|| ranked.get(piece.copy))?;
        Some(view.members()[*at as usize].name.clone())
    }

    /// Has the holders of these pieces do `what`, or the next ones in rank where one does not; adds to the sums of their
    /// extents what came of it.
    fn warm_pieces(&self, extents: &[Extent], mut left: Vec<Piece>, what: What, sums: &mut [PartDone]) {
        for attempt in 0..OTHERS {
            let mut by_node: BTreeMap<String, Vec<Piece>> = BTreeMap::new();
            for piece in left.drain(..) {
                let object = &extents[piece.extent].object;
                match self.holder(object, &piece, attempt) {
                    Some(name) => by_node.entry(name).or_default().push(piece),
                    // A group with fewer nodes than copies has as many as it can.
                    None if piece.copy > 0 => {}
                    None => note(&mut sums[piece.extent], &no_node()),
                }
            }
            let last = attempt + 1 == OTHERS;
            for (piece, outcome) in self.ask_each(extents, by_node, what) {
                match outcome {
                    Ok(done) => add(&mut sums[piece.extent], &done),
                    Err(error) if last => note(&mut sums[piece.extent], &error),
                    Err(_) => left.push(piece),
                }
            }
            if left.is_empty() {
                return;
            }
        }
    }

    /// Asks the nodes side by side, each for its pieces in as few requests as they fit into.
    fn ask_each(&self, extents: &[Extent], by_node: BTreeMap<String, Vec<Piece>>, what: What) -> Outcomes {
        if by_node.len() == 1 {
            return by_node.into_iter().flat_map(|(name, pieces)| self.ask_one(extents, &name, pieces, what)).collect();
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
                    .into_iter()
                    .map(|(name, pieces)| scope.spawn(move || self.ask_one(extents, &name, pieces, what)))
                    .collect();
                asked.into_iter().for_each(|thread| out.extend(thread.join().unwrap_or_default()));
            });
        }
    }

    fn ask_one(&self, extents: &[Extent], name: &str, pieces: Vec<Piece>, what: What) -> Outcomes {
        let mut out = Vec::with_capacity(pieces.len());
        let mut pieces = pieces.into_iter().peekable();
        let mut together: Vec<Piece> = Vec::new();
        while pieces.peek().is_some() {
            let (mut list, mut blocks) = (PartList::default(), 0);
            together.clear();
            while let Some(piece) = pieces.peek() {
                let object = &extents[piece.extent].object;
                let part = Part {
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
                // A path so long that not even it alone fits.
                let why = "its name is too long for a request";
                out.extend(pieces.next().map(|piece| (piece, Err(Error::new(ErrorKind::Invalid, why)))));
                continue;
            }
            // Of a node that is away its share is asked of others, or it is said to be away: no reader waits for it.
            let patience = Patience { absence: Duration::ZERO, ..self.patience() };
            let answer = self.ask_named(name, patience, |lease, body, deadline| {
                lease.call_for::<PartsDone>(&what.request(lease.welcome().volume, &list), body, deadline)
            });
            match answer {
                Ok(PartsDone(done)) if done.len() == together.len() => {
                    // Why it did not do it is often its own matter: its room, its disks.
                    let named = |done: PartDone| {
                        let error = done.error.map(|error| error.context(format_args!("node {name}")));
                        Ok(PartDone { error, ..done })
                    };
                    out.extend(together.drain(..).zip(done.into_iter().map(named)));
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

    /// Asks one node and no other.
    pub(crate) fn ask_named<T>(
        &self,
        name: &str,
        patience: Patience,
        mut call: impl FnMut(&mut Lease<'_>, &mut Vec<u8>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        let only = |view: &View, _, ranked: &mut Vec<u32>| {
            ranked.clear();
            ranked.extend(view.members().iter().position(|member| member.name == name).map(|at| at as u32));
        };
        let mut body = Vec::new();
        ask(self.roster(), NOWHERE, only, &mut Vec::new(), patience, self.retries(), |_, lease, deadline| {
            call(lease, &mut body, deadline)
        })
    }
}
