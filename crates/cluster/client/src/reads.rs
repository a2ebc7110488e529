//! Reads the bytes of a block: chooses the node, one channel or several, pipelined or on demand, and a second node
//! for a late read. Does not know names or attributes.

use crate::latency::LatencyTracker;
use crate::members::MembersSnapshot;
use crate::peer::{GroupPeer, RequestPatience, call_ranked, landing_address, was_suspended};
use crate::pipeline::ClaimedAnswer;
use crate::placement::{FIRST_HOLDERS, WantedBlock};
use crate::read_plan::{CallPlan, HolderChoice, HolderOrder, LateNodes, OwnedChoice, ReadPlan};
use crate::remote::{GroupClient, SCRATCH};
use crate::split::{self, SPLIT_FROM};
use spurline_mem::BlockFill;
use spurline_proto::{NodeRequest, ReadFlags, ReadRequest, is_hot_answer, is_redirect};
use spurline_transport::{CallAnswer, CallError, ChannelLease};
use spurline_types::{ByteSink as _, Error, ErrorKind, ObjectRef, Result};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Request size when filling a block ahead of its reader: the first bytes can be read before the last arrive.
const PIECE: usize = 1 << 20;

/// Blocks behind a held block that are expected to be held, too: a request for each costs a hot reader 3 to 5 %.
const HELD_BLOCKS: u64 = 4;
/// How long a node may take to begin a fetch, which it does not wait for.
const BEGIN_PATIENCE: RequestPatience = RequestPatience { answer: Duration::from_secs(1), absence: Duration::ZERO };

/// Result of a pipelined request.
enum PipelinedResult {
    Filled,
    Redirected,
    Failed(Error),
    /// The answer was abandoned, or had another length.
    Lost,
}

