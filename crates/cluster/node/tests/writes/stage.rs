//! Calls of one node to another about staged files, over TCP.

use crate::rig::{BLOCK, Node, OldHandshake};
use spurline_cache::CacheContext;
use spurline_client::{GroupMembers, GroupPeer, NodeCallFailure, NodeCalls};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_node::{CacheNode, StageHandler, StageReply};
use spurline_object_store::OriginOptions;
use spurline_proto::{MAX_STAGE_CALL, MAX_WRITE, MIN_STAGE_VERSION};
use spurline_transport::{DemandConfig, DemandPool};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Returns what it gets, the payload with every bit flipped.
struct FlippingHandler {
    served: AtomicUsize,
    /// The call "hang" waits for this.
    end: parking_lot::Mutex<Receiver<()>>,
}

impl StageHandler for FlippingHandler {
    fn serve(&self, call: &[u8], payload: &[u8]) -> Result<StageReply> {
        self.served.fetch_add(1, Ordering::Relaxed);
        match call {
            b"fail" => return Err(Error::new(ErrorKind::NoSpace, "the stage is full")),
            b"hang" => drop(self.end.lock().recv()),
            _ => {}
        }
        Ok(StageReply { body: call.to_vec(), payload: payload.iter().map(|byte| !byte).collect() })
    }
}

/// A node with blocks of [`MAX_WRITE`] bytes that keeps staged files.
fn start_stage_node(source: &Path, handler: Arc<dyn StageHandler>) -> TcpServer {
    let stats = Arc::new(Stats::default());
    let block = MAX_WRITE as u64;
    let pool = BufferPool::new(16 * block, MAX_WRITE).unwrap();
    let tier = MemTier::new(Arc::clone(&pool));
    let shared = CacheContext::new(tier, None, block, 16, Duration::from_secs(5), false, Arc::clone(&stats));
    let sources = vec![format!("file://{}", source.display())];
    let origin = OriginOptions { within: sources.clone(), ..OriginOptions::default() };
    let counted = Arc::clone(&stats);
    let open = move |source: &str| spurline_origin::open(source, &origin, Arc::clone(&counted));
    let node = CacheNode::new("n", shared, sources, Box::new(open));
    node.accept_stage(handler);
    let config = ServerConfig { payload_pool: Some(pool), ..ServerConfig::default() };
    TcpServer::bind(&["127.0.0.1:0".parse().unwrap()], node, config, stats).unwrap()
}

