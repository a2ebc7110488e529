//! Public suites of POSIX on a writable mount. Each runs on the bare directory too: what passes there has to pass on the
//! mount.

use rustix::fs::FallocateFlags;
use spurline_rig::installed_tool::tool;
use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, draw};
use spurline_rig::{fsx, pjdfstest};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::process::Command;
use std::time::Instant;

/// Its outcome on a mount says nothing: the C library answers pathconf(_PC_LINK_MAX) itself, with 127 for every file system
/// it does not know.
const LEFT_OUT: &str = "link::link_count_max";

/// A mount: its nodes, and its flags.
type MountWay = (usize, &'static [&'static str]);

/// Runs pjdfstest on the bare directory once, and on each mount.
fn check_pjdfstest(ways: &[MountWay]) {
    let Some(program) = tool("pjdfstest").filter(|_| can_mount()) else { return };
    let world = World::new();
    let bare = world.dir("bare");
    for open in [&world.path(""), &bare] {
        fs::set_permissions(open, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let config = world.file("pjdfstest.toml", pjdfstest::configuration("0.02").as_bytes());
    let want = pjdfstest::run_in(&program, &config, &bare, &[], 100);
    for (nodes, words) in ways {
        let Some(group) = Group::start(*nodes) else { return };
        let mount = group.mount("mnt", 0, &[&["-o", "suid,dev"], *words].concat());
        let got = pjdfstest::run_in(&program, &config, &mount.at, &[], 100);
        let way = format!("{nodes} nodes {words:?}");
        let passed = pjdfstest::check_equal(&way, &want, &got, |name| name != LEFT_OUT);
        println!("{way}: {passed} of {} tests pass, as on the bare directory", got.len());
        mount.unmount();
    }
}

/// Random operations on one file of each mount, each read compared. `SPURLINE_TEST_FSX_OPS` asks for more of them.
fn check_fsx(ways: &[MountWay], operations: u32) {
    let Some(program) = tool("fsx").filter(|_| can_mount()) else { return };
    for (nodes, words) in ways {
        // In memory: most operations would otherwise wait for a disk's sync.
        let Some(group) = Group::start_in_memory(*nodes, "64m") else { return };
        let config = group.world.file("fsx.toml", fsx::OPERATIONS.as_bytes());
        let mount = group.mount("mnt", 0, words);
        let operations = fsx::more_operations().unwrap_or(operations).to_string();
        let mut command = Command::new(&program);
        command.args(["-N", &operations, "-S", "18", "-f"]).arg(&config).arg("-P").arg(group.world.dir("left"));
        let start = Instant::now();
        let out = command.arg(mount.path("file")).output().unwrap();
        assert!(out.status.success(), "{nodes} nodes {words:?}: {out:?}");
        println!("{nodes} nodes {words:?}: {operations} operations in {:.1?}", start.elapsed());
        mount.unmount();
    }
}

#[test]
fn pjdfstest_passes_where_it_passes_on_the_bare_directory() {
    check_pjdfstest(&[(0, &[]), (2, &[])]);
}

#[test]
fn fsx_finds_no_wrong_byte() {
    check_fsx(&[(0, &["--no-passthrough", "--fuse-io", "uring"]), (2, &["--fuse-io", "dev"])], 10_000);
}

/// Two mounts open, change and close the same files in turn, at times both at once: what one has closed or synced the
/// other opens. The model is the bytes of each file.
#[test]
fn two_mounts_in_turn_find_no_wrong_byte() {
    let Some(group) = Group::start_in_memory(2, "64m") else { return };
    let mounts = [group.mount("one", 0, &[]), group.mount("two", 1, &[])];
    let seed = std::env::var("SPURLINE_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(18);
    println!("SPURLINE_TEST_SEED={seed}");
    let mut state: u64 = seed;
    let mut models = vec![Vec::new(); 3];
    for turn in 0..fsx::more_operations().map_or(600, |ops| ops / 5) {
        let (which, number) = (draw(&mut state, 2) as usize, draw(&mut state, 3) as usize);
        let (path, model) = (mounts[which].path(format!("f{number}")), &mut models[number]);
        let told = format!("turn {turn}, mount {which}, file {number}");
        let flags = draw(&mut state, 8);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(flags == 0);
        if flags == 0 {
            model.clear();
        }
        let file = options.open(&path).unwrap_or_else(|error| panic!("{told}: {error}"));
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64, "{told}: length");
        for _ in 0..=draw(&mut state, 6) {
            step(&file, model, &mut state, &told);
        }
        if draw(&mut state, 4) == 0 {
            // Synced and still open here; the other one opens it.
            file.sync_data().unwrap();
            let seen = fs::read(mounts[1 - which].path(format!("f{number}"))).unwrap();
            assert!(seen == *model, "{told}: {} bytes synced, {} read", model.len(), seen.len());
        }
    }
    for (number, model) in models.iter().enumerate() {
        assert!(fs::read(group.source.join(format!("f{number}"))).unwrap_or_default() == *model, "file {number}");
    }
    mounts.into_iter().for_each(Mount::unmount);
}

/// One operation on a file and its model.
fn step(file: &File, model: &mut Vec<u8>, state: &mut u64, told: &str) {
    const LONGEST: u64 = 1 << 20;
    let offset = draw(state, LONGEST);
    let len = 1 + draw(state, 96 << 10).min(LONGEST - offset);
    let (start, end) = (offset as usize, (offset + len) as usize);
    let kind = draw(state, 10);
    match kind {
        0..3 => {
            let text = bytes(*state, len as usize);
            file.write_all_at(&text, offset).unwrap();
            model.resize(model.len().max(end), 0);
            model[start..end].copy_from_slice(&text);
        }
        3 => {
            file.set_len(offset).unwrap();
            model.resize(start, 0);
        }
        4 => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, mode, offset, len).unwrap();
            let (start, end) = (start.min(model.len()), end.min(model.len()));
            model[start..end].fill(0);
        }
        5 if !model.is_empty() => {
            let (mut from, mut to) = (draw(state, model.len() as u64), offset);
            let first = from as usize;
            let most = (len as usize).min(model.len() - first);
            // Ranges of one file that overlap are refused.
            if first + most <= start || start + most <= first {
                let done = rustix::fs::copy_file_range(file, Some(&mut from), file, Some(&mut to), most).unwrap();
                model.resize(model.len().max(start + done), 0);
                model.copy_within(first..first + done, start);
            }
        }
        _ => {
            let mut seen = vec![0; len as usize];
            let mut done = 0;
            while done < seen.len() {
                match file.read_at(&mut seen[done..], offset + done as u64).unwrap() {
                    0 => break,
                    n => done += n,
                }
            }
            let (start, end) = (start.min(model.len()), end.min(model.len()));
            assert!(seen[..done] == model[start..end], "{told}: {len} bytes at {offset} of {}", model.len());
        }
    }
}

/// Run by `make test-all` only: with the source's file in the kernel and without, over both transports of the kernel.
mod test_all {
    use super::*;

    #[test]
    fn pjdfstest_passes_without_passthrough_too() {
        check_pjdfstest(&[(0, &["--no-passthrough", "--fuse-io", "dev"])]);
    }

    #[test]
    fn fsx_finds_no_wrong_byte_in_every_way() {
        let ways: [MountWay; 5] = [
            (0, &[]),
            (0, &["--no-passthrough", "--fuse-io", "uring"]),
            (0, &["--no-passthrough", "--fuse-io", "dev"]),
            (2, &["--fuse-io", "uring"]),
            (2, &["--fuse-io", "dev"]),
        ];
        check_fsx(&ways, 40_000);
    }
}
