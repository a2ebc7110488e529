//! Reads the bytes of a block: chooses the node, one channel or several, pipelined or on demand, and a second node
//! for a late read. Does not know names or attributes.

use crate::latency::LatencyTracker;
use crate::members::MembersSnapshot;
use crate::peer::{GroupPeer, NO_LANDING, call_ranked, landing_address, was_suspended};
use crate::pipeline::ClaimedAnswer;
use crate::placement::{FIRST_HOLDERS, WantedRun};
use crate::remote::{GroupClient, SCRATCH};
use crate::split::{self, SPLIT_FROM};
use spurline_mem::BlockFill;
use spurline_proto::{NodeRequest, ReadRequest, VolumeId, WelcomeAnswer, is_hot_answer, is_redirect};
use spurline_transport::{CallAnswer, CallError, ChannelLease, PoolState};
use spurline_types::{ByteSink as _, Error, ErrorKind, ObjectRef, Result};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Request size when filling a block ahead of its reader: the first bytes can be read before the last arrive.
const PIECE: usize = 1 << 20;

/// A read request for `len` bytes of `object`.
pub(crate) fn build_read(object: &ObjectRef, volume: VolumeId, offset: u64, len: usize) -> ReadRequest<'_> {
    let (path, version, size) = (&*object.path, object.version.as_str(), object.size);
    ReadRequest { volume, path, version, size, offset, len: len as u32 }
}

/// The wire request for `read`. A node that holds a copy and supports redirects may redirect the reader.
pub(crate) fn read_request<'a>(read: ReadRequest<'a>, a_copy: bool, welcome: &WelcomeAnswer) -> NodeRequest<'a> {
    if a_copy && welcome.capabilities.knows_redirects() { NodeRequest::ReadHere(read) } else { NodeRequest::Read(read) }
}

/// The order in which the holders of a block are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderOrder {
    /// Nearest first. A node before the owner may redirect the reader.
    NearFirst,
    /// Owner first; no node may redirect the reader.
    OwnerFirst,
}

impl GroupClient {
    /// Ranks the nodes for `wanted`, best first. Nodes rejected by `may_ask` (late ones) move to the end. Returns how
    /// many of the first nodes may redirect the reader to a later one.
    fn rank_holders(
        &self,
        view: &MembersSnapshot,
        (wanted, order): (WantedRun, HolderOrder),
        most: usize,
        ranked: &mut Vec<u32>,
        may_ask: impl Fn(&LatencyTracker) -> bool,
    ) -> usize {
        let mut copies = 0;
        if order == HolderOrder::OwnerFirst {
            view.find_holders(wanted, most, ranked);
        } else {
            let owner = view.rank_holders(wanted, &self.config.standpoint, most, ranked);
            if wanted.holder_count() > 1 {
                copies = ranked.iter().position(|index| Some(*index) == owner).unwrap_or(0);
            }
        }
        if !self.hedge.deprioritises_any() {
            return copies;
        }
        let may_ask = |index: u32| view.existing_peer(index).is_none_or(|peer| may_ask(peer.pace()));
        // If all of them are late, the order stays.
        for passed in 0..ranked.len().min(FIRST_HOLDERS) {
            if may_ask(ranked[0]) {
                // 0 if the owner itself was moved back.
                return copies.saturating_sub(passed);
            }
            ranked.rotate_left(1);
        }
        copies
    }

    /// The deadline of a read that starts now. One deadline covers all its attempts.
    pub(crate) fn new_deadline(&self) -> Instant {
        Instant::now() + self.config.patience.answer
    }

    /// The deadline for continuing a read after a failed attempt. Extended once if our own process was suspended.
    ///
    /// # Errors
    /// Returns `error` when the deadline has passed.
    pub(crate) fn extend_deadline(&self, deadline: Instant, error: Error) -> Result<Instant> {
        match Instant::now() < deadline {
            true => Ok(deadline),
            false if was_suspended(deadline) => Ok(self.new_deadline()),
            false => Err(error),
        }
    }

