//! Decides which blocks to read ahead: a state machine over the offsets and lengths of one handle's reads. It has no
//! clock, thread, lock or I/O, and allocates nothing after construction.
//!
//! A *run* is a stretch of the file that was read without a gap. A read at the end of a run extends it. Two runs that
//! meet are joined, so requests out of order (the kernel's own read-ahead, several threads on one handle) still form
//! one run. Many runs may grow side by side (a data loader's shards). Only an extended run is read ahead, by at most
//! twice its own length plus a block, so that wasted reads stay in proportion. A handle whose reads mostly start new
//! runs needs longer runs before read-ahead starts, so random reads that meet by chance cause none.

use std::ops::Range;

/// The number of runs tracked per handle: twice the sixteen interleaved readers of one file that data loaders use, so
/// that stray reads do not displace a live run.
const RUNS: usize = u32::BITS as usize;
/// A run not extended within this many reads of the handle no longer takes a share of the window.
const LIVE: u32 = 8 * RUNS as u32;
/// Doubt grows by this when a read starts a run, and falls by one when a read extends one.
const STRAY: u32 = 2;
const MAX_DOUBT: u32 = 2 * STRAY * RUNS as u32;
/// This much doubt requires one more extension before a run is read ahead.
const DOUBT_PER_READ: u32 = 8;
/// A read inside a run counts as a late one of several in flight if it starts within this many times its own length
/// before the run's end. A read further back is a reader that starts over.
const REORDER: u64 = 16;
/// A first read of at least this many bytes at the start of a file counts as a sequential reader: shorter ones mostly
/// read a header.
const WHOLE_FILE_READ: u64 = 64 << 10;

#[derive(Clone, Copy, Default)]
struct ReadRun {
    start: u64,
    end: u64,
    /// Bytes read in forward direction.
    read: u64,
    /// The first block not yet requested.
    frontier: u32,
    /// How many blocks beyond the reader are requested; 0 until read-ahead starts.
    window: u32,
    /// How many reads extended it.
    continued: u32,
    /// The number of the last read that touched it.
    touched: u32,
}

/// The run that a read belongs to.
enum RunMatch {
    In(usize),
    /// None; `oldest` may be replaced by a new run.
    Nowhere {
        oldest: usize,
    },
}

/// The indices of the set bits.
fn set_bits(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        bit
    })
}

/// The runs of one handle.
pub struct ReadAhead {
    size: u64,
    block: u64,
    blocks: u32,
    runs: [ReadRun; RUNS],
    /// A bit per run in use. Most handles have one run, and unused runs are not searched.
    used: u32,
    /// The run touched last: most reads extend it.
    last: usize,
    reads: u32,
    doubt: u32,
}

impl ReadAhead {
    /// For a file of `size` bytes in blocks of `block` bytes.
    pub fn new(size: u64, block: u64) -> Self {
        let blocks = u32::try_from(size.div_ceil(block.max(1))).unwrap_or(u32::MAX);
        ReadAhead {
            size,
            block: block.max(1),
            blocks,
            runs: [ReadRun::default(); RUNS],
            used: 0,
            last: 0,
            reads: 0,
            doubt: 0,
        }
    }

    /// Records a read of `len` bytes at `offset` and returns the blocks to request now, if any. `limit` returns the
    /// read-ahead limit of this handle in blocks, all its runs together; it is called only when there is something to
    /// request. Costs 5 to 90 ns.
    pub fn observe_read(&mut self, offset: u64, len: usize, limit: impl FnOnce() -> u32) -> Option<Range<u32>> {
        let end = offset.saturating_add(len as u64).min(self.size);
        if end <= offset {
            return None;
        }
        self.reads = self.reads.wrapping_add(1);
        let slack = end - offset;
        let at = match self.find_run(offset, end, slack) {
            RunMatch::In(at) => at,
            RunMatch::Nowhere { oldest } => return self.start_run(oldest, offset, end, limit),
        };
        let late = slack.saturating_mul(REORDER);
        let run = &mut self.runs[at];
        if offset >= run.start && end <= run.end && run.end - offset > late {
            // A reader starts over while the run may continue: the old run keeps its end, the new run gets the rest.
            run.start = run.end - slack;
            run.touched = self.reads;
            let oldest = self.oldest_run();
            return self.start_run(oldest, offset, end, limit);
        }
        self.last = at;
        run.touched = self.reads;
        run.start = run.start.min(offset);
        if end <= run.end {
            // Read before, or before the run's start: a backward reader. There is nothing to read ahead.
            return None;
        }
        run.read += end - run.end.max(offset);
        run.end = end;
        run.continued = run.continued.saturating_add(1);
        self.doubt = self.doubt.saturating_sub(1);
        self.join_runs(at);
        self.take_lead(at);
        self.blocks_ahead(at, limit)
    }

