//! A node and a client over TCP: bytes, errors, and a node that restarts.

use spurline_cache::CacheContext;
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupPeer, GroupVolume, GroupVolumeConfig, RequestPatience};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_node::CacheNode;
use spurline_object_store::OriginOptions;
use spurline_store::{CacheCapacity, IoMode, Store, StoreConfig};
use spurline_transport::{DemandConfig, DemandPool};
use spurline_types::{ErrorKind, Member, ObjectRef, Result, Stats};
use spurline_volume::{ReadData, Volume};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u64 = 1 << 20;

fn start_node(dir: &Path, at: SocketAddr) -> (TcpServer, Arc<Stats>) {
    start_node_with(dir, at, 32, None)
}

/// A node with this many blocks of memory, and optionally a disk read by splice.
fn start_node_with(dir: &Path, at: SocketAddr, memory: u64, disk: Option<&Path>) -> (TcpServer, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let pool = BufferPool::new(memory * BLOCK, BLOCK as usize).unwrap();
    let store = disk.map(|disk| {
        let config = StoreConfig {
            block_size: BLOCK as u32,
            io: IoMode::Splice,
            free_space_ratio: 0.0,
            ..StoreConfig::new(vec![disk.to_owned()], CacheCapacity::Bytes(1 << 30))
        };
        Store::open(config, Arc::clone(&stats)).unwrap()
    });
    let splice = store.is_some();
    let shared =
        CacheContext::new(MemTier::new(pool), store, BLOCK, 16, Duration::from_secs(5), splice, Arc::clone(&stats));
    let under_stats = Arc::clone(&stats);
    let sources = vec![format!("file://{}", dir.display())];
    let under = OriginOptions { within: sources.clone(), ..OriginOptions::default() };
    let open = move |source: &str| spurline_origin::open(source, &under, Arc::clone(&under_stats));
    let node = CacheNode::new("n1", shared, sources, Box::new(open));
    let server = TcpServer::bind(&[at], node, ServerConfig::default(), Arc::clone(&stats)).unwrap();
    (server, stats)
}

fn consumer(source: &str, at: SocketAddr, patience: Duration) -> Result<(Arc<GroupVolume>, Arc<Stats>)> {
    consumer_of(source, &[at], patience)
}

fn consumer_of(source: &str, nodes: &[SocketAddr], patience: Duration) -> Result<(Arc<GroupVolume>, Arc<Stats>)> {
    let stats = Arc::new(Stats::default());
    let (of, counted) = (source.to_owned(), Arc::clone(&stats));
    let members: Vec<_> = nodes.iter().map(|at| Arc::new(Member::from_address(&at.to_string(), 100))).collect();
    let members = GroupMembers::new(&members, move |member| {
        let connector = TcpConnector::new(&member.name, Vec::new(), SocketOptions::default(), Arc::clone(&counted));
        let pool = DemandPool::new(Arc::new(connector), "test", &of, DemandConfig::default(), Arc::clone(&counted));
        GroupPeer::new(pool, member)
    });
    let config = GroupVolumeConfig {
        patience: RequestPatience::new(patience),
        fetchers: 4,
        metadata_age: Duration::ZERO,
        copies: CopyCounts::default(),
        standpoint: ReaderLocation::default(),
        silence: Duration::from_secs(2),
        hedge_after: Duration::ZERO,
    };
    let remote = GroupVolume::connect(source, members, config, Arc::clone(&stats), |block| {
        Ok(MemTier::new(BufferPool::new(16 * block, block as usize)?))
    })?;
    Ok((remote, stats))
}

fn read(volume: &dyn Volume, object: &ObjectRef, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut buf = vec![0; len];
    Ok(match volume.read(object, offset, &mut buf)? {
        ReadData::Copied(n) => {
            buf.truncate(n);
            buf
        }
        ReadData::Shared(slice) => slice.to_vec(),
    })
}

fn object(volume: &dyn Volume, path: &[u8]) -> ObjectRef {
    let attr = volume.lookup(path).unwrap();
    ObjectRef::new(volume.source(), path, attr.version, attr.size)
}

fn dataset() -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..5 * BLOCK as usize + 77).map(|i| (i * 7 + (i >> 13)) as u8).collect();
    // A file modified within the last timestamp tick delays the lookup; an old one does not.
    std::fs::write(dir.path().join("data"), &bytes).unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(dir.path().join("sub/small"), b"hello").unwrap();
    (dir, bytes)
}

