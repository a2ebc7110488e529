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
/// A part that a node did not take is asked of the next ones in rank, so many times; of those that can't be reached it is
/// not counted.
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
    /// Which run of which all copies are it is a copy of.
    run: usize,
    /// The place in the run's ranking of the node that is to have it, and of the one to ask now.
    copy: usize,
    rank: usize,
    tries: usize,
    /// Why those asked so far did not take it.
    failed: Option<Error>,
}

/// What is known of the copies of a run.
struct Run {
    extent: usize,
    /// As many as were wanted.
    copies: u32,
    /// The place in the ranking of the next node that none of the copies was asked of.
    next: usize,
    /// Whether a node took one.
    taken: bool,
    /// Why one was not taken: what a node said comes before that none could be reached.
    failed: Option<Error>,
}

impl Remote {
    /// Has the nodes that hold these extents, `copies` nodes each or as many as is configured for the path, fetch what
    /// they do not have; with `verify` they also
    /// read back and check what they have. Sums over all pieces of each extent, and the first error. A copy that no node can
    /// be reached for is none as long as there is another one: a group has as many as it can.
    ///
    /// Blocks until all is done; asks each node that is concerned one request after another, the nodes side by side.
    pub fn warm(&self, extents: &[Extent], copies: Option<u32>, verify: bool) -> Vec<PartDone> {
        let inner = self.inner();
        let mut sums = vec![PartDone::default(); extents.len()];
        let (mut pieces, mut runs): (Vec<Piece>, Vec<Run>) = Default::default();
        for (number, extent) in extents.iter().enumerate() {
            let copies = copies.unwrap_or_else(|| inner.copies_of(&extent.object.path));
            for bytes in inner.runs(&extent.object, &extent.bytes) {
                let next = (copies as usize).clamp(1, FIRST);
                let run = runs.len();
                pieces.extend((0..next).map(|copy| Piece {
                    run,
                    copy,
                    rank: copy,
                    ..Piece::of(number, bytes.clone())
                }));
                runs.push(Run { extent: number, copies, next, taken: false, failed: None });
            }
        }
        // The other copies come from the first, once that is there, and not from the under-store again.
        let (first, others): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|piece| piece.copy == 0);
        for pieces in [first, others] {
            inner.warm_pieces(extents, pieces, What::Warm { verify }, &mut runs, &mut sums);
        }
        for run in runs {
            match run.failed {
                Some(error) if run.taken && error.kind() == ErrorKind::Unavailable => {}
                Some(error) => note(&mut sums[run.extent], &error),
                None if run.taken => {}
                None => note(&mut sums[run.extent], &no_node()),
            }
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
                    pieces.push(Piece::of(number, at..next));
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

impl Piece {
    /// The only one of its bytes.
    fn of(extent: usize, bytes: Range<u64>) -> Self {
        Piece { extent, bytes, run: 0, copy: 0, rank: 0, tries: 0, failed: None }
    }
}

fn no_node() -> Error {
    Error::new(ErrorKind::Unavailable, "the cache group has no node to hold it")
}

fn add(sum: &mut PartDone, done: &PartDone) {
    sum.moved_bytes = sum.moved_bytes.saturating_add(done.moved_bytes);
    sum.held_bytes = sum.held_bytes.saturating_add(done.held_bytes);
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

/// The error that tells more: not that a node is away, where another said what is wrong.
fn worst(known: Option<Error>, other: Option<Error>) -> Option<Error> {
    let away = |error: &Error| error.kind() == ErrorKind::Unavailable;
    if known.as_ref().is_none_or(away) && other.as_ref().is_some_and(|error| known.is_none() || !away(error)) {
        other
    } else {
        known
    }
}

/// What a thread found out of its pieces: of one that panicked nobody knows what it had done.
fn outcomes(pieces: &[Piece], asked: std::thread::Result<Outcomes>) -> Outcomes {
    asked.unwrap_or_else(|_| {
        let panicked = Error::new(ErrorKind::Io(5), "a thread that asked a node panicked; the log has where");
        pieces.iter().map(|piece| (piece.clone(), Err(panicked.clone()))).collect()
    })
}

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

    /// The name of the node to ask for a piece: the one whose copy it is, or another one further down. Where there is none
    /// that was not asked, the one whose copy it is may be back.
    fn holder(&self, object: &ObjectRef, piece: &Piece, copies: u32) -> Option<String> {
        let view = self.roster().view();
        let mut ranked = Vec::new();
        let index = (piece.bytes.start / self.block_size()) as u32;
        view.holders(Wanted::block(object.id, index, copies), FIRST, &mut ranked);
        let again = if piece.tries < OTHERS { ranked.get(piece.copy) } else { None };
        let at = ranked.get(piece.rank).or(again)?;
        Some(view.members()[*at as usize].name.clone())
    }

    /// Has the holders of these pieces do `what`, or the next ones in rank where one does not, each of them for one copy
    /// of a run; adds to the sums of their extents what came of it, and to the runs whether a node took them.
    fn warm_pieces(
        &self,
        extents: &[Extent],
        mut left: Vec<Piece>,
        what: What,
        runs: &mut [Run],
        sums: &mut [PartDone],
    ) {
        while !left.is_empty() {
            let mut by_node: BTreeMap<String, Vec<Piece>> = BTreeMap::new();
            for piece in left.drain(..) {
                // A group with fewer nodes than copies has as many as it can.
                match self.holder(&extents[piece.extent].object, &piece, runs[piece.run].copies) {
                    Some(name) => by_node.entry(name).or_default().push(piece),
                    None => runs[piece.run].failed = worst(runs[piece.run].failed.take(), piece.failed),
                }
            }
            for (mut piece, outcome) in self.ask_each(extents, by_node, what) {
                let run = &mut runs[piece.run];
                let error = match outcome {
                    Ok(done) => {
                        run.taken = true;
                        add(&mut sums[piece.extent], &done);
                        continue;
                    }
                    Err(error) => error,
                };
                let away = error.kind() == ErrorKind::Unavailable;
                piece.failed = worst(piece.failed, Some(error));
                piece.tries += 1;
                if away || piece.tries < OTHERS {
                    piece.rank = run.next;
                    run.next += 1;
                    left.push(piece);
                } else {
                    run.failed = worst(run.failed.take(), piece.failed);
                }
            }
        }
    }

    /// Asks the nodes side by side, each for its pieces in as few requests as they fit into.
    fn ask_each(&self, extents: &[Extent], by_node: BTreeMap<String, Vec<Piece>>, what: What) -> Outcomes {
        if by_node.len() == 1 {
            return by_node.iter().flat_map(|(name, pieces)| self.ask_one(extents, name, pieces, what)).collect();
        }
        let mut out = Vec::new();
        let mut by_node = by_node.into_iter();
        loop {
            let some: Vec<_> = by_node.by_ref().take(SIDE_BY_SIDE).collect();
            if some.is_empty() {
                return out;
            }
            std::thread::scope(|scope| {
                let ask = |(name, pieces)| (pieces, scope.spawn(move || self.ask_one(extents, name, pieces, what)));
                let asked: Vec<_> = some.iter().map(|(name, pieces)| ask((name, pieces.as_slice()))).collect();
                asked.into_iter().for_each(|(pieces, thread)| out.extend(outcomes(pieces, thread.join())));
            });
        }
    }

    fn ask_one(&self, extents: &[Extent], name: &str, pieces: &[Piece], what: What) -> Outcomes {
        let mut out = Vec::with_capacity(pieces.len());
        let mut pieces = pieces.iter().cloned().peekable();
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
        let waits = patience.asked_now();
        ask(self.roster(), NOWHERE, only, &mut Vec::new(), waits, self.retries(), |_, lease, deadline| {
            call(lease, &mut body, deadline)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_thread_that_panicked_are_not_done() {
        let pieces = [Piece::of(0, 0..10), Piece::of(1, 0..20)];
        let asked = std::thread::spawn(|| -> Outcomes { panic!("as a test wants it") }).join();
        let found = outcomes(&pieces, asked);
        assert!(found.len() == 2 && found.iter().all(|(_, outcome)| outcome.is_err()));
    }
}
