//! How the store keeps what a mount writes: storage class, encryption, and policies that want these.

use crate::objects::{BUCKET, BucketRig};
use spurline_rig::world::*;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

const MIB: usize = 1 << 20;

fn kept_as(rig: &BucketRig, key: &str) -> [String; 3] {
    rig.server.kept_as(BUCKET, key).unwrap_or_else(|| panic!("there is no {key}"))
}

#[test]
fn objects_are_written_with_the_encryption_and_the_class_of_the_options() {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.put_with_class(BUCKET, "p/old", b"text", "STANDARD_IA");
    rig.server.want_encryption();
    let flags = ["--sse", "aws:kms", "--sse-kms-key-id", "key", "--storage-class", "GLACIER_IR", "--request-payer"];
    let mount = rig.mount("mnt", &flags);
    fs::write(mount.path("small"), b"text").unwrap();
    fs::write(mount.path("large"), bytes(1, 20 * MIB)).unwrap();
    fs::rename(mount.path("small"), mount.path("renamed")).unwrap();
    fs::rename(mount.path("old"), mount.path("new")).unwrap();
    for key in ["p/renamed", "p/large", "p/new"] {
        assert_eq!(kept_as(&rig, key), ["GLACIER_IR", "aws:kms", "key"], "{key}");
    }
    mount.unmount();
}

#[test]
fn changed_and_renamed_objects_keep_their_class() {
    let Some(rig) = BucketRig::start() else { return };
    for key in ["p/appended", "p/renamed", "p/mode", "p/large"] {
        let len = if key == "p/large" { 20 * MIB } else { 100 };
        rig.server.put_with_class(BUCKET, key, &bytes(1, len), "STANDARD_IA");
    }
    let mount = rig.mount("mnt", &["--object-attrs"]);
    for name in ["appended", "large"] {
        OpenOptions::new().append(true).open(mount.path(name)).unwrap().write_all(b"more").unwrap();
    }
    fs::rename(mount.path("renamed"), mount.path("moved")).unwrap();
    fs::set_permissions(mount.path("mode"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(mount.path("new"), b"text").unwrap();
    for key in ["p/appended", "p/large", "p/moved", "p/mode"] {
        assert_eq!(kept_as(&rig, key), ["STANDARD_IA", "", ""], "{key}");
    }
    assert_eq!(kept_as(&rig, "p/new"), ["", "", ""]);
    mount.unmount();
}

#[test]
fn a_refusal_by_a_policy_names_the_flag() {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.want_encryption();
    let at = rig.world.dir("mnt");
    let mut command = rig.world.command(&["mount", &format!("s3://{BUCKET}/p"), at.to_str().unwrap(), "--rw"]);
    command.args(["--endpoint-url", &rig.server.endpoint()]);
    refused(&finish(with_credentials(&mut command)), 3, &["AccessDenied", "--sse"]);
}
