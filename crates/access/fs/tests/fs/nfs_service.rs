//! Both file systems as an NFS server in this process would use them, through [`FileService`] alone: handles instead of open
//! files, callers of other hosts with their groups, and no FUSE.

use crate::nfs_server;
use crate::objects;
use crate::records;
use crate::support;
use nfs_server::{NOT_SYNC, NfsCreate, NfsDirName, NfsHandle, NfsServer, PAGE_NAMES};
use objects::{NoReads, writable_config};
use records::MemoryRecords;
use spurline_directory::WritableSource;
use spurline_fs::writable::{WritableConfig, WritableFileSystem};
use spurline_fs::{CallerGroups, FileService, FileSystem, FsCaller, FsConfig, NewNode, RequestNumber};
use spurline_types::Stats;
use spurline_volume::writes::{AttrChange, FileTime, NewTime};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use support::{Tree, byte};

const ROOT_CALLER: FsCaller<'static> =
    FsCaller { uid: 0, gid: 0, groups: CallerGroups::All(&[]), pid: 0, umask: 0, request: RequestNumber::NONE };
/// A user whose group and supplementary groups are not those of the tests' files.
const STRANGER: FsCaller<'static> =
    FsCaller { uid: 3000, gid: 3000, groups: CallerGroups::All(&[4]), pid: 0, umask: 0, request: RequestNumber::NONE };
/// The same user, with the files' group among the supplementary ones.
const MEMBER: FsCaller<'static> = FsCaller {
    uid: 3000,
    gid: 3000,
    groups: CallerGroups::All(&[4, 2000]),
    pid: 0,
    umask: 0,
    request: RequestNumber::NONE,
};
const FILE_OWNER: u32 = 1000;
const FILE_GROUP: u32 = 2000;

/// A directory that only root can serve to several users. `None` after the reason was printed.
fn source_directory() -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: making changes as their callers needs root");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    Some(directory)
}

/// A server over a directory, as after a start: nothing is known but the names in `records`.
fn writable_server(directory: &Path, records: &Arc<MemoryRecords>) -> (NfsServer, Arc<WritableFileSystem>) {
    let source = WritableSource::open(directory, None).unwrap();
    // No kernel has checked anything before.
    let config = WritableConfig { kernel_checks: false, ..writable_config(u64::MAX) };
    let files = WritableFileSystem::new(Arc::new(NoReads), source, config, Arc::new(Stats::default())).unwrap();
    let files = Arc::new(files);
    files.keep_names(Arc::clone(records) as _);
    (NfsServer::new(Arc::clone(&files) as Arc<dyn FileService>), files)
}

fn in_directory(directory: NfsHandle, name: &[u8]) -> NfsDirName<'_> {
    NfsDirName { directory, name }
}

/// All names of a directory, page by page.
fn names_of(server: &NfsServer, directory: NfsHandle, caller: &FsCaller<'_>) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let mut cookie = 0;
    loop {
        let page = server.readdirplus(directory, cookie, caller).unwrap();
        let Some(last) = page.last() else { return names };
        assert!(page.len() <= PAGE_NAMES);
        cookie = last.cookie;
        for listed in page {
            if let Some((handle, attr)) = listed.object {
                assert_eq!(server.getattr(handle).unwrap(), attr, "the handle of a listing");
            }
            names.push(listed.name);
        }
    }
}

