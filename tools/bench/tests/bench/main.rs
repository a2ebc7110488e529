//! `spurline-bench` as users run it: the reports, workers over stand-ins for ssh, interrupted runs, and what goes wrong.

mod checkpoint;
mod fleet;
mod guest;
mod load;
mod program;
mod train;

use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// For runs that need no mount.
const NO_SPURLINE: [&str; 2] = ["--spurline", "/bin/false"];

fn bench_command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spurline-bench"));
    command.args(words);
    command
}

fn bench(words: &[&str]) -> Output {
    bench_command(words).output().unwrap()
}

/// Standard output and standard error.
fn said(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// A run that succeeds.
fn passed(out: &Output) -> String {
    assert!(out.status.success(), "{}", said(out));
    said(out)
}

/// A run that ends with this code and says this.
fn refused(words: &[&str], code: i32, says: &str) {
    let out = bench(words);
    assert!(out.status.code() == Some(code) && said(&out).contains(says), "{words:?}: {}", said(&out));
}

fn path_in(dir: &TempDir, name: &str) -> String {
    dir.path().join(name).display().to_string()
}

fn names(dir: &Path) -> Vec<String> {
    std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn report(path: impl AsRef<Path>) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A page with charts, which needs no network.
fn check_page(path: impl AsRef<Path>) {
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.contains("<svg") && !page.contains("http://") && !page.contains("https://"));
}

fn write_script(path: impl AsRef<Path>, text: &str) {
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Says why a test can't run; fails the test instead where `thing` is required.
fn skip(thing: &str, why: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == thing), "{why}");
    println!("SKIP: {why}");
}

/// The program that mounts, which is built with all tests; none on a machine without FUSE or network namespaces.
fn spurline_or_skip() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_spurline-bench")).with_file_name("spurline");
    let lacks = [
        ("fuse", !program.is_file(), "spurline is not built"),
        ("fuse", !Path::new("/dev/fuse").exists(), "there is no /dev/fuse"),
        ("netns", !rustix::process::geteuid().is_root(), "network namespaces need root"),
    ];
    let Some((thing, _, why)) = lacks.into_iter().find(|(_, lacks, _)| *lacks) else { return Some(program) };
    skip(thing, why);
    None
}

/// Whether fio is there, or a message that the test is skipped.
fn has_fio() -> bool {
    let found = Command::new("fio").arg("--version").output().is_ok();
    if !found {
        skip("fio", "fio is not installed");
    }
    found
}
