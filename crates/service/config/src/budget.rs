//! The memory budget: the setting, and the division into named terms, each with a reason. Pure arithmetic; the remainder holds hot
//! blocks.

use crate::host::HostLimits;
use spurline_types::Size;
use spurline_types::fault::Fault;
use std::fmt;
use std::str::FromStr as _;

settings! {
    /// The memory budget.
    #[derive(Eq)]
    #[command(next_help_heading = "General")]
    pub struct RawMemory {
        /// Memory budget for all buffers and cached blocks: a hard limit
        ///
        /// FUSE requests, fills in flight and read-ahead are part of it; the rest holds hot blocks. The start fails if
        /// the machine or the control group has too little memory. Memory is taken as it is first used; with
        /// --rdma-network all of it at the start, because the NICs access it.
        #[arg(long, value_name = "SIZE")]
        pub buffer_size: Size = Size::from_str("300M"),
    }
}

/// Kernel requests in flight per processor over io_uring. Two keep the processor busy while the other's reply is
/// copied; more cost memory on every possible processor and measured no faster.
pub const URING_DEPTH: u64 = 2;
/// Limit of concurrent kernel requests, if the budget allows: enough readers waiting for cold blocks for a node's full
/// throughput.
pub const MOST_SLOTS: u64 = 64;
/// Divisor of the budget for FUSE requests, unless --fuse-threads is given.
pub const SLOT_SHARE: u64 = 4;
/// Header and alignment beside the payload of a FUSE request.
pub const FUSE_SLOT_OVERHEAD: u64 = 8 << 10;
/// Fills required for progress: a fill per side of a block boundary, for two readers at once.
pub const MIN_FILLS: u64 = 4;
/// Read-ahead blocks required with read-ahead on: the current block and the next.
pub const MIN_READAHEAD_BLOCKS: u64 = 2;
/// Least memory for bytes written through nodes: four requests of the largest size that gathered writes make.
pub const MIN_WRITTEN: u64 = 4 << 20;
/// Divisor of the rest beside FUSE requests, connections and names, for bytes written through nodes. The other half is for reads.
pub const WRITTEN_SHARE: u64 = 2;
/// Default read-ahead of a stream: 100 ms at 300 MB/s.
pub const DEFAULT_READAHEAD: u64 = 32 << 20;
/// Divisor of the budget for RDMA connections. Each has registered message buffers, 80 KiB on a mount and 48 KiB on a
/// node: 300 MiB allow 500 channels of a mount, or 800 mounts of a node.
pub const RDMA_SHARE: u64 = 8;
/// Divisor of the budget for the inodes that the kernel references: about 77,000 names with 300 MiB. Above, the kernel is
/// requested to forget some, and a forgotten file loses the cached pages.
pub const INODE_SHARE: u64 = 8;
/// Divisor of the budget for names and attributes of the origin, which outlast the kernel's only by `--stale-if-error`.
pub const METADATA_SHARE: u64 = 16;
/// Limit of each of these two: millions of names.
pub const MOST_NAME_BYTES: u64 = 1 << 30;
/// Divisor of the budget for the connections of S3 clients, and once more for the pieces of answers to them.
pub const S3_SHARE: u64 = 8;
/// Memory of a connection: the head of a request, and two small pieces of an answer.
pub const S3_CONNECTION: u64 = 192 << 10;
/// Memory of a large piece of an answer.
pub const S3_PIECE: u64 = 1 << 20;
/// Limit of the two shares: more connections and pieces than a link needs.
pub const MOST_S3_BYTES: u64 = 256 << 20;
/// Memory outside `--buffer-size`: code, stacks, libraries, and [`MIN_INDEX`].
pub const OUTSIDE: u64 = 64 << 20;
/// Memory that the index of the cache disks may always take: about 15,000 blocks of 4 MiB, or 60 GiB.
pub const MIN_INDEX: u64 = 8 << 20;
/// Divisor of the memory that the host leaves beside the budget, for the index of the cache disks. The other half is for
/// other processes and the page cache.
pub const INDEX_SHARE: u64 = 2;

