//! Two machines joined by two cables: packets that are lost, on one rail and not on the other.

mod pattern;

use pattern::{Pattern, call, check, read};
use spurline_mem::BufferPool;
use spurline_net_rdma::{RdmaChannel, RdmaConnector, RdmaRail, RdmaServer, RdmaServerConfig, RdmaTimeouts};
use spurline_proto::HelloRequest;
use spurline_testkit::{GuestNet, run_in_guest};
use spurline_transport::perform_handshake;
use spurline_types::{ErrorKind, Result, Stats};
use spurline_verbs::{MemoryAccess, VerbsLibrary};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PORT: u16 = 18_515;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(90)
}

fn done() -> PathBuf {
    PathBuf::from(std::env::var_os("SPURLINE_TEST_VM_SHARE").unwrap()).join("done")
}

fn sh(command: &str) {
    let out = Command::new("bash").args(["-c", command]).output().unwrap();
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
#[ignore = "in_two_virtual_machines runs it in the second guest"]
fn side_b_serves() {
    let verbs = VerbsLibrary::load().unwrap();
    let pool = BufferPool::new(64 << 20, 8 << 20).unwrap();
    let open = |ip: &str| RdmaRail::open(&verbs, "node", ip.parse().unwrap(), &pool, MemoryAccess::Local).unwrap();
    let rails = [open("10.77.0.2"), open("10.77.1.2")];
    let (config, stats) = (RdmaServerConfig::default(), Arc::new(Stats::default()));
    let server = RdmaServer::bind(&rails, PORT, Pattern::new(&pool), config, stats).unwrap();
    println!("serving on {:?}", server.local_addrs());
    // The first guest ends both.
    while !done().exists() {
        std::thread::sleep(Duration::from_millis(100));
    }
}

struct Reader {
    rails: [Arc<RdmaRail>; 2],
    pool: Arc<BufferPool>,
}

impl Reader {
    fn open(&self, rail: usize) -> Result<RdmaChannel> {
        let peer = SocketAddr::new(format!("10.77.{rail}.2").parse().unwrap(), PORT);
        let ours = Arc::clone(&self.rails[rail]);
        let connector = RdmaConnector::new(ours, peer, RdmaTimeouts::default(), Arc::default());
        let mut channel = connector.open_channel(Instant::now() + Duration::from_secs(10))?;
        perform_handshake(&mut channel, &HelloRequest::new("tester", ""), soon())?;
        Ok(channel)
    }

    /// Tries until it works.
    fn reach(&self, rail: usize) -> RdmaChannel {
        let until = soon();
        loop {
            match self.open(rail) {
                Ok(channel) => return channel,
                Err(e) => {
                    println!("rail {rail}: not yet: {e}");
                    assert!(Instant::now() < until, "rail {rail} is not reached: {e}");
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    fn read(&self, channel: &mut RdmaChannel, offset: usize) {
        let mut dst = self.pool.try_alloc(1 << 20).unwrap();
        dst.fill(0);
        assert_eq!(call(channel, &read("data", offset, 1 << 20), &mut dst, soon()), Ok(1 << 20));
        check(&dst, offset);
    }
}

#[test]
#[ignore = "in_two_virtual_machines runs it in the first guest"]
fn side_a_loses_packets() {
    let verbs = VerbsLibrary::load().unwrap();
    let pool = BufferPool::new(64 << 20, 8 << 20).unwrap();
    let open =
        |ip: &str| RdmaRail::open(&verbs, "reader", ip.parse().unwrap(), &pool, MemoryAccess::PeerWrites).unwrap();
    let reader = Reader { rails: [open("10.77.0.1"), open("10.77.1.1")], pool };
    let (mut lossy, mut sound) = (reader.reach(0), reader.reach(1));
    reader.read(&mut lossy, 1);
    reader.read(&mut sound, 2);
    // Now nothing passes the first cable. A reader that only waits detects it: it probes the node's NIC, long
    // before its deadline and before the node's answer is due.
    let cut = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(500));
        sh("tc qdisc add dev rail0 root netem loss 100%");
        Instant::now()
    });
    let mut dst = reader.pool.try_alloc(1 << 20).unwrap();
    let error = call(&mut lossy, &read("slower", 0, 1 << 20), &mut dst, soon()).unwrap_err();
    println!("{error}\nfound out after {:?}", cut.join().unwrap().elapsed());
    assert!(error.is_broken() && error.error().kind() == ErrorKind::Unavailable, "{error}");
    assert!(error.error().message().contains("RETRY_EXC_ERR"), "{error}");
    drop(lossy);
    reader.read(&mut sound, 3);
    // The cable is whole again, and so is the rail.
    sh("tc qdisc del dev rail0 root");
    let mut lossy = reader.reach(0);
    reader.read(&mut lossy, 4);
    // Some packets lost are sent again, and no byte is wrong.
    sh("tc qdisc add dev rail0 root netem loss 1%");
    for i in 0..4 {
        reader.read(&mut lossy, 5 + i);
    }
    sh("tc qdisc del dev rail0 root");
    std::fs::write(done(), "").unwrap();
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_two_virtual_machines() {
        run_in_guest(GuestNet::Pair, &["side_"]);
    }
}
