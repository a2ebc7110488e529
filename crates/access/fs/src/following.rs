//! Fetches small files ahead of a reader that opens the files of a folder in the order of its listing. Only while reads of such
//! files take long: a file in the cache is read as fast without. It knows no volume, and does not fetch itself.

use crate::inode::{Inode, InodeTable};
use parking_lot::Mutex;
use spurline_types::FileKind;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longer files are read ahead by their own readers.
pub(crate) const FOLLOWED_BYTES: u64 = 1 << 20;
/// Readers followed at the same time.
const WALKS: usize = 8;
/// Files of a walk that are fetched ahead, and their bytes, at most.
const AHEAD_FILES: usize = 32;
const AHEAD_BYTES: u64 = 8 << 20;
/// So many files opened in order are a walk.
const WALK_FROM: usize = 4;
/// Several threads of a reader take files nearly in order: so many may be opened later than a file that comes after.
const LATE_FILES: usize = 16;
/// A read that takes this long comes from a far store.
const SLOW_READ: Duration = Duration::from_millis(1);
/// Files that are fetched ahead after a slow read.
const FILES_PER_SLOW_READ: u32 = 512;

/// A reader that goes through a listing.
#[derive(Default)]
struct ListingWalk {
    /// The files that come next, those skipped included.
    upcoming: VecDeque<UpcomingFile>,
    opened: usize,
    /// When the walk was last continued, in opens.
    used: u64,
}

struct UpcomingFile {
    inode: Arc<Inode>,
    is_fetched: bool,
}

#[derive(Default)]
struct WalkTable {
    walks: Vec<ListingWalk>,
    opens: u64,
}

/// The walks through listings of a mount.
#[derive(Default)]
pub(crate) struct ListingWalks {
    table: Mutex<WalkTable>,
    /// Files that may still be fetched ahead.
    credit: AtomicU32,
}

impl ListingWalks {
    /// Records the time of the first read of a small file.
    pub fn note_read(&self, took: Duration) {
        if took >= SLOW_READ {
            self.credit.store(FILES_PER_SLOW_READ, Ordering::Relaxed);
        }
    }

    /// Records that a file is opened, and returns the files to fetch now.
    pub fn note_open(&self, inode: &Arc<Inode>, inodes: &InodeTable) -> Vec<Arc<Inode>> {
        let credit = self.credit.load(Ordering::Relaxed);
        if credit == 0 || inode.next_listed().is_none() {
            return Vec::new();
        }
        let mut table = self.table.lock();
        table.opens += 1;
        let now = table.opens;
        let walk = table.find_walk(inode);
        walk.used = now;
        walk.note_opened(inode);
        let wanted = walk.files_ahead(inode, inodes);
        drop(table);
        self.credit.store(credit.saturating_sub(wanted.len() as u32), Ordering::Relaxed);
        wanted
    }
}

impl WalkTable {
    /// The walk that comes to this file, or a new one in place of the one that was idle longest.
    fn find_walk(&mut self, inode: &Inode) -> &mut ListingWalk {
        let known = self.walks.iter().position(|walk| walk.upcoming.iter().any(|file| file.inode.ino == inode.ino));
        let at = known.unwrap_or_else(|| {
            if self.walks.len() < WALKS {
                self.walks.push(ListingWalk::default());
                return self.walks.len() - 1;
            }
            let oldest = (0..WALKS).min_by_key(|at| self.walks[*at].used).unwrap_or(0);
            self.walks[oldest] = ListingWalk::default();
            oldest
        });
        &mut self.walks[at]
    }
}

impl ListingWalk {
    /// Removes an opened file from the upcoming ones, and those that were left out before.
    fn note_opened(&mut self, inode: &Inode) {
        let Some(at) = self.upcoming.iter().position(|file| file.inode.ino == inode.ino) else { return };
        self.upcoming.remove(at);
        self.upcoming.drain(..at.saturating_sub(LATE_FILES));
        self.opened += 1;
    }

    /// Completes the upcoming files, and returns those to fetch.
    fn files_ahead(&mut self, inode: &Arc<Inode>, inodes: &InodeTable) -> Vec<Arc<Inode>> {
        let is_walk = self.opened >= WALK_FROM;
        let most = if is_walk { (2 * self.opened).min(AHEAD_FILES) } else { WALK_FROM };
        while self.upcoming.len() < most
            && let Some(next) = self.upcoming.back().map_or(inode, |file| &file.inode).next_listed()
            && let Some(next) = inodes.get(next)
        {
            self.upcoming.push_back(UpcomingFile { inode: next, is_fetched: false });
        }
        let mut wanted = Vec::new();
        let mut bytes = 0;
        for file in self.upcoming.iter_mut().filter(|_| is_walk) {
            let size = file.inode.current().size;
            bytes += size.min(FOLLOWED_BYTES);
            if bytes > AHEAD_BYTES {
                break;
            }
            if !std::mem::replace(&mut file.is_fetched, true) && (1..=FOLLOWED_BYTES).contains(&size) {
                wanted.push(Arc::clone(&file.inode));
            }
        }
        wanted
    }
}

/// Links the files of a listing in the order in which it passes them.
#[derive(Default)]
pub struct ListingOrder {
    /// The position after the last file, and the file.
    last: Option<(u64, Arc<Inode>)>,
}

impl ListingOrder {
    /// Records the inode of the name before position `next`.
    pub fn note_listed(&mut self, next: u64, inode: &Arc<Inode>) {
        if let Some((position, last)) = &mut self.last
            && *position + 1 == next
        {
            if inode.kind == FileKind::File {
                last.set_next_listed(inode.ino);
            } else {
                *position = next;
                return;
            }
        }
        self.last = (inode.kind == FileKind::File).then(|| (next, Arc::clone(inode)));
    }
}