#[test]
fn files_are_made_written_and_read_by_handle() {
    let Some(directory) = source_directory() else { return };
    let (server, files) = writable_server(directory.path(), &Arc::default());
    let root = server.root().unwrap();
    let unchecked = |size| NfsCreate::Unchecked(size);
    let (file, attr) = server.create(root, b"f", &NfsCreate::Guarded, 0o640, &ROOT_CALLER).unwrap();
    assert_eq!((attr.mode, attr.size, attr.nlink), (libc::S_IFREG | 0o640, 0, 1));
    assert_eq!(server.create(root, b"f", &NfsCreate::Guarded, 0o640, &ROOT_CALLER), Err(libc::EEXIST));
    assert_eq!(server.write(file, 0, b"0123456789", &ROOT_CALLER), Ok(10));
    assert_eq!(server.write(file, 10, b"abc", &ROOT_CALLER), Ok(3));
    server.commit(file, &ROOT_CALLER).unwrap();
    assert_eq!(server.read(file, 8, 100, &ROOT_CALLER).unwrap(), b"89abc");
    assert_eq!(server.read(file, 13, 100, &ROOT_CALLER).unwrap(), b"");
    assert_eq!(std::fs::read(directory.path().join("f")).unwrap(), b"0123456789abc");
    // Unchecked, the file is the same one, and is cut on request.
    assert_eq!(server.create(root, b"f", &unchecked(None), 0o600, &ROOT_CALLER).unwrap().0, file);
    assert_eq!(server.getattr(file).unwrap().size, 13);
    assert_eq!(server.create(root, b"f", &unchecked(Some(0)), 0o600, &ROOT_CALLER).unwrap().0, file);
    assert_eq!(server.getattr(file).unwrap().size, 0);
    assert_eq!(server.lookup(root, b"f", &ROOT_CALLER).unwrap().0, file);
    assert_eq!(server.lookup(root, b"none", &ROOT_CALLER).unwrap_err(), libc::ENOENT);

    let set = AttrChange { mode: Some(0o600), mtime: Some(NewTime::At(FileTime::default())), ..AttrChange::default() };
    let seen = server.getattr(file).unwrap().ctime;
    let changed = server.setattr(file, &set, Some(seen), &ROOT_CALLER).unwrap();
    assert_eq!((changed.mode & 0o7777, changed.mtime), (0o600, FileTime::default()));
    let outdated = FileTime { seconds: 1, nanos: 0 };
    assert_eq!(server.setattr(file, &set, Some(outdated), &ROOT_CALLER), Err(NOT_SYNC));

    let space = server.fsstat().unwrap();
    assert!(space.block_size > 0 && space.blocks >= space.blocks_free && space.name_max == 255);
    assert_eq!(files.known_inodes(), 1, "nothing is kept between calls");
}

#[test]
fn a_repeated_exclusive_creation_succeeds_and_that_of_another_client_does_not() {
    let Some(directory) = source_directory() else { return };
    let (server, _) = writable_server(directory.path(), &Arc::default());
    let root = server.root().unwrap();
    let create = |verifier| server.create(root, b"f", &NfsCreate::Exclusive(verifier), 0o600, &ROOT_CALLER);
    let (file, _) = create(*b"verifier").unwrap();
    assert_eq!(create(*b"verifier").unwrap().0, file, "the answer to the first call was lost");
    assert_eq!(create(*b"anothers"), Err(libc::EEXIST));
    server.write(file, 0, b"x", &ROOT_CALLER).unwrap();
    assert_eq!(create(*b"verifier"), Err(libc::EEXIST), "the file is in use");
}

