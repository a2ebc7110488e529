//! How the bytes of a block are asked for: of which node, over one channel or several, ahead of the reader or now, and
//! of a second node when the first is late. It knows no names and no attributes.

use crate::ahead::Claimed;
use crate::peer::{Peer, ask, middle};
use crate::placement::{FIRST, Wanted};
use crate::remote::{Inner, SCRATCH};
use crate::roster::View;
use crate::split::{self, SPLIT_FROM};
use spurline_mem::Fill;
use spurline_proto::{Read, Request, VolumeId, Welcome, says_hot};
use spurline_transport::{Answer, CallError, Lease, PoolState};
use spurline_types::{Error, ErrorKind, ObjectRef, Result, Sink as _};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A block fetched ahead is asked for in pieces of this size, so that its first bytes can be read before the
/// last have come.
const PIECE: usize = 1 << 20;

/// A read of `len` bytes of `object`.
pub(crate) fn read_of(object: &ObjectRef, volume: VolumeId, offset: u64, len: usize) -> Read<'_> {
    let (path, version, size) = (&*object.path, object.version.as_str(), object.size);
    Read { volume, path, version, size, offset, len: len as u32 }
}

impl Inner {
    /// The nodes to ask for `wanted`, best first; those that answer late come last, but for a trial now and then.
    pub(crate) fn rank(&self, view: &View, wanted: Wanted, most: usize, ranked: &mut Vec<u32>) {
        view.rank(wanted, &self.config.standpoint, most, ranked);
        if !self.hedge.shuns() {
            return;
        }
        let may_ask = |index: u32| view.made(index).is_none_or(|peer| peer.pace().may_ask(Instant::now));
        // When all of them are late, nothing is changed.
        for _ in 0..ranked.len().min(FIRST) {
            if may_ask(ranked[0]) {
                return;
            }
            ranked.rotate_left(1);
        }
    }