#[test]
fn names_and_bytes_come_from_the_node_and_are_fetched_once() {
    let (dir, bytes) = dataset();
    let (server, node_stats) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let source = format!("file://{}", dir.path().display());
    let (remote, stats) = consumer(&source, server.local_addrs()[0], Duration::from_secs(10)).unwrap();
    assert_eq!(remote.block_size(), BLOCK);
    let page = remote.list(b"", None, 100).unwrap();
    let mut names: Vec<_> = page.entries.iter().map(|e| e.name.clone()).collect();
    names.sort();
    assert_eq!(names, [b"data".to_vec(), b"sub".to_vec()]);
    let small = object(&*remote, b"sub/small");
    assert_eq!(read(&*remote, &small, 0, 100).unwrap(), b"hello");
    assert_eq!(remote.lookup(b"none").unwrap_err().kind(), ErrorKind::NotFound);

    let data = object(&*remote, b"data");
    remote.prefetch(&data, 2..4, 4096);
    std::thread::scope(|scope| {
        for reader in 0..16u64 {
            let (remote, data, bytes) = (&remote, &data, &bytes);
            scope.spawn(move || {
                for step in 0..6u64 {
                    let offset = ((reader + step) % 6) * BLOCK + reader * 100;
                    let got = read(&**remote, data, offset, 300_000).unwrap();
                    let end = (offset as usize + 300_000).min(bytes.len());
                    assert!(got == bytes[(offset as usize).min(end)..end], "reader {reader} at {offset}");
                }
            });
        }
    });
    // A fetch counts when it ends, after its reader has the bytes.
    let until = Instant::now() + Duration::from_secs(10);
    while node_stats.object.get_ops.get() < 6 + 1 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(node_stats.object.get_ops.get(), 6 + 1, "six blocks of one file, one of the other");
    assert!(stats.tcp.recv_bytes.get() >= 3_000_000, "the bytes came over TCP");
    assert!(remote.info(b"data").unwrap().blocks.memory >= 6);
    server.shutdown();
    assert!(server.join(Instant::now() + Duration::from_secs(10)));
}

#[test]
fn a_source_the_node_does_not_serve_is_refused_in_words() {
    let (dir, _) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let error = consumer("file:///etc", server.local_addrs()[0], Duration::from_secs(5)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.message().contains("does not serve file:///etc") && error.message().contains("--source"), "{error}");
    // Neither by an escaped or dotted path nor by a link in the source.
    std::os::unix::fs::symlink("/etc", dir.path().join("link")).unwrap();
    for detour in ["../../etc", "%2e%2e/%2E./etc", "sub%2f../..", "link", "link/ssl"] {
        let source = format!("file://{}/{detour}", dir.path().display());
        let seen = consumer(&source, server.local_addrs()[0], Duration::from_secs(5))
            .and_then(|(remote, _)| remote.list(b"", None, 10));
        let error = seen.err().unwrap_or_else(|| panic!("{detour} was listed"));
        assert!(matches!(error.kind(), ErrorKind::Invalid | ErrorKind::PermissionDenied), "{detour}: {error}");
    }
    let below = format!("file://{}/sub", dir.path().display());
    let (remote, _) = consumer(&below, server.local_addrs()[0], Duration::from_secs(5)).unwrap();
    assert_eq!(read(&*remote, &object(&*remote, b"small"), 1, 3).unwrap(), b"ell");
}

/// Independent of the readers' timeouts.
#[test]
fn what_nodes_hold_is_told_without_those_that_do_not_answer() {
    let (dir, _) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    // They accept connections and never answer.
    let mute: Vec<_> = (0..3).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let mut nodes = vec![server.local_addrs()[0]];
    nodes.extend(mute.iter().map(|mute| mute.local_addr().unwrap()));
    let source = format!("file://{}", dir.path().display());
    let (remote, _) = consumer_of(&source, &nodes, Duration::from_secs(3600)).unwrap();
    let info = remote.info(b"sub/small").unwrap();
    assert_eq!(info.nodes.len(), 1, "{info:?}");
    for mute in &nodes[1..] {
        assert!(info.silent.contains(&mute.to_string()), "{mute} is missing in {info:?}");
    }
}

