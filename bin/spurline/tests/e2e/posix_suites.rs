//! Public suites of POSIX on a writable mount. Each runs on the bare directory too: what passes there has to pass on the
//! mount.

use crate::common::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tool that scripts/setup installs; prints the reason if it is not there.
fn tool(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::iter::once(own).chain(std::env::split_paths(&path).map(|dir| dir.join(name)));
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        skip(name, &format!("{name} is not installed (scripts/setup test does it)"));
    }
    found
}

const PJDFSTEST: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
allow_remount = false
[dummy_auth]
entries = [["daemon", "daemon"], ["bin", "bin"]]
"#;

/// Tests whose outcome on a mount says nothing, and the reason.
const LEFT_OUT: [(&str, &str); 1] = [(
    "link::link_count_max",
    "the C library answers pathconf(_PC_LINK_MAX) itself, with 127 for every file system it does not know",
)];

/// The outcome of each test in `at`.
fn pjdfstest(program: &Path, config: &Path, at: &Path) -> BTreeMap<String, String> {
    let out = Command::new(program).arg("-c").arg(config).arg("-p").arg(at).env("NO_COLOR", "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let outcome = |line: &str| {
        let (name, outcome) = line.split_once(char::is_whitespace)?;
        name.contains("::").then(|| (name.to_owned(), outcome.trim().to_owned()))
    };
    let outcomes: BTreeMap<_, _> = text.lines().filter_map(outcome).collect();
    assert!(outcomes.len() > 100, "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    outcomes
}

#[test]
fn pjdfstest_passes_where_it_passes_on_the_bare_directory() {
    let Some(program) = tool("pjdfstest").filter(|_| can_mount()) else { return };
    for way in [&[][..], &["--no-passthrough", "--fuse-io", "dev"]] {
        let world = World::new();
        let (source, bare) = (world.dir("source"), world.dir("bare"));
        for path in [&world.path(""), &source, &bare] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let config = world.file("pjdfstest.toml", PJDFSTEST.as_bytes());
        let words = [&["--rw", "-o", "allow_other,suid,dev"], way].concat();
        let mount = world.mount(source.to_str().unwrap(), &words);
        let want = pjdfstest(&program, &config, &bare);
        let got = pjdfstest(&program, &config, &mount.at);
        let counts = |name: &str| LEFT_OUT.iter().all(|(left_out, _)| *left_out != name);
        let worse: Vec<_> =
            want.iter().filter(|(name, outcome)| counts(name) && got.get(*name) != Some(outcome)).collect();
        let passed = got.values().filter(|outcome| *outcome == "ok").count();
        println!("{way:?}: {passed} of {} tests pass, as on the bare directory", got.len());
        assert!(worse.is_empty(), "on the bare directory: {worse:?}; on the mount: {got:?}");
        mount.unmount();
    }
}

const FSX: &str = "
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

/// Random operations on one file, each read compared. `SPURLINE_FSX_OPS` asks for more of them.
#[test]
fn fsx_finds_no_wrong_byte() {
    let Some(program) = tool("fsx").filter(|_| can_mount()) else { return };
    let more: Option<u32> = std::env::var("SPURLINE_FSX_OPS").ok().and_then(|ops| ops.parse().ok());
    let ways: [(&[&str], u32); 3] =
        [(&[], 10_000), (&["--no-passthrough"], 100_000), (&["--no-passthrough", "--fuse-io", "dev"], 2_000)];
    for (way, ops) in ways {
        let world = World::new();
        let config = world.file("fsx.toml", FSX.as_bytes());
        let mount = world.mount(world.dir("source").to_str().unwrap(), &[&["--rw"], way].concat());
        let ops = more.unwrap_or(ops).to_string();
        let mut command = Command::new(&program);
        command.args(["-N", &ops, "-S", "18", "-f"]).arg(&config).arg("-P").arg(world.dir("left"));
        let out = command.arg(mount.path("file")).output().unwrap();
        assert!(out.status.success(), "{way:?}: {out:?}");
        mount.unmount();
    }
}