/// Calls to nodes, for a source of theirs; with `version`, the handshake offers no newer protocol.
fn calls_to(source: &Path, nodes: &[SocketAddr], version: Option<u16>) -> NodeCalls {
    let source = format!("file://{}", source.display());
    let members: Vec<_> = nodes.iter().map(|at| Arc::new(Member::from_address(&at.to_string(), 100))).collect();
    let stats = Arc::new(Stats::default());
    NodeCalls::new(GroupMembers::new(&members, move |member| {
        let tcp = TcpConnector::new(&member.addresses[0], Vec::new(), SocketOptions::default(), Arc::clone(&stats));
        let version_limit = version.unwrap_or_default();
        let is_old = Arc::new(version.is_some().into());
        let connector = OldHandshake { inner: Arc::new(tcp), offered: version_limit, found: version_limit, is_old };
        let config = DemandConfig::default();
        let pool = DemandPool::new(Arc::new(connector), "caller", &source, config, Arc::clone(&stats));
        GroupPeer::new(pool, member)
    }))
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The error of a call that was not sent.
fn not_sent(calls: &NodeCalls, node: &str, call: &[u8], payload: &[u8]) -> Error {
    match calls.call(node, call, payload, 0, soon()) {
        Err(NodeCallFailure::NotSent(error)) => error,
        other => panic!("the call was sent: {other:?}"),
    }
}

#[test]
fn a_call_reaches_the_named_node_once_with_its_bytes() {
    let source = tempfile::tempdir().unwrap();
    let (end_hang, end) = channel();
    let handler = Arc::new(FlippingHandler { served: AtomicUsize::new(0), end: parking_lot::Mutex::new(end) });
    let server = start_stage_node(source.path(), Arc::clone(&handler) as _);
    let other = Node::start(source.path(), true);
    let addresses = [server.local_addrs()[0], other.at];
    let calls = calls_to(source.path(), &addresses, None);
    let [with, without] = addresses.map(|at| at.to_string());
    let payload: Vec<u8> = (0..MAX_WRITE).map(|at| (at * 7 + (at >> 12)) as u8).collect();
    let call = vec![5; MAX_STAGE_CALL];
    for len in [0, 1, 70_000, MAX_WRITE] {
        let reply = calls.call(&with, &call[..len.min(MAX_STAGE_CALL)], &payload[..len], MAX_WRITE, soon()).unwrap();
        assert_eq!(reply.body, call[..len.min(MAX_STAGE_CALL)]);
        assert!(reply.payload.iter().map(|byte| !byte).eq(payload[..len].iter().copied()), "{len} bytes");
    }
    let failed = calls.call(&with, b"fail", &payload, 0, soon());
    assert!(
        matches!(&failed, Err(NodeCallFailure::Answered(error)) if error.kind() == ErrorKind::NoSpace),
        "{failed:?}"
    );
    let refused = calls.call(&without, b"call", &[], 0, soon());
    let refused = match refused {
        Err(NodeCallFailure::Answered(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert_eq!(refused.message(), "node n keeps no staged files: start it with --stage-size");
    assert!(not_sent(&calls, "another", b"call", &[]).message().contains("node another is no member"));
    let long = [&call[..], b"x"].concat();
    assert_eq!(not_sent(&calls, &with, &long, &[]).kind(), ErrorKind::Invalid);
    assert_eq!(not_sent(&calls, &with, b"call", &[&payload[..], b"x"].concat()).kind(), ErrorKind::Invalid);
    // More than a buffer of that node.
    assert_eq!(not_sent(&calls, &without, b"call", &payload[..=BLOCK as usize]).kind(), ErrorKind::Invalid);
    let served = handler.served.load(Ordering::Relaxed);
    assert_eq!(served, 5);
    // An answer that comes too late, or that is too long: the node has executed the call.
    let soon_over = Instant::now() + Duration::from_millis(200);
    let lost = calls.call(&with, b"hang", &[], 0, soon_over);
    assert!(matches!(&lost, Err(NodeCallFailure::Lost(error)) if error.kind() == ErrorKind::Timeout), "{lost:?}");
    end_hang.send(()).unwrap();
    let lost = calls.call(&with, b"call", b"bytes", 4, soon());
    assert!(matches!(&lost, Err(NodeCallFailure::Lost(error)) if error.kind() == ErrorKind::Protocol), "{lost:?}");
    assert_eq!(calls.call(&with, b"call", b"bytes", 5, soon()).unwrap().payload.len(), 5);
    assert_eq!(handler.served.load(Ordering::Relaxed), served + 3, "no call was repeated");
}

#[test]
fn a_node_that_is_away_or_older_gets_no_call() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), false), Node::start(source.path(), false)];
    let old = calls_to(source.path(), &[nodes[0].at], Some(MIN_STAGE_VERSION - 1));
    let error = not_sent(&old, &nodes[0].at.to_string(), b"call", &[]);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("the node's release is older; upgrade spurline on its host"), "{error}");
    let calls = calls_to(source.path(), &[nodes[0].at], None);
    nodes[0].kill();
    let error = not_sent(&calls, &nodes[0].at.to_string(), b"call", &[]);
    assert!(error.message().contains(&nodes[0].at.to_string()), "{error}");
    // A node that joins.
    let joined = Arc::new(Member::from_address(&nodes[1].at.to_string(), 100));
    calls.set_members(&[Arc::clone(&joined)]);
    assert_eq!(calls.members(), [joined]);
    let answered = calls.call(&nodes[1].at.to_string(), b"call", &[], 0, soon());
    assert!(matches!(answered, Err(NodeCallFailure::Answered(_))), "{answered:?}");
}