#[test]
fn names_are_made_changed_and_removed_by_handle() {
    let Some(directory) = source_directory() else { return };
    let (server, files) = writable_server(directory.path(), &Arc::default());
    let root = server.root().unwrap();
    let (one, attr) = server.make(root, b"one", NewNode::Directory { mode: 0o755 }, &ROOT_CALLER).unwrap();
    assert_eq!(attr.mode, libc::S_IFDIR | 0o755);
    let (two, _) = server.make(root, b"two", NewNode::Directory { mode: 0o755 }, &ROOT_CALLER).unwrap();
    let (link, _) = server.make(one, b"link", NewNode::Symlink { target: b"../two/g" }, &ROOT_CALLER).unwrap();
    assert_eq!(server.readlink(link, &ROOT_CALLER).unwrap(), b"../two/g");
    let (file, _) = server.create(one, b"f", &NfsCreate::Guarded, 0o644, &ROOT_CALLER).unwrap();
    assert_eq!(server.readlink(file, &ROOT_CALLER), Err(libc::EINVAL));
    server.link(file, two, b"hard", &ROOT_CALLER).unwrap();
    assert_eq!(server.lookup(two, b"hard", &ROOT_CALLER).map(|(handle, attr)| (handle, attr.nlink)), Ok((file, 2)));

    // A handle is of the file, whatever its names are.
    server.rename(in_directory(one, b"f"), in_directory(two, b"g"), &ROOT_CALLER).unwrap();
    assert_eq!(server.lookup(one, b"f", &ROOT_CALLER).unwrap_err(), libc::ENOENT);
    assert_eq!(server.lookup(two, b"g", &ROOT_CALLER).unwrap().0, file);
    server.remove(two, b"hard", false, &ROOT_CALLER).unwrap();
    assert_eq!(server.getattr(file).unwrap().nlink, 1);
    server.rename(in_directory(root, b"two"), in_directory(one, b"below"), &ROOT_CALLER).unwrap();
    assert_eq!(server.lookup(two, b"g", &ROOT_CALLER).unwrap().0, file, "the directory has moved");
    assert_eq!(server.read(file, 0, 10, &ROOT_CALLER).unwrap(), b"");

    assert_eq!(server.remove(root, b"one", true, &ROOT_CALLER), Err(libc::ENOTEMPTY));
    assert_eq!(server.remove(two, b"g", true, &ROOT_CALLER), Err(libc::ENOTDIR));
    assert_eq!(server.remove(one, b"below", false, &ROOT_CALLER), Err(libc::EISDIR));
    server.remove(two, b"g", false, &ROOT_CALLER).unwrap();
    server.remove(one, b"below", true, &ROOT_CALLER).unwrap();
    for (removed, what) in [(file, "a file"), (two, "a directory")] {
        assert_eq!(server.getattr(removed), Err(libc::ESTALE), "{what}");
    }
    assert_eq!(server.write(file, 0, b"x", &ROOT_CALLER), Err(libc::ESTALE));
    // A new file of the same name is another one.
    let (second, _) = server.create(one, b"f", &NfsCreate::Guarded, 0o644, &ROOT_CALLER).unwrap();
    assert_ne!(second, file);
    assert_eq!(files.known_inodes(), 1, "nothing is kept between calls");
}

#[test]
fn groups_of_callers_decide() {
    let Some(directory) = source_directory() else { return };
    let (server, _) = writable_server(directory.path(), &Arc::default());
    let root = server.root().unwrap();
    let (file, _) = server.create(root, b"f", &NfsCreate::Guarded, 0o640, &ROOT_CALLER).unwrap();
    server.write(file, 0, b"secret", &ROOT_CALLER).unwrap();
    let set = AttrChange { uid: Some(FILE_OWNER), gid: Some(FILE_GROUP), ..AttrChange::default() };
    server.setattr(file, &set, None, &ROOT_CALLER).unwrap();
    let all = libc::R_OK | libc::W_OK | libc::X_OK;
    assert_eq!(server.access(file, all, &STRANGER), Ok(0));
    assert_eq!(server.access(file, all, &MEMBER), Ok(libc::R_OK));
    let owner = FsCaller { uid: FILE_OWNER, ..STRANGER };
    assert_eq!(server.access(file, all, &owner), Ok(libc::R_OK | libc::W_OK));
    assert_eq!(server.read(file, 0, 100, &STRANGER), Err(libc::EACCES));
    assert_eq!(server.read(file, 0, 100, &MEMBER).unwrap(), b"secret");
    assert_eq!(server.write(file, 0, b"x", &MEMBER), Err(libc::EACCES));
    let chmod = AttrChange { mode: Some(0o666), ..AttrChange::default() };
    assert_eq!(server.setattr(file, &chmod, None, &MEMBER), Err(libc::EPERM));
    // What a caller makes is the caller's.
    let (made, attr) = server.create(root, b"made", &NfsCreate::Guarded, 0o600, &MEMBER).unwrap();
    assert_eq!((attr.uid, attr.gid), (MEMBER.uid, MEMBER.gid));
    let chgrp = |gid| AttrChange { gid: Some(gid), ..AttrChange::default() };
    assert_eq!(server.setattr(made, &chgrp(FILE_GROUP), None, &STRANGER), Err(libc::EPERM));
    assert_eq!(server.setattr(made, &chgrp(FILE_GROUP), None, &MEMBER).unwrap().gid, FILE_GROUP);
}