impl GroupClient {
    /// Ranks the nodes for `wanted`, best first. Nodes rejected by `may_ask` (late ones) move to the end. Returns how
    /// many of the first nodes may redirect the reader to a later one.
    fn rank_holders(
        &self,
        view: &MembersSnapshot,
        wanted: WantedBlock,
        order: HolderOrder,
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
        let may_ask = |index: u32| view.existing_peer(index).is_none_or(|peer| may_ask(peer.latency()));
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

    /// A plan to read into the whole of `dst` from `offset`, inside one block.
    pub(crate) fn plan_read<'a>(
        &self,
        object: &'a ObjectRef,
        offset: u64,
        dst: &[u8],
        deadline: Instant,
    ) -> ReadPlan<'a> {
        let patience = self.config.patience;
        let call = CallPlan { lands: Some(landing_address(dst)), late_nodes: LateNodes::Try, patience, deadline };
        let block = self.wanted_block(object, offset);
        ReadPlan { object, offset, len: dst.len(), block, order: HolderOrder::NearFirst, call }
    }

    /// Calls the holders of `wanted` in this order until one answers or the plan's deadline passes. `call` builds the
    /// request anew for each attempt, because each connection numbers volumes itself.
    pub(crate) fn call_holders<T>(
        &self,
        wanted: WantedBlock,
        order: HolderOrder,
        plan: &CallPlan,
        mut call: impl FnMut(
            HolderChoice<&Arc<GroupPeer>>,
            &mut ChannelLease<'_>,
            &mut Vec<u8>,
            Instant,
        ) -> Result<T, CallError>,
    ) -> Result<T> {
        // Taken out of its cell, so that a nested call finds an empty one and does not panic.
        let (mut body, mut ranked) = SCRATCH.with(RefCell::take);
        let copies = Cell::new(0);
        let rank = |view: &MembersSnapshot, most, ranked: &mut Vec<u32>| {
            copies.set(self.rank_holders(view, wanted, order, most, ranked, |tracker| match plan.late_nodes {
                LateNodes::Try => tracker.admit_request(Instant::now),
                LateNodes::Skip => !tracker.is_deprioritised(),
            }));
        };
        let retries = &self.stats.remotecache.retries;
        let result = call_ranked(&self.members, plan, rank, &mut ranked, retries, |attempt, lease, deadline| {
            let holder = HolderChoice { peer: attempt.peer, may_redirect: attempt.rank < copies.get() };
            call(holder, lease, &mut body, deadline)
        });
        // Do not keep the memory of a long listing.
        body.clear();
        body.shrink_to(64 << 10);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        result
    }

    /// The node for the first attempt. A caller that then sends no request must call
    /// [`LatencyTracker::return_trial`], or the trial of a late node is lost.
    fn first_holder(&self, wanted: WantedBlock) -> Option<OwnedChoice> {
        let (body, mut ranked) = SCRATCH.with(RefCell::take);
        let view = self.members.snapshot();
        let copies = self.rank_holders(&view, wanted, HolderOrder::NearFirst, FIRST_HOLDERS, &mut ranked, |tracker| {
            tracker.would_admit(Instant::now)
        });
        let first = ranked.first().map(|index| {
            let peer = Arc::clone(view.peer(*index));
            HolderChoice { peer, may_redirect: copies > 0 }
        });
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
        let view = self.members.snapshot();
        let wanted = self.wanted_block(object, offset);
        view.rank_holders(wanted, &self.config.standpoint, FIRST_HOLDERS, &mut ranked);
        let holders = ranked.len().min(wanted.holder_count());
        let holds = ranked[..holders].iter().any(|index| Arc::ptr_eq(view.peer(*index), first));
        let others = if holds { &ranked[..] } else { &[] };
        let second = others
            .iter()
            .map(|index| view.peer(*index))
            .find(|peer| !Arc::ptr_eq(peer, first) && !peer.latency().is_deprioritised() && !peer.is_down())
            .map(Arc::clone);
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        second
    }

    /// The block that contains a byte of an object.
    pub(crate) fn wanted_block(&self, object: &ObjectRef, offset: u64) -> WantedBlock {
        let copies = self.config.copies.copies_of(&object.path);
        let wanted = WantedBlock::of_block(object.id, (offset / self.block_size) as u32, copies);
        wanted.with_copies(self.spread.copies_for(wanted.key(), copies))
    }

    /// Records a hot block reported in the answer to a read.
    fn note_hot(&self, wanted: WantedBlock, body: &[u8]) {
        if is_hot_answer(body) {
            self.stats.remotecache.hot_answers.add(1);
            self.spread.mark_hot(wanted.key());
        }
    }

    /// Reads `plan` into `dst`. A large read is split over several idle rails; the rest, or all of it, goes over one
    /// channel.
    pub(crate) fn read_planned(&self, plan: &ReadPlan<'_>, dst: &mut [u8]) -> Result<()> {
        if !self.rails || plan.len < SPLIT_FROM {
            return self.read_one_channel(plan, dst);
        }
        let Some(first) = self.first_holder(plan.block) else { return self.read_one_channel(plan, dst) };
        let peer = &first.peer;
        let Some(several) = peer.several_rails(plan.call.lands) else { return self.read_one_channel(plan, dst) };
        let started = Instant::now();
        if !peer.latency().admit_request(|| started) {
            return self.read_one_channel(plan, dst);
        }
        let Some(left) = split::read_split(&several, plan, first.may_redirect, dst) else {
            peer.latency().return_trial(|| started);
            return self.read_one_channel(plan, dst);
        };
        // A local rail failed: the time says nothing about the node.
        if left.iter().flatten().all(|left| left.redirected) {
            self.hedge.note_unwatched(peer, started);
        }
        left.into_iter().flatten().try_for_each(|left| {
            let late = format!("{}: a part of a read over several rails missed its deadline", peer.name());
            let deadline = self.extend_deadline(plan.call.deadline, Error::new(ErrorKind::Timeout, late))?;
            let dst = &mut dst[left.part.clone()];
            let part = plan.part(left.part, dst).until(deadline);
            self.read_one_channel(&if left.redirected { self.redirected(part) } else { part }, dst)
        })
    }

    /// The plan after a redirect, which is counted.
    fn redirected<'a>(&self, plan: ReadPlan<'a>) -> ReadPlan<'a> {
        self.stats.remotecache.sent_on.add(1);
        plan.redirected()
    }

    fn read_one_channel(&self, plan: &ReadPlan<'_>, dst: &mut [u8]) -> Result<()> {
        let (got, redirected) =
            self.call_holders(plan.block, plan.order, &plan.call, |holder, lease, body, deadline| {
                let request = NodeRequest::Read(plan.request(lease.welcome().volume, holder.may_redirect));
                holder.peer.compare_settings(lease.welcome(), self.block_size);
                body.clear();
                let got = self.call_hedged(plan, holder.peer, lease, dst, |lease, dst, unless| {
                    lease.call_unless(&request, body, dst, deadline, unless)
                });
                if got.is_ok() {
                    self.note_hot(plan.block, body);
                }
                got.map(|answer| (answer, is_redirect(body)))
            })?;
        // At most once: in owner order a redirect is not allowed.
        if redirected && plan.order == HolderOrder::NearFirst {
            return self.read_one_channel(&self.redirected(*plan), dst);
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
        plan: &ReadPlan<'_>,
        peer: &Arc<GroupPeer>,
        lease: &mut ChannelLease<'_>,
        dst: &mut [u8],
        take: impl FnOnce(&mut ChannelLease<'_>, &mut [u8], Option<&AtomicBool>) -> Result<CallAnswer, CallError>,
    ) -> Result<CallAnswer, CallError> {
        // A lone node has no alternative.
        let others = self.members.snapshot().members().len() > 1;
        let watched = others.then(|| self.hedge.watch_read(plan.object, plan.offset, plan.len, peer, lease.breaker()));
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
            let plan = self.plan_read(object, offset, &spare[..len], self.new_deadline());
            match self.read_planned(&plan, &mut spare[..len]) {
                Ok(()) => fill.commit(len),
                Err(error) => return fill.fail(error),
            }
            offset += len as u64;
        }
    }

    /// Has the nodes fetch those of `blocks` that their owners do not hold, before their reader gets there. A last block that is at
    /// its owner tells that the data is not cold, and that the next blocks need no such request.
    pub(crate) fn begin_fetches(&self, object: &ObjectRef, blocks: Range<u32>) {
        let Some(last) = blocks.end.checked_sub(1) else { return };
        if self.begin_fetch(object, last) {
            let _ = (blocks.start..last).all(|index| self.begin_fetch(object, index));
        } else {
            self.ahead.note_held(object.id, (u64::from(last) + 1 + HELD_BLOCKS) * self.block_size);
        }
    }

    /// Has the owner of a block fetch the block; false when that is not needed, or the owner gives no answer.
    fn begin_fetch(&self, object: &ObjectRef, index: u32) -> bool {
        let offset = u64::from(index) * self.block_size;
        let plan = CallPlan::without_payload(BEGIN_PATIENCE);
        let wanted = self.wanted_block(object, offset);
        let order = HolderOrder::OwnerFirst;
        let first = ReadPlan { object, offset, len: 1, block: wanted, order, call: plan };
        let answer = self.call_holders(wanted, order, &plan, |_, lease, body, deadline| {
            let flags = ReadFlags::BEGIN_FETCH;
            let request = ReadRequest { flags, ..first.request(lease.welcome().volume, false) };
            lease.call(&NodeRequest::Read(request), body, &mut [0], &mut |_| {}, deadline)
        });
        answer.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }

    /// Reads a large piece for a sequential reader. Sends the next pipelined requests, then takes the pipelined
    /// answer for this piece if there is one. `None` when `dst` is filled, else the plan of a normal read.
    ///
    /// # Errors
    /// When that answer used up the deadline.
    pub(crate) fn read_pipelined<'a>(&self, plan: ReadPlan<'a>, dst: &mut [u8]) -> Result<Option<ReadPlan<'a>>> {
        let (claimed, next) = self.ahead.note_read(plan.object.id, plan.offset, plan.len);
        self.pipeline_next(&plan, next);
        let Some(claimed) = claimed else { return Ok(Some(plan)) };
        let retried = match self.take_pipelined(&plan, claimed, dst) {
            PipelinedResult::Filled => {
                self.stats.blockcache.prefetch_bytes.add(dst.len() as u64);
                return Ok(None);
            }
            PipelinedResult::Redirected => return Ok(Some(self.redirected(plan))),
            PipelinedResult::Failed(error) => plan.until(self.extend_deadline(plan.call.deadline, error)?),
            PipelinedResult::Lost => plan,
        };
        // Repeated on every node that may hold it.
        self.stats.remotecache.retries.add(1);
        Ok(Some(retried))
    }

    fn take_pipelined(&self, plan: &ReadPlan<'_>, claimed: ClaimedAnswer, dst: &mut [u8]) -> PipelinedResult {
        let (mut body, ranked) = SCRATCH.with(RefCell::take);
        body.clear();
        let mut taken = None;
        claimed.resume_call(|peer, lease| {
            taken = Some(self.call_hedged(plan, peer, lease, dst, |lease, dst, unless| {
                lease.finish_call(&mut body, dst, plan.call.deadline, unless)
            }));
        });
        let result = match taken {
            None => PipelinedResult::Lost,
            Some(Err(error)) => PipelinedResult::Failed(error.into()),
            Some(Ok(answer)) => {
                self.note_hot(plan.block, &body);
                match answer.payload_len == dst.len() {
                    true => PipelinedResult::Filled,
                    false if is_redirect(&body) => PipelinedResult::Redirected,
                    false => PipelinedResult::Lost,
                }
            }
        };
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        result
    }

    /// Sends pipelined requests for the pieces of `next`, each as long as the plan's.
    fn pipeline_next(&self, plan: &ReadPlan<'_>, next: Range<u64>) {
        let piece = plan.len as u64;
        let mut at = next.start;
        while at < next.end && self.pipeline_piece(plan, at) {
            at += piece;
        }
        if at < next.end {
            self.ahead.release_pieces((next.end - at) / piece);
        }
    }

    /// Sends the pipelined request for the piece at `offset`; returns whether it was sent.
    fn pipeline_piece(&self, plan: &ReadPlan<'_>, offset: u64) -> bool {
        let index = (offset / self.block_size) as u32;
        let left = (plan.object.block_len(index, self.block_size) as u64).saturating_sub(offset % self.block_size);
        if left < plan.len as u64 {
            // The end of the file, or a piece across two blocks that may lie on two nodes.
            return false;
        }
        let piece = ReadPlan { offset, block: self.wanted_block(plan.object, offset), ..*plan };
        let Some(HolderChoice { peer, may_redirect }) = self.first_holder(piece.block) else { return false };
        let now = Instant::now();
        if !peer.latency().admit_request(|| now) {
            return false;
        }
        let Some(begun) = peer.tcp_pool().begin_call(
            |welcome| NodeRequest::Read(piece.request(welcome.volume, may_redirect)),
            now + self.config.patience.answer,
        ) else {
            peer.latency().return_trial(|| now);
            return false;
        };
        self.ahead.keep_answer(plan.object.id, offset, plan.len, peer, begun);
        true
    }
}
