//! Staged files as users see these: in two mounts at once, in `status --unsaved`, by an attribute, while the store is away and after; and
//! the ends of an upload by a command.

use crate::nodes::BUCKET;
use serde_json::Value;
use spurline_rig::staging_group::StagingGroup;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, S3Server};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::Output;

/// Two nodes that keep staged files, and a store behind a proxy.
pub struct StagedRig {
    pub server: S3Server,
    proxy: ChaosProxy,
    pub world: World,
    pub group: StagingGroup,
}

impl StagedRig {
    pub fn start() -> Option<StagedRig> {
        if !can_mount() {
            return None;
        }
        let world = World::new();
        let server = S3Server::in_memory().unwrap();
        server.create_bucket(BUCKET);
        let proxy = ChaosProxy::start(server.address()).unwrap();
        let group = StagingGroup::start(&world, 2, &format!("s3://{BUCKET}/p"), &proxy.endpoint());
        Some(StagedRig { server, proxy, world, group })
    }

    pub fn mount(&self, name: &str, flags: &[&str]) -> Mount {
        self.group.mount(&self.world, name, flags)
    }

    /// Waits until the store has everything.
    pub fn await_uploads(&self) {
        eventually("nothing to be left", || self.unsaved()["count"] == 0);
    }

    fn ask(&self, words: &[&str]) -> Output {
        self.world.run(&[words, &["--registry", &self.group.registry]].concat())
    }

