//! Real programs on writable mounts, alone and through nodes, and the calls that checkpoint writers make.

use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, WAYS, draw, has, shell};
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Lone mounts of each way, and one through two nodes.
fn on_every_way(test: impl Fn(&Group, Mount)) {
    for way in WAYS {
        let Some(group) = Group::start(0) else { return };
        test(&group, group.mount("mnt", 0, way));
    }
    let Some(group) = Group::start(2) else { return };
    test(&group, group.mount("mnt", 0, &[]));
}

#[test]
fn git_and_make_work_in_a_writable_mount() {
    if !has("git") || !has("make") || !has("cc") {
        return;
    }
    on_every_way(|_, mount| {
        shell(
            &mount.at,
            "git init -q origin && cd origin && git config user.email a@b && git config user.name a
             printf 'int main(void) { return 7; }\\n' > main.c
             printf 'main: main.o\\n\\tcc -o main main.o\\nmain.o: main.c\\n\\tcc -c main.c\\n' > Makefile
             git add . && git commit -qm first && cd .. && git clone -q origin copy && cd copy
             make -s && { ./main || test $? = 7; } && test \"$(make -q && echo done)\" = done
             git gc -q && git fsck --strict && git status --porcelain | grep -q main.o
             git worktree add -q ../second && cd ../second && sed -i s/7/8/ main.c
             git -c user.email=a@b -c user.name=a commit -qam second
             cd ../copy && git merge -q second && grep -q 8 main.c && git worktree remove ../second && git gc -q --prune=now",
        );
        mount.unmount();
    });
}

#[test]
fn a_database_survives_the_kill_of_its_mount() {
    if !has("sqlite3") {
        return;
    }
    for (mode, nodes, way) in [
        ("wal", 0, WAYS[0]),
        ("delete", 0, WAYS[0]),
        ("delete", 0, WAYS[1]),
        ("truncate", 0, WAYS[2]),
        ("wal", 2, WAYS[0]),
        ("delete", 2, WAYS[0]),
    ] {
        let Some(group) = Group::start(nodes) else { return };
        let mut mount = group.mount("mnt", 0, way);
        let database = mount.path("db");
        shell(&mount.at, &format!("sqlite3 db 'PRAGMA journal_mode={mode}; CREATE TABLE t(n INTEGER, b BLOB);'"));
        let mut writer = Command::new("sh")
            .arg("-c")
            .arg("i=0; while :; do i=$((i+1)); echo \"INSERT INTO t VALUES($i, randomblob(3000));\"; done | sqlite3 \"$0\"")
            .arg(&database)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let in_source = group.source.join("db");
        // The nodes hold the locks of a killed mount for 25 s.
        let query = |what: &str| {
            Command::new("sqlite3").args(["-cmd", ".timeout 120000"]).arg(&in_source).arg(what).output().unwrap()
        };
        let rows = || {
            let out = query("SELECT count(*) FROM t");
            String::from_utf8_lossy(&out.stdout).trim().parse::<u64>().unwrap_or(0)
        };
        eventually("the database grows", || fs::metadata(&in_source).is_ok_and(|found| found.len() > 100_000));
        mount.process_mut().kill();
        let _ = rustix::process::kill_process_group(rustix::process::Pid::from_child(&writer), Signal::KILL);
        writer.wait().unwrap();
        detach(&mount.at);
        let out = query("PRAGMA integrity_check");
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "ok", "{mode}, {nodes} nodes: {out:?}");
        assert!(rows() > 0, "{mode}, {nodes} nodes");
    }
}

