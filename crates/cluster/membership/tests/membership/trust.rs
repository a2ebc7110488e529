//! The coordinator's handshake gate: members by token and by TLS, and strangers of every kind, which keep no member
//! out.

use crate::common;
use common::{node, wait_for};
use spurline_membership::{
    CoordinatorServer, CoordinatorServerConfig, HoldTimes, NodeAnnouncer, Registry, RegistryFollower, RegistryState,
    request_jobs,
};
use spurline_trust::{GroupTokens, Trust};
use spurline_types::{Error, ErrorKind, Stats};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";
const OTHER: &str = "another-WJ7b2uR1xTzv9sLd3f";

fn with(token: &str, tls: bool) -> Arc<Trust> {
    let trust = Trust::with_tokens("somebody", GroupTokens::parse(token.as_bytes()).unwrap());
    if tls { trust.with_tls(None).unwrap() } else { trust }
}

fn start(trust: Arc<Trust>) -> (CoordinatorServer, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let config = CoordinatorServerConfig { trust, ..CoordinatorServerConfig::default() };
    (CoordinatorServer::start(config, Arc::clone(&stats)).unwrap(), stats)
}

fn open(coordinator: &CoordinatorServer, trust: &Arc<Trust>) -> Arc<dyn Registry> {
    let url = format!("coordinator://{}", coordinator.addresses()[0]);
    spurline_membership::open_registry(&url.parse().unwrap(), "g", trust).unwrap()
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The refusal, seen in each of the three ways to connect.
fn refusals(coordinator: &CoordinatorServer, trust: &Arc<Trust>) -> [Error; 3] {
    let registry = open(coordinator, trust);
    let stats = Arc::new(Stats::default());
    let enter = NodeAnnouncer::start(&registry, node("stranger", 9), Arc::clone(&stats)).map(|_| ()).unwrap_err();
    let follower = RegistryFollower::start(&registry, HoldTimes::default(), stats).unwrap();
    let mut follow = None;
    wait_for("the refusal", || {
        if let RegistryState::Lost { error } = follower.group_status().state {
            follow = Some(error);
        }
        follow.is_some()
    });
    let follow = follow.unwrap();
    // A start is not kept waiting.
    if follow.kind() == ErrorKind::PermissionDenied {
        assert_eq!(follower.first_members(later()).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    let at = coordinator.addresses()[0].to_string().parse().unwrap();
    let jobs = request_jobs(&at, "g", trust, &serde_json::json!({"do": "list"}), Duration::from_secs(60)).unwrap_err();
    [enter, follow, jobs]
}

#[test]
fn members_are_let_in_and_nobody_else() {
    for tls in [false, true] {
        let (coordinator, stats) = start(with(TOKEN, tls));
        let registry = open(&coordinator, &with(TOKEN, tls));
        let _a = NodeAnnouncer::start(&registry, node("a", 1), Arc::new(Stats::default())).unwrap().unwrap();
        let follower = RegistryFollower::start(&registry, HoldTimes::default(), Arc::new(Stats::default())).unwrap();
        assert_eq!(follower.first_members(later()).unwrap()[0].name, "a");
        assert!(stats.trust.proved.get() >= 1);
        let none = if tls { "speaks TLS only" } else { "requires a proof of the group token" };
        for (stranger, says) in
            [(with(OTHER, tls), "another group token"), (Trust::without_checks(), none), (with(TOKEN, !tls), "--tls")]
        {
            for error in refusals(&coordinator, &stranger) {
                assert!(error.message().contains(says), "tls {tls}: {says:?} is missing in: {error}");
                assert!(error.message().contains("--"), "what to do is missing in: {error}");
                let there = coordinator.addresses()[0].to_string();
                assert!(error.message().contains(&there), "where it was is missing in: {error}");
            }
        }
        assert!(stats.trust.refused_proof.get() >= 3);
        assert_eq!(coordinator.list_groups()["g"].len(), 1, "no stranger is in the list");
    }
}

#[test]
fn who_has_a_token_enters_no_group_that_asks_for_none() {
    let (coordinator, _) = start(Trust::without_checks());
    for error in refusals(&coordinator, &with(TOKEN, false)) {
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(error.message().contains("this side requires no group token"), "{error}");
    }
    assert!(coordinator.list_groups().is_empty());
}

/// Bytes of strangers: neither a proof nor gRPC.
fn nonsense() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> =
        [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0", b"SPUR", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r", b"\x16\x03\x01"]
            .map(<[u8]>::to_vec)
            .to_vec();
    // A frame that announces far more than there may be.
    let mut huge = b"SPUR".to_vec();
    huge.resize(4096, 0xff);
    all.push(huge);
    all.push((0..200_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect());
    all
}

#[test]
fn strangers_of_all_kinds_are_let_go_of_and_members_speak_on() {
    for trust in [Trust::without_checks(), with(TOKEN, false), with(TOKEN, true)] {
        let (coordinator, stats) = start(Arc::clone(&trust));
        let at = coordinator.addresses()[0];
        // More than are waited for: the oldest make room.
        let silent: Vec<TcpStream> = (0..350).map(|_| TcpStream::connect(at).unwrap()).collect();
        let registry = open(&coordinator, &trust);
        let _a = NodeAnnouncer::start(&registry, node("a", 1), Arc::new(Stats::default())).unwrap().unwrap();
        wait_for("the oldest to be closed", || stats.trust.refused_limit.get() >= 80);
        for words in nonsense() {
            let mut stranger = TcpStream::connect(at).unwrap();
            stranger.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            // It may be closed meanwhile.
            let _ = stranger.write_all(&words);
            let _ = stranger.shutdown(std::net::Shutdown::Write);
            let mut rest = Vec::new();
            match stranger.read_to_end(&mut rest) {
                Ok(_) => assert!(rest.len() < 4096, "{} bytes for a stranger", rest.len()),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it stays open"),
            }
        }
        let counted = &stats.trust;
        assert!(counted.refused_frames.get() + counted.refused_proof.get() + counted.refused_tls.get() > 0);
        let follower = RegistryFollower::start(&registry, HoldTimes::default(), Arc::new(Stats::default())).unwrap();
        assert_eq!(follower.first_members(later()).unwrap()[0].name, "a");
        drop(silent);
    }
}