/// A consumer of the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetTerm {
    /// The consumer.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: u64,
    /// Why this size.
    pub reason: &'static str,
}

/// The shares of the budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The whole of `--buffer-size`.
    pub total: u64,
    /// Concurrent kernel requests (0 on a node).
    pub fuse_slots: u64,
    /// Bytes of such a request.
    pub fuse_slot_bytes: u64,
    /// Concurrent peer requests on a node (0 on a mount).
    pub serve_slots: u64,
    /// Concurrent fetches of blocks from the origin or a node.
    pub fills: u64,
    /// Read-ahead limit of a sequential stream, in bytes.
    pub readahead: u64,
    /// Bytes of the RDMA connections' buffers (0 without rails).
    pub rdma_bytes: u64,
    /// Memory for inodes that the kernel references (0 on a node).
    pub inode_bytes: u64,
    /// Memory for names and attributes of the origin (0 for a mount that has them from nodes).
    pub metadata_bytes: u64,
    /// Memory for bytes written through nodes, until durable (0 for any other process).
    pub write_bytes: u64,
    /// Memory for connections of S3 clients, and as much again for pieces of answers to them (0 without an endpoint).
    pub s3_bytes: u64,
    /// Bytes of hot blocks in memory: the remainder.
    pub memory_tier: u64,
    /// Limit of the memory for the index of the cache disks, outside of `total`; `u64::MAX` where the memory of the host
    /// is unknown. Set by [`MemoryBudget::check_host`].
    pub index_bytes: u64,
    /// The terms, in the order of allocation.
    pub terms: Vec<BudgetTerm>,
}

/// The inputs of the division.
#[derive(Debug, Clone, Copy)]
pub struct BudgetDemand {
    /// `--buffer-size`.
    pub total: u64,
    /// `--block-size`.
    pub block: u64,
    /// `--max-write` on a mount; `None` on a node.
    pub max_write: Option<u64>,
    /// `--fuse-threads` on a mount; `None` for automatic.
    pub fuse_threads: Option<u64>,
    /// `--max-downloads`.
    pub max_downloads: u64,
    /// `--max-readahead`; `None` for automatic.
    pub readahead: Option<u64>,
    /// Processors of this machine.
    pub processors: u64,
    /// Whether there are rails (`--rdma-network`).
    pub rdma: bool,
    /// Whether the process keeps names of the origin: it reads the origin itself, or writes the objects of a bucket.
    pub origin: bool,
    /// Whether the mount writes through nodes.
    pub writes: bool,
    /// Whether the process serves S3 clients.
    pub s3: bool,
}

impl MemoryBudget {
    /// Kernel requests, the bytes of each, and peer requests.
    fn slot_counts(demand: &BudgetDemand) -> (u64, u64, u64) {
        match demand.max_write {
            Some(max_write) => {
                // Either transport fits: ring entries on every processor, or a slot per thread.
                let slot = max_write + FUSE_SLOT_OVERHEAD;
                // On many processors this may use half of the budget; if rings need more, the session uses /dev/fuse.
                let least = (demand.processors * URING_DEPTH).min(demand.total / 2 / slot).max(2);
                let slots = demand.fuse_threads.unwrap_or_else(|| (demand.total / SLOT_SHARE / slot).min(MOST_SLOTS));
                (slots.max(least), slot, 0)
            }
            // A node replies from blocks that are pinned during the send: one per processor, and one in transit. Blocks for slow
            // readers exceed that for a limited time. On many processors this may use a quarter of the budget.
            None => (0, 0, (demand.processors + 1).min(demand.total / 4 / demand.block).max(2)),
        }
    }

    /// The term of the RDMA connections.
    fn rdma(demand: &BudgetDemand) -> u64 {
        if demand.rdma { demand.total / RDMA_SHARE } else { 0 }
    }

    /// The term of the connections of S3 clients, and that of the pieces of answers.
    fn s3(demand: &BudgetDemand) -> u64 {
        if demand.s3 { (demand.total / S3_SHARE).min(MOST_S3_BYTES) } else { 0 }
    }

