//! Registered memory: the pool's arena registered with a device, and slots cut from buffers. Knows no queue.

use crate::device::DeviceContext;
use crate::error::VerbsError;
use crate::sys;
use spurline_mem::{BufferPool, PoolBuf};
use spurline_types::Size;
use std::ptr::NonNull;
use std::sync::Arc;

/// What a peer may do with registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryAccess {
    /// Nothing: only this host's requests use the memory. Nodes register memory this way.
    Local,
    /// A peer with the key may write. Readers register memory this way.
    PeerWrites,
    /// A peer with the key may read and write. Mounts that write register memory this way, and measurements.
    PeerReadsAndWrites,
}

/// Groups the queue pairs and memory regions that may be used with each other.
pub struct ProtectionDomain {
    context: Arc<DeviceContext>,
    raw: *mut sys::IbvPd,
}

// SAFETY: libibverbs allows calls with a protection domain from any thread.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A new domain on `context`.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the device has no more.
    pub fn new(context: &Arc<DeviceContext>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open, and this value keeps the context open.
        let raw = unsafe { (context.verbs().ib.ibv_alloc_pd)(context.raw()) };
        if raw.is_null() {
            return Err(VerbsError::last_os("ibv_alloc_pd", context.name()));
        }
        Ok(Arc::new(ProtectionDomain { context: Arc::clone(context), raw }))
    }

    /// The device.
    pub fn context(&self) -> &Arc<DeviceContext> {
        &self.context
    }

    pub(crate) fn raw(&self) -> *mut sys::IbvPd {
        self.raw
    }

    /// Registers the whole arena of `pool`, which pins the arena in memory. Once per pool and device; takes about 0.1 s per GiB
    /// without huge pages.
    ///
    /// # Errors
    /// [`VerbsError::Call`] with the number of bytes, when the limit of locked memory is lower or the device refuses.
    pub fn register_pool(
        self: &Arc<Self>,
        pool: &Arc<BufferPool>,
        access: MemoryAccess,
    ) -> Result<Arc<MemoryRegion>, VerbsError> {
        let (start, len) = pool.arena();
        let flags = match access {
            // Over iWARP the answer to a read is a write by the peer's NIC, with a key that the peer's program never gets.
            MemoryAccess::Local if !self.context.supports_immediate() => {
                sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE
            }
            MemoryAccess::Local => sys::ACCESS_LOCAL_WRITE,
            MemoryAccess::PeerWrites => sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE,
            MemoryAccess::PeerReadsAndWrites => {
                sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE | sys::ACCESS_REMOTE_READ
            }
        };
        let verbs = self.context.verbs();
        // SAFETY: the arena is mapped from `start` for `len` bytes, and the region made here keeps the pool.
        let raw = unsafe { (verbs.ib.ibv_reg_mr)(self.raw, start.cast_mut().cast(), len, flags) };
        let Some(raw) = NonNull::new(raw) else {
            let subject = format!("{} of {} bytes ({})", self.context.name(), len, Size(len as u64));
            return Err(VerbsError::last_os("ibv_reg_mr", subject));
        };
        // SAFETY: just made, and valid until deregistered.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Ok(Arc::new(MemoryRegion { pd: Arc::clone(self), pool: Arc::clone(pool), raw, lkey, rkey, access }))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything created there holds the `Arc` of this value, so the domain is empty now.
        unsafe { (self.context.verbs().ib.ibv_dealloc_pd)(self.raw) };
    }
}

/// A pool's arena, registered with a device.
pub struct MemoryRegion {
    pd: Arc<ProtectionDomain>,
    pool: Arc<BufferPool>,
    raw: NonNull<sys::IbvMr>,
    lkey: u32,
    rkey: u32,
    access: MemoryAccess,
}

// SAFETY: libibverbs allows calls with a region from any thread; the fields do not change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// The pool whose arena this is.
    pub fn pool(&self) -> &Arc<BufferPool> {
        &self.pool
    }

    /// The protection domain.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.pd
    }

    /// Whether all of `bytes` is registered here.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        let (start, len) = self.pool.arena();
        let start = start.addr();
        let at = bytes.as_ptr().addr();
        at >= start && at + bytes.len() <= start + len
    }

    /// Whether keys may be given to a peer.
    pub fn allows_remote_write(&self) -> bool {
        self.access != MemoryAccess::Local
    }

    /// Whether a peer with a key may read.
    pub fn allows_remote_read(&self) -> bool {
        self.access == MemoryAccess::PeerReadsAndWrites
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Cuts `buf` into slots of `len` bytes; the remainder at the end stays unused.
    ///
    /// # Errors
    /// [`VerbsError::Misuse`] when the buffer is not of this pool or `len` is 0 or above 2 GiB.
    pub fn split_slots(self: &Arc<Self>, buf: PoolBuf, len: usize) -> Result<Vec<MemorySlot>, VerbsError> {
        let slot_len = u32::try_from(len).ok().filter(|len| (1..1 << 31).contains(len));
        let Some(slot_len) = slot_len.filter(|_| self.contains(&buf)) else {
            return Err(VerbsError::Misuse("slots must be cut from a buffer of the registered pool".into()));
        };
        let count = buf.len() / len;
        let start = buf.as_ptr();
        let owner = Arc::new(SlotOwner { _buf: buf, region: Arc::clone(self) });
        Ok((0..count)
            .map(|i| {
                // SAFETY: `i * len` lies inside the buffer, which `owner` keeps.
                let at = unsafe { NonNull::new_unchecked(start.add(i * len)) };
                MemorySlot { at, len: slot_len, owner: Arc::clone(&owner) }
            })
            .collect())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: slots hold the `Arc` of this value; loaned memory was returned, or the queue pair destroyed.
        unsafe { (self.pd.context().verbs().ib.ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}

struct SlotOwner {
    _buf: PoolBuf,
    region: Arc<MemoryRegion>,
}

/// A piece of registered memory with a single owner: posted by value, returned with the completion.
pub struct MemorySlot {
    at: NonNull<u8>,
    len: u32,
    owner: Arc<SlotOwner>,
}

// SAFETY: a slot owns the bytes exclusively; the shared owner only keeps the buffer alive.
unsafe impl Send for MemorySlot {}
// SAFETY: shared access gives `&[u8]` only.
unsafe impl Sync for MemorySlot {}

impl MemorySlot {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer is initialised and kept by `owner`, this part belongs to this slot, and no device writes while the
        // slot is here: posting moves the slot away.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len()) }
    }

    /// The bytes, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes every other user.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len()) }
    }

    pub(crate) fn sge(&self, len: u32) -> sys::IbvSge {
        sys::IbvSge {
            addr: self.at.as_ptr().expose_provenance() as u64,
            length: len.min(self.len),
            lkey: self.owner.region.lkey(),
        }
    }

    pub(crate) fn domain(&self) -> &Arc<ProtectionDomain> {
        self.owner.region.domain()
    }
}
