//! Many clients of one node at once, over RDMA and over TCP.

use spurline_mem::BufferPool;
use spurline_net_rdma::{RdmaConnector, RdmaRail, RdmaTimeouts};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest};
use spurline_rig::rdma_rig::{LEN, Rig, SILENCE, count, token};
use spurline_transport::{Channel as _, call_decoded, perform_handshake};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, ObjectAttr};
use spurline_verbs::{MemoryAccess, VerbsLibrary};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(150)
}

/// Where the node's log reports RDMA.
fn rdma_address(log: &str) -> SocketAddr {
    let line = log.lines().find(|line| line.contains("over rdma")).expect("the node serves over RDMA");
    let at = line.split("serving on ").nth(1).and_then(|rest| rest.split([',', ' ']).next()).unwrap();
    at.parse().unwrap()
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_64_clients_and_mounts_of_both_kinds() {
    const CLIENTS: usize = 64;
    const READS: usize = 6;
    const MOST: usize = 64 << 10;
    let rig = Rig::new();
    rig.fill();
    let _node = rig.node(7030, &["--rdma-network", "rail0"]);
    let log = rig.log("node-7030");
    let to = rdma_address(&std::fs::read_to_string(&log).unwrap());
    let over_rdma = rig.mount("rdma", &[7030], &["--rdma-network", "rail0"]);
    let over_tcp = rig.mount("tcp", &[7030], &[]);
    over_rdma.wait("the path", |m| m.count("rdma", "paths_up") == 1);
    let source = rig.dir.join("src");
    let source = format!("file://{}", source.display());
    let (source, data, verbs) = (&*source, &rig.data, VerbsLibrary::load().unwrap());
    let trust = Trust::new("client", Some(&token(&rig.dir))).unwrap();
    let wanted: u64 = std::thread::scope(|scope| {
        let mounts = [scope.spawn(|| over_rdma.pass()), scope.spawn(|| over_tcp.pass())];
        let trust = &trust;
        let client = |client: usize| {
            // Each with a device, a registered pool and a connection of its own, as different processes have them.
            let pool = BufferPool::new(1 << 20, 256 << 10).unwrap();
            let rail = RdmaRail::open(&verbs, "client", to.ip(), &pool, MemoryAccess::PeerWrites).unwrap();
            let connector = RdmaConnector::new(rail, to, RdmaTimeouts { silence: SILENCE }, Arc::default());
            let connector = connector.with_trust(Arc::clone(trust));
            // On a busy machine one of so many misses the handshake deadline, and retries.
            let until = soon();
            let greeted = || {
                let mut channel = connector.open_channel(soon())?;
                let volume = perform_handshake(&mut channel, &HelloRequest::new("client", source), soon())?.volume;
                Ok::<_, Error>((channel, volume))
            };
            let (mut channel, volume) = loop {
                match greeted() {
                    Ok(greeted) => break greeted,
                    Err(e) => assert!(e.kind() == ErrorKind::Unavailable && Instant::now() < until, "{client}: {e}"),
                }
            };
            let mut body = Vec::new();
            let lookup = NodeRequest::Lookup { volume, path: b"file", max_age_ms: 60_000 };
            let attr: ObjectAttr = call_decoded(&mut channel, &lookup, &mut body, soon()).unwrap();
            let version = attr.version.as_str();
            let mut dst = pool.alloc(MOST, soon()).unwrap();
            let mut total = 0;
            for i in 0..READS {
                let (len, offset) =
                    (1 + (client * 977 + i * 14_093) % MOST, (client * 509_989 + i * 77_773) % (LEN - MOST));
                // No byte over the border of a block.
                let len = len.min((1 << 20) - offset % (1 << 20));
                let (size, offset64) = (attr.size, offset as u64);
                let read = ReadRequest {
                    volume,
                    path: b"file",
                    version,
                    size,
                    offset: offset64,
                    len: len as u32,
                    flags: ReadFlags::NONE,
                };
                let answer =
                    channel.call(&NodeRequest::Read(read), &mut body, &mut dst[..len], &mut |_| {}, soon()).unwrap();
                assert_eq!(answer.payload_len, len);
                assert!(dst[..len] == data[offset..offset + len], "client {client}: wrong bytes at {offset}");
                total += len as u64;
            }
            total
        };
        let clients: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(move || client(n))).collect();
        let total = clients.into_iter().map(|client| client.join().unwrap()).sum();
        mounts.into_iter().for_each(|mount| mount.join().unwrap());
        total
    });
    let (rdma, tcp) = over_rdma.received();
    assert!(rdma >= LEN as u64 && tcp == 0, "{rdma} bytes over RDMA, {tcp} over TCP");
    assert_eq!(over_tcp.count("rdma", "recv_bytes"), 0);
    assert_eq!((over_rdma.carries(), over_tcp.carries()), ("rdma".into(), "tcp".into()));
    // The node wrote what all of them took over RDMA, and sent the rest.
    let (written, sent) = (count(&log, "rdma", "write_bytes"), count(&log, "tcp", "send_bytes"));
    assert!(written >= wanted + rdma && sent >= LEN as u64, "{written} written, {wanted} and {rdma} read; {sent} sent");
}