    /// The terms of inodes and of metadata.
    fn name_bytes(demand: &BudgetDemand) -> (u64, u64) {
        let share = |wanted: bool, share: u64| if wanted { (demand.total / share).min(MOST_NAME_BYTES) } else { 0 };
        (share(demand.max_write.is_some(), INODE_SHARE), share(demand.origin, METADATA_SHARE))
    }

    /// The minimum for read-ahead and for fills.
    fn least_bytes(demand: &BudgetDemand) -> (u64, u64) {
        let readahead = if demand.readahead == Some(0) { 0 } else { MIN_READAHEAD_BLOCKS * demand.block };
        (readahead, MIN_FILLS.min(demand.max_downloads.max(1)) * demand.block)
    }

    /// The least budget that suffices for the terms: a larger budget has more requests and larger tables.
    fn least_total(demand: BudgetDemand) -> u64 {
        let mut least = Self::derive_need(demand).div_ceil(1 << 20) << 20;
        while Self::derive_need(BudgetDemand { total: least, ..demand }) > least {
            least += 1 << 20;
        }
        least
    }

    /// The fault of a budget that is too small. The terms are those of the sufficient size.
    fn too_small_fault(demand: BudgetDemand) -> Fault {
        let given = demand.total;
        let demand = BudgetDemand { total: Self::least_total(demand), ..demand };
        let block = demand.block;
        let (fuse_slots, fuse_slot_bytes, serve_slots) = Self::slot_counts(&demand);
        let (readahead, fills) = Self::least_bytes(&demand);
        let (inode_bytes, metadata_bytes) = Self::name_bytes(&demand);
        let terms = [
            (format!("{fuse_slots} FUSE requests of {}", Size(fuse_slot_bytes)), fuse_slots * fuse_slot_bytes),
            (format!("{serve_slots} answers of {}", Size(block)), serve_slots * block),
            ("RDMA connections".to_owned(), Self::rdma(&demand)),
            ("names".to_owned(), inode_bytes + metadata_bytes),
            ("S3 clients".to_owned(), 2 * Self::s3(&demand)),
            (format!("{} fills", fills / block), fills),
            (format!("{MIN_READAHEAD_BLOCKS} blocks of read-ahead"), readahead),
            ("written bytes".to_owned(), Self::least_written(&demand)),
        ];
        let needed = terms.iter().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<String> = needed.map(|(term, bytes)| format!("{term} = {}", show_bytes(*bytes))).collect();
        let whole = demand.total >> 20;
        Fault::usage(
            format!("--buffer-size {} is too small: {whole} MiB is needed ({})", Size(given), parts.join(", ")),
            format!("give --buffer-size {whole}M or more, or a smaller --block-size than {}", Size(block)),
        )
    }

    /// The minimum size of such a budget.
    fn derive_need(demand: BudgetDemand) -> u64 {
        let (slots, slot_bytes, serve) = Self::slot_counts(&demand);
        let (readahead, fills) = Self::least_bytes(&demand);
        let (inodes, metadata) = Self::name_bytes(&demand);
        let least = readahead + fills + Self::least_written(&demand);
        slots * slot_bytes
            + serve * demand.block
            + Self::rdma(&demand)
            + inodes
            + metadata
            + 2 * Self::s3(&demand)
            + least
    }

    fn least_written(demand: &BudgetDemand) -> u64 {
        if demand.writes { MIN_WRITTEN } else { 0 }
    }

    /// Divides a budget of this host; warns when it barely fits.
    pub(crate) fn of_host(demand: BudgetDemand, host: &HostLimits, warnings: &mut Vec<String>) -> Result<Self, Fault> {
        let mut budget = Self::divide(demand)?;
        warnings.extend(budget.check_host(host)?);
        Ok(budget)
    }

