//! How deep queues are and how long slots: each number a sum of named consumers. It makes nothing.

use spurline_verbs::QueueDepths;

/// Length of a slot: a message's prelude and a frame's header with all but the longest paths behind them.
pub(crate) const SLOT: usize = 4 << 10;
/// The most bytes of one write: long enough that its cost per byte is that of longer ones, short enough that a reader
/// hands the first bytes on while the rest is on its way.
pub(crate) const PIECE: usize = 512 << 10;
/// Answers up to this many bytes are one write: what the kernel reads at a time is handed on as a whole, and each further
/// announcement wakes both ends.
pub(crate) const WHOLE: usize = 2 * PIECE;
/// Payloads up to this many bytes are expected soon, and worth polling for.
pub(crate) const SOON: usize = 64 << 10;
/// Memory for bytes that are not registered and have to be copied first, per answer.
pub(crate) const BOUNCE: usize = WHOLE;

/// Writes announced to a reader while it is busy with earlier ones: a read of 4 MiB.
const PIECES_AHEAD: u32 = 8;
/// Parts of a frame on their way while the receiver is busy: a listing of 16 KiB.
const PARTS_AHEAD: u32 = 4;
/// Grants, which may come at any time; one credit is kept for them.
const GRANTS: u32 = 2;
/// A write of nothing that asks whether the path works.
const PROBES: u32 = 1;
/// Slots that parts of frames are sent from.
const PARTS_SENT: u32 = 2;

/// Slots a side sends messages from.
pub(crate) const SEND_SLOTS: u32 = PARTS_SENT + GRANTS;

/// What a reader posts and sends.
pub(crate) const READER: QueueDepths =
    QueueDepths { receives: PIECES_AHEAD + PARTS_AHEAD + GRANTS + 2, sends: SEND_SLOTS + PROBES };
/// What a node posts and sends on each connection.
pub(crate) const NODE: QueueDepths =
    QueueDepths { receives: PARTS_AHEAD + GRANTS + 2, sends: SEND_SLOTS + PROBES + PIECES_AHEAD };

const fn bytes(depths: QueueDepths) -> usize {
    // Receives and sends have a buffer each, which the pool rounds up to a power of two.
    (depths.receives as usize * SLOT).next_power_of_two() + (SEND_SLOTS as usize * SLOT).next_power_of_two()
}

/// What each connection takes from a node's pool, in bytes; an answer from memory that is not registered takes another
/// MiB while it lasts.
pub const fn connection_bytes() -> usize {
    bytes(NODE)
}

/// What each channel takes from a reader's pool, in bytes; a call into memory that is not registered takes as much
/// again as it reads while it lasts.
pub const fn reader_bytes() -> usize {
    bytes(READER)
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
