//! Queue depths and slot lengths: each number is a sum of named consumers. Allocates nothing.

use spurline_verbs::QueueDepths;

/// Length of a slot: a message's prelude, and a frame's header with all but the longest paths.
pub(crate) const SLOT: usize = 4 << 10;
/// Maximum bytes of a write: long enough to amortise the cost, short enough that a reader passes on the first bytes while the
/// rest is in transit.
pub(crate) const PIECE: usize = 512 << 10;
/// Answers up to this size are a single write: the kernel's reads are passed on as a whole, and each further announcement wakes
/// both ends.
pub(crate) const WHOLE: usize = 2 * PIECE;
/// Payloads up to this size are expected soon, so polling pays.
pub(crate) const SOON: usize = 64 << 10;
/// Buffer per answer for unregistered bytes, which must be copied first.
pub(crate) const BOUNCE: usize = WHOLE;

/// Reads of a mount's memory outstanding on a connection: the pieces of a write of 1 MiB, and as many of the next.
pub(crate) const READS: u8 = 4;

/// Writes announced to a reader that is busy with earlier writes: a read of 4 MiB.
const PIECES_AHEAD: u32 = 8;
/// Parts of a frame in transit while the receiver is busy: a listing of 16 KiB.
const PARTS_AHEAD: u32 = 4;
/// Grants, which may come at any time; a credit is reserved for grants.
const GRANT_SLOTS: u32 = 2;
/// A write of zero bytes that probes the path.
const PROBE_SLOTS: u32 = 1;
/// Slots for sending parts of frames.
const PARTS_SENT: u32 = 2;

/// Send slots of each side.
pub(crate) const SEND_SLOTS: u32 = PARTS_SENT + GRANT_SLOTS;

/// Depths of a reader's queue pair.
pub(crate) const READER: QueueDepths =
    QueueDepths { receives: PIECES_AHEAD + PARTS_AHEAD + GRANT_SLOTS + 2, sends: SEND_SLOTS + PROBE_SLOTS };
/// Depths of a node's queue pair, per connection.
pub(crate) const NODE: QueueDepths =
    QueueDepths { receives: PARTS_AHEAD + GRANT_SLOTS + 2, sends: SEND_SLOTS + PROBE_SLOTS + PIECES_AHEAD };

const fn queue_bytes(depths: QueueDepths) -> usize {
    // Receives and sends have a buffer each, rounded up to a power of two by the pool.
    (depths.receives as usize * SLOT).next_power_of_two() + (SEND_SLOTS as usize * SLOT).next_power_of_two()
}

/// Bytes of a node's pool per connection; an answer from unregistered memory takes another MiB until the end.
pub const fn connection_bytes() -> usize {
    queue_bytes(NODE)
}

/// Bytes of a reader's pool per channel; a call into unregistered memory takes the length of the read in addition until the end.
pub const fn reader_bytes() -> usize {
    queue_bytes(READER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_proto::rdma::{MIN_RECEIVES, MIN_SLOT_LEN};

    #[test]
    fn both_sides_receive_what_the_protocol_wants() {
        assert!(READER.receives.min(NODE.receives) >= MIN_RECEIVES.into() && SLOT >= MIN_SLOT_LEN as usize);
        assert_eq!((reader_bytes(), connection_bytes()), (80 << 10, 48 << 10));
    }
}
