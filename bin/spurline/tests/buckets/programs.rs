//! Programs that were not written for buckets, over a written bucket, alone and through nodes: libraries of PyPI that store
//! checkpoints and tables, databases, git, rsync, tar; and the calls of programs that are too large to install here.

use crate::nodes::{BUCKET, NodesRig};
use crate::objects::BucketRig;
use crate::staged::StagedRig;
use spurline_rig::python_packages::installed_packages;
use spurline_rig::world::*;
use spurline_rig::writable_group::has;
use std::path::Path;
use std::process::Command;

const PACKAGES: [&str; 4] = ["numpy==2.4.6", "safetensors==0.8.0", "h5py==3.16.0", "duckdb==2.0.1"];

/// What libraries store and read again, and the calls of others: TensorBoard appends and flushes; torch.distributed.checkpoint
/// writes a file for each rank and the metadata last, by a rename; orbax locks each file, and renames the folder at the end.
const LIBRARIES: &str = r#"
import duckdb, fcntl, h5py, numpy, os, sqlite3
from safetensors.numpy import save_file, load_file

saved = {str(n): numpy.random.default_rng(n).standard_normal((300, 100 + n)) for n in range(12)}
for _ in range(2):
    save_file(saved, "model.safetensors")
    loaded = load_file("model.safetensors")
    assert all(numpy.array_equal(saved[name], loaded[name]) for name in saved)

db = duckdb.connect("data.duckdb")
db.execute("CREATE TABLE t AS SELECT range AS n, hash(range) AS h FROM range(20000)")
db.execute("UPDATE t SET h = 0 WHERE n % 7 = 0")
db.execute("CHECKPOINT")
db.close()
db = duckdb.connect("data.duckdb")
assert db.execute("SELECT count(*), count(*) FILTER (h = 0) FROM t").fetchone() == (20000, 2858)
db.execute("COPY t TO 't.parquet' (FORMAT parquet)")
assert db.execute("SELECT sum(n) FROM 't.parquet'").fetchone()[0] == 199990000
db.close()

with h5py.File("a.h5", "w") as file:
    file["x"] = numpy.arange(100000)
with h5py.File("a.h5", "r+") as file:
    file["x"][500:600] = 7
    file["y"] = numpy.ones(1000)
with h5py.File("a.h5", "r") as file:
    assert file["x"][550] == 7 and file["x"][99999] == 99999 and file["y"][:].sum() == 1000

with open("events", "ab") as log:
    for n in range(20):
        log.write(b"record %d\n" % n)
        log.flush()
with open("events", "ab") as log:
    log.write(b"more\n")
assert open("events", "rb").read() == b"".join(b"record %d\n" % n for n in range(20)) + b"more\n"

os.mkdir("step")
for step in range(2):
    for rank in range(3):
        with open(f"step/__{rank}_0.distcp", "wb") as file:
            file.write(bytes([step]) * 1000000 * (rank + 1))
            file.flush()
            os.fsync(file.fileno())
    with open("step/.metadata.tmp", "wb") as file:
        file.write(b"step %d" % step)
        os.fsync(file.fileno())
    if os.path.exists("step/.metadata"):
        os.unlink("step/.metadata")
    os.rename("step/.metadata.tmp", "step/.metadata")
folder = os.open("step", os.O_RDONLY)
os.fsync(folder)
os.close(folder)
assert open("step/.metadata").read() == "step 1" and open("step/__2_0.distcp", "rb").read() == b"\1" * 3000000