    /// Asks the nodes that hold `wanted` with `request`, whose answer is to land at `lands`, made anew for each attempt because every connection numbers the
    /// volume itself.
    pub(crate) fn ask<T>(
        &self,
        wanted: Wanted,
        lands: usize,
        mut call: impl FnMut(&Arc<Peer>, &mut Lease<'_>, &mut Vec<u8>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        // Taken out of its cell for the call, so that a call made inside another finds an empty one, not a panic.
        let (mut body, mut ranked) = SCRATCH.with(RefCell::take);
        let place = |view: &View, most, ranked: &mut Vec<u32>| self.rank(view, wanted, most, ranked);
        let retries = &self.stats.remotecache.retries;
        let result =
            ask(&self.roster, lands, place, &mut ranked, self.config.patience, retries, |peer, lease, deadline| {
                call(peer, lease, &mut body, deadline)
            });
        // A long listing must not keep its memory for ever.
        body.clear();
        body.shrink_to(64 << 10);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        result
    }

    /// The node that is asked first.
    fn first_peer(&self, wanted: Wanted) -> Option<Arc<Peer>> {
        let (body, mut ranked) = SCRATCH.with(RefCell::take);
        let view = self.roster.view();
        self.rank(&view, wanted, FIRST, &mut ranked);
        let first = ranked.first().map(|index| Arc::clone(view.peer(*index)));
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        first
    }

    /// The node to ask for a byte of `object` when `first` is late: another one that holds it, or else the one that
    /// would be next to hold it, which gets it from its siblings or the under-store. None when `first` stands in for one
    /// that is lost: it fetches the block itself, and a third would only fetch it once more.
    pub(crate) fn second_peer(&self, object: &ObjectRef, offset: u64, first: &Arc<Peer>) -> Option<Arc<Peer>> {
        let (body, mut ranked) = SCRATCH.with(RefCell::take);
        let view = self.roster.view();
        let wanted = self.wanted(object, offset);
        view.rank(wanted, &self.config.standpoint, FIRST, &mut ranked);
        let holders = ranked.len().min(wanted.holders());
        let holds = ranked[..holders].iter().any(|index| Arc::ptr_eq(view.peer(*index), first));
        let fit = |peer: &&Arc<Peer>| {
            let well = || !peer.pace().is_shunned() && !matches!(peer.state().0, PoolState::Down { .. });
            !Arc::ptr_eq(peer, first) && well()
        };
        let others = if holds { &ranked[..] } else { &[] };
        let second = others.iter().map(|index| view.peer(*index)).find(fit).map(Arc::clone);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        second
    }

    /// The run that holds a byte of an object.
    pub(crate) fn wanted(&self, object: &ObjectRef, offset: u64) -> Wanted {
        let copies = self.config.copies.of(&object.path);
        let wanted = Wanted::block(object.id, (offset / self.block_size) as u32, copies);
        wanted.held_by(self.spread.copies(wanted.key(), copies))
    }

    /// What a node told with its answer to a read.
    fn told(&self, wanted: Wanted, body: &[u8]) {
        if says_hot(body) {
            self.stats.remotecache.hot_answers.add(1);
            self.spread.hot(wanted.key());
        }
    }

    /// Reads into the whole of `dst`, which lies inside one block: over several rails when it is large and they are
    /// idle, and what fails there, or all of it, over one channel.
    pub(crate) fn read_into(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<()> {
        if !self.rails || dst.len() < SPLIT_FROM {
            return self.read_plain(object, offset, dst);
        }
        let Some(first) = self.first_peer(self.wanted(object, offset)) else {
            return self.read_plain(object, offset, dst);
        };
        let several = first.paths().filter(|paths| paths.up() > 1);
        let several = several.and_then(|paths| Some((paths.current()?, paths.dialer().near(middle(dst)))));
        let Some((current, near)) = several else { return self.read_plain(object, offset, dst) };
        let request = read_of(object, VolumeId::default(), offset, dst.len());
        let started = Instant::now();
        match split::read(&current.pool, near, &request, dst, started + self.config.patience.answer) {
            None => self.read_plain(object, offset, dst),
            Some(failed) => {
                self.hedge.took(&first, started);
                failed
                    .into_iter()
                    .flatten()
                    .try_for_each(|part| self.read_plain(object, offset + part.start as u64, &mut dst[part]))
            }
        }
    }

    fn read_plain(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<()> {
        let wanted = self.wanted(object, offset);
        let got = self.ask(wanted, middle(dst), |peer, lease, body, deadline| {
            let request = Request::Read(read_of(object, lease.welcome().volume, offset, dst.len()));
            peer.compare(lease.welcome(), self.block_size);
            body.clear();
            let got = self.watched(object, offset, peer, lease, dst, |lease, dst, unless| {
                lease.call_unless(&request, body, dst, deadline, unless)
            });
            if got.is_ok() {
                self.told(wanted, body);
            }
            got
        })?;
        if got.payload_len != dst.len() {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("a node answered {} bytes where {} were asked for", got.payload_len, dst.len()),
            ));
        }
        Ok(())
    }

    /// Takes an answer of `peer` over `lease`, or that of a second node when it is late.
    fn watched(
        &self,
        object: &ObjectRef,
        offset: u64,
        peer: &Arc<Peer>,
        lease: &mut Lease<'_>,
        dst: &mut [u8],
        take: impl FnOnce(&mut Lease<'_>, &mut [u8], Option<&std::sync::atomic::AtomicBool>) -> Result<Answer, CallError>,
    ) -> Result<Answer, CallError> {
        // Of one node alone there is nobody else to ask.
        let others = self.roster.view().members().len() > 1;
        let watched = others.then(|| self.hedge.watch(object, offset, dst.len(), peer, lease.breaker()));
        match watched.flatten() {
            None => take(lease, dst, None),
            Some(watched) => {
                let result = take(lease, dst, Some(watched.unless()));
                watched.end(result, lease, dst)
            }
        }
    }

    pub(crate) fn run_fill(&self, object: &ObjectRef, mut fill: Fill) {
        let mut offset = u64::from(fill.id().index) * self.block_size;
        loop {
            let spare = fill.spare();
            let len = spare.len().min(PIECE);
            if len == 0 {
                return;
            }
            match self.read_into(object, offset, &mut spare[..len]) {
                Ok(()) => fill.commit(len),
                Err(error) => return fill.fail(error),
            }
            offset += len as u64;
        }
    }

    /// Reads a large piece of a sequential reader: the answer that was asked for ahead, if there is one, once the next
    /// ones are asked for. Whether `dst` is filled.
    ///
    /// # Errors
    /// `Timeout` when that answer took all the patience there is: asking again would wait as long once more.
    pub(crate) fn read_asked(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<bool> {
        let (claimed, next) = self.ahead.read(object.id, offset, dst.len());
        self.ask_ahead(object, next, dst.len());
        let Some(claimed) = claimed else { return Ok(false) };
        let deadline = Instant::now() + self.config.patience.answer;
        match self.take_asked(claimed, object, offset, dst, deadline) {
            Some(Ok(answer)) if answer.payload_len == dst.len() => {
                self.stats.blockcache.prefetch_bytes.add(dst.len() as u64);
                return Ok(true);
            }
            Some(Err(CallError::Broken(error))) if Instant::now() >= deadline => return Err(error),
            _ => {}
        }
        // Asked for again, of every node that may have it.
        self.stats.remotecache.retries.add(1);
        Ok(false)
    }

    fn take_asked(
        &self,
        claimed: Claimed,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<Answer, CallError>> {
        let (mut body, ranked) = SCRATCH.with(RefCell::take);
        body.clear();
        let mut taken = None;
        claimed.resume(|peer, lease| {
            taken = Some(self.watched(object, offset, peer, lease, dst, |lease, dst, unless| {
                lease.finish(&mut body, dst, deadline, unless)
            }));
        });
        if matches!(taken, Some(Ok(_))) {
            self.told(self.wanted(object, offset), &body);
        }
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        taken
    }

    fn ask_ahead(&self, object: &ObjectRef, next: Range<u64>, piece: usize) {
        let mut at = next.start;
        while at < next.end && self.ask_piece(object, at, piece) {
            at += piece as u64;
        }
        if at < next.end {
            self.ahead.release((next.end - at) / piece as u64);
        }
    }

    /// Asks for one piece ahead of its reader; says whether it is under way.
    fn ask_piece(&self, object: &ObjectRef, at: u64, piece: usize) -> bool {
        let index = (at / self.block_size) as u32;
        let left = (object.block_len(index, self.block_size) as u64).saturating_sub(at % self.block_size);
        if left < piece as u64 {
            // The last of the file, or a piece across two blocks: of two nodes, perhaps.
            return false;
        }
        let Some(peer) = self.first_peer(self.wanted(object, at)) else { return false };
        let request = |welcome: &Welcome| Request::Read(read_of(object, welcome.volume, at, piece));
        let Some(begun) = peer.tcp().begin(request, Instant::now() + self.config.patience.answer) else { return false };
        self.ahead.keep(object.id, at, piece, peer, begun);
        true
    }
}