#[test]
fn cookies_stay_valid_while_a_directory_changes() {
    let Some(directory) = source_directory() else { return };
    let (server, files) = writable_server(directory.path(), &Arc::default());
    let root = server.root().unwrap();
    let name = |n: u32| format!("file-{n:02}").into_bytes();
    for n in 0..20 {
        server.create(root, &name(n), &NfsCreate::Guarded, 0o600, &ROOT_CALLER).unwrap();
    }
    let mut wanted: BTreeSet<Vec<u8>> = (0..20).map(name).collect();
    wanted.extend([b".".to_vec(), b"..".to_vec()]);
    let listed = names_of(&server, root, &ROOT_CALLER);
    assert_eq!((listed.len(), listed.into_iter().collect()), (wanted.len(), wanted.clone()));

    // A name of the first page is removed before the next one is requested, and another is added.
    let first = server.readdirplus(root, 0, &ROOT_CALLER).unwrap();
    let mut seen: Vec<Vec<u8>> = first.iter().map(|listed| listed.name.clone()).collect();
    let gone = seen.iter().find(|name| name.starts_with(b"file")).unwrap().clone();
    server.remove(root, &gone, false, &ROOT_CALLER).unwrap();
    server.create(root, b"added", &NfsCreate::Guarded, 0o600, &ROOT_CALLER).unwrap();
    let mut cookie = first.last().unwrap().cookie;
    loop {
        let page = server.readdirplus(root, cookie, &ROOT_CALLER).unwrap();
        let Some(last) = page.last() else { break };
        cookie = last.cookie;
        seen.extend(page.into_iter().map(|listed| listed.name).filter(|name| name != b"added"));
    }
    assert_eq!((seen.len(), seen.into_iter().collect()), (wanted.len(), wanted));
    assert_eq!(files.known_inodes(), 1);
}

#[test]
fn handles_of_a_writable_file_system_outlive_the_server() {
    let Some(directory) = source_directory() else { return };
    let records = Arc::new(MemoryRecords::default());
    let (server, _) = writable_server(directory.path(), &records);
    let root = server.root().unwrap();
    let (below, _) = server.make(root, b"d", NewNode::Directory { mode: 0o755 }, &ROOT_CALLER).unwrap();
    let (file, _) = server.create(below, b"f", &NfsCreate::Guarded, 0o644, &ROOT_CALLER).unwrap();
    server.write(file, 0, b"kept", &ROOT_CALLER).unwrap();
    drop(server);
    let (server, _) = writable_server(directory.path(), &records);
    assert_eq!(server.root().unwrap(), root);
    assert_eq!(server.read(file, 0, 10, &ROOT_CALLER).unwrap(), b"kept");
    assert_eq!(server.lookup(below, b"f", &ROOT_CALLER).unwrap().0, file);
    server.remove(below, b"f", false, &ROOT_CALLER).unwrap();
    assert_eq!(server.read(file, 0, 10, &ROOT_CALLER), Err(libc::ESTALE));
}

/// A server over a tree in memory whose files are of one owner and group, as after a start.
fn reading_server(tree: &Arc<Tree>, records: &Arc<MemoryRecords>) -> (NfsServer, Arc<FileSystem>) {
    let config = FsConfig { uid: FILE_OWNER, gid: FILE_GROUP, list_page: 4, ..FsConfig::default() };
    let files = Arc::new(FileSystem::new(Arc::clone(tree) as _, config, Arc::new(Stats::default())));
    files.keep_names(Arc::clone(records) as _);
    (NfsServer::new(Arc::clone(&files) as Arc<dyn FileService>), files)
}

