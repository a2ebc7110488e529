//! The NUMA node of each part of the arena: stripes of the nodes in turn, and the actual placement by the kernel. Knows no
//! device; nodes are numbers.

use std::io::{Error, Result};

/// The length of a huge page: no stripe is shorter, and each begins at a multiple.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Sufficient stripes per node; each is a separate mapping in the kernel.
const STRIPES_PER_NODE: usize = 64;

/// Stripes of the same length, of each node in turn.
pub(crate) struct NumaStripes {
    shift: u32,
    nodes: Vec<u32>,
}

/// A sample of pages, on the intended node or elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NumaPlacement {
    /// Bytes of a stripe.
    pub stripe: usize,
    /// On the node of the stripe.
    pub right: usize,
    /// On another node, which had free memory.
    pub elsewhere: usize,
    /// Not touched yet.
    pub untouched: usize,
}

impl NumaStripes {
    /// Stripes for `len` bytes whose largest buffer has `largest` (a power of two), over the nodes in the bit mask
    /// `nodes`.
    pub fn for_arena(len: usize, largest: usize, nodes: u64) -> NumaStripes {
        let nodes: Vec<u32> = (0..u64::BITS).filter(|n| nodes >> n & 1 == 1).collect();
        let few = (len / (nodes.len().max(1) * STRIPES_PER_NODE)).next_power_of_two();
        NumaStripes { shift: few.max(largest).max(HUGE_PAGE).trailing_zeros(), nodes }
    }

    /// The length of a stripe as a power of two.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// The nodes, in order.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// The node of the byte `at`.
    pub fn node_of(&self, at: usize) -> u32 {
        self.nodes[(at >> self.shift) % self.nodes.len()]
    }

    /// Each stripe of `len` bytes: start, length, node.
    pub fn pieces(&self, len: usize) -> impl Iterator<Item = (usize, usize, u32)> {
        let stripe = 1 << self.shift;
        (0..len).step_by(stripe).map(move |at| (at, stripe.min(len - at), self.node_of(at)))
    }

    /// Queries the kernel for the node of a page in each two MiB.
    pub fn measure_placement(&self, start: *const u8, len: usize) -> Result<NumaPlacement> {
        let ats: Vec<usize> = (0..len).step_by(HUGE_PAGE).collect();
        let pages: Vec<*const u8> = ats.iter().map(|at| start.wrapping_add(*at)).collect();
        let mut status = vec![0i32; pages.len()];
        let pages = pages.as_ptr();
        let to = status.as_mut_ptr();
        // SAFETY: both arrays have the stated number of entries; without target nodes, no page is moved.
        let answer =
            unsafe { libc::syscall(libc::SYS_move_pages, 0, ats.len(), pages, std::ptr::null::<i32>(), to, 0) };
        if answer < 0 {
            return Err(Error::last_os_error());
        }
        let mut placed = NumaPlacement { stripe: 1 << self.shift, ..NumaPlacement::default() };
        for (at, node) in ats.into_iter().zip(status) {
            match u32::try_from(node) {
                Ok(node) if node == self.node_of(at) => placed.right += 1,
                Ok(_) => placed.elsewhere += 1,
                Err(_) => placed.untouched += 1,
            }
        }
        Ok(placed)
    }
}

/// Makes the kernel prefer the nodes in the bit mask `nodes` for pages of the range that are not resident yet.
///
/// # Safety
/// The range is a mapping of the caller, or a part.
pub(crate) unsafe fn prefer_nodes(start: *const u8, len: usize, nodes: u64) -> Result<()> {
    // The kernel reads a bit less than the given number.
    let bits = u64::BITS as usize + 1;
    // SAFETY: the range is the caller's; the mask is read during the call. Only the placement of pages changes.
    let answer = unsafe { libc::syscall(libc::SYS_mbind, start, len, libc::MPOL_PREFERRED, &raw const nodes, bits, 0) };
    if answer == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_large_few_and_in_turn() {
        let shift = |len: usize, largest: usize, nodes| NumaStripes::for_arena(len, largest, nodes).shift();
        assert_eq!(shift(24 << 20, 1 << 20, 0b11), 21, "a huge page at the least");
        assert_eq!(shift(300 << 20, 4 << 20, 0b11), 22, "the largest buffer at the least");
        assert_eq!(shift(64 << 30, 4 << 20, 0b11), 29, "and no more of them than need be");
        let stripes = NumaStripes::for_arena(21 << 20, 4 << 20, 0b1_0010);
        let pieces: Vec<_> = stripes.pieces(21 << 20).map(|(at, len, node)| (at >> 20, len >> 20, node)).collect();
        assert_eq!(pieces, [(0, 4, 1), (4, 4, 4), (8, 4, 1), (12, 4, 4), (16, 4, 1), (20, 1, 4)]);
        assert_eq!((stripes.node_of((4 << 20) - 1), stripes.node_of(4 << 20)), (1, 4));
    }
}