    fn unsaved(&self) -> Value {
        let out = self.ask(&["status", "--unsaved", "--json"]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }
}

fn is_marked(path: &Path) -> bool {
    let mut value = [0; 8];
    match rustix::fs::getxattr(path, c"user.spurline.staged", &mut value) {
        Ok(len) => {
            assert_eq!(&value[..len], b"1");
            true
        }
        Err(error) => {
            assert_eq!(error, rustix::io::Errno::NODATA);
            false
        }
    }
}

fn said(out: &Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn staged_files_are_shown_until_the_store_has_them() {
    let Some(rig) = StagedRig::start() else { return };
    let one = rig.mount("one", &["--fuse-io", "uring"]);
    let two = rig.mount("two", &["--fuse-io", "dev", "--attr-cache", "0s", "--entry-cache", "0s"]);
    let first = &one.at;
    assert_eq!(said(&rig.ask(&["status", "--unsaved"])), "every file is at the store\n");
    // Visible at once in the other mount, and marked until the upload.
    let content = bytes(1, 300_000);
    fs::write(first.join("file"), &content).unwrap();
    assert!(fs::read(two.path("file")).unwrap() == content);
    eventually("the upload", || rig.server.bytes(BUCKET, "p/file").as_deref() == Some(&content));
    eventually("the mark to go", || !is_marked(&first.join("file")) && !is_marked(&two.path("file")));
    // The copies of all files of a folder have one mark.
    fs::create_dir(first.join("old")).unwrap();
    (0..20).for_each(|number| fs::write(first.join(format!("old/{number}")), format!("{number}")).unwrap());
    fs::rename(first.join("old"), first.join("new")).unwrap();
    for number in 0..20 {
        assert_eq!(fs::read_to_string(two.path(format!("new/{number}"))).unwrap(), format!("{number}"));
    }
    fs::remove_dir_all(first.join("new")).unwrap();
    eventually("the bucket to forget the folder", || !rig.server.keys(BUCKET).iter().any(|key| key.contains("/new/")));
    // Without the store, files that are open can be closed.
    let mut kept = File::create(first.join("kept")).unwrap();
    let mut lost = File::create(first.join("lost")).unwrap();
    rig.proxy.refuse_connections(true);
    kept.write_all(&content).unwrap();
    lost.write_all(b"bytes that are dropped.").unwrap();
    kept.sync_all().unwrap();
    lost.sync_all().unwrap();
    drop((kept, lost));
    assert!(is_marked(&first.join("kept")) && is_marked(&two.path("kept")));
    assert!(fs::read(two.path("kept")).unwrap() == content);
    check_list(&rig);
    check_commands(&rig, first, &content);
    rig.proxy.refuse_connections(false);
    eventually("the other upload", || rig.server.bytes(BUCKET, "p/kept").as_deref() == Some(&content));
    rig.await_uploads();
    eventually("the other mark to go", || !is_marked(&first.join("kept")));
    two.unmount();
    one.unmount();
}

#[test]
fn long_files_removals_and_scratch_need_no_store() {
    let Some(rig) = StagedRig::start() else { return };
    let one = rig.mount("one", &["--buffer-size", "128M"]);
    let two = rig.mount("two", &["--attr-cache", "0s", "--entry-cache", "0s"]);
    let scratch = format!("s3://{BUCKET}/p/scratch");
    said(&rig.ask(&["limit", &scratch, "--scratch", "--ttl", "2s"]));
    fs::write(one.path("uploaded"), "uploaded").unwrap();
    // The rule is known when a file of the folder is not uploaded.
    fs::create_dir(one.path("scratch")).unwrap();
    rig.await_uploads();
    eventually("the rule", || {
        fs::write(one.path("scratch/first"), b"x").unwrap();
        rig.await_uploads();
        let is_known = rig.server.bytes(BUCKET, "p/scratch/first").is_none();
        fs::remove_file(one.path("scratch/first")).unwrap();
        is_known
    });
    let mut long = File::create(one.path("long")).unwrap();
    let mut uploaded = File::options().append(true).open(one.path("uploaded")).unwrap();
    rig.proxy.refuse_connections(true);
    // More than the mount's memory for changed bytes.
    let content = bytes(7, 80 * MIB);
    long.write_all(&content).unwrap();
    drop(long);
    assert!(two.read("long") == content);
    uploaded.write_all(b" and changed").unwrap();
    drop(uploaded);
    assert_eq!(two.read("uploaded"), b"uploaded and changed");
    // Both names wait for their uploads.
    fs::rename(one.path("long"), one.path("uploaded")).unwrap();
    assert!(two.read("uploaded") == content);
    fs::write(one.path("scratch/cached"), &content[..MIB]).unwrap();
    fs::rename(one.path("scratch/cached"), one.path("scratch/block")).unwrap();
    assert!(two.read("scratch/block") == content[..MIB]);
    assert!(!two.path("scratch/absent").exists());
    let listed = rig.unsaved();
    assert_eq!((&listed["count"], &listed["bytes"]), (&1.into(), &(80 * MIB).into()), "{listed}");
    assert_eq!(listed["scratch_count"], 2, "{listed}");
    rig.proxy.refuse_connections(false);
    rig.await_uploads();
    eventually("the old name to go", || !two.path("long").exists());
    assert!(rig.server.bytes(BUCKET, "p/uploaded").as_deref() == Some(&content));
    eventually("the end of scratch data", || !two.path("scratch/block").exists());
    assert!(two.path("scratch").is_dir(), "the folder stays");
    let hidden = |key: &String| key.contains(".spurline-part-") || key.contains("scratch/") && !key.ends_with('/');
    assert!(!rig.server.keys(BUCKET).iter().any(hidden), "{:?}", rig.server.keys(BUCKET));
    two.unmount();
    one.unmount();
}

/// The lists while the store is away.
fn check_list(rig: &StagedRig) {
    let unsaved = rig.unsaved();
    assert_eq!((&unsaved["count"], &unsaved["bytes"]), (&2.into(), &300_023.into()), "{unsaved}");
    let kept = unsaved["unsaved"].as_array().unwrap().iter().find(|file| file["path"] == "p/kept").unwrap();
    assert_eq!((&kept["source"], &kept["bytes"]), (&format!("s3://{BUCKET}").into(), &300_000.into()), "{kept}");
    assert_eq!((&kept["scratch"], &kept["removal"]), (&false.into(), &false.into()), "{kept}");
    assert_eq!(kept["nodes"], serde_json::json!(["node-0", "node-1"]), "{kept}");
    assert!(kept["age_seconds"].is_u64() && kept.get("error").is_some(), "{kept}");
    let text = said(&rig.ask(&["status", "--unsaved"]));
    assert!(text.contains(&format!("s3://{BUCKET}/p/kept  293 KiB, ")), "{text}");
    assert!(text.contains("at node-0 and node-1") && text.contains("2 files, 293 KiB, not at the store"), "{text}");
    eventually("the group's line", || {
        let out = rig.ask(&["status"]);
        String::from_utf8_lossy(&out.stdout).contains("unsaved 2 files, 293 KiB, oldest ")
    });
}

/// Copies one of the files, and gives the other up.
fn check_commands(rig: &StagedRig, mount: &Path, content: &[u8]) {
    let copy = rig.world.path("copy");
    let path = mount.join("kept").to_str().unwrap().to_owned();
    let export = ["stage", "export", &path, copy.to_str().unwrap()];
    said(&rig.ask(&export));
    assert!(fs::read(&copy).unwrap() == content);
    refused(&rig.ask(&export), 1, &["exists", "--force"]);
    said(&rig.ask(&[&export[..], &["--force"]].concat()));
    let url = format!("s3://{BUCKET}/p/lost");
    refused(&rig.ask(&["stage", "drop", &url]), 2, &["p/lost, 23 B, closed", "node-0 and node-1 only", "say --yes"]);
    let text = said(&rig.ask(&["stage", "drop", &url, "--yes"]));
    assert!(text.contains("dropped, 23 B"), "{text}");
    refused(&rig.ask(&["stage", "drop", &url, "--yes"]), 1, &["is no staged file", "status --unsaved"]);
    refused(&rig.ask(&["stage", "export", "/etc/passwd", "x"]), 2, &["names no object of a bucket"]);
    assert_eq!(rig.unsaved()["count"], 1);
}

mod test_all {
    use super::*;

    #[test]
    fn scratch_data_is_gone_and_comes_back_with_its_node() {
        let Some(mut rig) = StagedRig::start() else { return };
        let one = rig.mount("one", &["--attr-cache", "0s", "--entry-cache", "0s", "--peer-silence", "1s"]);
        let scratch = format!("s3://{BUCKET}/p/scratch");
        said(&rig.ask(&["limit", &scratch, "--scratch"]));
        fs::create_dir(one.path("scratch")).unwrap();
        eventually("the rule", || {
            fs::write(one.path("scratch/block"), b"block").unwrap();
            rig.unsaved()["scratch_count"] != 0
        });
        let listed = rig.unsaved();
        let files = listed["unsaved"].as_array().unwrap();
        let block = files.iter().find(|file| file["path"] == "p/scratch/block").unwrap();
        let node = usize::from(block["nodes"] == serde_json::json!(["node-1"]));
        assert_eq!(block["nodes"].as_array().unwrap().len(), 1, "{listed}");
        rig.group.nodes[node].process.kill();
        eventually("the end of the block", || {
            let read = fs::read(one.path("scratch/block"));
            read.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        });
        rig.group.restart(&rig.world, node);
        eventually("the block", || fs::read(one.path("scratch/block")).is_ok_and(|content| content == b"block"));
        one.unmount();
    }
}
