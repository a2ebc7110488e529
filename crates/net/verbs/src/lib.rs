//! RDMA verbs as safe types: devices, protection domains, registered memory, completion queues, and reliable connections through
//! rdma_cm. Deliberately knows no message and no request: bytes and completions only.
//!
//! libibverbs and librdmacm are opened at run time, so a binary with this crate starts without both; [`VerbsLibrary::load`]
//! reports the missing part, in four levels ([`RdmaUnavailable`]).
//!
//! **Ownership of memory that a NIC may write.** Receives take a [`MemorySlot`] by value and return the slot with the completion,
//! or drop the slot after the queue pair is destroyed:
//!
//! ```compile_fail
//! fn posted_slots_cannot_be_read(pair: &mut spurline_verbs::QueuePair, slot: spurline_verbs::MemorySlot) {
//!     pair.post_receive(slot).unwrap();
//!     println!("{:?}", slot.bytes());
//! }
//! ```
//!
//! Memory for the peer's writes is loaned for an exchange. Meanwhile no other code can access the memory, and an exchange that
//! does not complete destroys the queue pair before the memory is returned:
//!
//! ```compile_fail
//! use spurline_verbs::{LoanSettled, MemoryRegion, QueuePair};
//! fn loaned_memory_cannot_be_touched(pair: &mut QueuePair, memory: &MemoryRegion, dst: &mut [u8]) {
//!     let _ = pair.lend_memory(memory, dst, |_pair, _lent| {
//!         dst[0] = 1;
//!         ((), LoanSettled::Yes)
//!     });
//! }
//! ```
//!
//! Only a single thread at a time uses a queue pair; other threads can only break the pair ([`QueuePairBreaker`]):
//!
//! ```compile_fail
//! fn shared_between_threads<T: Sync>() {}
//! shared_between_threads::<spurline_verbs::QueuePair>();
//! ```
//!
//! The allowed forms of all three:
//!
//! ```
//! use spurline_verbs::{LoanSettled, MemoryRegion, MemorySlot, QueuePair};
//! fn slots_come_back(pair: &mut QueuePair, slot: MemorySlot) {
//!     println!("{:?}", slot.bytes());
//!     pair.post_receive(slot).unwrap();
//! }
//! fn loaned_memory_comes_back(pair: &mut QueuePair, memory: &MemoryRegion, dst: &mut [u8]) {
//!     let _ = pair.lend_memory(memory, dst, |_pair, _lent| ((), LoanSettled::Yes));
//!     dst[0] = 1;
//! }
//! fn moved_between_threads<T: Send>() {}
//! moved_between_threads::<QueuePair>();
//! ```

mod cm;
mod device;
mod error;
mod load;
mod loan;
mod memory;
mod polling;
mod qp;
mod queue;
mod sys;

pub use cm::{CmChannel, CmEvent, CmEventKind, CmId, CmRejection, ConnectOptions};
pub use device::{
    DeviceContext, DeviceInfo, DeviceLimits, DeviceProblem, GidInfo, GidType, LinkLayer, PortInfo, PortState,
    list_devices,
};
pub use error::{RdmaUnavailable, VerbsError, WcStatus};
pub use load::VerbsLibrary;
pub use loan::{BorrowedWrites, LoanSettled, LoanedMemory, RemoteRegion};
pub use memory::{MemoryAccess, MemoryRegion, MemorySlot, ProtectionDomain};
pub use qp::{QueueDepths, QueuePair, QueuePairBreaker, ReceiveCompletion};
pub use queue::{CompletionQueue, WakeReason};

/// Sizes of structures in this crate, for the test that compares the sizes with the C headers.
#[doc(hidden)]
pub fn layout_sizes() -> &'static [(&'static str, usize)] {
    sys::SIZES
}

/// Field offsets by structure and field, for the same test.
#[doc(hidden)]
pub fn layout_offsets() -> &'static [(&'static str, &'static str, usize)] {
    sys::OFFSETS
}