#[test]
fn a_node_that_goes_away_is_an_error_in_time_and_works_again_when_it_is_back() {
    let (dir, bytes) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let at = server.local_addrs()[0];
    let source = format!("file://{}", dir.path().display());
    let (remote, _) = consumer(&source, at, Duration::from_millis(500)).unwrap();
    let data = object(&*remote, b"data");
    assert_eq!(read(&*remote, &data, 0, 1000).unwrap(), bytes[..1000]);
    server.shutdown();
    assert!(server.join(Instant::now() + Duration::from_secs(10)));

    let error = read(&*remote, &data, 0, 1000).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{error:?}");
    assert!(error.message().contains(&at.to_string()), "{error}");

    let (server, _) = start_node(dir.path(), at);
    let until = Instant::now() + Duration::from_secs(20);
    while read(&*remote, &data, 0, 1000).is_err() {
        assert!(Instant::now() < until, "the node is back and not used");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(read(&*remote, &data, BLOCK, 1000).unwrap(), bytes[BLOCK as usize..][..1000]);
    drop(server);
}

#[test]
fn a_restart_in_the_middle_of_a_read_is_not_seen() {
    let (dir, bytes) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let at = server.local_addrs()[0];
    let source = format!("file://{}", dir.path().display());
    let (remote, _) = consumer(&source, at, Duration::from_secs(10)).unwrap();
    let data = object(&*remote, b"data");
    let restarted = std::thread::scope(|scope| {
        for reader in 0..4usize {
            let (remote, data, bytes) = (&remote, &data, &bytes);
            scope.spawn(move || {
                let until = Instant::now() + Duration::from_millis(1500);
                let mut at = reader * 1000;
                while Instant::now() < until {
                    let got = read(&**remote, data, at as u64, 20_000).unwrap();
                    assert!(got == bytes[at..(at + 20_000).min(bytes.len())]);
                    at = (at + 77_777) % (bytes.len() - 1);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        server.shutdown();
        server.join(Instant::now() + Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(300));
        start_node(dir.path(), at)
    });
    drop(restarted);
}

#[test]
fn blocks_are_sent_from_their_files_once_they_were_checked() {
    let (dir, bytes) = dataset();
    let disk = tempfile::tempdir().unwrap();
    // Two blocks of memory for a file of six blocks: a second read comes from disk.
    let (server, node) = start_node_with(dir.path(), "127.0.0.1:0".parse().unwrap(), 2, Some(disk.path()));
    let source = format!("file://{}", dir.path().display());
    let (remote, _) = consumer(&source, server.local_addrs()[0], Duration::from_secs(10)).unwrap();
    let data = object(&*remote, b"data");
    let until = Instant::now() + Duration::from_secs(30);
    let mut sent_from_files = 0;
    while sent_from_files == 0 {
        assert!(Instant::now() < until, "nothing was ever sent from a file");
        for block in 0..5u64 {
            let (hits, reads) = (node.blockcache.disk_hit_bytes.get(), node.blockcache.read_ops.get());
            let offset = block * BLOCK;
            let got = read(&*remote, &data, offset, BLOCK as usize).unwrap();
            assert!(got == bytes[offset as usize..(offset + BLOCK) as usize], "block {block}");
            // A disk hit without a read into memory.
            let from_disk = node.blockcache.disk_hit_bytes.get() > hits;
            sent_from_files += u64::from(from_disk && node.blockcache.read_ops.get() == reads);
        }
    }
    // The last fetch may be counted after its bytes were read.
    while node.object.get_ops.get() < 5 {
        assert!(Instant::now() < until, "a block was never fetched");
        std::thread::yield_now();
    }
    assert_eq!(node.object.get_ops.get(), 5, "each block was fetched once");
}

/// Reads `object` from `from` to its end in whole pieces, as a sequential reader whose file system looks ahead.
fn read_on(remote: &GroupVolume, object: &ObjectRef, from: u64, piece: usize, bytes: &[u8], mut each: impl FnMut(u64)) {
    let blocks = object.size.div_ceil(BLOCK) as u32;
    for at in (from..object.size).step_by(piece) {
        if at % BLOCK == 0 {
            remote.prefetch(object, (at / BLOCK) as u32 + 1..blocks, piece);
        }
        let got = read(remote, object, at, piece).unwrap();
        assert!(got == bytes[at as usize..bytes.len().min(at as usize + piece)], "at {at}");
        each(at);
    }
}

#[test]
fn a_sequential_reader_of_large_pieces_has_the_next_ones_on_their_way() {
    let (dir, bytes) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let source = format!("file://{}", dir.path().display());
    let (remote, stats) = consumer(&source, server.local_addrs()[0], Duration::from_secs(10)).unwrap();
    let data = object(&*remote, b"data");
    let piece = 256 << 10;
    read_on(&remote, &data, 0, piece, &bytes, |_| {});
    let ahead = stats.blockcache.prefetch_bytes.get();
    assert!(ahead > data.size / 2, "{ahead} bytes were asked for ahead of {}", data.size);
    assert_eq!(stats.blockcache.mem_hit_bytes.get(), 0, "they took no memory");
    assert_eq!(stats.remotecache.retries.get(), 0);
    // Each byte was transferred once: the pipelined answers were used.
    assert!(stats.tcp.recv_bytes.get() <= data.size, "{} bytes came", stats.tcp.recv_bytes.get());
    // Several readers of one file at different offsets.
    std::thread::scope(|scope| {
        for reader in 0..4 {
            let (remote, data, bytes) = (&remote, &data, &bytes);
            scope.spawn(move || read_on(remote, data, reader * BLOCK, piece, bytes, |_| {}));
        }
    });
}

#[test]
fn a_node_fetches_cold_blocks_before_their_sequential_reader_comes() {
    let (dir, bytes) = dataset();
    let (server, node) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let source = format!("file://{}", dir.path().display());
    let (remote, stats) = consumer(&source, server.local_addrs()[0], Duration::from_secs(10)).unwrap();
    let data = object(&*remote, b"data");
    let until = Instant::now() + Duration::from_secs(30);
    // The reader's announcement alone, then the whole file.
    remote.prefetch(&data, 1..6, 256 << 10);
    while node.blockcache.prefetch_bytes.get() < data.size - BLOCK {
        assert!(Instant::now() < until, "{} bytes were fetched", node.blockcache.prefetch_bytes.get());
        std::thread::sleep(Duration::from_millis(5));
    }
    read_on(&remote, &data, 0, 256 << 10, &bytes, |_| {});
    assert_eq!(node.object.get_ops.get(), 6, "each block was fetched once");
    assert!(stats.tcp.recv_bytes.get() <= data.size, "no byte came twice");
}

#[test]
fn what_was_asked_ahead_of_a_node_that_ends_is_asked_again() {
    let (dir, bytes) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let at = server.local_addrs()[0];
    let source = format!("file://{}", dir.path().display());
    let (remote, stats) = consumer(&source, at, Duration::from_secs(10)).unwrap();
    let data = object(&*remote, b"data");
    let mut server = Some(server);
    read_on(&remote, &data, 0, 256 << 10, &bytes, |offset| {
        if offset == 2 * BLOCK
            && let Some(old) = server.take()
        {
            old.shutdown();
            assert!(old.join(Instant::now() + Duration::from_secs(10)));
            server = Some(start_node(dir.path(), at).0);
        }
    });
    assert!(stats.remotecache.retries.get() > 0, "nothing was under way when the node ended");
}

#[test]
fn answers_that_nobody_takes_are_given_up() {
    let (dir, bytes) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let source = format!("file://{}", dir.path().display());
    let (remote, _) = consumer(&source, server.local_addrs()[0], Duration::from_secs(10)).unwrap();
    let data = object(&*remote, b"data");
    let piece = 256 << 10;
    remote.prefetch(&data, 1..6, piece);
    assert!(read(&*remote, &data, 0, piece).unwrap() == bytes[..piece]);
    let open = server.connection_count();
    assert!(open > 1, "nothing was asked for ahead");
    // The reader is gone: the connections with its answers close too.
    let until = Instant::now() + Duration::from_secs(30);
    while server.connection_count() >= open {
        assert!(Instant::now() < until, "unused answers are dropped");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(read(&*remote, &data, 3 * BLOCK, piece).unwrap() == bytes[3 * BLOCK as usize..][..piece]);
}

#[test]
fn readers_that_stop_all_at_once_leave_connections_for_the_next() {
    let (dir, bytes) = dataset();
    let (server, _) = start_node(dir.path(), "127.0.0.1:0".parse().unwrap());
    let source = format!("file://{}", dir.path().display());
    // The read timeout is shorter than the lifetime of an untaken answer.
    let (remote, stats) = consumer(&source, server.local_addrs()[0], Duration::from_millis(1500)).unwrap();
    let data = object(&*remote, b"data");
    let piece = 256 << 10;
    for round in 0..5 {
        std::thread::scope(|scope| {
            for reader in 0..8u64 {
                let (remote, data, bytes) = (&remote, &data, &bytes);
                scope.spawn(move || {
                    let from = (reader % 4) * BLOCK;
                    remote.prefetch(data, 1..6, piece);
                    for at in [from, from + piece as u64] {
                        let got = read(&**remote, data, at, piece);
                        assert!(got.unwrap() == bytes[at as usize..][..piece], "round {round}, at {at}");
                    }
                });
            }
        });
    }
    assert_eq!(stats.remotecache.errors.get(), 0);
}
