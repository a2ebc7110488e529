//! Open files and directories without a name: what their handles can do is what those of the bare directory can.

use rustix::fs::{Access, CWD, Mode, OFlags, XattrFlags, accessat, fgetxattr, flistxattr, fremovexattr, fsetxattr};
use spurline_rig::writable_group::{Group, WAYS, shell};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

/// Uses the extended attributes and rights of an open file; what it found.
fn use_attributes(file: &File) -> Vec<String> {
    let mut value = [0; 64];
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut seen = vec![
        format!("set {:?}", fsetxattr(file, "user.b", b"two", XattrFlags::CREATE)),
        format!("set again {:?}", fsetxattr(file, "user.b", b"two", XattrFlags::CREATE)),
        format!("get {:?} {:?}", fgetxattr(file, "user.b", &mut value[..]), &value[..3]),
        format!("none {:?}", fgetxattr(file, "user.none", &mut value[..])),
        format!("acl {:?}", fgetxattr(file, "system.posix_acl_access", &mut value[..])),
        format!("capabilities {:?}", fgetxattr(file, "security.capability", &mut value[..])),
    ];
    let names = flistxattr(file, &mut value[..]).map(|len| {
        let mut names: Vec<_> = value[..len].split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        names.retain(|name| name.starts_with("user."));
        names.sort();
        format!("{names:?}")
    });
    seen.push(format!("list {names:?}"));
    seen.push(format!("remove {:?}", fremovexattr(file, "user.b")));
    seen.push(format!("removed {:?}", fgetxattr(file, "user.b", &mut value[..])));
    // The kernel gets the ACL before it decides.
    std::os::unix::fs::fchown(file, Some(1), Some(1)).unwrap();
    file.set_permissions(Permissions::from_mode(0o640)).unwrap();
    seen.push(format!("access {:?}", accessat(CWD, &own, Access::READ_OK, rustix::fs::AtFlags::empty())));
    let mut text = String::new();
    let read = File::open(&own).and_then(|mut again| again.read_to_string(&mut text));
    seen.push(format!("open {:?} {text}", read.map_err(|error| error.raw_os_error())));
    seen
}

fn use_unnamed(folder: &Path) -> Vec<String> {
    let path = folder.join("file");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"text").unwrap();
    fsetxattr(&file, "user.a", b"one", XattrFlags::CREATE).unwrap();
    fs::remove_file(&path).unwrap();
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let unnamed = File::from(rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR).unwrap());
    [use_attributes(&file), use_attributes(&unnamed)].concat()
}

#[test]
fn a_file_without_a_name_has_its_attributes() {
    for (nodes, way) in WAYS.into_iter().map(|way| (0, way)).chain([(2, &[][..])]) {
        let Some(group) = Group::start(nodes) else { return };
        let mount = group.mount("mnt", 0, way);
        assert_eq!(use_unnamed(&mount.at), use_unnamed(&group.source), "{nodes} nodes, {way:?}");
        mount.unmount();
    }
}

/// Removes directories that are open or the working directory, and prints what can be done with them.
const REMOVE_DIRECTORIES: &str = r#"
    use_open() {
        stat -L -c "%F %h %a" /dev/fd/3
        chmod 750 /dev/fd/3
        stat -L -c "%F %h %a" /dev/fd/3
        ls -A /dev/fd/3/
        mkdir /dev/fd/3/new 2>&1 | grep -o "No such file"
    }
    umask 022
    mkdir removed; exec 3<removed; rmdir removed; use_open
    mkdir new old; exec 3<old; mv -T new old; use_open; rmdir old
    mkdir work; cd work; rmdir ../work
    stat -c "%F %h %a" .
    chmod 711 .
    stat -c "%F %h %a" .
    ls -A .
    touch new 2>&1 | grep -o "No such file"
"#;

#[test]
fn a_removed_directory_is_empty_and_has_its_attributes() {
    for (nodes, way) in WAYS.into_iter().map(|way| (0, way)).chain([(2, &[][..])]) {
        let Some(group) = Group::start(nodes) else { return };
        let mount = group.mount("mnt", 0, way);
        let on_mount = shell(&mount.at, REMOVE_DIRECTORIES);
        assert_eq!(on_mount, shell(&group.source, REMOVE_DIRECTORIES), "{nodes} nodes, {way:?}");
        assert!(on_mount.starts_with("directory 0 755\n"), "{on_mount}");
        // One that is removed beside the mount.
        fs::create_dir(mount.path("other")).unwrap();
        let open = File::open(mount.path("other")).unwrap();
        fs::remove_dir(group.source.join("other")).unwrap();
        open.set_permissions(Permissions::from_mode(0o710)).unwrap();
        let seen = open.metadata().unwrap();
        assert_eq!((seen.nlink(), seen.mode() & 0o777), (0, 0o710), "{nodes} nodes, {way:?}");
        drop(open);
        mount.unmount();
    }
}
