//! S3 clients of others beside a written bucket: boto3, the AWS command line and rclone read what a mount writes, and a mount reads
//! what they write.

use crate::objects::{BUCKET, OtherServer};
use spurline_rig::s3_clients::*;
use spurline_rig::world::*;
use spurline_testkit::{ACCESS_KEY, SECRET_KEY};
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What boto3 finds of the files that the mount has written.
const READ_BY_BOTO3: &str = r#"
import boto3, hashlib, os, sys
s3 = boto3.client('s3', endpoint_url=sys.argv[1])
at = sys.argv[2]
for name, kind in [('report.json', 'application/json'), ('big.bin', 'application/octet-stream')]:
    written = open(os.path.join(at, name), 'rb').read()
    found = s3.get_object(Bucket='bucket', Key='p/' + name, ChecksumMode='ENABLED')
    assert found['Body'].read() == written, name
    assert found['ContentType'] == kind, found['ContentType']
    assert found['ContentLength'] == len(written)
    if name == 'report.json':
        assert found['ETag'].strip('"') == hashlib.md5(written).hexdigest(), found['ETag']
        assert found.get('ChecksumCRC64NVME'), found
assert os.stat(os.path.join(at, 'report.json')).st_mtime > 1.7e9
s3.put_object(Bucket='bucket', Key='p/from-boto3.txt', Body=b'by boto3', ContentType='text/x-note', CacheControl='no-cache',
              Metadata={'note': 'kept'})
s3.put_object(Bucket='bucket', Key='p/replaced', Body=b'by boto3, and longer')
s3.upload_file(os.path.join(at, 'big.bin'), 'bucket', 'p/big-from-boto3')
"#;

/// What is left of an object of boto3 after the mount has changed its bytes.
const READ_AGAIN: &str = r#"
import boto3, sys
s3 = boto3.client('s3', endpoint_url=sys.argv[1])
found = s3.get_object(Bucket='bucket', Key='p/from-boto3.txt')
assert found['Body'].read() == b'by boto3, and by the mount'
assert found['ContentType'] == 'text/x-note' and found['CacheControl'] == 'no-cache', found
assert found['Metadata']['note'] == 'kept', found['Metadata']
"#;

/// A program with the keys and the place of the server.
fn client(program: &Path, endpoint: &str) -> Command {
    s3_client(program, endpoint, ClientKeys { id: ACCESS_KEY, secret: SECRET_KEY })
}

#[test]
fn clients_of_others_read_and_write_the_same_objects() {
    if !can_mount() {
        return;
    }
    let Some(bin) = s3_clients() else { return };
    let world = World::new();
    let Some(server) = OtherServer::start(&world) else { return };
    let endpoint = server.endpoint.as_str();
    let at = world.dir("mnt");
    let source = format!("s3://{BUCKET}/p");
    let flags = ["mount", &source, at.to_str().unwrap(), "--rw", "--object-attrs", "--endpoint-url", endpoint];
    let mut command = world.command(&flags);
    let mount = world.mount_at(with_credentials(command.arg("--cache-dir").arg(world.dir("cache"))), &at);
    let big = bytes(5, 20 * MIB + 3);
    fs::write(mount.path("report.json"), b"{\"by\": \"the mount\"}").unwrap();
    fs::write(mount.path("big.bin"), &big).unwrap();
    fs::write(mount.path("replaced"), b"by the mount").unwrap();
    let python = bin.join("python");
    succeed(client(&python, endpoint).args(["-c", READ_BY_BOTO3, endpoint]).arg(&at));
    assert_eq!(mount.read("from-boto3.txt"), b"by boto3");
    assert!(mount.read("big-from-boto3") == big);
    eventually("the object of boto3 is seen", || mount.read("replaced") == b"by boto3, and longer");
    fs::write(mount.path("from-boto3.txt"), b"by boto3, and by the mount").unwrap();
    succeed(client(&python, endpoint).args(["-c", READ_AGAIN, endpoint]));

    let aws = bin.join("aws");
    let local = world.dir("local");
    succeed(client(&aws, endpoint).args(["s3", "cp", "--quiet", &format!("{source}/big.bin")]).arg(local.join("big")));
    assert!(fs::read(local.join("big")).unwrap() == big);
    succeed(
        client(&aws, endpoint).args(["s3", "cp", "--quiet"]).arg(local.join("big")).arg(format!("{source}/from-aws")),
    );
    assert!(mount.read("from-aws") == big);

    let rclone = bin.join("rclone");
    let remote = format!("s:{BUCKET}/p");
    succeed(client(&rclone, endpoint).args(["copyto"]).arg(local.join("big")).arg(format!("{remote}/from-rclone")));
    assert!(mount.read("from-rclone") == big);
    let modified = |path: PathBuf| fs::metadata(path).unwrap().modified().unwrap();
    assert_eq!(
        modified(mount.path("from-rclone")),
        modified(local.join("big")),
        "rclone keeps the time in the metadata"
    );
    // Names, lengths and checksums of all files, as rclone reads them on both sides.
    let checked = finish(client(&rclone, endpoint).args(["check", "--download"]).arg(&at).arg(&remote));
    assert!(checked.status.success(), "{checked:?}");
    succeed(
        client(&rclone, endpoint).args(["moveto"]).arg(format!("{remote}/from-aws")).arg(format!("{remote}/moved")),
    );
    eventually("the moved object is seen", || mount.path("moved").exists() && !mount.path("from-aws").exists());
    // Attributes and folders of that server.
    fs::create_dir(mount.path("folder")).unwrap();
    fs::set_permissions(mount.path("folder"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::rename(mount.path("big.bin"), mount.path("folder/big.bin")).unwrap();
    fs::set_permissions(mount.path("folder/big.bin"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("big.bin", mount.path("folder/link")).unwrap();
    fs::rename(mount.path("folder"), mount.path("again")).unwrap();
    assert_eq!(fs::metadata(mount.path("again")).unwrap().mode() & 0o777, 0o750);
    assert_eq!(fs::metadata(mount.path("again/big.bin")).unwrap().mode() & 0o777, 0o600);
    assert!(mount.read("again/link") == big);
    assert!(!mount.path("folder").exists());
    mount.unmount();
}
