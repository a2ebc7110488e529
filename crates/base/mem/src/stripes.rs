//! Which NUMA node each part of the arena comes from: stripes of it in turn, and what the kernel made of that.
//! It knows no device; nodes are numbers that it is told.

use std::io::{Error, Result};

/// The length of a huge page: no stripe is shorter, and each begins at a multiple of it.
pub(crate) const HUGE: usize = 2 << 20;
/// Stripes of each node that are enough; every one of them is a mapping of its own to the kernel.
const ENOUGH: usize = 64;

/// Stripes of one length, of each node in turn.
pub(crate) struct Stripes {
    shift: u32,
    nodes: Vec<u32>,
}

/// Of some pages, how many are where they should be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Placed {
    /// Bytes of a stripe.
    pub stripe: usize,
    /// On the node of their stripe.
    pub right: usize,
    /// On another one, which had room.
    pub elsewhere: usize,
    /// Not touched yet.
    pub untouched: usize,
}

impl Stripes {
    /// For `len` bytes whose largest buffer has `largest` (a power of two), over the nodes that are bits of `nodes`.
    pub fn over(len: usize, largest: usize, nodes: u64) -> Stripes {
        let nodes: Vec<u32> = (0..u64::BITS).filter(|n| nodes >> n & 1 == 1).collect();
        let few = (len / (nodes.len().max(1) * ENOUGH)).next_power_of_two();
        Stripes { shift: few.max(largest).max(HUGE).trailing_zeros(), nodes }
    }

    /// The length of a stripe as a power of two.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// The nodes, in their order.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// The node of the byte `at`.
    pub fn node_of(&self, at: usize) -> u32 {
        self.nodes[(at >> self.shift) % self.nodes.len()]
    }

    /// Each stripe of `len` bytes: where it begins, its length, its node.
    pub fn pieces(&self, len: usize) -> impl Iterator<Item = (usize, usize, u32)> {
        let stripe = 1 << self.shift;
        (0..len).step_by(stripe).map(move |at| (at, stripe.min(len - at), self.node_of(at)))
    }

    /// Asks the kernel where one page of each two MiB is.
    pub fn placed(&self, start: *const u8, len: usize) -> Result<Placed> {
        let ats: Vec<usize> = (0..len).step_by(HUGE).collect();
        let pages: Vec<*const u8> = ats.iter().map(|at| start.wrapping_add(*at)).collect();
        let mut status = vec![0i32; pages.len()];
        let (pages, to) = (pages.as_ptr(), status.as_mut_ptr());
        // SAFETY: both arrays have as many entries as is said; without nodes to move to, no page is moved.
        let answer =
            unsafe { libc::syscall(libc::SYS_move_pages, 0, ats.len(), pages, std::ptr::null::<i32>(), to, 0) };
        if answer < 0 {
            return Err(Error::last_os_error());
        }
        let mut placed = Placed { stripe: 1 << self.shift, ..Placed::default() };
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

/// Has pages that are not there yet come from the nodes that are bits of `nodes`, one of them, while it has any.
///
/// # Safety
/// The range is a mapping of the caller's own, or part of one.
pub(crate) unsafe fn prefer(start: *const u8, len: usize, nodes: u64) -> Result<()> {
    // The kernel counts one bit more than it reads.
    let bits = u64::BITS as usize + 1;
    // SAFETY: the range is the caller's; the mask is read during the call. Only where pages come from changes.
    let answer = unsafe { libc::syscall(libc::SYS_mbind, start, len, libc::MPOL_PREFERRED, &raw const nodes, bits, 0) };
    if answer == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_large_few_and_in_turn() {
        let shift = |len: usize, largest: usize, nodes| Stripes::over(len, largest, nodes).shift();
        assert_eq!(shift(24 << 20, 1 << 20, 0b11), 21, "a huge page at the least");
        assert_eq!(shift(300 << 20, 4 << 20, 0b11), 22, "the largest buffer at the least");
        assert_eq!(shift(64 << 30, 4 << 20, 0b11), 29, "and no more of them than need be");
        let stripes = Stripes::over(21 << 20, 4 << 20, 0b1_0010);
        let pieces: Vec<_> = stripes.pieces(21 << 20).map(|(at, len, node)| (at >> 20, len >> 20, node)).collect();
        assert_eq!(pieces, [(0, 4, 1), (4, 4, 4), (8, 4, 1), (12, 4, 4), (16, 4, 1), (20, 1, 4)]);
        assert_eq!((stripes.node_of((4 << 20) - 1), stripes.node_of(4 << 20)), (1, 4));
    }
}
