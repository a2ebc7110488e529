//! One large read over several rails at once: cut by the rails' speeds, every part asked for before the first is
//! waited for, all by one thread. What fails, or is sent on, is left to the caller to ask for again.

use crate::reads::request_for;
use spurline_proto::Read;
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

/// What is left of a read: a range of it, and whether its node sent the reader on.
pub(crate) struct Left {
    pub part: Range<usize>,
    pub sent_on: bool,
}

/// Reads `dst` over as many rails as are idle, and says what is left; `None` when fewer than two rails are idle now. `near`
/// are the rails near `dst`. `whole` is what is read, its volume is each channel's own, and whether the node may send the
/// reader on.
pub(crate) fn read(
    paths: &PathPool,
    near: u64,
    whole: (&Read<'_>, bool),
    dst: &mut [u8],
    deadline: Instant,
) -> Option<[Option<Left>; PARTS_MAX]> {
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
    let mut left = [const { None }; PARTS_MAX];
    fetch(&mut parts[..count], whole, 0, dst, &mut left, deadline);
    for (part, left) in parts.iter().flatten().zip(&left) {
        if let (Some(path), Some(Left { sent_on: false, .. })) = (part.lease.path(), left) {
            paths.count_retry(path);
        }
    }
    Some(left)
}

/// `len` cut in proportion to `speeds`, no part below [`PART_MIN`] where there is enough for all: a rail that was slow once
/// shows only by what it carries that it is not any more. What does not divide goes to the last.
fn shares(len: usize, speeds: &[u64]) -> [usize; PARTS_MAX] {
    let mut out = [0; PARTS_MAX];
    let least = if len >= speeds.len() * PART_MIN { PART_MIN } else { 0 };
    // Those that would get less than the least get it, and the others share the rest, until all of them get enough.
    let mut few = [false; PARTS_MAX];
    loop {
        let held: usize = few.iter().filter(|few| **few).count() * least;
        let fast = || speeds.iter().zip(&few).filter(|(_, few)| !**few).map(|(speed, _)| *speed);
        let (rest, total) = (len.saturating_sub(held), fast().sum::<u64>().max(1));
        let mut more = false;
        for (i, speed) in speeds.iter().enumerate() {
            if few[i] {
                continue;
            }
            let share = (u128::from(*speed) * rest as u128 / u128::from(total)) as usize;
            out[i] = share / PART_ALIGN * PART_ALIGN;
            if out[i] < least {
                (out[i], few[i], more) = (least, true, true);
            }
        }
        if !more {
            break;
        }
    }
    let before_last = speeds.len().saturating_sub(1);
    out[before_last] = len - out[..before_last].iter().sum::<usize>();
    out
}

fn fetch(
    parts: &mut [Option<Part<'_>>],
    whole: (&Read<'_>, bool),
    at: usize,
    dst: &mut [u8],
    left: &mut [Option<Left>],
    deadline: Instant,
) {
    let (Some((Some(part), rest)), Some((own_left, others_left))) = (parts.split_first_mut(), left.split_first_mut())
    else {
        return;
    };
    let len = part.len.min(dst.len());
    let (own, others) = dst.split_at_mut(len);
    if len == 0 {
        return fetch(rest, whole, at, others, others_left, deadline);
    }
    let welcome = part.lease.welcome();
    let (volume, offset) = (welcome.volume, whole.0.offset + at as u64);
    let request = request_for(Read { volume, offset, len: len as u32, ..*whole.0 }, whole.1, welcome);
    let mut others = Some((rest, others, others_left));
    let answer = part.lease.call_while(&request, own, deadline, &mut || {
        if let Some((rest, dst, left)) = others.take() {
            fetch(rest, whole, at + len, dst, left, deadline);
        }
    });
    // A channel that could not even send has run nothing meanwhile.
    if let Some((rest, dst, left)) = others.take() {
        fetch(rest, whole, at + len, dst, left, deadline);
    }
    // Nothing but the word to go on has no bytes.
    let landed = answer.map(|answer| answer.payload_len);
    if landed != Ok(len) {
        *own_left = Some(Left { part: at..at + len, sent_on: landed == Ok(0) });
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

    #[test]
    fn no_part_is_too_short_to_tell_how_fast_its_rail_is() {
        for len in [SPLIT_FROM, (1 << 20) + 5, 4 << 20, 16 << 20] {
            for speeds in [&[1000u64, 100][..], &[100, 1000], &[1000, 100, 100, 1], &[u64::from(u32::MAX), 1, 1, 1]] {
                let out = shares(len, speeds);
                let parts = &out[..speeds.len()];
                assert!(parts.iter().all(|part| *part >= PART_MIN), "{len} by {speeds:?}: {parts:?}");
                assert_eq!(out.iter().sum::<usize>(), len, "{len} by {speeds:?}: {parts:?}");
            }
        }
        // What is long enough for all is cut as ever.
        assert_eq!(shares(16 << 20, &[300, 100])[..2], [12 << 20, 4 << 20]);
    }
}
