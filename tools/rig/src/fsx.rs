//! The operations of fsx on writable mounts, alone and through nodes. It knows neither.

/// The configuration: lengths, and how often each operation comes.
pub const OPERATIONS: &str = "
flen = 1048576
[opsize]
max = 131072
[weights]
close_open = 1
read = 5
write = 5
mapread = 3
mapwrite = 3
truncate = 2
invalidate = 1
fsync = 0.5
fdatasync = 0.5
posix_fallocate = 1
punch_hole = 2
sendfile = 1
posix_fadvise = 1
copy_file_range = 2
";

/// How many operations `SPURLINE_TEST_FSX_OPS` asks for, in place of a test's own number.
pub fn more_operations() -> Option<u32> {
    std::env::var("SPURLINE_TEST_FSX_OPS").ok()?.parse().ok()
}
