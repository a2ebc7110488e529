//! One-sided writes there and back, noticed by looking at the memory they land in. Both ends use this; it knows no clock
//! of a measurement.
//!
//! A write ends with a number from 1 to 255 that differs from the one before, so that the last byte says that all of it
//! is there: NICs place the bytes of a message in their order, and perftest relies on the same.

use super::{encode, say};
use crate::lane::{Stop, TICK};
use spurline_types::Result;
use spurline_verbs::{Lent, QueuePair, RemoteRegion, Slot, VerbsError};
use std::time::{Duration, Instant};

/// So many looks at the memory before the processor is offered to others: software devices may do their work in a thread
/// of the kernel, which may want this very one. Longer than an answer takes: offering is a system call, and what arrives
/// meanwhile is seen after it.
const LOOKS: u32 = 4096;
/// So many looks between two at the connection, which cost more.
const LOOKS_AT_ALL: u32 = LOOKS * 4;
/// Who has looked for this long without seeing anything lets the processor rest between looks.
const RESTLESS: Duration = Duration::from_millis(5);
/// The rest.
const REST: Duration = Duration::from_micros(200);

/// The number after `number`.
pub fn next(number: u8) -> u8 {
    number.checked_add(1).unwrap_or(1)
}

/// Tells the other end where to write, and leaves `large` as the only slots to send from: one that a short message went
/// out of is too small for a write.
pub fn tell(pair: &mut QueuePair, small: &mut Vec<Slot>, lent: &Lent<'_>, large: Vec<Slot>) -> Result<(), VerbsError> {
    let deadline = Instant::now() + TICK * 8;
    say(pair, small, &encode(lent.region()), deadline)?;
    pair.settle(0, deadline)?;
    while let Some(slot) = pair.free_slot()? {
        small.push(slot);
    }
    large.into_iter().for_each(|slot| pair.keep_slot(slot));
    Ok(())
}

/// Writes `len` bytes that end with `number`. One write is under way at a time, so there is room, and `deadline` may be
/// far.
pub fn put(
    pair: &mut QueuePair,
    len: usize,
    region: RemoteRegion,
    number: u8,
    deadline: Instant,
) -> Result<(), VerbsError> {
    let mut slot = pair.take_slot(deadline)?;
    slot.bytes_mut()[len - 1] = number;
    pair.write_slot(slot, len, region, None, deadline)
}

/// Looks until the byte at `at` is `number`, for a tick at most; says whether it is.
///
/// # Errors
/// When the connection failed.
pub fn seen(pair: &mut QueuePair, lent: &Lent<'_>, at: usize, number: u8, stop: &Stop) -> Result<bool, VerbsError> {
    let mut looks = 0u32;
    let mut since = None;
    loop {
        if lent.byte(at) == number {
            return Ok(true);
        }
        looks += 1;
        if !looks.is_multiple_of(LOOKS) {
            // No pause: on some processors it is longer than the wait.
            continue;
        }
        std::thread::yield_now();
        if !looks.is_multiple_of(LOOKS_AT_ALL) {
            continue;
        }
        // What ends the connection shows in its queues: a write fails, receives come back.
        pair.poll()?;
        pair.check()?;
        let waited = since.get_or_insert_with(Instant::now).elapsed();
        if waited >= TICK || stop.is_cut() {
            return Ok(false);
        }
        if waited >= RESTLESS {
            std::thread::sleep(REST);
        }
    }
}
