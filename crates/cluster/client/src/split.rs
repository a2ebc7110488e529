//! Splits one large read over several rails by their speeds. One thread sends all parts before it waits for the
//! first. Failed or redirected parts are returned to the caller.

use crate::peer_paths::SplitRails;
use crate::read_plan::ReadPlan;
use spurline_proto::NodeRequest;
use spurline_transport::ChannelLease;
use std::ops::Range;

/// Minimum size of a split read: below it a second request costs more than a second rail gains.
pub(crate) const SPLIT_FROM: usize = 512 << 10;
/// Minimum size of a part.
const PART_MIN: usize = 128 << 10;
/// Alignment of part ends, so that each part lands on its own pages.
const PART_ALIGN: usize = 4 << 10;
/// Maximum number of parts.
pub(crate) const PARTS_MAX: usize = 8;

/// One part: its channel and its bytes of the whole.
struct SplitPart<'a> {
    lease: ChannelLease<'a>,
    len: usize,
}

/// An unread range, and whether the node redirected the reader.
pub(crate) struct UnreadRange {
    pub part: Range<usize>,
    pub redirected: bool,
}

/// Reads `plan` into `dst` over all idle rails and returns the unread ranges; `None` when fewer than two rails are
/// idle.
pub(crate) fn read_split(
    several: &SplitRails,
    plan: &ReadPlan<'_>,
    may_redirect: bool,
    dst: &mut [u8],
) -> Option<[Option<UnreadRange>; PARTS_MAX]> {
    let most = (dst.len() / PART_MIN).min(PARTS_MAX);
    let mut parts: [Option<SplitPart<'_>>; PARTS_MAX] = [const { None }; PARTS_MAX];
    let mut speeds = [0u64; PARTS_MAX];
    let mut taken = 0;
    let mut count = 0;
    while count < most
        && let Some((lease, speed, rail)) = several.rails.pool.checkout_beside(taken, several.near)
    {
        taken |= rail;
        speeds[count] = u64::from(speed).max(1);
        parts[count] = Some(SplitPart { lease, len: 0 });
        count += 1;
    }
    if count < 2 {
        return None;
    }
    let lens = cut_shares(dst.len(), &speeds[..count]);
    parts.iter_mut().flatten().zip(lens).for_each(|(part, len)| part.len = len);
    let mut left = [const { None }; PARTS_MAX];
    let split = SplitRead { plan, may_redirect };
    split.fetch_parts(&mut parts[..count], 0, dst, &mut left);
    for (part, left) in parts.iter().flatten().zip(&left) {
        if let Some(UnreadRange { redirected: false, .. }) = left {
            part.lease.count_retry();
        }
    }
    Some(left)
}

/// Cuts `len` in proportion to `speeds`. Each part gets at least [`PART_MIN`] where possible, so that a rail once
/// measured as slow can recover. The last part takes the remainder.
fn cut_shares(len: usize, speeds: &[u64]) -> [usize; PARTS_MAX] {
    let mut out = [0; PARTS_MAX];
    let least = if len >= speeds.len() * PART_MIN { PART_MIN } else { 0 };
    // Parts below the minimum are raised to it; the others share the rest, until all have enough.
    let mut few = [false; PARTS_MAX];
    loop {
        let held: usize = few.iter().filter(|few| **few).count() * least;
        let fast = || speeds.iter().zip(&few).filter(|(_, few)| !**few).map(|(speed, _)| *speed);
        let rest = len.saturating_sub(held);
        let total = fast().sum::<u64>().max(1);
        let mut more = false;
        for (i, speed) in speeds.iter().enumerate() {
            if few[i] {
                continue;
            }
            let share = (u128::from(*speed) * rest as u128 / u128::from(total)) as usize;
            out[i] = share / PART_ALIGN * PART_ALIGN;
            if out[i] < least {
                out[i] = least;
                few[i] = true;
                more = true;
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

/// A read in parts.
struct SplitRead<'a> {
    plan: &'a ReadPlan<'a>,
    may_redirect: bool,
}

impl SplitRead<'_> {
    /// Reads `parts` into `dst`, which begins at `at` of the whole read.
    fn fetch_parts(
        &self,
        parts: &mut [Option<SplitPart<'_>>],
        at: usize,
        dst: &mut [u8],
        left: &mut [Option<UnreadRange>],
    ) {
        let (Some((Some(part), rest)), Some((own_left, others_left))) =
            (parts.split_first_mut(), left.split_first_mut())
        else {
            return;
        };
        let len = part.len.min(dst.len());
        let (own, others) = dst.split_at_mut(len);
        if len == 0 {
            return self.fetch_parts(rest, at, others, others_left);
        }
        let own_plan = self.plan.part(at..at + len, own);
        let request = NodeRequest::Read(own_plan.request(part.lease.welcome().volume, self.may_redirect));
        let mut others = Some((rest, others, others_left));
        let answer = part.lease.call_while(&request, own, self.plan.call.deadline, &mut || {
            if let Some((rest, dst, left)) = others.take() {
                self.fetch_parts(rest, at + len, dst, left);
            }
        });
        // The channel failed to send, so it did not run the others meanwhile.
        if let Some((rest, dst, left)) = others.take() {
            self.fetch_parts(rest, at + len, dst, left);
        }
        // A redirect has no payload.
        let landed = answer.map(|answer| answer.payload_len);
        if landed != Ok(len) {
            *own_left = Some(UnreadRange { part: at..at + len, redirected: landed == Ok(0) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_speeds_and_make_the_whole() {
        assert_eq!(cut_shares(1 << 20, &[100, 100])[..2], [512 << 10, 512 << 10]);
        assert_eq!(cut_shares(1 << 20, &[300, 100])[..2], [768 << 10, 256 << 10]);
        let uneven = cut_shares((1 << 20) + 5, &[1, 1, 1]);
        assert_eq!(uneven.iter().sum::<usize>(), (1 << 20) + 5);
        assert!(uneven[..2].iter().all(|len| len.is_multiple_of(PART_ALIGN)));
        assert_eq!(cut_shares(1 << 20, &[u64::from(u32::MAX), 1])[..2].iter().sum::<usize>(), 1 << 20);
        assert_eq!(cut_shares(0, &[1, 1]).iter().sum::<usize>(), 0);
    }

    #[test]
    fn no_part_is_too_short_to_tell_how_fast_its_rail_is() {
        for len in [SPLIT_FROM, (1 << 20) + 5, 4 << 20, 16 << 20] {
            for speeds in [&[1000u64, 100][..], &[100, 1000], &[1000, 100, 100, 1], &[u64::from(u32::MAX), 1, 1, 1]] {
                let out = cut_shares(len, speeds);
                let parts = &out[..speeds.len()];
                assert!(parts.iter().all(|part| *part >= PART_MIN), "{len} by {speeds:?}: {parts:?}");
                assert_eq!(out.iter().sum::<usize>(), len, "{len} by {speeds:?}: {parts:?}");
            }
        }
        // Parts above the minimum follow the speeds.
        assert_eq!(cut_shares(16 << 20, &[300, 100])[..2], [12 << 20, 4 << 20]);
    }
}
