//! Memory used by a connection for an exchange: loaned to the peer's writes or reads, the source of writes to the peer, or the
//! destination of reads from it. When the exchange fails, the queue pair is destroyed first.

use crate::error::VerbsError;
use crate::memory::MemoryRegion;
use crate::qp::{QpHandle, QueuePair};
use crate::sys;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

/// A memory region of the peer, as the peer announced it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Address at the peer.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The remote key.
    pub rkey: u32,
}

/// Whether an exchange completed, so that the peer writes no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoanSettled {
    /// The peer reported completion.
    Yes,
    /// The peer may still write: the queue pair is destroyed before the memory is returned.
    No,
}

/// Memory loaned to the peer; made by [`QueuePair::lend_memory`].
pub struct LoanedMemory<'a> {
    start: *mut u8,
    region: RemoteRegion,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl LoanedMemory<'_> {
    /// The region to announce to the peer.
    pub fn region(&self) -> RemoteRegion {
        self.region
    }

    /// The current byte at `at`, for detecting a peer's write without immediate data. 0 past the end.
    #[inline]
    pub fn read_byte(&self, at: usize) -> u8 {
        if at as u64 >= self.region.len {
            return 0;
        }
        // SAFETY: `at` lies inside the loaned memory, which is initialised and kept for this value's lifetime. The
        // NIC may write it concurrently; a byte is old or new, and a volatile read is not cached.
        unsafe { self.start.add(at).read_volatile() }
    }

    /// Copies arrived bytes from `from` on, up to the end of the memory. Bytes that the peer has not announced are
    /// unspecified.
    pub fn copy_to(&self, from: usize, to: &mut [u8]) {
        let left = (self.region.len as usize).saturating_sub(from);
        let n = to.len().min(left);
        // SAFETY: `from + n` lies inside the loaned memory, which is initialised and kept for this value's lifetime,
        // and `to` does not overlap as it is borrowed mutably. A peer that violates the protocol may write these
        // bytes concurrently; they are only copied as bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.add(from.min(self.region.len as usize)), to.as_mut_ptr(), n)
        };
    }
}

/// Destroys the queue pair when a loan ends unsettled.
struct LoanGuard(Arc<QpHandle>, LoanSettled);

impl Drop for LoanGuard {
    fn drop(&mut self) {
        if self.1 == LoanSettled::No {
            self.0.destroy();
        }
    }
}

