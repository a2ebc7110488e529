//! The C library's allocator under `limit_heaps`, in a process of its own.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::sync::Barrier;

const THREADS: usize = 32;
const BUFFER: usize = 1 << 20;

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// With glibc's defaults most of the buffers stay in the heaps of the threads.
#[test]
fn buffers_of_ended_threads_go_back_to_the_kernel() {
    spurline_mem::allocator::limit_heaps();
    // Freeing a mapping of this length raises the threshold for mappings above the buffers, unless that is fixed.
    drop(vec![1u8; 8 * BUFFER]);
    let before = resident_bytes();
    let all = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for n in 0..THREADS {
            let all = &all;
            scope.spawn(move || {
                let buffer = vec![n as u8 + 1; BUFFER];
                all.wait();
                drop(buffer);
            });
        }
    });
    let kept = resident_bytes().saturating_sub(before);
    assert!(kept < THREADS * BUFFER / 4, "{kept} bytes of {} stayed", THREADS * BUFFER);
}
