//! Settings of the C library's allocator, which serves everything outside the arena. Knows nothing of the allocations.

/// Maximum number of heaps. glibc creates up to eight per processor, and each keeps free memory. With 64 readers over 20,000
/// files on two processors eight heaps held 49 MiB, two heaps 34 MiB, and the difference grows with the threads. The data path
/// allocates nothing, so threads seldom compete for a heap.
const MAX_HEAPS: i32 = 2;
/// Each allocation from this length on is a mapping, and goes back to the kernel when freed. By default glibc raises this
/// threshold after the first such free, and the buffers of later threads (256 KiB each) stay in the heaps.
const MAPPED_FROM_BYTES: i32 = 128 << 10;
/// Free memory at the end of a heap that is kept.
const KEPT_FREE_BYTES: i32 = 1 << 20;

/// Limits the memory that the allocator keeps beyond what is in use. To be called before the first thread starts. Environment
/// variables of glibc (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`) take precedence; other C libraries are not changed.
pub fn limit_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        if is_set_by_user("MALLOC_ARENA_MAX") || is_set_by_user("GLIBC_TUNABLES") {
            return;
        }
        // SAFETY: each call only changes a parameter of the allocator, under a lock.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, MAX_HEAPS);
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_FREE_BYTES);
        }
    }
}

fn is_set_by_user(variable: &str) -> bool {
    std::env::var_os(variable).is_some()
}
