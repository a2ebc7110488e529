//! How the bytes of a block are asked for: of which node, over one channel or several, ahead of the reader or now, and
//! of a second node when the first is late. It knows no names and no attributes.

use crate::ahead::Claimed;
use crate::pace::Pace;
use crate::peer::{NOWHERE, Peer, ask, middle, overslept};
use crate::placement::{FIRST, Wanted};
use crate::remote::{Inner, SCRATCH};
use crate::roster::View;
use crate::split::{self, SPLIT_FROM};
use spurline_mem::Fill;
use spurline_proto::{Read, Request, VolumeId, Welcome, says_hot, says_sent_on};
use spurline_transport::{Answer, CallError, Lease, PoolState};
use spurline_types::{Error, ErrorKind, ObjectRef, Result, Sink as _};
use std::cell::{Cell, RefCell};
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

/// The request for `read` of a node that may send the reader on, if it is `a_copy` and knows how to.
pub(crate) fn request_for<'a>(read: Read<'a>, a_copy: bool, welcome: &Welcome) -> Request<'a> {
    if a_copy && welcome.capabilities.sends_on() { Request::ReadHere(read) } else { Request::Read(read) }
}

/// In which order the nodes that hold a block are asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The nearest first. One that comes before the block's owner may send the reader on.
    NearFirst,
    /// The owner first, who fetches it for all, and no other sends the reader on.
    OwnerFirst,
}

impl Inner {
    /// The nodes to ask for `wanted`, best first; those that answer late come last, unless it is their turn by `may_ask`. How
    /// many of the first may send the reader on to one that comes after them.
    fn rank(
        &self,
        view: &View,
        (wanted, order): (Wanted, Order),
        most: usize,
        ranked: &mut Vec<u32>,
        may_ask: impl Fn(&Pace) -> bool,
    ) -> usize {
        let mut copies = 0;
        if order == Order::OwnerFirst {
            view.holders(wanted, most, ranked);
        } else {
            let owner = view.rank(wanted, &self.config.standpoint, most, ranked);
            if wanted.holders() > 1 {
                copies = ranked.iter().position(|index| Some(*index) == owner).unwrap_or(0);
            }
        }
        if !self.hedge.shuns() {
            return copies;
        }
        let may_ask = |index: u32| view.made(index).is_none_or(|peer| may_ask(peer.pace()));
        // When all of them are late, nothing is changed.
        for passed in 0..ranked.len().min(FIRST) {
            if may_ask(ranked[0]) {
                // None, when their owner is one of those that are passed.
                return copies.saturating_sub(passed);
            }
            ranked.rotate_left(1);
        }
        copies
    }

