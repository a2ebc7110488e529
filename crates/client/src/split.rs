//! One large read over several rails at once: cut by the rails' speeds, every part asked for before the first is
//! waited for, all by one thread. What fails is left to the caller to ask for again.

use spurline_proto::{Read, Request};
use spurline_transport::{Lease, PathPool};
use std::ops::Range;
use std::time::Instant;

/// Reads from this size on are split: below, a second request costs more than the second rail brings.
pub(crate) const SPLIT_FROM: usize = 512 << 10;
/// No part is smaller than this.
const PART_MIN: usize = 128 << 10;
/// Parts end at multiples of this, so that each lands on pages of its own.
const PART_ALIGN: usize = 4 << 10;
/// The most parts.
pub(crate) const PARTS_MAX: usize = 8;

/// One part: the channel it is read over, and its bytes of the whole.
struct Part<'a> {
    lease: Lease<'a>,
    len: usize,
}

/// Reads `dst` over as many rails as are idle, and says which ranges of it failed; `None` when fewer than two rails
/// are idle now. `near` are the rails near `dst`. `request` is for the whole, its volume is each channel's own.
pub(crate) fn read(
    paths: &PathPool,
    near: u64,
    request: &Read<'_>,
    dst: &mut [u8],
    deadline: Instant,
) -> Option<[Option<Range<usize>>; PARTS_MAX]> {
    let most = (dst.len() / PART_MIN).min(PARTS_MAX);
    let mut parts: [Option<Part<'_>>; PARTS_MAX] = [const { None }; PARTS_MAX];
    let mut speeds = [0u64; PARTS_MAX];
    let (mut taken, mut count) = (0, 0);
    while count < most
        && let Some((lease, speed, rail)) = paths.checkout_beside(taken, near)
    {
        taken |= rail;
        speeds[count] = u64::from(speed).max(1);
        parts[count] = Some(Part { lease, len: 0 });
        count += 1;
    }
    if count < 2 {
        return None;
    }
    let lens = shares(dst.len(), &speeds[..count]);
    parts.iter_mut().flatten().zip(lens).for_each(|(part, len)| part.len = len);
    let mut failed = [const { None }; PARTS_MAX];
    fetch(&mut parts[..count], request, 0, dst, &mut failed, deadline);
    for (part, range) in parts.iter().flatten().zip(&failed) {
        if let (Some(path), Some(_)) = (part.lease.path(), range) {
            paths.count_retry(path);
        }
    }
    Some(failed)
}

/// `len` cut in proportion to `speeds`; what does not divide goes to the last of them that gets any.
fn shares(len: usize, speeds: &[u64]) -> [usize; PARTS_MAX] {
    let mut out = [0; PARTS_MAX];
    let total: u64 = speeds.iter().sum::<u64>().max(1);
    let (mut left, last) = (len, speeds.len().saturating_sub(1));
    for (i, speed) in speeds.iter().enumerate() {
        let share = (u128::from(*speed) * len as u128 / u128::from(total)) as usize;
        out[i] = if i == last { left } else { (share / PART_ALIGN * PART_ALIGN).min(left) };
        left -= out[i];
    }
    out
}

fn fetch(
    parts: &mut [Option<Part<'_>>],
    request: &Read<'_>,
    at: usize,
    dst: &mut [u8],
    failed: &mut [Option<Range<usize>>],
    deadline: Instant,
) {
    let (Some((Some(part), rest)), Some((failure, failures))) = (parts.split_first_mut(), failed.split_first_mut())
    else {
        return;
    };
    let len = part.len.min(dst.len());
    let (own, others) = dst.split_at_mut(len);
    if len == 0 {
        return fetch(rest, request, at, others, failures, deadline);
    }
    let read = Request::Read(Read {
        volume: part.lease.welcome().volume,
        offset: request.offset + at as u64,
        len: len as u32,
        ..*request
    });
    let mut others = Some((rest, others, failures));
    let answer = part.lease.call_while(&read, own, deadline, &mut || {
        if let Some((rest, dst, failures)) = others.take() {
            fetch(rest, request, at + len, dst, failures, deadline);
        }
    });
    // A channel that could not even send has run nothing meanwhile.
    if let Some((rest, dst, failures)) = others.take() {
        fetch(rest, request, at + len, dst, failures, deadline);
    }
    if !answer.is_ok_and(|answer| answer.payload_len == len) {
        *failure = Some(at..at + len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_speeds_and_make_the_whole() {
        assert_eq!(shares(1 << 20, &[100, 100])[..2], [512 << 10, 512 << 10]);
        assert_eq!(shares(1 << 20, &[300, 100])[..2], [768 << 10, 256 << 10]);
        let uneven = shares((1 << 20) + 5, &[1, 1, 1]);
        assert_eq!(uneven.iter().sum::<usize>(), (1 << 20) + 5);
        assert!(uneven[..2].iter().all(|len| len.is_multiple_of(PART_ALIGN)));
        assert_eq!(shares(1 << 20, &[u64::from(u32::MAX), 1])[..2].iter().sum::<usize>(), 1 << 20);
        assert_eq!(shares(0, &[1, 1]).iter().sum::<usize>(), 0);
    }
}
