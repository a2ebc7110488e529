//! RDMA verbs as safe types: devices, protection domains, registered memory, completion queues, and reliable
//! connections made by rdma_cm. It deliberately knows no message and no request: bytes and completions only.
//!
//! libibverbs and librdmacm are opened at run time, so a binary with this crate starts where neither is installed;
//! [`Verbs::load`] says what is missing, in four levels ([`Absent`]).
//!
//! **Who owns memory that a NIC may write.** Receives take a [`Slot`] by value and give it back with its completion, or
//! drop it after the queue pair is destroyed:
//!
//! ```compile_fail
//! fn posted_slots_cannot_be_read(pair: &mut spurline_verbs::QueuePair, slot: spurline_verbs::Slot) {
//!     pair.post_receive(slot).unwrap();
//!     println!("{:?}", slot.bytes());
//! }
//! ```
//!
//! Memory that the peer is to write is lent for the length of one exchange. Meanwhile nobody else can touch it, and
//! an exchange that does not end as agreed destroys the queue pair before the memory is given back:
//!
//! ```compile_fail
//! use spurline_verbs::{MemoryRegion, QueuePair, Settled};
//! fn lent_memory_cannot_be_touched(pair: &mut QueuePair, memory: &MemoryRegion, dst: &mut [u8]) {
//!     let _ = pair.lend(memory, dst, |_pair, _lent| {
//!         dst[0] = 1;
//!         ((), Settled::Yes)
//!     });
//! }
//! ```
//!
//! One thread at a time drives a queue pair; what others may do to it is to break it ([`Breaker`]):
//!
//! ```compile_fail
//! fn shared_between_threads<T: Sync>() {}
//! shared_between_threads::<spurline_verbs::QueuePair>();
//! ```
//!
//! The same three as they are allowed:
//!
//! ```
//! use spurline_verbs::{MemoryRegion, QueuePair, Settled, Slot};
//! fn slots_come_back(pair: &mut QueuePair, slot: Slot) {
//!     println!("{:?}", slot.bytes());
//!     pair.post_receive(slot).unwrap();
//! }
//! fn lent_memory_comes_back(pair: &mut QueuePair, memory: &MemoryRegion, dst: &mut [u8]) {
//!     let _ = pair.lend(memory, dst, |_pair, _lent| ((), Settled::Yes));
//!     dst[0] = 1;
//! }
//! fn moved_between_threads<T: Send>() {}
//! moved_between_threads::<QueuePair>();
//! ```

mod cm;
mod device;
mod error;
mod lend;
mod load;
mod memory;
mod polling;
mod qp;
mod queue;
mod sys;

pub use cm::{CmChannel, CmEvent, CmEventKind, CmId, ConnectOptions, Rejection};
pub use device::{
    Context, DeviceInfo, DeviceLimits, DeviceProblem, GidInfo, GidType, LinkLayer, PortInfo, PortState, devices,
};
pub use error::{Absent, VerbsError, WcStatus};
pub use lend::{Lent, RemoteRegion, Settled, Writing};
pub use load::Verbs;
pub use memory::{Access, MemoryRegion, ProtectionDomain, Slot};
pub use qp::{Breaker, Completion, QueueDepths, QueuePair};
pub use queue::{CompletionQueue, Wake};

/// Sizes of structures as this crate has them, for the test that compares them with the C headers.
#[doc(hidden)]
pub fn layout_sizes() -> &'static [(&'static str, usize)] {
    sys::SIZES
}

/// Field offsets by structure and field, for the same test.
#[doc(hidden)]
pub fn layout_offsets() -> &'static [(&'static str, &'static str, usize)] {
    sys::OFFSETS
}
