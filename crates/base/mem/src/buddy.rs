//! A binary buddy allocator over page numbers, without memory and I/O.

use std::ops::Range;

/// The smallest allocation: 16 KiB.
pub(crate) const PAGE_SHIFT: u32 = 14;

const NO_PAGE: u32 = u32::MAX;
/// State of a page that heads no free run.
const NOT_FREE: u8 = u8::MAX;

/// Allocates runs of 2^order pages, aligned to the size of the run, relative to the arena. The arena may be divided into parts of
/// interleaved stripes; no run crosses two parts.
pub(crate) struct BuddyAllocator {
    /// First free run of each order, part by part.
    heads: Vec<u32>,
    orders: usize,
    parts: usize,
    /// Pages of a stripe, as a power of two.
    stripe: u32,
    /// The part of the last allocation without preference.
    turn: usize,
    /// Links of the free lists, by first page of a run.
    next: Vec<u32>,
    prev: Vec<u32>,
    /// The order of the free run a page heads, or `NOT_FREE`.
    order: Vec<u8>,
    free_pages: usize,
}

impl BuddyAllocator {
    /// Starts with all of `pages` free, in runs of at most 2^`max_order`.
    pub(crate) fn new(pages: usize, max_order: u32) -> Self {
        let mut buddy = BuddyAllocator {
            heads: vec![NO_PAGE; max_order as usize + 1],
            orders: max_order as usize + 1,
            parts: 1,
            stripe: u32::BITS - 1,
            turn: 0,
            next: vec![NO_PAGE; pages],
            prev: vec![NO_PAGE; pages],
            order: vec![NOT_FREE; pages],
            free_pages: 0,
        };
        let mut page = 0usize;
        while page < pages {
            // The largest run that is aligned at `page` and fits into the rest.
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

    /// Pages of the largest run.
    pub(crate) fn largest_run(&self) -> usize {
        1 << (self.orders - 1)
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.free_pages
    }

    /// Divides the arena into `parts` parts of interleaved stripes of 2^`stripe` pages; no run may be larger than a
    /// stripe.
    pub(crate) fn divide_by_stripe(&mut self, stripe: u32, parts: usize) {
        assert!(self.orders <= stripe as usize + 1, "a run must not cross two parts");
        self.stripe = stripe;
        self.parts = parts.max(1);
        self.heads = vec![NO_PAGE; self.orders * self.parts];
        for page in 0..self.order.len() {
            if self.order[page] != NOT_FREE {
                self.push(page as u32, self.order[page].into());
            }
        }
    }

    fn part_of(&self, page: u32) -> usize {
        (page >> self.stripe) as usize % self.parts
    }

    /// Allocates a run of 2^`order` pages, from the part `near` if there is a run, else from the parts in turn. Returns the first
    /// page's number, or `None` when no run is large enough.
    pub(crate) fn take_run(&mut self, order: u32, near: Option<usize>) -> Option<u32> {
        let first = near.unwrap_or_else(|| {
            self.turn = (self.turn + 1) % self.parts;
            self.turn
        });
        (first..first + self.parts).find_map(|part| self.take_from_part(part % self.parts, order))
    }

    fn take_from_part(&mut self, part: usize, order: u32) -> Option<u32> {
        let heads = &self.heads[part * self.orders..(part + 1) * self.orders];
        let mut found = order;
        while *heads.get(found as usize)? == NO_PAGE {
            found += 1;
        }
        let page = heads[found as usize];
        self.unlink(page);
        while found > order {
            found -= 1;
            self.push(page + (1 << found), found);
        }
        self.free_pages -= 1 << order;
        Some(page)
    }

    /// Frees a run that [`BuddyAllocator::take_run`] returned with the same order.
    pub(crate) fn give_back(&mut self, mut page: u32, mut order: u32) {
        self.free_pages += 1 << order;
        while (order as usize) + 1 < self.orders {
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

    /// The free runs that begin in `pages`: the first page and the order of each.
    pub(crate) fn free_in(&self, pages: Range<u32>) -> impl Iterator<Item = (u32, u32)> {
        let mut page = pages.start;
        let end = pages.end.min(self.order.len() as u32);
        std::iter::from_fn(move || {
            while page < end {
                let at = page;
                let order = self.order[page as usize];
                if order != NOT_FREE {
                    page += 1 << order;
                    return Some((at, order.into()));
                }
                page += 1;
            }
            None
        })
    }

    /// Allocates a run that [`BuddyAllocator::free_in`] listed, under the same lock.
    pub(crate) fn take_free_run(&mut self, page: u32, order: u32) {
        self.unlink(page);
        self.free_pages -= 1 << order;
    }

    fn head_of(&mut self, page: u32, order: u32) -> &mut u32 {
        let at = self.part_of(page) * self.orders + order as usize;
        &mut self.heads[at]
    }

    fn push(&mut self, page: u32, order: u32) {
        let head = std::mem::replace(self.head_of(page, order), page);
        self.next[page as usize] = head;
        self.prev[page as usize] = NO_PAGE;
        if head != NO_PAGE {
            self.prev[head as usize] = page;
        }
        self.order[page as usize] = order as u8;
    }

    fn unlink(&mut self, page: u32) {
        let next = self.next[page as usize];
        let prev = self.prev[page as usize];
        let order = std::mem::replace(&mut self.order[page as usize], NOT_FREE);
        if prev == NO_PAGE {
            *self.head_of(page, order.into()) = next;
        } else {
            self.next[prev as usize] = next;
        }
        if next != NO_PAGE {
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
        let mut buddy = BuddyAllocator::new(13, 3);
        assert_eq!(buddy.free_pages(), 13);
        let mut taken = Vec::new();
        while let Some(page) = buddy.take_run(0, None) {
            taken.push(page);
        }
        assert_eq!(taken.len(), 13);
        for page in taken {
            buddy.give_back(page, 0);
        }
        assert!(buddy.take_run(3, None).is_some(), "freed pages merge again");
        assert!(buddy.take_run(4, None).is_none());
    }

    #[test]
    fn a_part_is_preferred_while_it_has_any() {
        let mut buddy = BuddyAllocator::new(16, 1);
        buddy.divide_by_stripe(2, 2);
        let part = |page: Option<u32>| page.map(|page| page >> 2 & 1);
        // Without a wish the parts take turns.
        assert_ne!(part(buddy.take_run(0, None)), part(buddy.take_run(0, None)));
        for _ in 0..7 {
            assert_eq!(part(buddy.take_run(0, Some(1))), Some(1));
        }
        assert_eq!(part(buddy.take_run(0, Some(1))), Some(0), "the other part's, as there is no more of this one");
        assert_eq!((buddy.take_run(2, Some(0)), buddy.free_pages()), (None, 6));
    }

    proptest! {
        #[test]
        fn runs_never_overlap_and_all_come_back(pages in 1usize..300, ops in prop::collection::vec((0u32..6, any::<u8>()), 1..200), parts in 1usize..4, split_at in 0usize..200) {
            let mut buddy = BuddyAllocator::new(pages, 4);
            let mut used = vec![false; pages];
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (n, (order, pick)) in ops.into_iter().enumerate() {
                if n == split_at {
                    // Whatever is handed out by then.
                    buddy.divide_by_stripe(5, parts);
                }
                let near = (pick % 3 == 0).then_some(usize::from(pick) / 3 % buddy.parts);
                if order == 5 {
                    // All that is free in one place.
                    let first = u32::from(pick) * 16;
                    let free: Vec<(u32, u32)> = buddy.free_in(first..first + 16).collect();
                    for &(page, order) in &free {
                        buddy.take_free_run(page, order);
                        used[page as usize..(page + (1 << order)) as usize].fill(true);
                    }
                    prop_assert!(used.iter().skip(first as usize).take(16).all(|used| *used));
                    held.extend(free);
                } else if pick % 2 == 0 {
                    if let Some(page) = buddy.take_run(order, near) {
                        prop_assert_eq!(page & ((1 << order) - 1), 0, "a run is aligned to its size");
                        for p in page..page + (1 << order) {
                            prop_assert!(!std::mem::replace(&mut used[p as usize], true));
                        }
                        held.push((page, order));
                    }
                } else if !held.is_empty() {
                    let (page, order) = held.swap_remove(pick as usize % held.len());
                    used[page as usize..(page + (1 << order)) as usize].fill(false);
                    buddy.give_back(page, order);
                }
                prop_assert_eq!(buddy.free_pages(), used.iter().filter(|u| !**u).count());
            }
            for (page, order) in held { buddy.give_back(page, order); }
            let mut whole = BuddyAllocator::new(pages, 4);
            for order in (0..5).rev() {
                loop {
                    let (a, b) = (buddy.take_run(order, None), whole.take_run(order, None));
                    prop_assert_eq!(a.is_some(), b.is_some());
                    if a.is_none() { break; }
                }
            }
        }
    }
}