impl QueuePair {
    /// Loans `dst` to the peer's writes (and reads, where `memory` allows them) while `exchange` runs. Unless it ends
    /// with [`LoanSettled::Yes`], the queue pair is destroyed before this returns, so that no late write reaches
    /// `dst`. A panic counts as not settled.
    ///
    /// The key covers the whole arena: a peer that violates the protocol can write elsewhere in it while the queue
    /// pair exists. Only nodes trusted with the data receive keys.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when `dst` is not in `memory`, or `memory` does not allow remote writes.
    pub fn lend_memory<R>(
        &mut self,
        memory: &MemoryRegion,
        dst: &mut [u8],
        exchange: impl FnOnce(&mut QueuePair, &LoanedMemory<'_>) -> (R, LoanSettled),
    ) -> Result<R, VerbsError> {
        let lendable =
            memory.allows_remote_write() && memory.contains(dst) && Arc::ptr_eq(memory.domain(), &self.domain);
        if !lendable {
            return Err(VerbsError::Misuse("this memory is not registered for a peer's writes".into()));
        }
        let start = dst.as_mut_ptr();
        let region =
            RemoteRegion { addr: start.expose_provenance() as u64, len: dst.len() as u64, rkey: memory.rkey() };
        let lent = LoanedMemory { start, region, borrowed: PhantomData };
        // The handle, not the queue pair: `exchange` could replace the queue pair.
        let mut guard = LoanGuard(Arc::clone(&self.handle), LoanSettled::No);
        let (result, settled) = exchange(self, &lent);
        guard.1 = settled;
        Ok(result)
    }

    /// Offers `src` to the peer's reads while `exchange` runs. Unless it ends with [`LoanSettled::Yes`], the queue pair is
    /// destroyed before this returns: the peer then gets none of the bytes that `src` holds later. A panic counts as
    /// not settled.
    ///
    /// The key covers the whole arena, as that of [`QueuePair::lend_memory`] does.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when `src` is not in `memory`, or `memory` does not allow remote reads.
    pub fn offer_memory<R>(
        &mut self,
        memory: &MemoryRegion,
        src: &[u8],
        exchange: impl FnOnce(&mut QueuePair, RemoteRegion) -> (R, LoanSettled),
    ) -> Result<R, VerbsError> {
        let open = memory.allows_remote_read() && memory.contains(src) && Arc::ptr_eq(memory.domain(), &self.domain);
        if !open {
            return Err(VerbsError::Misuse("this memory is not registered for a peer's reads".into()));
        }
        let addr = src.as_ptr().expose_provenance() as u64;
        let region = RemoteRegion { addr, len: src.len() as u64, rkey: memory.rkey() };
        let mut guard = LoanGuard(Arc::clone(&self.handle), LoanSettled::No);
        let (result, settled) = exchange(self, region);
        guard.1 = settled;
        Ok(result)
    }

    /// Reads the peer's `region` into the start of `dst`, by requests of at most `longest` bytes, and waits for all of
    /// them. The peer's program is not involved. On failure the queue pair is destroyed before this returns, so that
    /// nothing lands in returned memory.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when `dst` is not in `memory` or shorter than the region; when the connection failed or the
    /// peer withdrew the region, or not all bytes arrived by `deadline`.
    pub fn read_region(
        &mut self,
        memory: &MemoryRegion,
        dst: &mut [u8],
        region: RemoteRegion,
        longest: usize,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        let here = memory.contains(dst) && Arc::ptr_eq(memory.domain(), &self.domain);
        let len = usize::try_from(region.len).ok().filter(|len| here && *len <= dst.len());
        let Some(len) = len else {
            let why = format!("{} bytes can't be read into {} bytes of this memory", region.len, dst.len());
            return Err(VerbsError::Misuse(why));
        };
        let mut guard = LoanGuard(Arc::clone(&self.handle), LoanSettled::No);
        let longest = longest.clamp(1, 1 << 30);
        for at in (0..len).step_by(longest) {
            self.wait_room(deadline)?;
            let piece = &mut dst[at..len.min(at + longest)];
            let addr = piece.as_mut_ptr().expose_provenance() as u64;
            let mut sge = sys::IbvSge { addr, length: piece.len() as u32, lkey: memory.lkey() };
            let mut wr = sys::IbvSendWr::new(self.posted + 1, sys::WR_RDMA_READ, sys::SEND_SIGNALED);
            wr.remote_addr = region.addr.wrapping_add(at as u64);
            wr.rkey = region.rkey;
            wr.sg_list = &mut sge;
            wr.num_sge = 1;
            self.post_send(&mut wr, None)?;
        }
        self.wait_sent(self.posted, deadline)?;
        guard.1 = LoanSettled::Yes;
        Ok(())
    }

    /// Runs `f`, which writes borrowed memory to the peer, and waits until the peer's NIC has acknowledged all of it.
    /// On failure the queue pair is destroyed before this returns, so that nothing is sent from returned memory.
    ///
    /// # Errors
    /// Those of `f`; when the connection failed, or not all was acknowledged by `deadline`.
    pub fn write_borrowed<'m, R, E: From<VerbsError>>(
        &mut self,
        deadline: Instant,
        f: impl FnOnce(&mut BorrowedWrites<'_, 'm>) -> Result<R, E>,
    ) -> Result<R, E> {
        struct BorrowedWritesGuard(Arc<QpHandle>, bool);
        impl Drop for BorrowedWritesGuard {
            fn drop(&mut self) {
                if !self.1 {
                    self.0.destroy();
                }
            }
        }
        let mut guard = BorrowedWritesGuard(Arc::clone(&self.handle), false);
        let mut writing = BorrowedWrites { pair: self, deadline, memory: PhantomData };
        let result = f(&mut writing)?;
        let until = self.posted;
        self.wait_sent(until, deadline)?;
        guard.1 = true;
        Ok(result)
    }
}

/// Outstanding writes of borrowed memory; made by [`QueuePair::write_borrowed`].
pub struct BorrowedWrites<'q, 'm> {
    pair: &'q mut QueuePair,
    deadline: Instant,
    memory: PhantomData<&'m [u8]>,
}

impl<'m> BorrowedWrites<'_, 'm> {
    /// Writes `bytes` into `region` from `offset` on. With `immediate` the peer gets a completion, which consumes a receive.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when the bytes are not in `memory` or would not fit in the region; when the connection
    /// failed, or there was no room in time.
    pub fn post_write(
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
            return Err(VerbsError::Misuse("bytes to write must be in registered memory".into()));
        }
        let (Some(end), Ok(length)) = (offset.checked_add(len), u32::try_from(len)) else {
            return Err(VerbsError::Misuse(format!("{len} bytes at {offset}")));
        };
        if end > region.len {
            let why = format!("{len} bytes at {offset} do not fit in the peer's region of {}", region.len);
            return Err(VerbsError::Misuse(why));
        }
        pair.wait_room(self.deadline)?;
        let mut sge = sys::IbvSge { addr: bytes.as_ptr().expose_provenance() as u64, length, lkey: memory.lkey() };
        let opcode = if immediate.is_some() { sys::WR_RDMA_WRITE_WITH_IMM } else { sys::WR_RDMA_WRITE };
        let mut wr = sys::IbvSendWr::new(pair.posted + 1, opcode, sys::SEND_SIGNALED);
        wr.imm_data = immediate.unwrap_or(0).to_be();
        wr.remote_addr = region.addr.wrapping_add(offset);
        wr.rkey = region.rkey;
        // No element for zero bytes: some devices refuse a length of 0.
        if length > 0 {
            wr.sg_list = &mut sge;
            wr.num_sge = 1;
        }
        pair.post_send(&mut wr, None)
    }

    /// The queue pair, for receiving and sending meanwhile.
    pub fn pair(&mut self) -> &mut QueuePair {
        self.pair
    }
}