#[test]
fn a_read_only_file_system_serves_the_reading_calls() {
    let tree = Tree::new();
    let records = Arc::new(MemoryRecords::default());
    tree.dir(b"d");
    tree.put(b"d/file", 1, 100);
    tree.link(b"d/link", b"file");
    (0..10).for_each(|n| tree.put(format!("d/n{n}").as_bytes(), 1, n));
    let (server, files) = reading_server(&tree, &records);
    let root = server.root().unwrap();
    let (below, attr) = server.lookup(root, b"d", &STRANGER).unwrap();
    assert_eq!((attr.mode & libc::S_IFMT, server.getattr(below)), (libc::S_IFDIR, Ok(attr)));
    let (file, attr) = server.lookup(below, b"file", &STRANGER).unwrap();
    assert_eq!((attr.size, attr.uid, attr.gid, attr.mode), (100, FILE_OWNER, FILE_GROUP, libc::S_IFREG | 0o640));
    let expected: Vec<u8> = (90..100).map(|offset| byte(1, offset)).collect();
    assert_eq!(server.read(file, 90, 100, &MEMBER).unwrap(), expected);
    assert_eq!(server.read(file, 100, 100, &MEMBER).unwrap(), b"");
    assert_eq!(server.read(file, 0, 100, &STRANGER), Err(libc::EACCES));
    let all = libc::R_OK | libc::W_OK | libc::X_OK;
    assert_eq!((server.access(file, all, &MEMBER), server.access(file, all, &STRANGER)), (Ok(libc::R_OK), Ok(0)));
    let (link, _) = server.lookup(below, b"link", &STRANGER).unwrap();
    assert_eq!(server.readlink(link, &STRANGER).unwrap(), b"file");
    let mut names = names_of(&server, below, &STRANGER);
    names.sort();
    assert_eq!(names.len(), 14);
    names.dedup();
    assert_eq!(names.len(), 14, "no name comes twice");
    assert_eq!(server.fsstat().map(|space| space.files), Ok(77));
    assert_eq!(files.known_inodes(), 1, "nothing is kept between calls");

    // A handle outlives the server, and is of one version of the file.
    drop(server);
    let (server, _) = reading_server(&tree, &records);
    assert_eq!((server.root(), server.getattr(file)), (Ok(root), Ok(attr)));
    tree.put(b"d/file", 2, 100);
    assert_eq!(server.getattr(file), Err(libc::ESTALE));
    tree.remove(b"d/link");
    assert_eq!(server.readlink(link, &STRANGER), Err(libc::ESTALE));
}

#[test]
fn a_read_only_file_system_refuses_every_change() {
    let tree = Tree::new();
    tree.dir(b"d");
    tree.put(b"f", 1, 100);
    let (server, _) = reading_server(&tree, &Arc::default());
    let root = server.root().unwrap();
    let (file, _) = server.lookup(root, b"f", &ROOT_CALLER).unwrap();
    let refused = Err(libc::EROFS);
    let set = AttrChange { size: Some(0), ..AttrChange::default() };
    assert_eq!(server.setattr(file, &set, None, &ROOT_CALLER).map(drop), refused);
    assert_eq!(server.write(file, 0, b"x", &ROOT_CALLER).map(drop), refused);
    assert_eq!(server.commit(file, &ROOT_CALLER), refused);
    for kind in [NfsCreate::Unchecked(None), NfsCreate::Guarded, NfsCreate::Exclusive([0; 8])] {
        assert_eq!(server.create(root, b"new", &kind, 0o600, &ROOT_CALLER).map(drop), refused);
    }
    assert_eq!(server.make(root, b"new", NewNode::Directory { mode: 0o700 }, &ROOT_CALLER).map(drop), refused);
    assert_eq!(server.make(root, b"new", NewNode::Symlink { target: b"f" }, &ROOT_CALLER).map(drop), refused);
    assert_eq!(server.link(file, root, b"new", &ROOT_CALLER), refused);
    assert_eq!(server.rename(in_directory(root, b"f"), in_directory(root, b"g"), &ROOT_CALLER), refused);
    assert_eq!(server.remove(root, b"f", false, &ROOT_CALLER), refused);
    assert_eq!(server.remove(root, b"d", true, &ROOT_CALLER), refused);
}