/// A tree as archives of programs have it: modes, times, links of both kinds, empty files and folders, long names. It has at
/// least 300 files.
fn make_tree(at: &Path, files: u64) {
    fs::create_dir(at).unwrap();
    let mut state = 0x5eed;
    for n in 0..files {
        let folder = match n {
            0..300 => at.join(format!("d{}/e{}", n % 7, n % 3)),
            _ => at.join(format!("s{}/t{}", n / 1000, n / 20)),
        };
        fs::create_dir_all(&folder).unwrap();
        let len = [0, 1, 37, 4096, 9000, 70_000][draw(&mut state, 6) as usize];
        fs::write(folder.join(format!("file {n} {}", "x".repeat(n as usize % 90))), bytes(n, len)).unwrap();
    }
    shell(
        at,
        "chmod 755 d1/e1/* && chmod 600 d2/e1/* && chmod 2775 d3 && mkdir empty && mkfifo pipe
         ln -s ../d1 d2/link && ln -s missing dangling && touch -d '2001-02-03 04:05:06.789' d4/e1/* d4
         for f in d5/e1/*; do ln \"$f\" \"$f.hard\"; done",
    );
}

/// What differs between two trees, as rsync sees it: contents, modes, times, owners, links.
fn differences(from: &Path, to: &Path) -> String {
    let mut command = Command::new("rsync");
    command.args(["-aHAXDnic", "--delete"]).arg(from.join("")).arg(to.join(""));
    let out = finish(&mut command);
    assert!(out.status.success(), "{out:?}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// The calls of torch.distributed.checkpoint: each rank writes one file in sequence and syncs it; then the metadata comes under
/// its name by a rename. Another mount loads it.
#[test]
fn a_checkpoint_of_torch_is_whole_in_another_mount() {
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    let shard = |step: u64, rank: u64| bytes(step * 10 + rank, 3 * MIB + 12_345 * rank as usize);
    for step in 0..3u64 {
        // The second save replaces the first one.
        let name = format!("step-{}", step / 2);
        fs::create_dir_all(one.path(&name)).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..4u64 {
                let (path, text) = (one.path(&name).join(format!("__{rank}_0.distcp")), shard(step, rank));
                scope.spawn(move || {
                    let mut file = File::create(path).unwrap();
                    let (mut at, mut state) = (0, rank + 1);
                    while at < text.len() {
                        let len = (1 + draw(&mut state, 300_000) as usize).min(text.len() - at);
                        file.write_all(&text[at..at + len]).unwrap();
                        at += len;
                    }
                    file.sync_all().unwrap();
                });
            }
        });
        let (temporary, metadata) = (one.path(&name).join(".metadata.tmp"), one.path(&name).join(".metadata"));
        let mut file = File::create(&temporary).unwrap();
        file.write_all(format!("step {step}").as_bytes()).unwrap();
        file.sync_all().unwrap();
        drop(file);
        if metadata.exists() {
            fs::remove_file(&metadata).unwrap();
        }
        fs::rename(&temporary, &metadata).unwrap();
        eventually("the other mount sees the checkpoint", || {
            fs::read_to_string(two.path(&name).join(".metadata")).is_ok_and(|text| text == format!("step {step}"))
        });
        for rank in 0..4u64 {
            let (file, want) =
                (File::open(two.path(&name).join(format!("__{rank}_0.distcp"))).unwrap(), shard(step, rank));
            assert_eq!(file.metadata().unwrap().len(), want.len() as u64, "step {step}, rank {rank}");
            let mut state = 99 + rank;
            for _ in 0..20 {
                let at = draw(&mut state, want.len() as u64) as usize;
                let len = (draw(&mut state, 500_000) as usize).min(want.len() - at);
                let mut got = vec![0; len];
                file.read_exact_at(&mut got, at as u64).unwrap();
                assert!(got == want[at..at + len], "step {step}, rank {rank}, {len} bytes at {at}");
            }
        }
    }
    one.unmount();
    two.unmount();
}

/// The calls of orbax: a folder under a temporary name, in it files that come under their names by a lock file and a
/// rename, then the rename of the folder.
#[test]
fn a_checkpoint_of_orbax_appears_at_once() {
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    let text = |step: u64, part: u64| bytes(step * 100 + part, 40_000 + 7000 * part as usize);
    for step in 0..3u64 {
        let (temporary, name) = (one.path(format!("{step}.orbax-checkpoint-tmp-17")), format!("{step}"));
        fs::create_dir_all(temporary.join("default/ocdbt.process_0/d")).unwrap();
        std::thread::scope(|scope| {
            for part in 0..6u64 {
                let (path, text) = (temporary.join(format!("default/ocdbt.process_0/d/{part}")), text(step, part));
                scope.spawn(move || {
                    let lock = path.with_extension("__lock");
                    let mut file = OpenOptions::new().write(true).create_new(true).open(&lock).unwrap();
                    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
                    file.write_all(&text).unwrap();
                    file.sync_all().unwrap();
                    fs::rename(&lock, &path).unwrap();
                    File::open(path.parent().unwrap()).unwrap().sync_all().unwrap();
                });
            }
        });
        fs::write(temporary.join("_CHECKPOINT_METADATA"), "{}").unwrap();
        assert!(!two.path(&name).exists());
        fs::rename(&temporary, one.path(&name)).unwrap();
        eventually("the other mount sees the checkpoint", || two.path(&name).exists());
        let folder = two.path(&name).join("default/ocdbt.process_0/d");
        let mut found: Vec<_> = fs::read_dir(&folder).unwrap().map(|found| found.unwrap().file_name()).collect();
        found.sort();
        assert_eq!(found, ["0", "1", "2", "3", "4", "5"]);
        for part in 0..6u64 {
            assert!(fs::read(folder.join(format!("{part}"))).unwrap() == text(step, part), "step {step}, part {part}");
        }
        assert_eq!(fs::read(two.path(&name).join("_CHECKPOINT_METADATA")).unwrap(), b"{}");
    }
    one.unmount();
    two.unmount();
}

/// A log of records beside its readers, in the same mount and in another: they see a prefix of it, never a zero or a
/// part of another record.
#[test]
fn readers_beside_an_appender_see_a_prefix() {
    let Some(group) = Group::start(2) else { return };
    let (one, two) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
    fs::write(one.path("events"), "").unwrap();
    let ended = AtomicBool::new(false);
    let record = |n: u64| format!("record {n} {}\n", "y".repeat(n as usize % 200));
    let whole: String = (0..1500).map(record).collect();
    std::thread::scope(|scope| {
        for mount in [&one, &two] {
            let (whole, ended) = (&whole, &ended);
            scope.spawn(move || {
                let mut longest = 0;
                loop {
                    let last = ended.load(Ordering::Acquire);
                    let seen = fs::read(mount.path("events")).unwrap();
                    assert!(whole.as_bytes().starts_with(&seen), "{} bytes are no prefix", seen.len());
                    assert!(seen.len() >= longest, "{} bytes after {longest}", seen.len());
                    longest = seen.len();
                    if last {
                        return assert_eq!(longest, whole.len());
                    }
                    std::thread::sleep(Duration::from_millis(3));
                }
            });
        }
        let mut log = OpenOptions::new().append(true).open(one.path("events")).unwrap();
        for n in 0..1500 {
            log.write_all(record(n).as_bytes()).unwrap();
            if n % 200 == 199 {
                log.sync_data().unwrap();
            }
        }
        drop(log);
        ended.store(true, Ordering::Release);
    });
    one.unmount();
    two.unmount();
}

/// Packages from the index, fetched beside the mount, so that only the mount's part is tested. `None` prints the reason.
fn wheels(group: &Group, packages: &[&str]) -> Option<String> {
    let to = group.world.dir("wheels");
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "download", "-q", "--only-binary", ":all:", "-d"]).arg(&to);
    let out = command.args(packages).stdin(Stdio::null()).output();
    match out {
        Ok(out) if out.status.success() => Some(to.to_str().unwrap().to_owned()),
        Ok(out) => {
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            skip("pypi", &format!("pip can't fetch packages: {}", said.lines().last().unwrap_or_default()));
            None
        }
        Err(error) => {
            skip("pypi", &format!("python3 can't be run: {error}"));
            None
        }
    }
}

/// Stores and reads with DuckDB, HDF5, Zarr and Arrow, which map files, append in place and write many small ones.
const DATA_LIBRARIES: &str = r#"
import duckdb, h5py, numpy, os, pyarrow, pyarrow.parquet, subprocess, sys, zarr

db = duckdb.connect("data.duckdb")
db.execute("CREATE TABLE t AS SELECT range AS n, hash(range) AS h FROM range(200000)")
db.execute("UPDATE t SET h = 0 WHERE n % 7 = 0")
db.execute("CHECKPOINT")
db.close()
db = duckdb.connect("data.duckdb")
assert db.execute("SELECT count(*), count(*) FILTER (h = 0) FROM t").fetchone() == (200000, 28572)
db.execute("COPY t TO 't.parquet' (FORMAT parquet)")
assert db.execute("SELECT sum(n) FROM 't.parquet'").fetchone()[0] == 19999900000
db.close()

with h5py.File("swmr.h5", "w", libver="latest") as file:
    rows = file.create_dataset("rows", (0,), maxshape=(None,), chunks=(1000,), dtype="i8")
    file.swmr_mode = True
    read = "import h5py; d = h5py.File('swmr.h5', 'r', swmr=True)['rows']; print(len(d), int(d[:].sum()))"
    for n in range(3):
        rows.resize((1000 * (n + 1),))
        rows[1000 * n:] = n
        rows.flush()
        seen = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout
        assert seen.split() == [str(1000 * (n + 1)), str(1000 * n * (n + 1) // 2)], seen

array = zarr.open("array.zarr", mode="w", shape=(300, 300), chunks=(50, 50), dtype="f8")
array[:] = numpy.arange(90000).reshape(300, 300)
array[100:200, 100:200] = -1
again = zarr.open("array.zarr", mode="r")[:]
assert (again[100:200, 100:200] == -1).all() and again[299, 299] == 89999

table = pyarrow.table({"n": numpy.arange(100000), "x": numpy.random.default_rng(1).standard_normal(100000)})
with pyarrow.OSFile("table.arrow", "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
    writer.write_table(table)
with pyarrow.memory_map("table.arrow") as source:
    assert pyarrow.ipc.open_file(source).read_all().equals(table)
with pyarrow.memory_map("table.arrow", "r+") as mapped:
    mapped.seek(mapped.size() - 6)
    assert mapped.read(6) == b"ARROW1"
pyarrow.parquet.write_table(table, "table.parquet", row_group_size=10000)
assert pyarrow.parquet.read_table("table.parquet", memory_map=True).equals(table)
"#;

/// The packages are large: `SPURLINE_TEST_DATA_LIBRARIES` set to anything requests them.
#[test]
fn data_libraries_store_on_a_mount() {
    if std::env::var_os("SPURLINE_TEST_DATA_LIBRARIES").is_none() {
        return skip("data-libraries", "DuckDB, HDF5, Zarr and Arrow are run with SPURLINE_TEST_DATA_LIBRARIES=1");
    }
    let Some(beside) = Group::start(0) else { return };
    let packages = ["duckdb", "h5py", "numpy", "pyarrow", "zarr"];
    let Some(wheels) = wheels(&beside, &packages) else { return };
    let folder = beside.world.path("");
    let list = packages.join(" ");
    shell(
        &folder,
        &format!("python3 -m venv venv && venv/bin/pip install -q --no-index --find-links '{wheels}' {list}"),
    );
    fs::write(folder.join("store.py"), DATA_LIBRARIES).unwrap();
    on_every_way(|_, mount| {
        shell(&mount.at, &format!("'{0}/venv/bin/python' '{0}/store.py'", folder.display()));
        mount.unmount();
    });
}

mod test_all {
    use super::*;

    #[test]
    fn archives_and_copies_arrive_whole() {
        if !has("rsync") || !has("tar") {
            return;
        }
        on_every_way(|group, mount| {
            let (tree, archive, back) =
                (group.world.path("tree"), group.world.path("tree.tar"), group.world.path("back"));
            make_tree(&tree, 300);
            let (tree_text, archive, back_text) = (tree.display(), archive.display(), back.display());
            shell(
                &mount.at,
                &format!(
                    "tar -C '{tree_text}' -cf '{archive}' . && mkdir untarred && cd untarred && tar -xpf '{archive}'"
                ),
            );
            shell(&mount.path("untarred"), &format!("tar -df '{archive}'"));
            assert_eq!(differences(&tree, &mount.path("untarred")), "");
            // There, back, and once more over files that exist.
            shell(&mount.at, &format!("rsync -aHAX '{tree_text}/' copied/ && rsync -aHAX copied/ '{back_text}/'"));
            assert_eq!(differences(&tree, &mount.path("copied")), "");
            assert_eq!(differences(&tree, &back), "");
            shell(&tree, "printf more >> 'd1/e1/file 1 x' && rm d2/link && mv d3 d3new");
            shell(&mount.at, &format!("rsync -aHAX --delete --inplace '{tree_text}/' copied/"));
            assert_eq!(differences(&tree, &mount.path("copied")), "");
            assert_eq!(differences(&tree, &group.source.join("copied")), "");
            shell(&tree, "printf appended >> 'd1/e1/file 1 x'");
            shell(&mount.at, &format!("rsync -aHAX --append-verify '{tree_text}/' copied/"));
            assert_eq!(differences(&tree, &mount.path("copied")), "");
            if has("cpio") {
                let list = format!("cd '{tree_text}' && find . -depth -print0");
                shell(
                    &mount.at,
                    &format!("mkdir passed && ({list} | cpio -0pdm --quiet '{}/passed')", mount.at.display()),
                );
                // cpio sets neither the times of links nor those of the folder that it copies into.
                let left = differences(&tree, &mount.path("passed"));
                let unset = |line: &str| line == ".d..t...... ./" || line.starts_with(".L..t...... ");
                assert!(left.lines().all(unset), "{left}");
            }
            shell(&mount.at, "cp -a copied again && rm -r copied untarred && mv again copied");
            assert_eq!(differences(&tree, &mount.path("copied")), "");
            mount.unmount();
        });
    }

    /// `SPURLINE_TEST_TREE_FILES` asks for another number of files.
    #[test]
    fn a_large_source_tree_is_unpacked_whole() {
        if !has("rsync") || !has("tar") {
            return;
        }
        let files = std::env::var("SPURLINE_TEST_TREE_FILES").ok().and_then(|files| files.parse().ok()).unwrap_or(4000);
        for (nodes, way) in [(0, WAYS[0]), (0, WAYS[1]), (2, WAYS[0])] {
            let Some(group) = Group::start(nodes) else { return };
            let mount = group.mount("mnt", 0, way);
            let (tree, archive) = (group.world.path("tree"), group.world.path("tree.tar"));
            make_tree(&tree, files);
            shell(&group.world.path(""), "tar -C tree -cf tree.tar .");
            let start = Instant::now();
            shell(&mount.at, &format!("tar -xpf '{}'", archive.display()));
            println!("{nodes} nodes {way:?}: {files} files unpacked in {:.1?}", start.elapsed());
            assert_eq!(differences(&tree, &group.source), "");
            shell(&mount.at, &format!("tar -df '{}'", archive.display()));
            mount.unmount();
        }
    }

    #[test]
    fn python_packages_and_tensors_live_on_a_mount() {
        let Some(group) = Group::start(2) else { return };
        let Some(wheels) = wheels(&group, &["uv", "numpy", "safetensors"]) else { return };
        let (mount, other) = (group.mount("one", 0, &[]), group.mount("two", 1, &[]));
        let lone = Group::start(0).map(|group| (group.mount("mnt", 0, WAYS[0]), group));
        // In this order: the mount ends before its source.
        let (lone, _lone_group) = lone.unwrap();
        for at in [&mount.at, &lone.at] {
            shell(
                at,
                &format!(
                    "python3 -m venv venv && venv/bin/pip install -q --no-index --find-links '{wheels}' uv
                     VIRTUAL_ENV=$PWD/venv venv/bin/uv pip install -q --cache-dir cache --no-index --find-links '{wheels}' numpy safetensors
                     venv/bin/python -c \"
import numpy
from safetensors.numpy import save_file, load_file
saved = {{str(n): numpy.random.default_rng(n).standard_normal((300, 100 + n)) for n in range(12)}}
for _ in range(2):
    save_file(saved, 'model.safetensors')
    loaded = load_file('model.safetensors')
    assert all(numpy.array_equal(saved[name], loaded[name]) for name in saved)
\""
                ),
            );
        }
        // What the one has installed and saved runs in the other.
        shell(
            &other.at,
            "venv/bin/python -c \"
import numpy
from safetensors.numpy import load_file
loaded = load_file('model.safetensors')
assert all(numpy.array_equal(tensor, numpy.random.default_rng(int(name)).standard_normal((300, 100 + int(name)))) for name, tensor in loaded.items())
assert len(loaded) == 12
\"",
        );
        lone.unmount();
        mount.unmount();
        other.unmount();
    }
}
