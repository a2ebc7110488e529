//! Memory across a connection for the length of one exchange: lent to the peer's writes, or written from to the peer.
//! Both end with the queue pair when they do not end as agreed.

use crate::error::VerbsError;
use crate::memory::MemoryRegion;
use crate::qp::{Handle, QueuePair};
use crate::sys;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

/// Memory of a peer that may be written: what it sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Address there.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key.
    pub rkey: u32,
}

/// Whether an exchange ended as agreed, so that the peer will not write any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The peer said that it is done.
    Yes,
    /// It may still write: the queue pair is destroyed before the memory is given back.
    No,
}

/// Memory lent to the peer; made by [`QueuePair::lend`].
pub struct Lent<'a> {
    start: *mut u8,
    region: RemoteRegion,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl Lent<'_> {
    /// What the peer is told.
    pub fn region(&self) -> RemoteRegion {
        self.region
    }

    /// The byte at `at` as it is now, which is how a peer's write without a number is noticed. 0 past the end.
    #[inline]
    pub fn byte(&self, at: usize) -> u8 {
        if at as u64 >= self.region.len {
            return 0;
        }
        // SAFETY: `at` lies inside the memory lent, which is initialised and kept for this value's lifetime. The NIC
        // may write it at the same time; a byte is old or new, and volatile makes each call look anew.
        unsafe { self.start.add(at).read_volatile() }
    }

    /// Copies what has arrived from `from` on; as much of `to` is filled as there is memory. Bytes that the peer has
    /// not announced yet may be any.
    pub fn copy_to(&self, from: usize, to: &mut [u8]) {
        let left = (self.region.len as usize).saturating_sub(from);
        let n = to.len().min(left);
        // SAFETY: `from + n` lies inside the memory lent, which is initialised and kept for this value's lifetime, and
        // `to` is elsewhere as it is borrowed mutably. A peer that breaks the protocol may write these bytes at the
        // same time; they are copied as bytes and nothing is concluded from them.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.add(from.min(self.region.len as usize)), to.as_mut_ptr(), n)
        };
    }
}

impl QueuePair {
    /// Lends `dst` to the peer's writes, and to its reads where `memory` is registered for those, while `exchange` runs.
    /// When it does not end [`Settled::Yes`], or panics, the queue pair is destroyed before this returns, so that no late
    /// write can land in `dst`.
    ///
    /// The key covers the whole arena: a peer that breaks the protocol can write elsewhere in it while the queue pair
    /// lives. Only nodes that are trusted with the data are given keys.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when `dst` is not in `memory`, or peers may not write there.
    pub fn lend<R>(
        &mut self,
        memory: &MemoryRegion,
        dst: &mut [u8],
        exchange: impl FnOnce(&mut QueuePair, &Lent<'_>) -> (R, Settled),
    ) -> Result<R, VerbsError> {
        struct Guard(Arc<Handle>, Settled);
        impl Drop for Guard {
            fn drop(&mut self) {
                if self.1 == Settled::No {
                    self.0.destroy();
                }
            }
        }
        let lendable = memory.lets_peers_write() && memory.contains(dst) && Arc::ptr_eq(memory.domain(), &self.domain);
        if !lendable {
            return Err(VerbsError::Misuse("this memory is not registered for a peer's writes".into()));
        }
        let start = dst.as_mut_ptr();
        let region =
            RemoteRegion { addr: start.expose_provenance() as u64, len: dst.len() as u64, rkey: memory.rkey() };
        let lent = Lent { start, region, borrowed: PhantomData };
        // The handle, not the queue pair: `exchange` could put another one in its place.
        let mut guard = Guard(Arc::clone(&self.handle), Settled::No);
        let (result, settled) = exchange(self, &lent);
        guard.1 = settled;
        Ok(result)
    }

    /// Runs `f`, which writes borrowed memory to the peer, and waits until its NIC has acknowledged all of it. When
    /// that fails the queue pair is destroyed before this returns, so that no byte is sent from memory that was given
    /// back.
    ///
    /// # Errors
    /// Those of `f`; when the connection failed, or not all was acknowledged by `deadline`.
    pub fn writing<'m, R, E: From<VerbsError>>(
        &mut self,
        deadline: Instant,
        f: impl FnOnce(&mut Writing<'_, 'm>) -> Result<R, E>,
    ) -> Result<R, E> {
        struct Guard(Arc<Handle>, bool);
        impl Drop for Guard {
            fn drop(&mut self) {
                if !self.1 {
                    self.0.destroy();
                }
            }
        }
        let mut guard = Guard(Arc::clone(&self.handle), false);
        let mut writing = Writing { pair: self, deadline, memory: PhantomData };
        let result = f(&mut writing)?;
        let until = self.posted;
        self.wait_sent(until, deadline)?;
        guard.1 = true;
        Ok(result)
    }
}

/// Writes of borrowed memory under way; made by [`QueuePair::writing`].
pub struct Writing<'q, 'm> {
    pair: &'q mut QueuePair,
    deadline: Instant,
    memory: PhantomData<&'m [u8]>,
}

impl<'m> Writing<'_, 'm> {
    /// Writes `bytes` into `region` from `offset` on. With `immediate` the peer learns of it, which takes one of its
    /// receives.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when the bytes are not in `memory` or would not fit in the region; when the connection
    /// failed, or there was no room in time.
    pub fn write(
        &mut self,
        memory: &'m MemoryRegion,
        bytes: &'m [u8],
        region: RemoteRegion,
        offset: u64,
        immediate: Option<u32>,
    ) -> Result<(), VerbsError> {
        let pair = &mut *self.pair;
        let len = bytes.len() as u64;
        if !memory.contains(bytes) || !Arc::ptr_eq(memory.domain(), &pair.domain) {
            return Err(VerbsError::Misuse("bytes to write are in registered memory".into()));
        }
        let (Some(end), Ok(length)) = (offset.checked_add(len), u32::try_from(len)) else {
            return Err(VerbsError::Misuse(format!("{len} bytes at {offset}")));
        };
        if end > region.len {
            let why = format!("{len} bytes at {offset} do not fit in the peer's region of {}", region.len);
            return Err(VerbsError::Misuse(why));
        }
        pair.room(self.deadline)?;
        let mut sge = sys::Sge { addr: bytes.as_ptr().expose_provenance() as u64, length, lkey: memory.lkey() };
        let opcode = if immediate.is_some() { sys::WR_RDMA_WRITE_WITH_IMM } else { sys::WR_RDMA_WRITE };
        let mut wr = sys::SendWr::new(pair.posted + 1, opcode, sys::SEND_SIGNALED);
        wr.imm_data = immediate.unwrap_or(0).to_be();
        wr.remote_addr = region.addr.wrapping_add(offset);
        wr.rkey = region.rkey;
        // Without bytes there is no element: some devices refuse one of length 0.
        if length > 0 {
            wr.sg_list = &mut sge;
            wr.num_sge = 1;
        }
        pair.post(&mut wr, None)
    }

    /// The queue pair, to take what arrives meanwhile and to send.
    pub fn pair(&mut self) -> &mut QueuePair {
        self.pair
    }
}
