//! Shared by the tests of running services: the binary without the caller's variables, mounts, deadlines.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longer than anything here takes on the busiest machine.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The program `spurline` that was built with this test; `SPURLINE_TEST_PROGRAM` names another one.
pub fn program_path() -> PathBuf {
    if let Some(named) = std::env::var_os("SPURLINE_TEST_PROGRAM") {
        return named.into();
    }
    let test = std::env::current_exe().expect("a test knows its path");
    // Test programs are in the folder `deps` beside it.
    test.parent().and_then(Path::parent).expect("a test lies in two folders").join("spurline")
}

/// The program with no variable of the caller's that could steer it.
pub fn spurline() -> Command {
    let mut command = Command::new(program_path());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SPURLINE_") {
            command.env_remove(name);
        }
    }
    command.env_remove("RUST_LOG");
    command
}

/// Whether file systems can be mounted here; prints SKIP if not, or fails where FUSE is required.
pub fn fuse() -> bool {
    let reason = if !Path::new("/dev/fuse").exists() {
        "there is no /dev/fuse"
    } else if std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        "/dev/fuse can't be opened"
    } else {
        return true;
    };
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one == "fuse"), "SPURLINE_TEST_REQUIRE lists fuse: {reason}");
    println!("SKIP: {reason}");
    false
}

/// Resident memory of a process and the anonymous part of it, as the kernel shows them.
pub fn memory_of(pid: u32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let lines = status.lines().filter(|line| line.starts_with("VmRSS") || line.starts_with("RssAnon"));
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>().join(", ")
}

/// The value below which `share` of the values lie.
pub fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

/// A directory with the path that mount tables show.
pub fn tempdir() -> tempfile::TempDir {
    tempfile::tempdir_in(std::env::temp_dir().canonicalize().unwrap()).unwrap()
}

/// Whether anything is mounted at or below `dir`.
pub fn mounted_below(dir: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4).is_some_and(|at| Path::new(at).starts_with(dir)))
}

/// Waits until `done`.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "{what} did not come within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