    /// Divides a budget.
    ///
    /// # Errors
    /// When the budget is too small for the minimum of each term; the message names the terms and the size required.
    pub fn divide(demand: BudgetDemand) -> Result<Self, Fault> {
        let BudgetDemand { total, block, .. } = demand;
        let (fuse_slots, fuse_slot_bytes, serve_slots) = Self::slot_counts(&demand);
        let fuse = fuse_slots * fuse_slot_bytes;
        let serve = serve_slots * block;
        let (min_readahead, min_fills) = Self::least_bytes(&demand);
        let wants_readahead = min_readahead > 0;
        let rdma = Self::rdma(&demand);
        let (inode_bytes, metadata_bytes) = Self::name_bytes(&demand);
        let min_written = Self::least_written(&demand);
        let s3_bytes = Self::s3(&demand);
        let need =
            fuse + serve + rdma + 2 * s3_bytes + inode_bytes + metadata_bytes + min_fills + min_readahead + min_written;
        if total < need {
            return Err(Self::too_small_fault(demand));
        }
        let rest = total - fuse - serve - rdma - 2 * s3_bytes - inode_bytes - metadata_bytes;
        let write_bytes = if demand.writes {
            (rest / WRITTEN_SHARE).min(rest - min_fills - min_readahead).max(min_written)
        } else {
            0
        };
        let rest = rest - write_bytes;
        // At most half of the rest may be in flight, so that the other half is a useful cache.
        let fills = (rest / 2 / block).min(demand.max_downloads.max(1)).max(min_fills / block);
        let left = rest - fills * block;
        let readahead = match demand.readahead {
            Some(bytes) => bytes.min(left.max(min_readahead)),
            None => DEFAULT_READAHEAD.min(left / 2),
        };
        let readahead = if wants_readahead { readahead.max(min_readahead).min(left) } else { 0 };
        let memory_tier = left - readahead;
        let mut terms = Vec::new();
        let mut term = |name, bytes, reason| {
            if bytes > 0 {
                terms.push(BudgetTerm { name, bytes, reason });
            }
        };
        term("FUSE requests", fuse, "each request of the kernel has its own answer buffer");
        term("answers to peers", serve, "a block is held while it is sent");
        term("RDMA connections", rdma, "each keeps buffers for the messages of its queue pair");
        term("names in the kernel", inode_bytes, "the kernel names each file that it knows by an inode kept here");
        term("names of the origin", metadata_bytes, "lookups and listings are answered from here, also in an outage");
        term("S3 connections", s3_bytes, "each keeps the head of a request and small pieces of an answer");
        term("S3 answers", s3_bytes, "a piece of an object is held while it is sent, and the next while it is read");
        term("written bytes", write_bytes, "what was written stays here until a node reports it durable");
        term("fills", fills * block, "a block is held while it is fetched and written to disk");
        term("read-ahead", readahead, "blocks fetched ahead wait here for their reader");
        term("hot blocks", memory_tier, "the rest: blocks kept in memory");
        Ok(MemoryBudget {
            total,
            fuse_slots,
            fuse_slot_bytes,
            serve_slots,
            fills,
            readahead,
            rdma_bytes: rdma,
            inode_bytes,
            metadata_bytes,
            write_bytes,
            s3_bytes,
            memory_tier,
            index_bytes: u64::MAX,
            terms,
        })
    }

    /// Bytes of all FUSE requests together.
    pub fn fuse_bytes(&self) -> u64 {
        self.fuse_slots * self.fuse_slot_bytes
    }

    /// Bytes of the two tables of names, which lie outside the arena.
    pub fn name_table_bytes(&self) -> u64 {
        self.inode_bytes + self.metadata_bytes
    }

    /// Bytes of S3 clients, which lie outside the arena.
    pub fn s3_client_bytes(&self) -> u64 {
        2 * self.s3_bytes
    }

