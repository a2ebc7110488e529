//! One-sided writes in both directions, noticed by polling the target memory. Both ends use this module.
//!
//! A write ends with a number from 1 to 255 that differs from the last number, so that the last byte proves the whole write: NICs
//! place the bytes of a message in order, and perftest relies on the same.

use super::{encode_region, send_small};
use crate::stream::{StopSignal, WAIT_TICK};
use spurline_types::Result;
use spurline_verbs::{LoanedMemory, MemorySlot, QueuePair, RemoteRegion, VerbsError};
use std::time::{Duration, Instant};

/// Polls of the memory before the thread yields. Software devices may work in a kernel thread that needs this CPU.
/// The value exceeds an answer's time: yielding is a system call, and an arrival meanwhile is seen late.
const POLLS_PER_YIELD: u32 = 4096;
/// Polls of the memory between two checks of the connection, which cost more.
const POLLS_PER_CHECK: u32 = POLLS_PER_YIELD * 4;
/// After this time without an arrival the thread sleeps between polls.
const SPIN_TIME: Duration = Duration::from_millis(5);
/// Length of these sleeps.
const POLL_SLEEP: Duration = Duration::from_micros(200);

/// The number after `number`.
pub fn next_number(number: u8) -> u8 {
    number.checked_add(1).unwrap_or(1)
}

/// Sends the target region to the other end, and leaves `large` as the only slots to send from: the slot of a short
/// message is too small for a write.
pub fn send_region(
    pair: &mut QueuePair,
    small: &mut Vec<MemorySlot>,
    lent: &LoanedMemory<'_>,
    large: Vec<MemorySlot>,
) -> Result<(), VerbsError> {
    let deadline = Instant::now() + WAIT_TICK * 8;
    send_small(pair, small, &encode_region(lent.region()), deadline)?;
    pair.wait_in_flight(0, deadline)?;
    while let Some(slot) = pair.free_slot()? {
        small.push(slot);
    }
    large.into_iter().for_each(|slot| pair.keep_slot(slot));
    Ok(())
}

/// Writes `len` bytes that end with `number`. Only a single write is under way at a time, so there is room, and `deadline` may be
/// distant.
pub fn write_number(
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

/// Polls until the byte at `at` is `number`, at most for a tick; returns whether the number came.
///
/// # Errors
/// When the connection failed.
pub fn wait_number(
    pair: &mut QueuePair,
    lent: &LoanedMemory<'_>,
    at: usize,
    number: u8,
    stop: &StopSignal,
) -> Result<bool, VerbsError> {
    let mut looks = 0u32;
    let mut since = None;
    loop {
        if lent.read_byte(at) == number {
            return Ok(true);
        }
        looks += 1;
        if !looks.is_multiple_of(POLLS_PER_YIELD) {
            // No pause instruction, which on some CPUs takes longer than the wait.
            continue;
        }
        std::thread::yield_now();
        if !looks.is_multiple_of(POLLS_PER_CHECK) {
            continue;
        }
        // A lost connection shows in the queues: a write fails, or receives complete with an error.
        pair.poll_receive()?;
        pair.check_connection()?;
        let waited = since.get_or_insert_with(Instant::now).elapsed();
        if waited >= WAIT_TICK || stop.is_aborted() {
            return Ok(false);
        }
        if waited >= SPIN_TIME {
            std::thread::sleep(POLL_SLEEP);
        }
    }
}