temporary = "7.orbax-checkpoint-tmp-17"
os.makedirs(temporary + "/default/ocdbt.process_0/d")
for part in range(4):
    path = f"{temporary}/default/ocdbt.process_0/d/{part}"
    file = os.open(path + ".__lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, b"x" * 40000)
    os.fsync(file)
    os.rename(path + ".__lock", path)
    os.close(file)
with open(temporary + "/_CHECKPOINT_METADATA", "w") as file:
    file.write("{}")
os.rename(temporary, "7")
assert sorted(os.listdir("7/default/ocdbt.process_0/d")) == ["0", "1", "2", "3"]
assert all(os.path.getsize(f"7/default/ocdbt.process_0/d/{part}") == 40000 for part in range(4))

for mode in ["delete", "truncate", "persist", "wal"]:
    for count in [3, 6]:
        db = sqlite3.connect(mode + ".db")
        db.execute("PRAGMA journal_mode=" + mode)
        db.execute("CREATE TABLE IF NOT EXISTS t(a)")
        for n in range(3):
            db.execute("INSERT INTO t VALUES(?)", (n,))
            db.commit()
        assert db.execute("SELECT count(*) FROM t").fetchone()[0] == count
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        db.close()
"#;

/// `$1` is a folder beside the mount.
const SHELL_PROGRAMS: &str = r#"
git init -q origin && cd origin && git config user.email a@b && git config user.name a
echo 1 > a && mkdir d && echo 2 > d/b && git add . && git commit -qm first && cd ..
git clone -q origin copy && cd copy && echo 3 >> a && git -c user.email=a@b -c user.name=a commit -qam second
git gc -q && git fsck --strict && test -z "$(git status --porcelain)" && cd ..

tree=$1/tree && mkdir -p "$tree/d" && echo hi > "$tree/d/f" && head -c 300000 /dev/urandom > "$tree/g" && chmod 600 "$tree/g"
ln -s d/f "$tree/l" && touch -d '2001-02-03 04:05:06.789' "$tree/g"
rsync -a "$tree/" synced/ && test -z "$(rsync -aic "$tree/" synced/)"
rsync -a synced/ "$1/back/" && test -z "$(rsync -aic "$tree/" "$1/back/")"
echo more >> "$tree/d/f" && rsync -a --inplace "$tree/" synced/ && test -z "$(rsync -aic "$tree/" synced/)"
echo more >> "$tree/d/f" && rsync -a --append-verify "$tree/" synced/ && test -z "$(rsync -aic "$tree/" synced/)"

tar -C "$tree" -cf "$1/tree.tar" . && mkdir untarred && cd untarred && tar -xpf "$1/tree.tar" && tar -df "$1/tree.tar"
tar -cf ../inside.tar . && tar -df ../inside.tar && cd ..

printf 'a\nb\n' > edited && sed -i s/a/c/ edited && test "$(head -1 edited)" = c
"#;

fn run_programs(python: &Path, mount: &Mount, world: &World) {
    let beside = world.dir("beside");
    let libraries = world.file("libraries.py", LIBRARIES.as_bytes());
    run(Command::new(python).arg(libraries), mount);
    run(Command::new("sh").args(["-ec", SHELL_PROGRAMS, "sh"]).arg(beside), mount);
}

fn run(command: &mut Command, mount: &Mount) {
    let out = finish(command.current_dir(&mount.at).env("HOME", &mount.at));
    assert!(out.status.success(), "{out:?}");
}

/// Another mount has the same files.
fn compare_trees(mount: Mount, other: Mount) {
    assert_same(&tree(&other.at), &tree(&mount.at));
    other.unmount();
    mount.unmount();
}

mod test_all {
    use super::*;

    #[test]
    fn programs_store_in_a_bucket() {
        if !can_mount() || !["git", "rsync", "tar"].iter().all(|program| has(program)) {
            return;
        }
        let Some(bin) = installed_packages("data-libraries", &PACKAGES) else { return };
        let python = bin.join("python");
        let Some(rig) = BucketRig::start() else { return };
        let mount = rig.mount("mnt", &["--object-attrs", "-o", "allow_other"]);
        run_programs(&python, &mount, &rig.world);
        compare_trees(mount, rig.mount("other", &["--object-attrs"]));
        assert_eq!(rig.server.open_uploads(), 0);
        let Some(rig) = NodesRig::start_with(2, &["--object-attrs"]) else { return };
        let mount = rig.mount("mnt", &["-o", "allow_other"]);
        run_programs(&python, &mount, &rig.world);
        compare_trees(mount, rig.mount("other", &[]));
        assert_eq!(rig.server.open_uploads(), 0);
        // The other mount sees all files before the uploads, and the bucket has no others after these.
        let Some(rig) = StagedRig::start() else { return };
        let mount = rig.mount("mnt", &["-o", "allow_other"]);
        run_programs(&python, &mount, &rig.world);
        compare_trees(mount, rig.mount("other", &[]));
        rig.await_uploads();
        let keys = rig.server.keys(BUCKET);
        assert!(!keys.iter().any(|key| key.contains(".conflict-")), "{keys:?}");
        assert_eq!(rig.server.open_uploads(), 0);
    }
}
