//! Reads of a writable mount through nodes from cached bytes: which reads are, and each event that ends them. The node's count
//! of bytes from the source shows where bytes came from.

use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, draw, has, shell};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The ways to the kernel.
const TRANSPORTS: [&str; 2] = ["dev", "uring"];
/// Bytes of a file of several blocks.
const FILE_LEN: usize = 4 * MIB + 100;

/// Waits until the clock of file times has ticked: a file that was changed before has its final version.
fn wait_for_tick() {
    std::thread::sleep(Duration::from_millis(60));
}

/// Takes the file's pages out of the kernel, so that the next read is one of the mount.
fn drop_pages(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn read_all(file: &File) -> Vec<u8> {
    drop_pages(file);
    let mut text = vec![0; FILE_LEN * 2];
    let mut done = 0;
    loop {
        match file.read_at(&mut text[done..], done as u64).unwrap() {
            0 => break,
            count => done += count,
        }
    }
    text.truncate(done);
    text
}

fn read_part(file: &File, offset: u64, len: usize) -> Vec<u8> {
    drop_pages(file);
    let mut text = vec![0; len];
    file.read_exact_at(&mut text, offset).unwrap();
    text
}

fn open_to_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// One node, a file in the source, and a mount without read-ahead, so that only blocks that were read are cached.
fn start(transport: &str) -> Option<(Group, Mount, Vec<u8>)> {
    let group = Group::start(1)?;
    let text = bytes(3, FILE_LEN);
    fs::write(group.source.join("file"), &text).unwrap();
    wait_for_tick();
    let mount = group.mount("mnt", 0, &["--fuse-io", transport, "--max-readahead", "0"]);
    Some((group, mount, text))
}

fn bytes_from_source(group: &Group) -> u64 {
    group.nodes.iter().map(|node| node.count("object", "get_bytes")).sum()
}

#[test]
fn a_file_that_is_not_changed_is_read_from_the_source_once() {
    for transport in TRANSPORTS {
        let Some((group, mount, text)) = start(transport) else { return };
        assert!(read_all(&File::open(mount.path("file")).unwrap()) == text);
        assert_eq!(bytes_from_source(&group), text.len() as u64, "through the cache");
        for _ in 0..3 {
            assert!(read_all(&File::open(mount.path("file")).unwrap()) == text);
        }
        // A second mount, and one for reading only, use the same blocks.
        let second = group.mount("second", 0, &["--fuse-io", transport]);
        assert!(fs::read(second.path("file")).unwrap() == text);
        let source = group.source.to_str().unwrap();
        let reader = group.world.mount_at(
            group
                .world
                .command(&["mount", source, group.world.dir("reader").to_str().unwrap(), "--registry"])
                .arg(format!("static:{}", group.nodes[0].address)),
            &group.world.path("reader"),
        );
        assert!(fs::read(reader.path("file")).unwrap() == text);
        assert_eq!(bytes_from_source(&group), text.len() as u64, "{transport}");
        [mount, second, reader].into_iter().for_each(Mount::unmount);
    }
}

#[test]
fn what_the_mount_writes_is_read_at_once_by_those_that_read_cached_bytes() {
    for transport in TRANSPORTS {
        let Some((group, mount, mut text)) = start(transport) else { return };
        let reader = File::open(mount.path("file")).unwrap();
        assert!(read_all(&reader) == text);
        let writer = open_to_write(&mount.path("file"));
        for (round, offset) in [10, MIB + 7, FILE_LEN - 50].into_iter().enumerate() {
            let new = bytes(100 + round as u64, 200);
            writer.write_all_at(&new, offset as u64).unwrap();
            text.resize(text.len().max(offset + new.len()), 0);
            text[offset..offset + new.len()].copy_from_slice(&new);
            assert!(read_all(&reader) == text, "{transport}, round {round}");
        }
        drop(writer);
        assert!(read_all(&reader) == text);
        // Cut by its name, while it is open for reading only.
        let reopened = loop {
            wait_for_tick();
            let before = bytes_from_source(&group);
            let reopened = File::open(mount.path("file")).unwrap();
            assert!(read_all(&reopened) == text);
            assert!(read_all(&reopened) == text);
            if bytes_from_source(&group) > before {
                break reopened;
            }
        };
        if !has("perl") {
            return;
        }
        // Without an open.
        shell(&mount.at, "perl -e 'truncate(\"file\", 1000) or die $!'");
        text.truncate(1000);
        assert!(read_all(&reopened) == text);
        drop((reader, reopened));
        mount.unmount();
    }
}

#[test]
fn what_was_written_under_a_lock_is_read_after_the_lock() {
    for transport in TRANSPORTS {
        let Some((group, mount, mut text)) = start(transport) else { return };
        let other = group.mount("other", 0, &["--fuse-io", transport]);
        let reader = File::open(mount.path("file")).unwrap();
        assert!(read_all(&reader) == text);
        let writer = open_to_write(&other.path("file"));
        for round in 0..3u64 {
            writer.lock().unwrap();
            let new = bytes(200 + round, 300);
            let offset = MIB * round as usize + 11;
            writer.write_all_at(&new, offset as u64).unwrap();
            text[offset..offset + new.len()].copy_from_slice(&new);
            writer.unlock().unwrap();
            reader.lock_shared().unwrap();
            assert!(read_all(&reader) == text, "{transport}, round {round}");
            reader.unlock().unwrap();
        }
        drop((reader, writer));
        mount.unmount();
        other.unmount();
    }
}

/// What an open has found, all files of the mount read: the kernel keeps one set of pages for them.
#[test]
fn another_version_that_an_open_finds_is_read_by_all_open_files() {
    for transport in TRANSPORTS {
        let Some((group, mount, mut text)) = start(transport) else { return };
        let other = group.mount("other", 0, &["--fuse-io", transport]);
        let reader = File::open(mount.path("file")).unwrap();
        assert!(read_all(&reader) == text);
        for round in 0..3u64 {
            let new = bytes(300 + round, 3000);
            let offset = MIB * round as usize + 5;
            open_to_write(&other.path("file")).write_all_at(&new, offset as u64).unwrap();
            text[offset..offset + new.len()].copy_from_slice(&new);
            let next = File::open(mount.path("file")).unwrap();
            assert!(read_all(&next) == text && read_all(&reader) == text, "{transport}, round {round}");
            wait_for_tick();
        }
        drop(reader);
        mount.unmount();
        other.unmount();
    }
}

#[test]
fn a_version_that_is_gone_is_read_from_the_source_without_an_error() {
    for transport in TRANSPORTS {
        let Some((group, mount, mut text)) = start(transport) else { return };
        let changed = File::open(mount.path("file")).unwrap();
        assert!(read_part(&changed, 0, 1000) == text[..1000]);
        // By another program, which no node knows.
        let new = bytes(9, MIB);
        open_to_write(&group.source.join("file")).write_all_at(&new, 2 * MIB as u64).unwrap();
        text[2 * MIB..3 * MIB].copy_from_slice(&new);
        assert!(read_part(&changed, 2 * MIB as u64 + 3, 5000) == text[2 * MIB + 3..][..5000]);
        assert!(read_all(&changed) == text);
        fs::write(group.source.join("removed"), &text).unwrap();
        wait_for_tick();
        let removed = File::open(mount.path("removed")).unwrap();
        assert!(read_part(&removed, 0, 1000) == text[..1000]);
        fs::remove_file(group.source.join("removed")).unwrap();
        assert!(read_all(&removed) == text, "{transport}");
        drop((changed, removed));
        mount.unmount();
    }
}

/// Two mounts and a program on the source change files; each open reads the bytes of the last close, whether they come
/// from a cache or not.
#[test]
fn an_open_for_reading_finds_no_older_byte_than_the_last_close() {
    const FILES: u64 = 3;
    let Some(group) = Group::start_in_memory(2, "64m") else { return };
    let mounts = [group.mount("one", 0, &[]), group.mount("two", 1, &["--attr-cache", "0", "--entry-cache", "0"])];
    let mut state = std::env::var("SPURLINE_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(18);
    println!("SPURLINE_TEST_SEED={state}");
    let mut models: Vec<Vec<u8>> = (0..FILES).map(|number| bytes(number, 3 * MIB)).collect();
    for (number, model) in models.iter().enumerate() {
        fs::write(group.source.join(format!("f{number}")), model).unwrap();
    }
    let mut open: Vec<(usize, File)> = Vec::new();
    for turn in 0..spurline_rig::fsx::more_operations().map_or(150, |ops| ops / 20) {
        let number = draw(&mut state, FILES) as usize;
        let model = &mut models[number];
        let name = format!("f{number}");
        if draw(&mut state, 3) == 0 {
            let new = bytes(state, 1 + draw(&mut state, 50_000) as usize);
            let offset = draw(&mut state, (model.len() - new.len()) as u64) as usize;
            let path = match draw(&mut state, 5) {
                0 => group.source.join(&name),
                which => mounts[which as usize % 2].path(&name),
            };
            open_to_write(&path).write_all_at(&new, offset as u64).unwrap();
            model[offset..offset + new.len()].copy_from_slice(&new);
        }
        if draw(&mut state, 2) == 0 {
            wait_for_tick();
        }
        let mount = draw(&mut state, 2) as usize;
        let file = File::open(mounts[mount].path(&name)).unwrap();
        let offset = draw(&mut state, model.len() as u64 - 100_000);
        if draw(&mut state, 2) == 0 {
            drop_pages(&file);
        }
        let mut seen = vec![0; 100_000];
        file.read_exact_at(&mut seen, offset).unwrap();
        assert!(seen == model[offset as usize..][..seen.len()], "turn {turn}, mount {mount}, {name} at {offset}");
        // Some stay open, in the version of their time or a later one.
        open.push((number, file));
        if open.len() > 12 {
            let (_, file) = open.swap_remove(draw(&mut state, 12) as usize);
            assert_eq!(read_all(&file).len(), 3 * MIB);
        }
    }
    assert!(bytes_from_source(&group) > 0, "some were read through the cache");
    drop(open);
    mounts.into_iter().for_each(Mount::unmount);
}

/// What `info` says of reads of a file.
fn reads_by_info(group: &Group, mount: &Mount, name: &str) -> (bool, String) {
    let out = group.world.run(&["info", "--json", mount.path(name).to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    let info: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let why_not = info["reads"]["why_not"].as_str().unwrap_or_default();
    (info["reads"]["cached"].as_bool().unwrap(), why_not.to_owned())
}

#[test]
fn info_load_free_and_status_agree_with_the_reads() {
    let Some((group, mount, text)) = start("uring") else { return };
    let run = |words: &[&str]| {
        let out = group.world.run(words);
        assert!(out.status.success(), "{words:?}: {out:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let at = mount.path("file").to_str().unwrap().to_owned();
    let len = text.len() as u64;
    run(&["load", &at]);
    assert_eq!(bytes_from_source(&group), len);
    assert!(read_all(&File::open(&at).unwrap()) == text);
    assert_eq!(bytes_from_source(&group), len, "loaded blocks are read");
    assert_eq!(reads_by_info(&group, &mount, "file"), (true, String::new()));
    run(&["free", &at]);
    // The mount itself may have blocks in memory.
    let second = group.mount("second", 0, &[]);
    assert!(fs::read(second.path("file")).unwrap() == text);
    assert_eq!(bytes_from_source(&group), 2 * len, "freed blocks are fetched");
    assert!(run(&["status", mount.at.to_str().unwrap()]).contains("cache on its nodes"));
    // A new file is loaded under the version that it was closed in, at once.
    let writer = File::create(mount.path("new")).unwrap();
    writer.write_all_at(&text, 0).unwrap();
    let (cached, why_not) = reads_by_info(&group, &mount, "new");
    assert!(!cached && why_not == "a process has it open for changes", "{why_not}");
    drop(writer);
    run(&["load", mount.path("new").to_str().unwrap()]);
    assert_eq!(bytes_from_source(&group), 3 * len);
    eventually("the new file is read from the cache", || reads_by_info(&group, &mount, "new").0);
    assert!(fs::read(second.path("new")).unwrap() == text);
    assert_eq!(bytes_from_source(&group), 3 * len, "what was loaded is read");
    mount.unmount();
    second.unmount();
    let Some(alone) = Group::start(0) else { return };
    let mount = alone.mount("mnt", 0, &[]);
    fs::write(mount.path("file"), "text").unwrap();
    let (cached, why_not) = reads_by_info(&alone, &mount, "file");
    assert!(!cached && why_not.contains("a directory of this host"), "{why_not}");
    mount.unmount();
}

/// A source in user space, as one on a network: another mount of the same program. Both are alone.
#[test]
fn a_lone_mount_reads_a_source_on_a_network_through_its_cache() {
    for transport in TRANSPORTS {
        let Some(near) = Group::start(0) else { return };
        let mut text = bytes(3, FILE_LEN);
        fs::write(near.source.join("file"), &text).unwrap();
        let server = near.mount("server", 0, &["--attr-cache", "0"]);
        let far = Group::start_at(0, World::new(), server.at.clone());
        let mount = far.mount("mnt", 0, &["--fuse-io", transport, "--attr-cache", "0", "--entry-cache", "0"]);
        let fetched = || mount.count("object", "get_bytes");
        // The server's clock is known by the times of its files.
        eventually("the file is read from the cache", || reads_by_info(&far, &mount, "file").0);
        assert!(read_all(&File::open(mount.path("file")).unwrap()) == text);
        assert_eq!(fetched(), text.len() as u64);
        let reader = File::open(mount.path("file")).unwrap();
        assert!(read_all(&reader) == text);
        assert_eq!(fetched(), text.len() as u64, "{transport}");
        // Own writes, and those of others at the next open.
        let new = bytes(7, 5000);
        let writer = open_to_write(&mount.path("file"));
        writer.write_all_at(&new, 2 * MIB as u64).unwrap();
        text[2 * MIB..][..new.len()].copy_from_slice(&new);
        assert!(read_all(&reader) == text);
        drop(writer);
        open_to_write(&server.path("file")).write_all_at(&new, 100).unwrap();
        text[100..][..new.len()].copy_from_slice(&new);
        assert!(read_all(&File::open(mount.path("file")).unwrap()) == text, "{transport}");
        eventually("the new version is cached", || reads_by_info(&far, &mount, "file").0);
        assert!(read_all(&File::open(mount.path("file")).unwrap()) == text);
        let out = far.world.run(&["load", mount.path("file").to_str().unwrap()]);
        assert!(out.status.success(), "{out:?}");
        drop(reader);
        mount.unmount();
        drop(far);
        server.unmount();
    }
}

/// Opens of readers and writers meet at any time: no reader gets a number that is older than the one that was written before its
/// open.
#[test]
fn readers_find_what_was_closed_before_their_open_while_others_write() {
    const ROUNDS: u64 = 60;
    const PLACES: [u64; 3] = [8, MIB as u64 + 16, 2 * MIB as u64 + 24];
    let Some(group) = Group::start_in_memory(2, "64m") else { return };
    fs::write(group.source.join("file"), vec![0; FILE_LEN]).unwrap();
    let mounts = [group.mount("one", 0, &[]), group.mount("two", 1, &[])];
    let paths = [mounts[0].path("file"), mounts[1].path("file")];
    let written = AtomicU64::new(0);
    let is_over = AtomicBool::new(false);
    let read = |path: &Path, mut state: u64| {
        while !is_over.load(Ordering::Acquire) {
            let least = written.load(Ordering::Acquire);
            let file = File::open(path).unwrap();
            if draw(&mut state, 2) == 0 {
                drop_pages(&file);
            }
            for place in PLACES {
                let mut found = [0; 8];
                file.read_exact_at(&mut found, place).unwrap();
                let found = u64::from_le_bytes(found);
                assert!(found >= least, "{}: {found} at {place} after {least}", path.display());
            }
        }
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|n| {
                scope.spawn({
                    let path = &paths[n % 2];
                    let read = &read;
                    move || read(path, 7 + n as u64)
                })
            })
            .collect();
        let mut state = 18;
        for round in 1..=ROUNDS {
            let writer = open_to_write(&paths[draw(&mut state, 2) as usize]);
            PLACES.iter().for_each(|place| writer.write_all_at(&round.to_le_bytes(), *place).unwrap());
            drop(writer);
            written.store(round, Ordering::Release);
            // Sometimes for so long that the version is final.
            std::thread::sleep(Duration::from_millis(draw(&mut state, 60)));
            assert!(!readers.iter().any(|reader| reader.is_finished()), "a reader has failed");
        }
        is_over.store(true, Ordering::Release);
    });
    mounts.into_iter().for_each(Mount::unmount);
}

#[test]
fn a_lost_node_costs_a_reader_of_cached_bytes_no_error() {
    let Some(mut group) = Group::start(2) else { return };
    let mut text = bytes(3, FILE_LEN);
    fs::write(group.source.join("file"), &text).unwrap();
    wait_for_tick();
    let mount = group.mount("mnt", 0, &["--max-readahead", "0", "--peer-silence", "1s"]);
    let reader = File::open(mount.path("file")).unwrap();
    assert!(read_part(&reader, 0, 1000) == text[..1000]);
    for lost in 0..2 {
        group.nodes[lost].process.kill();
        assert!(read_all(&reader) == text, "without node {lost}");
        let port = group.nodes[lost].port();
        group.nodes[lost] = group.node(lost, port);
        eventually("the file is read from the cache again", || reads_by_info(&group, &mount, "file").0);
        let next = File::open(mount.path("file")).unwrap();
        assert!(read_all(&next) == text);
        let new = bytes(40 + lost as u64, 100);
        open_to_write(&mount.path("file")).write_all_at(&new, 50).unwrap();
        text[50..150].copy_from_slice(&new);
        assert!(read_all(&next) == text && read_all(&reader) == text, "after node {lost}");
        eventually("the new version is final", || reads_by_info(&group, &mount, "file").0);
    }
    drop(reader);
    mount.unmount();
}
