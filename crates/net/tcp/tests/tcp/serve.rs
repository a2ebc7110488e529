//! A server and a pool of channels over loopback.

use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{ConnState, DemandConfig, DemandPool, Responder, Service};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Zeros(Vec<u8>);

impl Service for Zeros {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        Ok(WelcomeAnswer {
            version: 0,
            volume: VolumeId(1),
            block_size: 4 << 20,
            node: "n".into(),
            ..WelcomeAnswer::default()
        })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        match request {
            NodeRequest::Read(ReadRequest { offset, len, .. }) => {
                match self.0.get(offset as usize..offset as usize + len as usize) {
                    Some(slice) => responder.send_data(&[], &[slice]),
                    None => Err(Error::new(ErrorKind::Invalid, "past the end")),
                }
            }
            _ => Err(Error::new(ErrorKind::NotFound, "no such thing")),
        }
    }
}

#[test]
fn reads_through_a_pool() {
    let stats = Arc::new(Stats::default());
    let data: Vec<u8> = (0..8 << 20).map(|i: u32| (i / 7) as u8).collect();
    let service = Arc::new(Zeros(data.clone()));
    let server =
        TcpServer::bind(&["127.0.0.1:0".parse().unwrap()], service, ServerConfig::default(), Arc::clone(&stats))
            .unwrap();
    let peer = server.local_addrs()[0].to_string();
    let connector = TcpConnector::new(&peer, vec![], SocketOptions::default(), Arc::clone(&stats));
    let pool = DemandPool::new(Arc::new(connector), "test", "mem", DemandConfig::default(), Arc::clone(&stats));
    let deadline = Instant::now() + Duration::from_secs(20);
    std::thread::scope(|s| {
        for t in 0..12u64 {
            let (pool, data) = (&pool, &data);
            s.spawn(move || {
                let mut dst = vec![0u8; 1 << 20];
                for i in 0..20u64 {
                    let mut lease = pool.checkout(deadline).unwrap();
                    let (offset, len) = ((t * 20 + i) * 4099, 1 << (i % 21));
                    let (path, version, size) = (b"a".as_slice(), "v", 8 << 20);
                    let request = NodeRequest::Read(ReadRequest {
                        volume: lease.welcome().volume,
                        path,
                        version,
                        size,
                        offset,
                        len,
                        flags: ReadFlags::NONE,
                    });
                    let answer = lease.call(&request, &mut Vec::new(), &mut dst, &mut |_| {}, deadline).unwrap();
                    assert_eq!(answer.payload_len, len as usize);
                    assert!(dst[..len as usize] == data[offset as usize..][..len as usize]);
                }
            });
        }
    });
    assert!(pool.open_count() <= 8);
    // The node counts an answer slightly later than its reader receives it.
    while stats.tcp.recv_bytes.get() != stats.tcp.send_bytes.get() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(stats.tcp.recv_bytes.get(), stats.tcp.send_bytes.get());
    let mut lease = pool.checkout(deadline).unwrap();
    let refused =
        lease.call(&NodeRequest::StatFs { volume: VolumeId(1) }, &mut Vec::new(), &mut [], &mut |_| {}, deadline);
    assert_eq!(refused.unwrap_err().error().kind(), ErrorKind::NotFound);
    drop(lease);
    assert!(server.join(deadline));
    // A recently used channel is not probed; its call fails, and no channel is left after that.
    let soon = Instant::now() + Duration::from_secs(5);
    let mut lease = pool.checkout(soon).unwrap();
    let lost = lease.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon).unwrap_err();
    assert!(lost.is_broken() && lost.error().kind() == ErrorKind::Unavailable, "{lost}");
    drop(lease);
    let down = pool.checkout(soon).err().unwrap();
    assert!(down.kind() == ErrorKind::Unavailable && down.message().contains("connection refused"), "{down}");
}

#[test]
fn an_answer_can_wait_in_its_connection() {
    let stats = Arc::new(Stats::default());
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 5) as u8).collect();
    let any = ["127.0.0.1:0".parse().unwrap()];
    let service = Arc::new(Zeros(data.clone()));
    let server = TcpServer::bind(&any, service, ServerConfig::default(), Arc::clone(&stats)).unwrap();
    let peer = server.local_addrs()[0].to_string();
    let connector = TcpConnector::new(&peer, vec![], SocketOptions::default(), Arc::clone(&stats));
    let config = DemandConfig { nconnect: 3, ..DemandConfig::default() };
    let pool = DemandPool::new(Arc::new(connector), "test", "mem", config, Arc::clone(&stats));
    let deadline = Instant::now() + Duration::from_secs(20);
    let read = |offset: u64| {
        move |welcome: &WelcomeAnswer| {
            let (path, version, size, len) = (b"a".as_slice(), "v", 1 << 20, 300_000);
            NodeRequest::Read(ReadRequest {
                volume: welcome.volume,
                path,
                version,
                size,
                offset,
                len,
                flags: ReadFlags::NONE,
            })
        }
    };
    assert!(pool.begin_call(read(0), deadline).is_none(), "a peer that was never reached is not waited for");
    drop(pool.checkout(deadline).unwrap());
    let begun: Vec<_> = [0u64, 7, 11].map(|offset| (offset, pool.begin_call(read(offset), deadline))).into();
    assert!(pool.begin_call(read(0), deadline).is_none(), "all channels are taken");
    let mut dst = vec![0; 300_000];
    let mut body = Vec::new();
    for (offset, begun) in begun {
        let begun = begun.expect("a channel");
        if offset == 7 {
            pool.abandon_call(begun);
            continue;
        }
        let answer = pool.resume_call(begun).finish_call(&mut body, &mut dst, deadline, None).unwrap();
        assert!(dst[..answer.payload_len] == data[offset as usize..][..300_000]);
    }
    assert_eq!(pool.open_count(), 2, "the channel whose answer was given up is closed");
    // An answer with an error leaves the channel usable.
    let begun = pool.begin_call(read(1 << 40), deadline).expect("a channel");
    let error = pool.resume_call(begun).finish_call(&mut body, &mut dst, deadline, None).unwrap_err();
    assert!(!error.is_broken() && error.to_string().contains("past the end"), "{error}");
    let mut lease = pool.checkout(deadline).unwrap();
    let request = read(5)(lease.welcome());
    lease.call(&request, &mut body, &mut dst, &mut |_| {}, deadline).unwrap();
    assert!(dst == data[5..300_005]);
}

#[test]
fn a_peer_that_accepts_and_does_not_greet_is_waited_for_no_longer_than_its_silence() {
    // The kernel accepts connections for a suspended process.
    let frozen = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stats = Arc::new(Stats::default());
    let peer = frozen.local_addr().unwrap().to_string();
    let connector = TcpConnector::new(&peer, vec![], SocketOptions::default(), Arc::clone(&stats));
    let for_ever = Duration::from_secs(24 * 3600);
    let config = DemandConfig { connect_timeout: for_ever, ..DemandConfig::default() };
    let pool = DemandPool::new(Arc::new(connector), "test", "mem", config, stats);
    pool.set_monitored(Some(Duration::from_millis(50)));
    let (said, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let ask = || pool.checkout(Instant::now() + for_ever).err().map(|e| e.kind());
        // The second call makes no attempt: that is left to the monitor until the peer answers a heartbeat.
        said.send((ask(), ask())).unwrap();
    });
    let timeout = Some(ErrorKind::Timeout);
    assert_eq!(heard.recv_timeout(Duration::from_secs(120)).unwrap(), (timeout, timeout));
}
