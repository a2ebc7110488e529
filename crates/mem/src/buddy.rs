//! A binary buddy allocator over page numbers; it holds no memory and does no I/O.

/// The smallest piece handed out: 16 KiB.
pub(crate) const PAGE_SHIFT: u32 = 14;

const NONE: u32 = u32::MAX;
/// State of a page that heads no free run.
const NOT_FREE: u8 = u8::MAX;

/// Hands out runs of 2^order pages, aligned to their own size relative to the arena.
pub(crate) struct Buddy {
    /// First free run of each order.
    heads: Vec<u32>,
    /// Links of the free lists, by first page of a run.
    next: Vec<u32>,
    prev: Vec<u32>,
    /// The order of the free run a page heads, or `NOT_FREE`.
    order: Vec<u8>,
    free_pages: usize,
}

impl Buddy {
    /// All of `pages` free, in runs of at most 2^`max_order`.
    pub(crate) fn new(pages: usize, max_order: u32) -> Self {
        let mut buddy = Buddy {
            heads: vec![NONE; max_order as usize + 1],
            next: vec![NONE; pages],
            prev: vec![NONE; pages],
            order: vec![NOT_FREE; pages],
            free_pages: 0,
        };
        let mut page = 0usize;
        while page < pages {
            // The largest run that is aligned at `page` and fits into what is left.
            let mut order = max_order;
            while order > 0 && (page & ((1 << order) - 1) != 0 || page + (1 << order) > pages) {
                order -= 1;
            }
            buddy.push(page as u32, order);
            buddy.free_pages += 1 << order;
            page += 1 << order;
        }
        buddy
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.free_pages
    }

    /// Takes a run of 2^`order` pages: the first page's number, or `None` when no run is large enough.
    pub(crate) fn take(&mut self, order: u32) -> Option<u32> {
        let mut found = order;
        while *self.heads.get(found as usize)? == NONE {
            found += 1;
        }
        let page = self.heads[found as usize];
        self.unlink(page);
        while found > order {
            found -= 1;
            self.push(page + (1 << found), found);
        }
        self.free_pages -= 1 << order;
        Some(page)
    }

    /// Gives back a run that [`Buddy::take`] handed out with the same order.
    pub(crate) fn give(&mut self, mut page: u32, mut order: u32) {
        self.free_pages += 1 << order;
        while (order as usize) + 1 < self.heads.len() {
            let buddy = page ^ (1 << order);
            if self.order.get(buddy as usize) != Some(&(order as u8)) {
                break;
            }
            self.unlink(buddy);
            page = page.min(buddy);
            order += 1;
        }
        self.push(page, order);
    }

    fn push(&mut self, page: u32, order: u32) {
        let head = self.heads[order as usize];
        self.next[page as usize] = head;
        self.prev[page as usize] = NONE;
        if head != NONE {
            self.prev[head as usize] = page;
        }
        self.heads[order as usize] = page;
        self.order[page as usize] = order as u8;
    }

    fn unlink(&mut self, page: u32) {
        let (next, prev) = (self.next[page as usize], self.prev[page as usize]);
        let order = std::mem::replace(&mut self.order[page as usize], NOT_FREE);
        if prev == NONE {
            self.heads[order as usize] = next;
        } else {
            self.next[prev as usize] = next;
        }
        if next != NONE {
            self.prev[next as usize] = prev;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn odd_sizes_are_wholly_usable() {
        let mut buddy = Buddy::new(13, 3);
        assert_eq!(buddy.free_pages(), 13);
        let mut taken = Vec::new();
        while let Some(page) = buddy.take(0) {
            taken.push(page);
        }
        assert_eq!(taken.len(), 13);
        for page in taken {
            buddy.give(page, 0);
        }
        assert!(buddy.take(3).is_some(), "freed pages merge again");
        assert!(buddy.take(4).is_none());
    }

    proptest! {
        #[test]
        fn runs_never_overlap_and_all_come_back(pages in 1usize..300, ops in prop::collection::vec((0u32..5, any::<u8>()), 1..200)) {
            let mut buddy = Buddy::new(pages, 4);
            let mut used = vec![false; pages];
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (order, pick) in ops {
                if pick % 2 == 0 {
                    if let Some(page) = buddy.take(order) {
                        prop_assert_eq!(page & ((1 << order) - 1), 0, "a run is aligned to its size");
                        for p in page..page + (1 << order) {
                            prop_assert!(!std::mem::replace(&mut used[p as usize], true));
                        }
                        held.push((page, order));
                    }
                } else if !held.is_empty() {
                    let (page, order) = held.swap_remove(pick as usize % held.len());
                    used[page as usize..(page + (1 << order)) as usize].fill(false);
                    buddy.give(page, order);
                }
                prop_assert_eq!(buddy.free_pages(), used.iter().filter(|u| !**u).count());
            }
            for (page, order) in held { buddy.give(page, order); }
            let mut whole = Buddy::new(pages, 4);
            for order in (0..5).rev() {
                loop {
                    let (a, b) = (buddy.take(order), whole.take(order));
                    prop_assert_eq!(a.is_some(), b.is_some());
                    if a.is_none() { break; }
                }
            }
        }
    }
}
