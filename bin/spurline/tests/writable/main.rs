//! Writable mounts end to end with the real binary: lone ones and those through nodes, what programs do on them, locks,
//! promises, and faults from outside.

mod cached_reads;
mod locks;
mod posix_suites;
mod writable_calls;
mod writable_faults;
mod writable_programs;
mod writable_promises;
mod writes;
mod writes_behind;
mod writes_nodes;
mod writes_places;
mod writes_unnamed;