    /// Calls the holders of `wanted` in this order until one answers or `deadline` passes. `lands` is the address of
    /// the answer's payload. `call` builds the request anew for each attempt, because each connection numbers volumes
    /// itself. Its flag says whether the node may redirect the reader.
    pub(crate) fn call_holders<T>(
        &self,
        wanted: WantedRun,
        order: HolderOrder,
        lands: usize,
        deadline: Instant,
        mut call: impl FnMut((&Arc<GroupPeer>, bool), &mut ChannelLease<'_>, &mut Vec<u8>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        // Taken out of its cell, so that a nested call finds an empty one and does not panic.
        let (mut body, mut ranked) = SCRATCH.with(RefCell::take);
        let copies = Cell::new(0);
        // Only a read is a valid trial of a late node, because only reads are timed.
        let may_ask = |pace: &LatencyTracker| {
            if lands == NO_LANDING { !pace.is_shunned() } else { pace.admit_request(Instant::now) }
        };
        let rank = |view: &MembersSnapshot, most, ranked: &mut Vec<u32>| {
            copies.set(self.rank_holders(view, (wanted, order), most, ranked, may_ask));
        };
        let retries = &self.stats.remotecache.retries;
        let waits = (self.config.patience, deadline);
        let result = call_ranked(&self.roster, lands, rank, &mut ranked, waits, retries, |asked, lease, deadline| {
            call((asked.peer, asked.rank < copies.get()), lease, &mut body, deadline)
        });
        // Do not keep the memory of a long listing.
        body.clear();
        body.shrink_to(64 << 10);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        result
    }

    /// The node for the first attempt, and whether it may redirect the reader. A caller that then sends no request
    /// must call [`LatencyTracker::return_trial`], or the trial of a late node is lost.
    fn first_peer(&self, wanted: WantedRun) -> Option<(Arc<GroupPeer>, bool)> {
        let (body, mut ranked) = SCRATCH.with(RefCell::take);
        let view = self.roster.snapshot();
        let would_ask = |pace: &LatencyTracker| pace.would_admit(Instant::now);
        let copies = self.rank_holders(&view, (wanted, HolderOrder::NearFirst), FIRST_HOLDERS, &mut ranked, would_ask);
        let first = ranked.first().map(|index| (Arc::clone(view.peer(*index)), copies > 0));
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        first
    }

    /// The node for the second request when `first` is late: another holder, else the next in rank, which gets the
    /// block from a peer or the origin. `None` when `first` replaces a lost holder: a third node would only repeat
    /// its fetch.
    pub(crate) fn second_peer(
        &self,
        object: &ObjectRef,
        offset: u64,
        first: &Arc<GroupPeer>,
    ) -> Option<Arc<GroupPeer>> {
        let (body, mut ranked) = SCRATCH.with(RefCell::take);
        let view = self.roster.snapshot();
        let wanted = self.wanted_run(object, offset);
        view.rank_holders(wanted, &self.config.standpoint, FIRST_HOLDERS, &mut ranked);
        let holders = ranked.len().min(wanted.holder_count());
        let holds = ranked[..holders].iter().any(|index| Arc::ptr_eq(view.peer(*index), first));
        let fit = |peer: &&Arc<GroupPeer>| {
            let well = || !peer.pace().is_shunned() && !matches!(peer.pool_state().0, PoolState::Down { .. });
            !Arc::ptr_eq(peer, first) && well()
        };
        let others = if holds { &ranked[..] } else { &[] };
        let second = others.iter().map(|index| view.peer(*index)).find(fit).map(Arc::clone);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        second
    }

    /// The run that contains a byte of an object.
    pub(crate) fn wanted_run(&self, object: &ObjectRef, offset: u64) -> WantedRun {
        let copies = self.config.copies.copies_of(&object.path);
        let wanted = WantedRun::of_block(object.id, (offset / self.block_size) as u32, copies);
        wanted.with_copies(self.spread.copies_for(wanted.key(), copies))
    }

    /// Records a hot run reported in the answer to a read.
    fn note_hot(&self, wanted: WantedRun, body: &[u8]) {
        if is_hot_answer(body) {
            self.stats.remotecache.hot_answers.add(1);
            self.spread.mark_hot(wanted.key());
        }
    }

    /// Fills `dst`, which lies inside one block. A large read is split over several idle rails; the rest, or all of
    /// it, goes over one channel to the nodes in this order.
    pub(crate) fn read_into(
        &self,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        order: HolderOrder,
        deadline: Instant,
    ) -> Result<()> {
        if !self.rails || dst.len() < SPLIT_FROM {
            return self.read_one_channel(object, offset, dst, order, deadline);
        }
        let Some((first, a_copy)) = self.first_peer(self.wanted_run(object, offset)) else {
            return self.read_one_channel(object, offset, dst, order, deadline);
        };
        let several = first.paths().filter(|paths| paths.up_count() > 1);
        let several =
            several.and_then(|paths| Some((paths.current()?, paths.dialer().rails_near(landing_address(dst)))));
        let Some((current, near)) = several else { return self.read_one_channel(object, offset, dst, order, deadline) };
        let request = build_read(object, VolumeId::default(), offset, dst.len());
        let started = Instant::now();
        if !first.pace().admit_request(|| started) {
            return self.read_one_channel(object, offset, dst, order, deadline);
        }
        match split::read_split(&current.pool, near, (&request, a_copy), dst, deadline) {
            None => {
                first.pace().return_trial(|| started);
                self.read_one_channel(object, offset, dst, order, deadline)
            }
            Some(left) => {
                // A local rail failed: the time says nothing about the node.
                if left.iter().flatten().all(|left| left.redirected) {
                    self.hedge.note_unwatched(&first, started);
                }
                left.into_iter().flatten().try_for_each(|left| {
                    let late = || format!("{}: a part of a read over several rails missed its deadline", first.name());
                    let deadline = self.extend_deadline(deadline, Error::new(ErrorKind::Timeout, late()))?;
                    let order = self.order_after(left.redirected);
                    self.read_one_channel(object, offset + left.part.start as u64, &mut dst[left.part], order, deadline)
                })
            }
        }
    }

    /// The order after an answer; counts a redirect.
    fn order_after(&self, sent_on: bool) -> HolderOrder {
        self.stats.remotecache.sent_on.add(u64::from(sent_on));
        if sent_on { HolderOrder::OwnerFirst } else { HolderOrder::NearFirst }
    }

    fn read_one_channel(
        &self,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        order: HolderOrder,
        deadline: Instant,
    ) -> Result<()> {
        let wanted = self.wanted_run(object, offset);
        let (got, sent_on) = self.call_holders(
            wanted,
            order,
            landing_address(dst),
            deadline,
            |(peer, a_copy), lease, body, deadline| {
                let read = build_read(object, lease.welcome().volume, offset, dst.len());
                let request = read_request(read, a_copy, lease.welcome());
                peer.compare_settings(lease.welcome(), self.block_size);
                body.clear();
                let got = self.call_hedged(object, offset, peer, lease, dst, |lease, dst, unless| {
                    lease.call_unless(&request, body, dst, deadline, unless)
                });
                if got.is_ok() {
                    self.note_hot(wanted, body);
                }
                got.map(|answer| (answer, is_redirect(body)))
            },
        )?;
        // At most once: in owner order a redirect is not allowed.
        if sent_on && order == HolderOrder::NearFirst {
            return self.read_one_channel(object, offset, dst, self.order_after(true), deadline);
        }
        if got.payload_len != dst.len() {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("a node answered {} bytes, {} were requested", got.payload_len, dst.len()),
            ));
        }
        Ok(())
    }

    /// Takes the answer of `peer` over `lease`, or that of a second node when it is late.
    fn call_hedged(
        &self,
        object: &ObjectRef,
        offset: u64,
        peer: &Arc<GroupPeer>,
        lease: &mut ChannelLease<'_>,
        dst: &mut [u8],
        take: impl FnOnce(
            &mut ChannelLease<'_>,
            &mut [u8],
            Option<&std::sync::atomic::AtomicBool>,
        ) -> Result<CallAnswer, CallError>,
    ) -> Result<CallAnswer, CallError> {
        // A lone node has no alternative.
        let others = self.roster.snapshot().members().len() > 1;
        let watched = others.then(|| self.hedge.watch_read(object, offset, dst.len(), peer, lease.breaker()));
        match watched.flatten() {
            None => take(lease, dst, None),
            Some(watched) => {
                let result = take(lease, dst, Some(watched.cancelled_flag()));
                watched.end_read(result, lease, dst)
            }
        }
    }

    pub(crate) fn fill_block(&self, object: &ObjectRef, mut fill: BlockFill) {
        let mut offset = u64::from(fill.id().index) * self.block_size;
        loop {
            let spare = fill.spare();
            let len = spare.len().min(PIECE);
            if len == 0 {
                return;
            }
            match self.read_into(object, offset, &mut spare[..len], HolderOrder::NearFirst, self.new_deadline()) {
                Ok(()) => fill.commit(len),
                Err(error) => return fill.fail(error),
            }
            offset += len as u64;
        }
    }

    /// Reads a large piece for a sequential reader. Sends the next pipelined requests, then takes the pipelined
    /// answer for this piece if there is one. `None` when `dst` is filled, else the order and deadline for a normal
    /// read.
    ///
    /// # Errors
    /// When that answer used up the deadline.
    pub(crate) fn read_pipelined(
        &self,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        mut deadline: Instant,
    ) -> Result<Option<(HolderOrder, Instant)>> {
        let (claimed, next) = self.ahead.note_read(object.id, offset, dst.len());
        self.pipeline_next(object, next, dst.len());
        let Some(claimed) = claimed else { return Ok(Some((HolderOrder::NearFirst, deadline))) };
        match self.take_pipelined(claimed, object, offset, dst, deadline) {
            Some(Ok((answer, _))) if answer.payload_len == dst.len() => {
                self.stats.blockcache.prefetch_bytes.add(dst.len() as u64);
                return Ok(None);
            }
            Some(Ok((_, true))) => return Ok(Some((self.order_after(true), deadline))),
            Some(Err(error)) => deadline = self.extend_deadline(deadline, error.into())?,
            _ => {}
        }
        // Repeated on every node that may hold it.
        self.stats.remotecache.retries.add(1);
        Ok(Some((HolderOrder::NearFirst, deadline)))
    }

    fn take_pipelined(
        &self,
        claimed: ClaimedAnswer,
        object: &ObjectRef,
        offset: u64,
        dst: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<(CallAnswer, bool), CallError>> {
        let (mut body, ranked) = SCRATCH.with(RefCell::take);
        body.clear();
        let mut taken = None;
        claimed.resume_call(|peer, lease| {
            taken = Some(self.call_hedged(object, offset, peer, lease, dst, |lease, dst, unless| {
                lease.finish_call(&mut body, dst, deadline, unless)
            }));
        });
        if matches!(taken, Some(Ok(_))) {
            self.note_hot(self.wanted_run(object, offset), &body);
        }
        let taken = taken.map(|taken| taken.map(|answer| (answer, is_redirect(&body))));
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        taken
    }

    fn pipeline_next(&self, object: &ObjectRef, next: Range<u64>, piece: usize) {
        let mut at = next.start;
        while at < next.end && self.pipeline_piece(object, at, piece) {
            at += piece as u64;
        }
        if at < next.end {
            self.ahead.release_pieces((next.end - at) / piece as u64);
        }
    }

    /// Sends the pipelined request for one piece; returns whether it was sent.
    fn pipeline_piece(&self, object: &ObjectRef, at: u64, piece: usize) -> bool {
        let index = (at / self.block_size) as u32;
        let left = (object.block_len(index, self.block_size) as u64).saturating_sub(at % self.block_size);
        if left < piece as u64 {
            // The end of the file, or a piece across two blocks that may lie on two nodes.
            return false;
        }
        let Some((peer, a_copy)) = self.first_peer(self.wanted_run(object, at)) else { return false };
        let request =
            |welcome: &WelcomeAnswer| read_request(build_read(object, welcome.volume, at, piece), a_copy, welcome);
        let now = Instant::now();
        if !peer.pace().admit_request(|| now) {
            return false;
        }
        let Some(begun) = peer.tcp_pool().begin_call(request, now + self.config.patience.answer) else {
            peer.pace().return_trial(|| now);
            return false;
        };
        self.ahead.keep_answer(object.id, at, piece, peer, begun);
        true
    }
}