    /// Compares the budget with the available memory, and limits the index of the cache disks to a share of the rest;
    /// returns a warning when the budget barely fits.
    ///
    /// # Errors
    /// When the budget and the memory outside exceed the control group's limit or the machine's memory.
    pub fn check_host(&mut self, host: &HostLimits) -> Result<Option<String>, Fault> {
        let need = self.total + OUTSIDE;
        let limits = [
            host.cgroup
                .as_ref()
                .map(|(limit, file)| (*limit, format!("the control group's limit ({})", file.display()))),
            host.memory_bytes.map(|memory| (memory, "the memory of this machine (/proc/meminfo)".to_owned())),
        ];
        let mut warning = None;
        for (limit, what) in limits.into_iter().flatten() {
            if need > limit {
                let fits = (limit.saturating_sub(OUTSIDE) * 3 / 4) >> 20;
                let raise = format!("raise the limit to {} or more", show_bytes(need));
                let remedy = if fits > 0 { format!("give --buffer-size {fits}M or less, or {raise}") } else { raise };
                return Err(Fault::usage(
                    format!(
                        "--buffer-size {} and {} outside it do not fit into {}, {what}",
                        Size(self.total),
                        show_bytes(OUTSIDE),
                        show_bytes(limit)
                    ),
                    remedy,
                ));
            }
            self.index_bytes = self.index_bytes.min(((limit - need) / INDEX_SHARE).max(MIN_INDEX));
            if need > limit / 10 * 9 && warning.is_none() {
                warning = Some(format!(
                    "--buffer-size {} takes nearly all of {}, {what}",
                    Size(self.total),
                    show_bytes(limit)
                ));
            }
        }
        Ok(warning)
    }
}

fn show_bytes(bytes: u64) -> String {
    spurline_types::units::human_bytes(bytes)
}