    /// A run that grows within the read-ahead of another run is the same reader with one late request. It takes the
    /// other's window over, so that the two do not share the limit as if they were two readers.
    fn take_lead(&mut self, at: usize) {
        let others = self.used & !(1 << at);
        if others == 0 {
            return;
        }
        let start = self.runs[at].start;
        let first = self.block_of(start);
        let behind = set_bits(others).find(|other| {
            let other = &self.runs[*other];
            other.window > 0 && other.end <= start && first <= other.frontier
        });
        let Some(other) = behind else { return };
        let led = self.runs[other];
        self.runs[other] = ReadRun { window: 0, read: 0, ..led };
        let run = &mut self.runs[at];
        run.frontier = run.frontier.max(led.frontier);
        run.window = run.window.max(led.window);
        run.read = run.read.saturating_add(led.read);
        run.continued = run.continued.max(led.continued);
    }

    /// The run that a read belongs to: it lies in the run, touches it, or starts at most `slack` after its end.
    fn find_run(&self, offset: u64, end: u64, slack: u64) -> RunMatch {
        // One wrapping difference instead of two comparisons. With a random reader half of the runs start before the
        // read, which no branch predictor predicts: the search over all runs took 155 ns instead of 85.
        let continues = |run: &ReadRun| offset.wrapping_sub(run.start) <= run.end.saturating_add(slack) - run.start;
        if self.used != 0 && continues(&self.runs[self.last]) {
            return RunMatch::In(self.last);
        }
        let mut before = None;
        for at in set_bits(self.used) {
            let run = &self.runs[at];
            if continues(run) {
                return RunMatch::In(at);
            }
            if run.start.wrapping_sub(offset) <= end - offset {
                before = Some(at);
            }
        }
        before.map_or_else(|| RunMatch::Nowhere { oldest: self.oldest_run() }, RunMatch::In)
    }

    /// An unused run, or the least recently touched.
    fn oldest_run(&self) -> usize {
        match (!self.used).trailing_zeros() as usize {
            RUNS => (0..RUNS).max_by_key(|at| self.reads.wrapping_sub(self.runs[*at].touched)).unwrap_or(0),
            free => free,
        }
    }

    /// Joins `at` with the runs that its end has reached.
    fn join_runs(&mut self, at: usize) {
        for other in set_bits(self.used & !(1 << at)) {
            let run = &self.runs[at];
            let next = &self.runs[other];
            if next.start < run.start || next.start > run.end {
                continue;
            }
            self.runs[at] = ReadRun {
                start: run.start,
                end: run.end.max(next.end),
                read: run.read.saturating_add(next.read),
                frontier: run.frontier.max(next.frontier),
                window: run.window.max(next.window),
                continued: run.continued.saturating_add(next.continued).saturating_add(1),
                touched: run.touched,
            };
            self.used &= !(1 << other);
            // The read that started the other run was not a stray one.
            self.doubt = self.doubt.saturating_sub(STRAY);
        }
    }

    fn start_run(&mut self, at: usize, offset: u64, end: u64, limit: impl FnOnce() -> u32) -> Option<Range<u32>> {
        let frontier = self.block_of(end - 1) + 1;
        self.runs[at] =
            ReadRun { start: offset, end, read: end - offset, frontier, window: 0, continued: 0, touched: self.reads };
        self.used |= 1 << at;
        self.last = at;
        let first = self.reads == 1;
        self.doubt = (self.doubt + STRAY).min(MAX_DOUBT);
        if !(first && offset == 0 && end >= WHOLE_FILE_READ.min(self.size)) || frontier >= self.blocks {
            return None;
        }
        if limit() == 0 {
            return None;
        }
        self.runs[at].frontier = frontier + 1;
        Some(frontier..frontier + 1)
    }

    /// The blocks after the end of run `at` to request now.
    fn blocks_ahead(&mut self, at: usize, limit: impl FnOnce() -> u32) -> Option<Range<u32>> {
        let run = self.runs[at];
        if run.continued <= self.doubt / DOUBT_PER_READ {
            return None;
        }
        let here = self.block_of(run.end - 1);
        let from = run.frontier.max(here + 1);
        let near = from - (here + 1);
        // Requested in steps of half a window, so that a long run makes one request for several blocks.
        if from >= self.blocks || near > run.window / 2 {
            return None;
        }
        let used = set_bits(self.used).map(|at| &self.runs[at]);
        let live = used.filter(|run| run.window > 0 && self.reads.wrapping_sub(run.touched) < LIVE).count();
        let live = live as u32 + u32::from(run.window == 0);
        let limit = limit();
        // Every live run gets at least one block: it needs the block after its own soon in any case.
        let share = if limit == 0 { 0 } else { (limit / live).max(1) };
        let earned = u32::try_from(run.read.saturating_mul(2) / self.block + 1).unwrap_or(u32::MAX);
        let window = run.window.saturating_mul(2).clamp(1, u32::MAX).min(earned).min(share);
        let to = here.saturating_add(1).saturating_add(window).min(self.blocks);
        let run = &mut self.runs[at];
        run.window = window;
        if to <= from {
            return None;
        }
        run.frontier = to;
        Some(from..to)
    }

    fn block_of(&self, offset: u64) -> u32 {
        u32::try_from(offset / self.block).unwrap_or(u32::MAX - 1)
    }
}
