//! The runtime as another program uses it: volumes and nodes without a command line, FUSE or signals.

use spurline_config::{
    CacheSize, HostLimits, RawCache, RawLog, RawMemory, RawNode, RawVolume, SourceUrl, WritesConfig,
};
use spurline_runtime::{open_volume, open_writable_files, start_node};
use spurline_types::{ErrorKind, ObjectRef, Size, Stats, Version};
use spurline_volume::{ReadData, Volume};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

fn source(dir: &Path) -> SourceUrl {
    dir.to_str().unwrap().parse().unwrap()
}

fn cache(dir: &Path) -> RawCache {
    RawCache { cache_dir: vec![dir.to_owned()], cache_size: CacheSize::Bytes(64 << 20), ..RawCache::default() }
}

fn read(volume: &dyn Volume, name: &str) -> Vec<u8> {
    let attr = volume.lookup(name.as_bytes()).unwrap();
    let object = ObjectRef::new(volume.source(), name.as_bytes(), Version::new(attr.version.settled_text()), attr.size);
    let (mut out, mut buffer) = (Vec::new(), vec![0; 100_000]);
    while (out.len() as u64) < attr.size {
        match volume.read(&object, out.len() as u64, &mut buffer).unwrap() {
            ReadData::Copied(bytes) => out.extend_from_slice(&buffer[..bytes]),
            ReadData::Shared(slice) => out.extend_from_slice(&slice),
        }
    }
    out
}

#[test]
fn a_volume_lists_and_reads_through_the_cache() {
    let root = tempfile::tempdir().unwrap();
    let (data, cached) = (root.path().join("data"), root.path().join("cache"));
    std::fs::create_dir(&data).unwrap();
    let bytes: Vec<u8> = (0..5_000_000u32).map(|n| (n % 251) as u8).collect();
    std::fs::write(data.join("a"), &bytes).unwrap();
    let raw = RawVolume {
        cache: cache(&cached),
        memory: RawMemory { buffer_size: Size(64 << 20) },
        ..RawVolume::new(source(&data))
    };
    let stats = Arc::new(Stats::default());
    let open = || open_volume(&raw.clone().check(&HostLimits::detect()).unwrap(), &stats).unwrap();

    let volume = open();
    let page = volume.volume().list(b"", None, 10).unwrap();
    assert_eq!(page.entries.iter().map(|entry| entry.name.as_slice()).collect::<Vec<_>>(), [b"a"]);
    assert_eq!(read(&**volume.volume(), "a"), bytes);
    assert!(stats.blockcache.miss_bytes.get() > 0);
    assert_eq!(volume.volume().lookup(b"b").unwrap_err().kind(), ErrorKind::NotFound);

    // The second reading comes from the cache.
    let missed = stats.blockcache.miss_bytes.get();
    assert_eq!(read(&**volume.volume(), "a"), bytes);
    assert_eq!(stats.blockcache.miss_bytes.get(), missed);
}

#[test]
fn a_start_that_fails_names_the_remedy() {
    let root = tempfile::tempdir().unwrap();
    let raw = RawVolume { cache: cache(&root.path().join("c")), ..RawVolume::new(source(&root.path().join("none"))) };
    let config = raw.check(&HostLimits::detect()).unwrap();
    let fault = open_volume(&config, &Arc::default()).err().unwrap();
    assert!(fault.what.contains("none"), "{fault}");
    assert!(!root.path().join("c").exists(), "nothing stays of it");
}

#[test]
fn a_volume_is_read_from_a_node_of_the_same_process() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("a"), b"from the node").unwrap();
    let raw = raw_node(&data, &root.path().join("cache"));
    let node = start_node(raw.check(&HostLimits::detect()).unwrap()).unwrap();
    let mut raw = RawVolume { memory: RawMemory { buffer_size: Size(64 << 20) }, ..RawVolume::new(source(&data)) };
    raw.group.registry = Some(format!("static:{}", node.addresses()[0]).parse().unwrap());
    let volume = open_volume(&raw.check(&HostLimits::detect()).unwrap(), &Arc::default()).unwrap();
    assert_eq!(read(&**volume.volume(), "a"), b"from the node");
    drop(volume);
    node.stop();
}

/// A node over `data`; without a metrics page, whose port may be taken.
fn raw_node(data: &Path, cached: &Path) -> RawNode {
    let log = RawLog { metrics: Some("none".to_owned()), ..RawLog::default() };
    RawNode {
        cache: cache(cached),
        memory: RawMemory { buffer_size: Size(64 << 20) },
        log,
        ..RawNode::new(vec![source(data)])
    }
}

/// The example of this name, which `cargo test` builds beside the tests.
fn example(name: &str) -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().and_then(Path::parent).unwrap().join("examples").join(name)
}

/// `place`: a directory for what the example leaves behind.
fn run_example(name: &str, place: &Path, words: &[&str]) -> String {
    let output = Command::new(example(name)).args(words).env("TMPDIR", place).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {said}");
    said
}

#[test]
fn the_examples_read_and_write_a_directory_and_a_group_of_nodes() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let written = data.join("written-by-a-program");
    run_example("write_a_file", root.path(), &[data.to_str().unwrap()]);
    assert_eq!(std::fs::read(&written).unwrap(), b"written without a mount\n");
    let said = run_example("read_a_file", root.path(), &[data.to_str().unwrap(), "written-by-a-program"]);
    assert!(said.contains("24 bytes of written-by-a-program read"), "{said}");
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: a node that takes changes as their callers needs root");
        return;
    }
    std::fs::remove_file(&written).unwrap();
    let raw = RawNode { writable: true, ..raw_node(&data, &root.path().join("cache")) };
    let node = start_node(raw.check(&HostLimits::detect()).unwrap()).unwrap();
    run_example("write_a_file", root.path(), &[data.to_str().unwrap(), &format!("static:{}", node.addresses()[0])]);
    assert_eq!(std::fs::read(&written).unwrap(), b"written without a mount\n");
    node.stop();
}

#[test]
fn a_volume_that_is_not_changed_takes_no_changes() {
    let root = tempfile::tempdir().unwrap();
    let raw = || RawVolume {
        memory: RawMemory { buffer_size: Size(64 << 20) },
        cache: cache(root.path()),
        ..RawVolume::new(source(root.path()))
    };
    let config = raw().check(&HostLimits::detect()).unwrap();
    let fault = open_writable_files(&config, &Arc::default()).err().unwrap();
    assert!(fault.remedy.contains("check_writable"), "{fault}");
    let bucket = RawVolume::new("gs://bucket".parse().unwrap());
    let fault = bucket.check_writable(WritesConfig::default(), &HostLimits::detect()).unwrap_err();
    assert!(fault.what.contains("neither a directory nor an S3 bucket"), "{fault}");
}