    /// Until when the answer to what is asked now is waited for. A read has one deadline, whatever it asks and waits for.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config.patience.answer
    }

    /// Until when a read is waited for of which something ended without its bytes.
    ///
    /// # Errors
    /// What that was, `error`, when the time is over, and not because this process stood still.
    pub(crate) fn goes_on(&self, deadline: Instant, error: Error) -> Result<Instant> {
        match Instant::now() < deadline {
            true => Ok(deadline),
            false if overslept(deadline) => Ok(self.deadline()),
            false => Err(error),
        }
    }

    /// Asks the nodes that hold `wanted`, in this order and until `deadline`, with `call`, whose answer is to land at `lands`,
    /// made anew for each attempt because every connection numbers the volume itself. It is told whether the node may
    /// send the reader on.
    pub(crate) fn ask<T>(
        &self,
        wanted: Wanted,
        order: Order,
        lands: usize,
        deadline: Instant,
        mut call: impl FnMut((&Arc<Peer>, bool), &mut Lease<'_>, &mut Vec<u8>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        // Taken out of its cell for the call, so that a call made inside another finds an empty one, not a panic.
        let (mut body, mut ranked) = SCRATCH.with(RefCell::take);
        let copies = Cell::new(0);
        // A late node is tried with a read, whose time is taken.
        let may_ask = |pace: &Pace| if lands == NOWHERE { !pace.is_shunned() } else { pace.may_ask(Instant::now) };
        let rank = |view: &View, most, ranked: &mut Vec<u32>| {
            copies.set(self.rank(view, (wanted, order), most, ranked, may_ask));
        };
        let retries = &self.stats.remotecache.retries;
        let waits = (self.config.patience, deadline);
        let result = ask(&self.roster, lands, rank, &mut ranked, waits, retries, |asked, lease, deadline| {
            call((asked.peer, asked.place < copies.get()), lease, &mut body, deadline)
        });
        // A long listing must not keep its memory for ever.
        body.clear();
        body.shrink_to(64 << 10);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        result
    }

    /// The node that is asked first, and whether it may send the reader on. Whoever asks it has its [`Pace::may_ask`] for
    /// that, and who can't after all has its [`Pace::not_asked`], or the trial of a late one would be lost.
    fn first_peer(&self, wanted: Wanted) -> Option<(Arc<Peer>, bool)> {
        let (body, mut ranked) = SCRATCH.with(RefCell::take);
        let view = self.roster.view();
        let would_ask = |pace: &Pace| pace.would_ask(Instant::now);
        let copies = self.rank(&view, (wanted, Order::NearFirst), FIRST, &mut ranked, would_ask);
        let first = ranked.first().map(|index| (Arc::clone(view.peer(*index)), copies > 0));
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
    /// idle, and what fails there, or all of it, over one channel, of the nodes in this order.
    pub(crate) fn read_into(
        &self,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        order: Order,
        deadline: Instant,
    ) -> Result<()> {
        if !self.rails || dst.len() < SPLIT_FROM {
            return self.read_plain(object, offset, dst, order, deadline);
        }
        let Some((first, a_copy)) = self.first_peer(self.wanted(object, offset)) else {
            return self.read_plain(object, offset, dst, order, deadline);
        };
        let several = first.paths().filter(|paths| paths.up() > 1);
        let several = several.and_then(|paths| Some((paths.current()?, paths.dialer().near(middle(dst)))));
        let Some((current, near)) = several else { return self.read_plain(object, offset, dst, order, deadline) };
        let request = read_of(object, VolumeId::default(), offset, dst.len());
        let started = Instant::now();
        if !first.pace().may_ask(|| started) {
            return self.read_plain(object, offset, dst, order, deadline);
        }
        match split::read(&current.pool, near, (&request, a_copy), dst, deadline) {
            None => {
                first.pace().not_asked(|| started);
                self.read_plain(object, offset, dst, order, deadline)
            }
            Some(left) => {
                // How long the node takes is not told by a read of which a rail of this side lost a part.
                if left.iter().flatten().all(|left| left.sent_on) {
                    self.hedge.took(&first, started);
                }
                left.into_iter().flatten().try_for_each(|left| {
                    let late = || format!("{}: a part of a read over several rails did not come in time", first.name());
                    let deadline = self.goes_on(deadline, Error::new(ErrorKind::Timeout, late()))?;
                    let order = self.after(left.sent_on);
                    self.read_plain(object, offset + left.part.start as u64, &mut dst[left.part], order, deadline)
                })
            }
        }
    }

    /// The order in which nodes are asked after an answer, which is counted if it `sent_on` the reader.
    fn after(&self, sent_on: bool) -> Order {
        self.stats.remotecache.sent_on.add(u64::from(sent_on));
        if sent_on { Order::OwnerFirst } else { Order::NearFirst }
    }

    fn read_plain(
        &self,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        order: Order,
        deadline: Instant,
    ) -> Result<()> {
        let wanted = self.wanted(object, offset);
        let (got, sent_on) =
            self.ask(wanted, order, middle(dst), deadline, |(peer, a_copy), lease, body, deadline| {
                let read = read_of(object, lease.welcome().volume, offset, dst.len());
                let request = request_for(read, a_copy, lease.welcome());
                peer.compare(lease.welcome(), self.block_size);
                body.clear();
                let got = self.watched(object, offset, peer, lease, dst, |lease, dst, unless| {
                    lease.call_unless(&request, body, dst, deadline, unless)
                });
                if got.is_ok() {
                    self.told(wanted, body);
                }
                got.map(|answer| (answer, says_sent_on(body)))
            })?;
        // Once: who is asked in the owner's order is not allowed to.
        if sent_on && order == Order::NearFirst {
            return self.read_plain(object, offset, dst, self.after(true), deadline);
        }
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
            match self.read_into(object, offset, &mut spare[..len], Order::NearFirst, self.deadline()) {
                Ok(()) => fill.commit(len),
                Err(error) => return fill.fail(error),
            }
            offset += len as u64;
        }
    }

    /// Reads a large piece of a sequential reader: the answer that was asked for ahead, if there is one, once the next
    /// ones are asked for. `None` when `dst` is filled, or else the order in which nodes are to be asked for it, and until
    /// when.
    ///
    /// # Errors
    /// When that answer took all the time there is.
    pub(crate) fn read_asked(
        &self,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        mut deadline: Instant,
    ) -> Result<Option<(Order, Instant)>> {
        let (claimed, next) = self.ahead.read(object.id, offset, dst.len());
        self.ask_ahead(object, next, dst.len());
        let Some(claimed) = claimed else { return Ok(Some((Order::NearFirst, deadline))) };
        match self.take_asked(claimed, object, offset, dst, deadline) {
            Some(Ok((answer, _))) if answer.payload_len == dst.len() => {
                self.stats.blockcache.prefetch_bytes.add(dst.len() as u64);
                return Ok(None);
            }
            Some(Ok((_, true))) => return Ok(Some((self.after(true), deadline))),
            Some(Err(error)) => deadline = self.goes_on(deadline, error.into())?,
            _ => {}
        }
        // Asked for again, of every node that may have it.
        self.stats.remotecache.retries.add(1);
        Ok(Some((Order::NearFirst, deadline)))
    }

    fn take_asked(
        &self,
        claimed: Claimed,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<(Answer, bool), CallError>> {
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
        let taken = taken.map(|taken| taken.map(|answer| (answer, says_sent_on(&body))));
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
        let Some((peer, a_copy)) = self.first_peer(self.wanted(object, at)) else { return false };
        let request = |welcome: &Welcome| request_for(read_of(object, welcome.volume, at, piece), a_copy, welcome);
        let now = Instant::now();
        if !peer.pace().may_ask(|| now) {
            return false;
        }
        let Some(begun) = peer.tcp().begin(request, now + self.config.patience.answer) else {
            peer.pace().not_asked(|| now);
            return false;
        };
        self.ahead.keep(object.id, at, piece, peer, begun);
        true
    }
}