impl fmt::Display for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, term) in self.terms.iter().enumerate() {
            let sep = if i == 0 { "" } else { ", " };
            write!(f, "{sep}{} {}", term.name, show_bytes(term.bytes))?;
        }
        if self.index_bytes < u64::MAX {
            write!(f, "; outside of it: index of cache disks at most {}", show_bytes(self.index_bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn mount(total: u64) -> BudgetDemand {
        BudgetDemand {
            total,
            block: 4 * MIB,
            max_write: Some(MIB),
            fuse_threads: None,
            max_downloads: 200,
            readahead: None,
            processors: 4,
            rdma: false,
            origin: true,
            writes: false,
            s3: false,
        }
    }

    #[test]
    fn written_bytes_have_a_share_where_nodes_write() {
        for (total, processors) in [(60, 1), (300, 1), (300, 1024), (4096, 16)] {
            let demand =
                BudgetDemand { origin: false, writes: true, rdma: total > 60, processors, ..mount(total * MIB) };
            let budget = MemoryBudget::divide(demand).unwrap_or_else(|e| panic!("{demand:?}: {e}"));
            let term = budget.terms.iter().find(|term| term.name == "written bytes").unwrap();
            assert_eq!(term.bytes, budget.write_bytes);
            assert!(budget.write_bytes >= MIN_WRITTEN && budget.fills >= MIN_FILLS, "{budget:?}");
            assert_eq!(budget.terms.iter().map(|term| term.bytes).sum::<u64>(), total * MIB);
        }
        let error = MemoryBudget::divide(BudgetDemand { writes: true, ..mount(40 * MIB) }).unwrap_err();
        assert!(error.to_string().contains("written bytes"), "{error}");
    }

    #[test]
    fn terms_add_up_to_the_total() {
        for (total, rdma) in [(44, false), (64, true), (100, false), (300, true), (4096, true)] {
            let total = total * MIB;
            for processors in [1, 2, 4] {
                for max_write in [Some(MIB), None] {
                    for readahead in [None, Some(0), Some(16 * MIB), Some(1 << 40)] {
                        let origin = max_write.is_none() || !rdma;
                        let demand = BudgetDemand { processors, max_write, readahead, rdma, origin, ..mount(total) };
                        let budget = MemoryBudget::divide(demand).unwrap_or_else(|e| panic!("{demand:?}: {e}"));
                        let sum: u64 = budget.terms.iter().map(|t| t.bytes).sum();
                        assert_eq!(sum, total, "{demand:?}");
                        assert!(budget.fills >= MIN_FILLS);
                        assert_eq!(budget.rdma_bytes, if rdma { total / RDMA_SHARE } else { 0 });
                        assert_eq!(budget.readahead == 0, readahead == Some(0));
                        assert_eq!(
                            (budget.inode_bytes, budget.metadata_bytes),
                            match (max_write, origin) {
                                (Some(_), true) => (total / INODE_SHARE, total / METADATA_SHARE),
                                (Some(_), false) => (total / INODE_SHARE, 0),
                                (None, _) => (0, total / METADATA_SHARE),
                            }
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn the_default_is_enough_for_any_number_of_processors() {
        for processors in [1, 16, 64, 128, 224, 1024] {
            for (max_write, rdma) in [(Some(MIB), false), (Some(MIB), true), (None, false), (None, true)] {
                // Rails lead to nodes, which read the origin.
                let origin = max_write.is_none() || !rdma;
                let demand = BudgetDemand { processors, max_write, rdma, origin, ..mount(300 * MIB) };
                let budget = MemoryBudget::divide(demand);
                let budget = budget.unwrap_or_else(|e| panic!("{processors} processors: {e}"));
                assert!(budget.memory_tier + budget.readahead >= 36 * MIB, "{processors} processors: {budget:?}");
            }
        }
    }

    #[test]
    fn too_small_says_the_number_that_works() {
        let error = MemoryBudget::divide(mount(8 * MIB)).unwrap_err();
        assert!(error.what.contains("is too small") && error.what.contains("fills"), "{error}");
        let number: u64 =
            error.remedy.split("--buffer-size ").nth(1).unwrap().split('M').next().unwrap().parse().unwrap();
        assert!(error.what.contains(&format!("{number} MiB is needed")), "{error}");
        assert!(MemoryBudget::divide(mount(number * MIB)).is_ok());
        assert!(MemoryBudget::divide(mount((number - 1) * MIB)).is_err());
        // Terms grow with the budget: on few processors the suggested budget needs more than the first message said.
        for processors in 1..=16 {
            let demand = |mib: u64| BudgetDemand { processors, rdma: processors % 2 == 0, ..mount(mib * MIB) };
            let remedy = MemoryBudget::divide(demand(1)).unwrap_err().remedy;
            let number: u64 =
                remedy.split("--buffer-size ").nth(1).unwrap().split('M').next().unwrap().parse().unwrap();
            assert!(MemoryBudget::divide(demand(number)).is_ok(), "{processors} processors: {remedy}");
        }
    }

    #[test]
    fn compared_with_the_machine() {
        let mut budget = MemoryBudget::divide(mount(300 * MIB)).unwrap();
        let host = |memory: u64, cgroup: Option<u64>| HostLimits {
            processors: 4,
            memory_bytes: Some(memory * MIB),
            cgroup: cgroup.map(|c| (c * MIB, "/sys/fs/cgroup/memory.max".into())),
            root: true,
            home: None,
            pipe_max_size: None,
        };
        assert_eq!(budget.check_host(&host(1024, None)), Ok(None));
        assert_eq!(budget.index_bytes, (1024 - 300 - 64) / 2 * MIB);
        assert!(budget.to_string().ends_with("index of cache disks at most 330 MiB"), "{budget}");
        // Of the tightest limit, and never less than a minimum.
        assert!(budget.check_host(&host(4096, Some(400))).is_ok());
        assert_eq!(budget.index_bytes, 18 * MIB);
        assert!(budget.check_host(&host(4096, Some(366))).is_ok());
        assert_eq!(budget.index_bytes, MIN_INDEX);
        assert!(budget.check_host(&host(380, None)).unwrap().unwrap().contains("nearly all"));
        assert!(budget.check_host(&host(300, None)).unwrap_err().what.contains("this machine"));
        let error = budget.check_host(&host(4096, Some(256))).unwrap_err();
        assert!(error.what.contains("memory.max") && error.remedy.contains("144M"), "{error}");
        let error = budget.check_host(&host(4096, Some(64))).unwrap_err();
        assert_eq!(error.remedy, "raise the limit to 364 MiB or more");
    }
}
